"""Independent parts of a batch in several threads, to keep a CPU's cores busy.

XLA's CPU backend spreads only large operations over the cores, and the steps of a decode are small. Two threads with
half of the groups each draw the same samples in less time. On GPUs and TPUs a batch is not split. `in_background` runs
the device's work in a thread, in parallel with the reward functions.
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

CACHED = 64 * 2**20
"""Bytes of parameters that fit into a CPU's cache; larger ones are read from memory, by each stream."""

Part = TypeVar("Part")
Result = TypeVar("Result")


def devices_of(params: Params) -> set[jax.Device]:
    """Return the devices of params or of their shapes; none for NumPy arrays and tracers."""
    devices: set[jax.Device] = set()
    for leaf in jax.tree.leaves(params):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
            devices |= leaf.devices()
        elif isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is not None:
            devices |= leaf.sharding.device_set
    return devices


def count_streams(params: Params, parts: int) -> int:
    """Return the number of streams for a batch of `parts` parts: one per core, at most one per part.

    It is 1 unless the parameters are small and on one CPU device. The products of a large model keep all cores busy,
    and each further stream would read its weights again.
    """
    devices = devices_of(params)
    if len(devices) > 1 or any(device.platform != "cpu" for device in devices):
        return 1
    if sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params)) > CACHED:
        return 1
    return max(1, min(parts, count_cores()))


def count_cores() -> int:
    """Return the number of cores of the CPU that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_in_streams(function: Callable[[Part], Result], parts: Sequence[Part]) -> list[Result]:
    """Return `[function(part) for part in parts]`, computed in one thread per part.

    An exception is raised when all threads have ended. Jitted functions that are called have to be `shared`.
    """
    if len(parts) == 1:
        return [function(parts[0])]
    futures = [_pool(len(parts)).submit(lambda part: jax.block_until_ready(function(part)), part) for part in parts]
    wait(futures)
    return [future.result() for future in futures]


class shared:
    """A jitted function for several threads, which is compiled once.

    Without a lock, two threads that need a new program at the same time would both compile it. The lock is held until
    a call is dispatched; dispatched programs run in parallel.
    """

    def __init__(self, jitted: Any):
        self._jitted, self._lock = jitted, threading.Lock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return self._jitted(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._jitted, name)  # such as `lower`


def in_turn(tree: Result) -> Result:
    """Return arrays that the next of several programs needs; if they are on a CPU, wait for them first.

    XLA's CPU backend allocates a program's memory when it is dispatched, not when it starts. If the host ran ahead,
    all parts of a batch would have their memory at once. Other backends reuse memory in the order of the programs.
    """
    if any(device.platform == "cpu" for device in devices_of(tree)):
        jax.block_until_ready(tree)
    return tree


@contextlib.contextmanager
def in_background(function: Callable[[], Result]) -> Iterator[Future[Result]]:
    """Run a function in a thread while the block runs, and wait for it at the end; yield its future.

    JAX's context managers apply to one thread. `jax.default_matmul_precision` and `jax.default_device` change results,
    so their values are also set in the new thread.
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
    """Return a pool of threads, which is kept because a decode calls it for every 16 tokens."""
    return ThreadPoolExecutor(size, thread_name_prefix="grpo_jax-stream")
