"""Test configuration: errors for rank promotion and (in pyproject.toml) warnings; eight CPU devices; compile cache."""

import gc
import hashlib
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _programs() -> Path:
    """Return the cache directory for compiled programs, since compilation takes about half of a test run.

    XLA's cache key covers the program and jaxlib but not the CPU, so the directory's name contains a hash of the CPU's
    features.
    """
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else [f"Features {platform.processor()}"]
    features = sorted({line for line in lines if line.startswith(("flags", "Features"))})
    name = f"programs-{hashlib.sha256(repr(features).encode()).hexdigest()[:12]}"
    directory = Path(__file__).parent.parent / ".pytest_cache" / name
    directory.mkdir(parents=True, exist_ok=True)
    return directory


# Tests share compiled programs across processes and test runs. To compile everything again, run
# rm -r .pytest_cache
if "GRPO_JAX_TEST_PROGRAMS" not in os.environ:
    os.environ["GRPO_JAX_TEST_PROGRAMS"] = str(_programs())
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ["GRPO_JAX_TEST_PROGRAMS"]
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"  # writing small programs would take longer

# Tests spend far more time compiling than computing. Without LLVM's optimizer and with the older, simpler fusion
# emitters, an update compiles in a quarter of the time. XLA's own passes (fusions, operations, bytes), whose results
# tests count, run earlier and are not affected.
_FAST = ["backend_optimization_level=0", "llvm_disable_expensive_passes=true"]
if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):  # later versions have only the new emitters
    _FAST += ["cpu_use_fusion_emitters=false"]
_ONE_BY_ONE = "cpu_parallel_codegen_split_count=1"  # two workers keep two cores busy
_FLAGS = " ".join(f"--xla_{flag}" for flag in (*_FAST, _ONE_BY_ONE))
if _FLAGS not in os.environ.get("XLA_FLAGS", ""):  # do not move flags that chex has added
    os.environ["XLA_FLAGS"] = f"{_FLAGS} {os.environ.get('XLA_FLAGS', '')}"

import chex  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

chex.set_n_cpu_devices(8)

# Make every test folder importable, because tests share helpers across folders.
sys.path += sorted(str(path) for path in Path(__file__).parent.iterdir() if path.is_dir())
jax.config.update("jax_numpy_rank_promotion", "raise")

# The slowest files run first; otherwise one worker would wait for the other at the end.
SLOW = ("test_two_processes", "test_resume", "test_mesh", "test_families", "test_fused")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name == "experiments":
            item.add_marker("experiments")
    items.sort(key=lambda item: SLOW.index(item.path.stem) if item.path.stem in SLOW else len(SLOW))


# .ci/run installs optional packages one after the other and reruns the tests that were skipped without them.
_skipped: dict[str, None] = {}


def pytest_runtest_logreport(report):
    if report.skipped and not hasattr(report, "wasxfail"):
        _skipped[report.nodeid] = None


def pytest_collectreport(report):  # for files that are skipped entirely
    if report.skipped:
        _skipped[report.nodeid] = None


def pytest_sessionfinish(session):
    names = os.environ.get("GRPO_JAX_TESTS_SKIPPED")
    if names and not hasattr(session.config, "workerinput"):
        Path(names).write_text("".join(f"{name}\n" for name in _skipped))


def pytest_collection_finish():
    """Exclude imported modules from garbage collection and collect less often, to save time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)


# The files whose tests check the reports that runs draw.
PICTURES = ("test_experiments", "test_publish", "test_readme", "test_train")


@pytest.fixture(autouse=True, scope="module")
def _no_unused_reports(request):
    """Disable reports, which take seconds to draw, in files whose tests do not check them.

    The scope is the module, so that this also applies to runs in module-scoped fixtures.
    """
    with pytest.MonkeyPatch.context() as patch:
        if request.path.stem not in PICTURES and request.path.parent.name != "watch":
            patch.setattr("grpo_jax.watch.monitor.Monitor.write_report", lambda self, **_: None)
        yield


@pytest.fixture(autouse=True, scope="module")
def _limit_programs():
    """Clear JAX's caches before programs use up the memory maps, of which Linux allows a process 65530.

    Until then, exclude the objects that programs keep alive from garbage collection: there are a million, and each full
    collection would take two seconds.
    """
    yield
    maps = Path("/proc/self/maps")
    if not maps.exists() or maps.read_bytes().count(b"\n") > 20_000:
        gc.unfreeze()
        gc.collect()
        jax.clear_caches()
    gc.collect()
    gc.freeze()


@pytest.fixture
def key():
    return jax.random.key(0)
