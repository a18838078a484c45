"""Independent parts of a batch on several threads, where that keeps a CPU's cores busy.

XLA's CPU backend spreads one operation over the cores only if the operation is large. The steps of a decode are small:
one core works and the other waits. Half of the groups on each of two threads are the same samples in half the time. On
GPUs and TPUs, where one program fills the device, nothing is split.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jax

from grpo_jax.types import Params

__all__ = ["count_streams", "run_in_streams"]

Part = TypeVar("Part")
Result = TypeVar("Result")


def count_streams(params: Params, parts: int, rows: int, *, at_least: int = 32) -> int:
    """How many streams serve a batch that can be cut into `parts` equal parts and has `rows` rows in all.

    Args:
      params: where these are is where the work is done.
      parts: the number of streams divides it.
      rows: rows of the whole batch.
      at_least: rows of one stream; fewer leave the matrix products too thin.

    Returns:
      A divisor of `parts`, at most the number of cores; 1 unless the parameters are on one CPU device.
    """
    devices: set[Any] = set()
    for leaf in jax.tree.leaves(params):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
            devices |= leaf.devices()
    if len(devices) > 1 or any(device.platform != "cpu" for device in devices):
        return 1
    most = min(parts, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    return max((n for n in range(1, most + 1) if parts % n == 0 and rows // n >= at_least), default=1)


def run_in_streams(function: Callable[[Part], Result], parts: Sequence[Part]) -> list[Result]:
    """`[function(part) for part in parts]`, one thread a part; a failure is raised when all have ended."""
    if len(parts) == 1:
        return [function(parts[0])]
    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(function, parts))
