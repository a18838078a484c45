"""JAX's persistent compilation cache in the user's cache directory, so that the next run compiles nothing again."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import sys
from pathlib import Path

import jax

MOST_BYTES = 2 * 2**30
"""Limit of the cache; JAX deletes the programs that were not used for longest."""


def user_cache() -> Path:
    """Return this package's directory in the user's cache, by XDG_CACHE_HOME or the platform's convention."""
    if home := os.environ.get("XDG_CACHE_HOME"):
        return Path(home) / "grpo_jax"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "grpo_jax"
    if sys.platform == "win32" and (home := os.environ.get("LOCALAPPDATA")):
        return Path(home) / "grpo_jax" / "Cache"
    return Path.home() / ".cache" / "grpo_jax"


def keep_programs() -> Path | None:
    """Let JAX store the programs that it compiles from here on, and return the directory; None if it stores none there.

    A CPU's programs use the instructions of its processor, whose hash names the directory, since machines may share a
    home. JAX's own settings (`JAX_COMPILATION_CACHE_DIR`, `jax_enable_compilation_cache`) take precedence. Several
    processes store nothing: on GPUs, a process that compiles would wait for one that has found its program.
    """
    directory = user_cache() / "programs" / _processor()
    current = _setting("jax_compilation_cache_dir")
    if current == str(directory):
        return directory
    if current is not None or "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return None
    if not _setting("jax_enable_compilation_cache") or jax.process_count() > 1 or not _prepared(directory):
        return None
    # Faster compilations are many, and each file makes a look-up slower.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
    if _setting("jax_compilation_cache_max_size") == -1:
        jax.config.update("jax_compilation_cache_max_size", MOST_BYTES)
    jax.config.update("jax_compilation_cache_dir", str(directory))
    return directory


def _setting(name: str) -> object:
    """Return a setting of JAX; type checkers do not know their names."""
    return getattr(jax.config, name)


def _processor() -> str:
    """Return a name for processors with the same instructions."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    able = sorted({line for line in lines if line.startswith(("flags", "Features"))})
    about = repr((platform.machine(), able or platform.processor()))
    return hashlib.sha256(about.encode()).hexdigest()[:12]


def _prepared(directory: Path) -> bool:
    """Whether programs can be stored there; removes those that a killed process has left incomplete.

    JAX writes a program and then its time of use. A program without a time may be cut off: JAX would fail to read it,
    and would then write no further programs.
    """
    from filelock import FileLock, Timeout  # it comes with transformers

    try:
        directory.mkdir(parents=True, exist_ok=True)
        with FileLock(directory / ".lockfile", timeout=10):  # JAX's own
            for program in directory.glob("*-cache"):
                if not program.with_name(program.name.removesuffix("-cache") + "-atime").exists():
                    with contextlib.suppress(FileNotFoundError):
                        program.unlink()
    except (OSError, Timeout, NotImplementedError):  # NotImplementedError: a file system without locks
        return False
    return os.access(directory, os.W_OK)
