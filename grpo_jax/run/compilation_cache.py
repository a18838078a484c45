"""Setup of JAX's persistent compilation cache in the user's cache directory, so that later runs reuse programs."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import sys
from pathlib import Path

import jax

MAX_BYTES = 2 * 2**30
"""Maximum size of the cache; JAX evicts the least recently used programs."""


def user_cache() -> Path:
    """Return this package's cache directory, from XDG_CACHE_HOME or the platform's convention."""
    if home := os.environ.get("XDG_CACHE_HOME"):
        return Path(home) / "grpo_jax"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "grpo_jax"
    if sys.platform == "win32" and (home := os.environ.get("LOCALAPPDATA")):
        return Path(home) / "grpo_jax" / "Cache"
    return Path.home() / ".cache" / "grpo_jax"


def enable_compilation_cache() -> Path | None:
    """Enable JAX's persistent compilation cache and return its directory, or None if this cache is not used.

    Programs for CPUs depend on the instruction set, and machines may share a home directory, so the directory is named
    after a hash of the instruction set. JAX's settings (`JAX_COMPILATION_CACHE_DIR`, `jax_enable_compilation_cache`)
    take precedence. Multi-process runs do not use the cache: on GPUs, a miss in one process would block the others.
    """
    directory = user_cache() / "programs" / _processor()
    current = _setting("jax_compilation_cache_dir")
    if current == str(directory):
        return directory
    if current is not None or "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return None
    if not _setting("jax_enable_compilation_cache") or jax.process_count() > 1 or not _prepared(directory):
        return None
    # Skip the many programs that compile faster: each file in the cache slows down look-ups.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
    if _setting("jax_compilation_cache_max_size") == -1:
        jax.config.update("jax_compilation_cache_max_size", MAX_BYTES)
    jax.config.update("jax_compilation_cache_dir", str(directory))
    return directory


def _setting(name: str) -> object:
    """Return a JAX setting. `getattr` is used because type checkers do not recognize the names."""
    return getattr(jax.config, name)


def _processor() -> str:
    """Return a hash of the processor's instruction set."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    able = sorted({line for line in lines if line.startswith(("flags", "Features"))})
    about = repr((platform.machine(), able or platform.processor()))
    return hashlib.sha256(about.encode()).hexdigest()[:12]


def _prepared(directory: Path) -> bool:
    """Create the cache directory and delete incomplete programs of killed processes.

    Returns whether the directory is writable. JAX writes a program and then a file with its access time. A program
    without this file may be truncated. JAX would fail to read it and then stop writing programs.
    """
    from filelock import FileLock, Timeout  # a dependency of transformers

    try:
        directory.mkdir(parents=True, exist_ok=True)
        with FileLock(directory / ".lockfile", timeout=10):  # the lock that JAX uses
            for program in directory.glob("*-cache"):
                if not program.with_name(program.name.removesuffix("-cache") + "-atime").exists():
                    with contextlib.suppress(FileNotFoundError):
                        program.unlink()
    except (OSError, Timeout, NotImplementedError):  # NotImplementedError: no file locks
        return False
    return os.access(directory, os.W_OK)
