"""Compiled programs, kept in the user's cache from one run to the next, by JAX's persistent compilation cache."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import sys
from pathlib import Path

import jax

MOST_BYTES = 2 * 2**30
"""Of the programs that are kept, those that were used last; JAX deletes the others."""

_said: set[Path] = set()


def user_cache() -> Path:
    """The directory of this package in the user's cache, where the platform has that; XDG_CACHE_HOME says otherwise."""
    if home := os.environ.get("XDG_CACHE_HOME"):
        return Path(home) / "grpo_jax"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "grpo_jax"
    if sys.platform == "win32" and (home := os.environ.get("LOCALAPPDATA")):
        return Path(home) / "grpo_jax" / "Cache"
    return Path.home() / ".cache" / "grpo_jax"


def keep_programs() -> Path | None:
    """Let JAX store the programs that it compiles from here on, and return the directory; None if it is not ours.

    A CPU's programs use the instructions of its processor, which is in the name of the directory, since machines may
    share a home. JAX's own settings (`JAX_COMPILATION_CACHE_DIR`, `jax_enable_compilation_cache`) take precedence.
    Nothing is stored for runs of several processes: on GPUs, a process that compiles would wait for one that has found
    its program.
    """
    directory = user_cache() / "programs" / _processor()
    told = _setting("jax_compilation_cache_dir")
    if told == str(directory):
        return directory
    if told is not None or "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return None
    if not _setting("jax_enable_compilation_cache") or jax.process_count() > 1 or not _prepared(directory):
        return None
    # Programs that compile in less are many, and as many files to look through.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
    if _setting("jax_compilation_cache_max_size") == -1:
        jax.config.update("jax_compilation_cache_max_size", MOST_BYTES)
    jax.config.update("jax_compilation_cache_dir", str(directory))
    return directory


def where_kept(directory: Path) -> str | None:
    """Where programs are kept, as a sentence, the first time that a process asks; the user's home is `~` in it."""
    if directory in _said:
        return None
    _said.add(directory)
    home = Path.home()
    shown = Path("~") / directory.relative_to(home) if directory.is_relative_to(home) else directory
    return f"compiled programs are kept in {shown} (JAX_ENABLE_COMPILATION_CACHE=0 disables this)"


def _setting(name: str) -> object:
    """A setting of JAX, whose names are added at run time."""
    return getattr(jax.config, name)


def _processor() -> str:
    """A name for processors with the same instructions."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    able = sorted({line for line in lines if line.startswith(("flags", "Features"))})
    about = repr((platform.machine(), able or platform.processor()))
    return hashlib.sha256(about.encode()).hexdigest()[:12]


def _prepared(directory: Path) -> bool:
    """Whether programs can be kept there; what a process that was killed has left half written is gone.

    JAX writes a program first and then when it was used. Without the second, the first may be a part of it, which JAX
    would read, refuse and leave where it is, and all further programs would not be written.
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
