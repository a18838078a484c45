"""Checkpoints restore every array from the newest complete step; interruptions do not change which is the best."""

import dataclasses
import functools
import json
import os
import resource
import time

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_resume import about as about_run
from test_resume import shaped

from grpo_jax import GRPOConfig, Prompts
from grpo_jax.run import checkpoint
from grpo_jax.run.checkpoint import Checkpoints
from grpo_jax.update.state import TrainState, create_state
from grpo_jax.watch.monitor import Progress

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
names_in = lambda run_dir: sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def state_at(step):
    params = {"a": {"w": jnp.arange(6.0).reshape(2, 3) + step}, "b": jnp.full(4, step, jnp.bfloat16)}
    return create_state(params, OPTIMIZER, jax.random.key(step)).replace(step=jnp.int32(step))


def as_data(tree):
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)


def filled(kind, place=0, shape=(2, 2, 3)):
    """Return a `kind` (a dataclass of arrays) with a different value in every field."""
    fields = {}
    for n, field in enumerate(dataclasses.fields(kind), place):
        special = {"key": jax.random.key(n), "step": jnp.int32(3), "opt_state": OPTIMIZER.init(PARAMS)}
        if field.name in special:
            fields[field.name] = special[field.name]
        elif "Params" in field.type:
            fields[field.name] = jax.tree.map(lambda x, n=n: x + jnp.asarray(n, x.dtype), PARAMS)
        elif "Prompts" in field.type:
            fields[field.name] = filled(Prompts, n)
        else:
            fields[field.name] = jnp.full(() if kind is TrainState else shape, n, jnp.float32)
    return kind(**fields)


PARAMS = {"a": {"w": jnp.arange(6.0).reshape(2, 3)}, "b": jnp.full(4, 2, jnp.bfloat16)}
COUNTERS = {"int": 7, "bool": True, "float | None": 0.5, "dict[str, float]": {"3": 0.5}}
COUNTERS |= {"dict[str, list[float]]": {"kl": [0.1, 3]}}


def test_checkpoint_holds_every_field_of_state_and_progress(tmp_path):
    """A checkpoint stores every field of `TrainState`, `Progress`, `Batch`, `Completions` and `Restored`."""
    state = filled(TrainState)
    progress = Progress(**{field.name: COUNTERS[field.type] for field in dataclasses.fields(Progress)} | {"step": 3})
    pending = [filled(kind, 20 * i) for i, kind in enumerate(checkpoint._OPTIONAL.values())]
    given = checkpoint.Restored(state, progress, *pending, {"metrics": {"é": 0.5}, "prompts": [None, "a"]})
    assert len(given) == len(checkpoint.Restored._fields)
    with Checkpoints(tmp_path, GRPOConfig(save_steps=3, metric_for_best_model=None)) as checkpoints:
        checkpoints.save(*given)
    with Checkpoints(tmp_path, GRPOConfig()) as checkpoints:
        found = checkpoints.restore(filled(TrainState, 40))
    assert all(getattr(found.progress, field.name) != field.default for field in dataclasses.fields(Progress))
    for part, before, after in zip(given._fields, given, found, strict=True):
        if part in ("progress", "prefetched_metadata"):
            assert after == before
            continue
        chex.assert_trees_all_equal(as_data(after), as_data(before))
        chex.assert_trees_all_equal_dtypes(as_data(after), as_data(before))
        for field in dataclasses.fields(after) if dataclasses.is_dataclass(after) else ():
            assert getattr(after, field.name) is not None, f"{part}.{field.name}"


class OtherState(TrainState):
    """The state of a version with one more field."""

    teacher_params: jax.Array | None = None


