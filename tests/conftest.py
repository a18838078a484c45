"""Strict by default: ranks never broadcast by accident, every warning is an error, and there are eight CPU devices."""

import atexit
import contextlib
import gc
import hashlib
import os
import platform
import shutil
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _programs() -> Path:
    """Where compiled programs are kept, from one run of the tests to the next: about half of a run is compiling.

    XLA's key says what a program is and which jaxlib made it; the processor, whose instructions it uses, is in the
    name of the directory. What is a week old is compiled again. Where nothing can be kept, nothing is.
    """
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else [platform.processor()]
    able = sorted({line for line in lines if line.startswith(("flags", "Features"))}) or lines[:1]
    name = f"programs-{hashlib.sha256(repr(able).encode()).hexdigest()[:12]}"
    kept = Path(__file__).parent.parent / ".pytest_cache" / name
    with contextlib.suppress(OSError):
        kept.mkdir(parents=True, exist_ok=True)
    if not os.access(kept, os.W_OK):
        kept = Path(tempfile.mkdtemp(prefix="programs"))
        atexit.register(shutil.rmtree, kept, ignore_errors=True)
    for program in kept.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another run of the tests was faster
            if program.stat().st_mtime < time.time() - 7 * 86400:
                program.unlink()
    return kept


# What one test has compiled, another finds, also in another process and in the next run. To compile everything anew:
# rm -r .pytest_cache
if "GRPO_JAX_TEST_PROGRAMS" not in os.environ:
    os.environ["GRPO_JAX_TEST_PROGRAMS"] = str(_programs())
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ["GRPO_JAX_TEST_PROGRAMS"]
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

# Tests compile far more than they compute: they do without LLVM's optimizer, and with the older and simpler code for
# fusions, by which an update compiles in a quarter of the time. What XLA itself makes of a program (fusions,
# operations, bytes), which tests count, comes before that and is the same.
_FAST = ["backend_optimization_level=0", "llvm_disable_expensive_passes=true"]
if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):  # later, XLA knows the other code alone
    _FAST += ["cpu_use_fusion_emitters=false"]
_ONE_BY_ONE = "cpu_parallel_codegen_split_count=1"  # two workers keep two cores busy
_FLAGS = " ".join(f"--xla_{flag}" for flag in (*_FAST, _ONE_BY_ONE))
if _FLAGS not in os.environ.get("XLA_FLAGS", ""):  # read again, it leaves what chex has added where chex looks for it
    os.environ["XLA_FLAGS"] = f"{_FLAGS} {os.environ.get('XLA_FLAGS', '')}"

import chex  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

chex.set_n_cpu_devices(8)

# Tests share helpers across folders: each folder of tests can be imported from.
sys.path += sorted(str(path) for path in Path(__file__).parent.iterdir() if path.is_dir())
jax.config.update("jax_numpy_rank_promotion", "raise")

# The files that take longest go first: the last of them would keep one worker waiting for the other.
SLOW = ("test_two_processes", "test_resume", "test_mesh", "test_families", "test_fused")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name == "experiments":
            item.add_marker("experiments")
    items.sort(key=lambda item: SLOW.index(item.path.stem) if item.path.stem in SLOW else len(SLOW))


# .ci/run installs optional packages one after the other, and runs again what was skipped without them.
_skipped: dict[str, None] = {}


def pytest_runtest_logreport(report):
    if report.skipped and not hasattr(report, "wasxfail"):
        _skipped[report.nodeid] = None


def pytest_collectreport(report):  # of a file that is skipped as a whole
    if report.skipped:
        _skipped[report.nodeid] = None


def pytest_sessionfinish(session):
    names = os.environ.get("GRPO_JAX_TESTS_SKIPPED")
    if names and not hasattr(session.config, "workerinput"):
        Path(names).write_text("".join(f"{name}\n" for name in _skipped))


def pytest_collection_finish():
    """What is imported stays: the garbage collector need not look through all of it again, nor after every program."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)


# The files whose tests look at what a run draws.
PICTURES = ("test_experiments", "test_publish", "test_readme", "test_train")


@pytest.fixture(autouse=True, scope="module")
def _only_what_is_looked_at(request):
    """No pictures of a run, which take seconds, outside the tests that look at them.

    For a whole module, so that they hold while its shared runs are made.
    """
    with pytest.MonkeyPatch.context() as patch:
        if request.path.stem not in PICTURES and request.path.parent.name != "watch":
            patch.setattr("grpo_jax.watch.monitor.Monitor.write_report", lambda self, **_: None)
        yield


@pytest.fixture(autouse=True, scope="module")
def _programs_of_one_module():
    """Drop what was compiled before it is too much: each program takes memory maps, and Linux gives a process 65530."""
    yield
    maps = Path("/proc/self/maps")
    if not maps.exists() or maps.read_bytes().count(b"\n") > 20_000:
        gc.collect()
        jax.clear_caches()


@pytest.fixture
def key():
    return jax.random.key(0)
