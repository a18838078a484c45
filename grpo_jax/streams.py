"""Independent parts of a batch on several threads, where that keeps a CPU's cores busy.

XLA's CPU backend spreads one operation over the cores only if the operation is large. The steps of a decode are small:
one core works and the other waits. Half of the groups on each of two threads are the same samples in less time. On
GPUs and TPUs, where one program fills the device, nothing is split.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import jax

from grpo_jax.types import Params

__all__ = ["count_streams", "devices_of", "run_in_streams"]

CACHED = 64 * 2**20
"""Bytes of parameters that a CPU's cache may hold: larger ones come from memory, once for each stream."""

Part = TypeVar("Part")
Result = TypeVar("Result")


def devices_of(params: Params) -> set[Any]:
    """The devices that hold some params; none for arrays of NumPy and for tracers."""
    devices: set[Any] = set()
    for leaf in jax.tree.leaves(params):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
            devices |= leaf.devices()
    return devices


def count_streams(params: Params, parts: int) -> int:
    """How many streams serve a batch that is cut into `parts` parts: the number of cores, at most one a part.

    1 unless the parameters are on one CPU device, and small: the products of a large model keep all cores busy, and a
    second stream would only read its weights once more.
    """
    devices = devices_of(params)
    if len(devices) > 1 or any(device.platform != "cpu" for device in devices):
        return 1
    if sum(leaf.nbytes for leaf in jax.tree.leaves(params)) > CACHED:
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(parts, cores))


def run_in_streams(
    function: Callable[[Part], Result], parts: Sequence[Part], *, program: Hashable | None = None
) -> list[Result]:
    """`[function(part) for part in parts]`, one thread a part; a failure is raised when all have ended.

    Args:
      function: what is done with a part.
      parts: for the threads.
      program: what the function compiles, if all parts need the same: the first part of a new one goes alone, because
        two threads that meet a program which neither of them finds would both compile it.
    """
    if len(parts) == 1:
        return [function(parts[0])]
    if program is not None and program not in _COMPILED:
        first = function(parts[0])
        _COMPILED.add(program)
        return [first, *run_in_streams(function, parts[1:])]
    futures = [_pool(len(parts)).submit(function, part) for part in parts]
    wait(futures)
    return [future.result() for future in futures]


@functools.cache
def _pool(size: int) -> ThreadPoolExecutor:
    """Threads that stay: a decode has a segment every few milliseconds."""
    return ThreadPoolExecutor(size, thread_name_prefix="grpo_jax-stream")


_COMPILED: set[Hashable] = set()