def test_checkpoint_of_another_version_is_restored(tmp_path):
    """Names and arrays that only one version knows are ignored. A difference in what both describe is reported."""
    run = about_run(model=shaped())
    state = create_state({"w": np.zeros((2, 3), np.float32)}, optax.adam(0.1), jax.random.key(0))
    state = state.replace(step=jnp.int32(3), ref_params=None)
    with Checkpoints(tmp_path, GRPOConfig(), run) as checkpoints:
        other = OtherState(**{field.name: getattr(state, field.name) for field in dataclasses.fields(state)})
        checkpoints.save(other.replace(teacher_params=jnp.ones(2)), Progress(step=3, tokens=5), None)
    path = tmp_path / "checkpoints/3/_CHECKPOINT_METADATA"
    metadata = json.loads(path.read_text())
    stored = json.loads(metadata["custom_metadata"]["about"])
    stored["progress"]["asked"] = stored["progress"].pop("in_progress")
    stored["run"]["functions"] = {}
    stored["run"]["teacher"] = None
    stored["run"]["config"]["unknown"] = 1
    del stored["run"]["policy"]["rope"]["theta"]
    metadata["custom_metadata"]["about"] = json.dumps(stored)
    path.write_text(json.dumps(metadata))
    changed = about_run(model=shaped(rms_norm_eps=1e-5))
    line = r"Differences:\n  policy: rms_norm_eps = 1e-05, but the run has 1e-06$"
    with Checkpoints(tmp_path, GRPOConfig(), changed) as checkpoints, pytest.raises(ValueError, match=line):
        checkpoints.restore(state)
    with Checkpoints(tmp_path, GRPOConfig(), run) as checkpoints:
        found = checkpoints.restore(jax.tree.map(jnp.copy, state))
    assert found.progress == Progress(step=3, tokens=5)
    chex.assert_trees_all_equal(as_data(found.state), as_data(state))


def write(run_dir, *steps, about=None, metrics=None, evaluated=None, **settings):
    """Save a checkpoint and a metric for each step, resuming an existing run; return the best (step, metric)."""
    with Checkpoints(run_dir, GRPOConfig(**{"save_steps": 1, **settings}), about) as checkpoints:
        progress = checkpoints.restore(state_at(0))[1] or Progress()
        for step, metric in zip(steps, metrics or [None] * len(steps), strict=True):
            progress.step, progress.metric = step, metric
            progress.evaluated = step if evaluated is None else evaluated
            checkpoints.save(state_at(step), progress, None)
        checkpoints.wait()
        return checkpoints.best(progress)


BEST = {"metric_for_best_model": "reward", "save_steps": 2, "save_total_limit": 1, "load_best_model_at_end": True}


@pytest.mark.quick
@pytest.mark.parametrize(("metrics", "step"), [([0.1, 0.9, 0.3], 4), ([0.1, 0.3, 0.9], 6)], ids=["earlier", "last"])
def test_best_state_is_loaded_at_end(tmp_path, metrics, step):
    # In two parts: metrics are restored after a restart, and old checkpoints are deleted.
    write(tmp_path, 2, 4, metrics=metrics[:2], **BEST)
    write(tmp_path, 6, metrics=metrics[2:], **BEST)
    assert names_in(tmp_path) == sorted({"6", str(step)})
    last = state_at(6)
    with Checkpoints(tmp_path, GRPOConfig(**BEST)) as checkpoints:
        best = checkpoints.restore_best(last, checkpoints.restore(state_at(0))[1])
        assert checkpoints.steps()[-1] == 6  # a longer run resumes from here
    chex.assert_trees_all_equal(as_data(best), as_data(state_at(step)))
    # Only one of the two states is in memory.
    assert all(leaf.is_deleted() == (step != 6) for leaf in jax.tree.leaves(last))


@pytest.mark.quick
def test_last_state_is_kept_without_a_best_one(tmp_path):
    last = state_at(4)
    with Checkpoints(tmp_path, GRPOConfig(**{**BEST, "load_best_model_at_end": False})) as checkpoints:
        assert checkpoints.restore_best(last, Progress()) is last
    with pytest.warns(UserWarning, match="metric_for_best_model = 'rewrd' has no finite value at step"):
        write(tmp_path, 2, 4, **{**BEST, "metric_for_best_model": "rewrd"})
    with Checkpoints(tmp_path, GRPOConfig(**{**BEST, "metric_for_best_model": "rewrd"})) as checkpoints:
        assert checkpoints.restore_best(last, Progress()) is last


