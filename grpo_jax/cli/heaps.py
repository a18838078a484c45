"""How many heaps the C library keeps.

glibc gives the threads of a process up to eight heaps for each core, and what one of them frees is not used by another.
The arrays of a run on a CPU come from the threads of XLA: freed ones lie about in all heaps, and memory grows with the
iterations. On two cores a model of 135 million parameters takes 7.1 GB with one heap and 8.5 GB without, in the same
time.
"""

from __future__ import annotations

import contextlib
import ctypes
import os

_M_ARENA_MAX = -8  # of mallopt(3)

CORES = 4
"""Cores that share a heap: threads that allocate at the same time wait for each other there."""


def few_heaps() -> None:
    """Have glibc make at most one heap for every `CORES` cores, in a process that has not begun threads.

    `MALLOC_ARENA_MAX` in the environment, which says how many, is left alone, and so is any other C library.
    """
    if "MALLOC_ARENA_MAX" in os.environ:
        return
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, max(1, (os.cpu_count() or 1) // CORES))
