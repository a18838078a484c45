"""The compilation cache: a process loads the programs compiled by earlier ones, and its size is bounded."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_jax.run import compilation_cache
from grpo_jax.run.compilation_cache import enable_compilation_cache, user_cache

COMPILE = """
import json
import jax
from grpo_jax.run.compilation_cache import enable_compilation_cache

counts = {"compile_requests_use_cache": 0, "cache_hits": 0}

def listen(event, **about):
    name = event.rpartition("/")[2]
    if name in counts:
        counts[name] += 1

jax.monitoring.register_event_listener(listen)
jax.numpy.ones(3).block_until_ready()  # programs compiled before the call are not cached; that must do no harm
directory = enable_compilation_cache()
assert directory == enable_compilation_cache(), "a second call returns the same directory"
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.jit(lambda x: jax.numpy.sin(x) @ x)(jax.numpy.ones((7, 7))).block_until_ready()
print(json.dumps([str(directory), jax.config.jax_compilation_cache_max_size, counts["cache_hits"]]))
"""


def compile_in(cache):
    """Compile in a new process with the user cache `cache`; return (directory, size limit, cache hits) and stderr."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("JAX_COMPILATION")}
    env |= {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(Path(compilation_cache.__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout), done.stderr


def test_second_process_loads_the_programs_of_the_first(tmp_path):
    (directory, bound, found), _ = compile_in(tmp_path)
    kept = sorted(path.name for path in Path(directory).glob("*-cache"))
    assert Path(directory).parent == tmp_path / "grpo_jax" / "programs"
    assert (bound, found) == (compilation_cache.MAX_BYTES, 0)
    assert kept
    # A process killed while writing leaves a file that must not be read and must not prevent later writes.
    torn = Path(directory) / kept[0].replace("-cache", "0-cache")
    torn.write_bytes(b"half a progr")
    first = Path(directory) / kept[0]
    first.with_name(kept[0].replace("-cache", "-atime")).unlink()
    (_, _, found), stderr = compile_in(tmp_path)
    assert found == len(kept) - 1
    assert not torn.exists()
    assert "Error" not in stderr


@pytest.mark.parametrize("case", ["several processes", "environment", "disabled", "own directory", "unwritable"])
def test_no_cache_if_configured_disabled_unwritable_or_multi_process(case, monkeypatch, tmp_path):
    settings = {
        "jax_compilation_cache_dir": "own" if case == "own directory" else None,
        "jax_enable_compilation_cache": case != "disabled",
    }
    monkeypatch.setattr(compilation_cache, "_setting", settings.get)
    monkeypatch.setattr(compilation_cache.jax, "process_count", lambda: 1 + (case == "several processes"))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR" if case == "environment" else "XDG_CACHE_HOME", str(tmp_path))
    if case == "unwritable":
        (tmp_path / "grpo_jax").write_text("a file")
    assert enable_compilation_cache() is None


@pytest.mark.quick
def test_user_cache_is_in_the_cache_home(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert user_cache() == Path.home() / ".cache" / "grpo_jax"
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert user_cache() == Path("/elsewhere/grpo_jax")