@pytest.mark.quick
def test_evaluation_counts_for_the_step_it_evaluated(tmp_path):
    settings = {"metric_for_best_model": "eval/right", "eval_steps": 1, "save_steps": 1}
    assert write(tmp_path, 2, metrics=[0.5], **settings) == (2, 0.5)
    assert write(tmp_path, 3, metrics=[0.9], evaluated=2, **settings) == (2, 0.5)
    # Saved by a stop and evaluated by the resumed run: the checkpoint is kept and counts now.
    assert write(tmp_path, 3, metrics=[0.9], **settings) == (3, 0.9)


@pytest.mark.quick
def test_when_a_save_is_due(tmp_path, monkeypatch):
    """A save is due every `save_steps` steps or `save_minutes` minutes, by default every five minutes."""
    due = lambda step, **settings: Checkpoints(None, GRPOConfig(**settings), {"total_steps": 7}).should_save(step)
    assert [step for step in range(1, 8) if due(step, save_steps=3)] == [3, 6, 7]
    assert [step for step in range(1, 8) if due(step, save_steps=None)] == [7]
    clock = [100.0]
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: clock[0])
    for settings, pause in (({"save_steps": None, "save_minutes": 2}, 120), ({}, 300)):
        with Checkpoints(tmp_path / str(pause), GRPOConfig(**settings)) as checkpoints:
            for seconds, is_due in ((pause - 1, False), (2, True)):
                clock[0] += seconds
                assert checkpoints.should_save(1) is is_due


def test_donating_a_state_while_it_is_saved(tmp_path):
    """A state may be donated while it is saved: on CPUs its arrays are views of buffers that must not be reused."""

    @functools.partial(jax.jit, donate_argnums=0)
    def update(state):
        return jax.tree.map(lambda x: (x * 1.5 + 1).astype(x.dtype), state)

    params = {f"w{i}": jax.random.normal(jax.random.key(i), (1_000_000,)) for i in range(4)}
    state = create_state(params, OPTIMIZER, jax.random.key(0)).replace(key=None)
    first, state = state, update(state)
    assert first.params["w0"].is_deleted(), "the update did not donate its input, so this test checks nothing"
    wanted = jax.tree.map(np.array, state)
    with Checkpoints(tmp_path, GRPOConfig()) as checkpoints:
        checkpoints.save(state, Progress(step=1), None)
        for _ in range(3):
            state = update(state)
    with Checkpoints(tmp_path, GRPOConfig()) as checkpoints:
        chex.assert_trees_all_equal(checkpoints.restore(state)[0], wanted)


def test_full_disk_raises_and_keeps_the_last_checkpoint(tmp_path):
    """A full disk raises an error and leaves the last complete checkpoint readable."""
    wanted = np.asarray(jax.random.normal(jax.random.key(0), (500_000,)))
    state = create_state({"w": jnp.array(wanted)}, OPTIMIZER, jax.random.key(0))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    message = r"step 4 could not be written to .*checkpoints \(.*\); the last complete one is from step 2\. Free disk"

    def fill():
        with Checkpoints(tmp_path, GRPOConfig(save_total_limit=1)) as checkpoints:
            checkpoints.save(state, Progress(step=2), None)
            checkpoints.wait()
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
            checkpoints.save(state, Progress(step=4), None)

    try:
        with pytest.raises(OSError, match=message):
            fill()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    with Checkpoints(tmp_path, GRPOConfig(save_total_limit=1)) as checkpoints:
        found, progress, *_ = checkpoints.restore(state)
        assert progress.step == 2
        chex.assert_trees_all_equal(found.params["w"], wanted)
        checkpoints.save(found, Progress(step=4), None)
    assert names_in(tmp_path) == ["4"], "files of the failed save remain"


