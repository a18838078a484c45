"""Threads for independent parts of a batch on CPUs, and for background work, such as compilation and prefetching.

XLA's CPU backend does not parallelize small operations, such as in a decode step. GPUs and TPUs need only one thread.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import jax

from grpo_jax.types import Params

CACHE_BYTES = 64 * 2**20
"""Maximum size of params, in bytes, for which several threads are used. Larger params do not fit in the CPU's cache."""

Part = TypeVar("Part")
Result = TypeVar("Result")


def devices_of(params: Params) -> set[jax.Device]:
    """Return the devices of concrete or abstract params. NumPy arrays and tracers are ignored."""
    devices: set[jax.Device] = set()
    for leaf in jax.tree.leaves(params):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
            devices |= leaf.devices()
        elif isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is not None:
            devices |= leaf.sharding.device_set
    return devices


def count_threads(params: Params, parts: int) -> int:
    """Return the number of threads for a batch with `parts` parts: one per core, but at most one per part.

    Returns 1 if params are on a GPU, a TPU or several devices, or exceed `CACHE_BYTES` (large products use all cores).
    """
    devices = devices_of(params)
    if len(devices) > 1 or any(device.platform != "cpu" for device in devices):
        return 1
    if sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params)) > CACHE_BYTES:
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(parts, cores))


def run_in_threads(function: Callable[[Part], Result], parts: Sequence[Part]) -> list[Result]:
    """Apply `function` to each part in a separate thread, and return the results in order.

    An exception is raised only after all parts have finished. If `function` calls jitted functions, wrap them in
    `compile_once_across_threads`.
    """
    if len(parts) == 1:
        return [function(parts[0])]
    futures = [_pool(len(parts)).submit(lambda part: jax.block_until_ready(function(part)), part) for part in parts]
    wait(futures)
    return [future.result() for future in futures]


class compile_once_across_threads:
    """Decorator that compiles each program of a jitted function only once, even if several threads call the function.

    A call holds the function's lock until its program is compiled and dispatched. Dispatched programs run in parallel.
    """

    def __init__(self, jitted: Any):
        self._jitted, self._lock = jitted, threading.Lock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return self._jitted(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._jitted, name)  # such as `lower`


def block_if_cpu(tree: Result) -> Result:
    """Return `tree` unchanged. If it contains arrays on a CPU, first wait until all its arrays are computed.

    XLA's CPU backend allocates a program's memory at dispatch. Without waiting, the memory of all dispatched programs
    would be allocated at once. Other backends reuse the memory.
    """
    if any(device.platform == "cpu" for device in devices_of(tree)):
        jax.block_until_ready(tree)
    return tree


@contextlib.contextmanager
def in_background(function: Callable[[], Result]) -> Iterator[Future[Result]]:
    """Run a function in a thread during the `with` block. Yields the future, and waits for it at the end of the block.

    JAX's context managers are thread-local; the matmul precision and default device are copied to the thread.
    """
    settings: Any = jax.config
    precision, device = settings.jax_default_matmul_precision, settings.jax_default_device

    def run() -> Result:
        with jax.default_matmul_precision(precision), jax.default_device(device):
            return function()

    with ThreadPoolExecutor(1, thread_name_prefix="grpo_jax-background") as pool:
        yield pool.submit(run)


@functools.cache
def _pool(size: int) -> ThreadPoolExecutor:
    """Return a pool of `size` threads. Pools are cached, since a rollout calls `run_in_threads` many times."""
    return ThreadPoolExecutor(size, thread_name_prefix="grpo_jax-part")
