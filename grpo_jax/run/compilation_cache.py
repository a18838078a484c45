"""Setup of JAX's persistent compilation cache in the user's cache directory, so that later runs reuse programs."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

import jax

MAX_BYTES = 2 * 2**30
"""Maximum size of the cache; JAX evicts the least recently used programs."""


def user_cache() -> Path:
    """Return this package's cache directory, in XDG_CACHE_HOME or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "grpo_jax"


def enable_compilation_cache() -> Path | None:
    """Enable JAX's persistent compilation cache in this package's cache directory. Returns it, or None if unused.

    Unused if JAX's settings disable it or name another directory, if it is not writable, or in multi-process runs: on
    GPUs, one miss would block all other processes. Machines may share it, so each instruction set has a subdirectory.
    """
    directory = user_cache() / "programs" / _processor()
    current = _setting("jax_compilation_cache_dir")
    if current == str(directory):
        return directory
    if current is not None or "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return None
    if not _setting("jax_enable_compilation_cache") or jax.process_count() > 1:
        return None
    if not _make_writable(directory):
        return None
    # Programs that compile faster than this are not cached, because each file in the cache slows down look-ups.
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
    features = sorted({line for line in lines if line.startswith(("flags", "Features"))})
    description = repr((platform.machine(), features or platform.processor()))
    return hashlib.sha256(description.encode()).hexdigest()[:12]


def _make_writable(directory: Path) -> bool:
    """Create the cache directory and delete incomplete entries. Returns whether the directory is writable.

    JAX writes an entry, then a file with its access time. If the second file is missing, evictions fail.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for program in directory.glob("*-cache"):
            if not program.with_name(program.name.removesuffix("-cache") + "-atime").exists():
                program.unlink(missing_ok=True)
    except OSError:
        return False
    return os.access(directory, os.W_OK)