def test_background_error_does_not_hide_the_error_that_ends_the_run(tmp_path, monkeypatch):
    def broken():
        raise OSError(28, "No space left on device")

    with pytest.raises(KeyError, match="first") as caught, Checkpoints(tmp_path, GRPOConfig()) as checkpoints:  # noqa: PT012
        checkpoints.save(state_at(2), Progress(step=2), None)
        monkeypatch.setattr(checkpoints._saving[1], "result", broken)
        raise KeyError("first")
    assert "could not be written" in caught.value.__notes__[0]


def test_run_resumes_from_the_last_readable_checkpoint(tmp_path):
    """A run renames unreadable checkpoints and resumes from the newest readable one."""
    write(tmp_path, 2, 4, 6)
    latest = tmp_path / "checkpoints" / "6"
    for file in [*latest.rglob("manifest.ocdbt"), *latest.glob("*/d/*"), *latest.rglob("_METADATA")]:
        os.truncate(file, file.stat().st_size // 2)
    (tmp_path / "checkpoints" / "4" / "_CHECKPOINT_METADATA").write_text("{}")
    with Checkpoints(tmp_path, GRPOConfig(save_steps=1)) as checkpoints:
        with pytest.warns(RuntimeWarning, match=r"step [46] cannot be read \(.*\). It was renamed to .*; .* at step 2"):
            state, progress, *_ = checkpoints.restore(state_at(0))
        chex.assert_trees_all_equal(as_data(state), as_data(state_at(2)))
        assert progress.step == checkpoints.steps()[-1] == 2
        checkpoints.save(state_at(4), Progress(step=4), None)
    two, four, aside, later = names_in(tmp_path)
    assert (two, four, aside[:13], later[:13]) == ("2", "4", "4.unreadable-", "6.unreadable-")
    for step in ("2", "4"):
        (tmp_path / "checkpoints" / step / "_CHECKPOINT_METADATA").write_text("{}")
    message = r"run_dir = '.*': none of its checkpoints can be read \(step 4: .*step 2: .* move .*checkpoints away"
    with Checkpoints(tmp_path, GRPOConfig()) as checkpoints, pytest.raises(ValueError, match=message):
        checkpoints.restore(state_at(0))
    assert names_in(tmp_path) == ["2", "4", aside, later], "files were moved"


def test_resume_modes(tmp_path):
    with Checkpoints(tmp_path, GRPOConfig()) as checkpoints:
        assert checkpoints.restore(state_at(0), "never")[1] is None
        with pytest.raises(ValueError, match=r'resume="must" needs a checkpoint to resume from, but run_dir = '):
            checkpoints.restore(state_at(0), "must")
    (tmp_path / "metrics.jsonl").touch()  # as in a run that was killed before its first checkpoint
    with Checkpoints(tmp_path, GRPOConfig()) as checkpoints:
        assert checkpoints.restore(state_at(0), "auto")[1] is None
        with pytest.raises(ValueError, match=r'resume="never" needs .* contains a run\. Use a different directory'):
            checkpoints.restore(state_at(0), "never")
    (tmp_path / "metrics.jsonl").unlink()
    write(tmp_path, 2)
    with Checkpoints(tmp_path, GRPOConfig()) as checkpoints:
        assert checkpoints.restore(state_at(0), "must")[1].step == 2
        with pytest.raises(ValueError, match="contains a run"):
            checkpoints.restore(state_at(0), "never")


@pytest.mark.quick
def test_several_processes_decide_together(tmp_path, monkeypatch):
    """Process 0's clock decides when to save; a checkpoint that one process cannot read is skipped by all."""
    write(tmp_path, 2, 4)
    load = Checkpoints._load
    with Checkpoints(tmp_path, GRPOConfig(save_steps=None, save_minutes=1)) as checkpoints:
        monkeypatch.setattr(checkpoint, "gather_objects", lambda own: [False, own])
        monkeypatch.setattr(checkpoints, "_saved_at", time.monotonic() - 90)
        assert not checkpoints.should_save(5)
        monkeypatch.setattr(checkpoint, "gather_objects", lambda own: [own, False])
        assert checkpoints.should_save(5)
        reading = []
        monkeypatch.setattr(checkpoints, "_load", lambda step, *x: reading.append(step) or load(checkpoints, step, *x))
        broken = lambda own: [own, "OSError: disk failed on one host" if reading and reading.pop() == 4 else ""]
        monkeypatch.setattr("grpo_jax.run.checkpoint_reader.gather_objects", broken)
        with pytest.warns(RuntimeWarning, match=r"step 4 cannot be read \(OSError: disk failed on one host\)"):
            assert checkpoints.restore(state_at(0))[1].step == 2


LIMITED = {"save_steps": 4, "save_total_limit": 2, "metric_for_best_model": "reward"}


SCHEDULES = [
    ({}, [4, 8, 12], {"4": 0.5, "8": 0.1, "12": 0.2}, (4, 0.5), {4, 8, 12}),
    ({}, [4, 8, 12], {"4": 0.1, "8": 0.5, "12": 0.5}, (12, 0.5), {8, 12}),
    ({"greater_is_better": False}, [4, 8, 12], {"4": 0.1, "8": 0.5, "12": 0.2}, (4, 0.1), {4, 8, 12}),
    ({}, [4, 8, 9], {"4": 0.5, "8": 0.1, "9": 0.9}, (4, 0.5), {4, 8, 9}),
    ({}, [4, 8, 9, 12], {"4": 0.1, "8": 0.1}, (8, 0.1), {8, 12}), ({}, [1, 2, 3], {}, None, {2, 3}),
    ({}, [4, 8, 12, 14], {"14": 0.9}, (14, 0.9), {12, 14}), ({}, [4, 6, 8], {"6": 0.9}, None, {4, 8}),
    ({"save_total_limit": None}, [4, 5, 8], {"5": 0.9}, None, {4, 8}),
    ({"save_total_limit": None}, [4, 5, 8, 9, 10], {}, None, {4, 8, 10}),
    ({"save_total_limit": None, "save_steps": None}, [3, 5, 9], {}, None, {9}),
    ({"save_total_limit": None, "save_steps": None}, [9, 14], {}, None, {14}),
    ({"save_steps": None}, [3, 5, 9, 14], {"5": 0.9, "14": 0.1}, (14, 0.1), {9, 14}),
]  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize(("settings", "steps", "metrics", "best", "kept"), SCHEDULES)
def test_best_and_kept_checkpoints(settings, steps, metrics, best, kept):
    checkpoints = Checkpoints(None, GRPOConfig(**{**LIMITED, **settings}), {"total_steps": 14})
    assert checkpoints.best_among(steps, metrics) == best
    assert checkpoints.steps_to_keep(steps, metrics) == kept


REWARD, KL = (GRPOConfig(save_steps=1, metric_for_best_model=name) for name in ("reward", "kl"))


def restored(run_dir, config):
    with Checkpoints(run_dir, config, about_run(config=config)) as checkpoints:
        progress = checkpoints.restore(state_at(0))[1]
        return progress.metric, progress.metrics, checkpoints.best(progress)


@pytest.mark.quick
def test_metrics_of_another_name_are_not_compared(tmp_path):
    with Checkpoints(tmp_path, REWARD, about_run(config=REWARD)) as checkpoints:
        for step in (1, 2):
            checkpoints.save(state_at(step), Progress(step=step, metric=1 / step, metrics={"1": 1.0}), None)
    assert restored(tmp_path, REWARD) == (0.5, {"1": 1.0, "2": 0.5}, (1, 1.0))
    assert restored(tmp_path, KL) == (None, {}, None)
