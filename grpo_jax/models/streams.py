"""Independent parts of a batch on several threads, where that keeps a CPU's cores busy.

XLA's CPU backend spreads only large operations over the cores, and the steps of a decode are small: half of the groups
on each of two threads are the same samples in less time. On GPUs and TPUs nothing is split. `in_background` runs the
device's work in a thread, while the caller's own thread runs the reward functions.
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
"""Bytes of parameters that a CPU's cache may hold: larger ones come from memory, once for each stream."""

Part = TypeVar("Part")
Result = TypeVar("Result")


def devices_of(params: Params) -> set[jax.Device]:
    """The devices that hold some params, or that their shapes are placed on; none for NumPy arrays and tracers."""
    devices: set[jax.Device] = set()
    for leaf in jax.tree.leaves(params):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
            devices |= leaf.devices()
        elif isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is not None:
            devices |= leaf.sharding.device_set
    return devices


def count_streams(params: Params, parts: int) -> int:
    """Return the number of streams for a batch that is cut into `parts` parts: one per core, at most one per part.

    1 unless the parameters are on one CPU device, and small: the products of a large model keep all cores busy, and a
    second stream would only read its weights once more.
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
    """`[function(part) for part in parts]`, one thread per part; a failure is raised when all have ended.

    Only several parts are waited for. What the function compiles is to be `shared`.
    """
    if len(parts) == 1:
        return [function(parts[0])]

    def whole(part: Part) -> Result:
        return jax.block_until_ready(function(part))

    futures = [_pool(len(parts)).submit(whole, part) for part in parts]
    wait(futures)
    return [future.result() for future in futures]


class shared:
    """A jitted function that the threads of a batch call: the first one compiles it, and the others wait for that.

    Two threads that meet a program which neither of them finds would both compile it. So they are let in one after
    another, as far as the dispatch; what has been dispatched runs beside the rest.
    """

    def __init__(self, jitted: Any):
        self._jitted, self._lock = jitted, threading.Lock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return self._jitted(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._jitted, name)  # `lower`, for one


def in_turn(tree: Result) -> Result:
    """Arrays that the next of several programs begins with, waited for if they are on a CPU.

    XLA's CPU backend gives a program its memory when it is dispatched, not when its turn comes: of all parts of a
    batch at once, if the host runs ahead of the device. Other backends reuse the memory in the order of the programs.
    """
    if any(device.platform == "cpu" for device in devices_of(tree)):
        jax.block_until_ready(tree)
    return tree


@contextlib.contextmanager
def in_background(function: Callable[[], Result]) -> Iterator[Future[Result]]:
    """Run a function in a thread while the block runs, and wait for it at the end; yields its future.

    JAX keeps settings made by `with` to their thread: `jax.default_matmul_precision` and `jax.default_device`, which
    decide numbers and places, are set in this one too.
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
    """Return a pool of threads that stay, since a decode calls them once for every 16 tokens."""
    return ThreadPoolExecutor(size, thread_name_prefix="grpo_jax-stream")
