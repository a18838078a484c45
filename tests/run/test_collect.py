"""`collect` assigns rewards, advantages and masks to the right rows and replaces zero-signal groups."""

import dataclasses
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collecting import collected as collect
from tiny import tiny_policy

from grpo_jax import GRPOConfig, compute_advantages
from grpo_jax.config import settings
from grpo_jax.run.prepare import prepare
from grpo_jax.run.sources import PrefetchedRollouts, rollout_source
from grpo_jax.update.packed import PackedUpdater
from grpo_jax.update.state import create_state
from grpo_jax.watch.monitor import Progress

# A quarter of the bytes end a completion, so that completions of a group differ in length and some are truncated.
POLICY = tiny_policy().replace(generation_config={"eos_token_id": [1, *range(2, 66)], "pad_token_id": 0})
ROWS = [{"prompt": text, "number": i} for i, text in enumerate(["ab", "c", "def", "gh", "i", "jkl"])]
SMALL = {"max_completion_length": 8, "per_device_train_batch_size": 16, "num_generations": 4, "max_steps": 4}


def length_reward(completion_ids):
    return [float(len(ids)) for ids in completion_ids]


def run_of(reward_fns=length_reward, rows=ROWS, **settings):
    return prepare(POLICY, rows, reward_fns, GRPOConfig(**SMALL | {"shuffle_dataset": False} | settings))


def collected(run, cursor=0, **keep):
    return collect(run, create_state(tiny_policy().params, run.optimizer, jax.random.key(0), **keep), cursor)


def test_rows_match_their_rewards_and_advantages():
    run = run_of()
    experience = collected(run)
    batch = experience.batch
    lengths = np.asarray(batch.mask.sum(-1))
    assert len(set(lengths.ravel())) > 3, "this test needs rewards that differ"
    expected = compute_advantages(lengths.astype(np.float32))
    np.testing.assert_allclose(batch.advantages, expected, atol=1e-6)
    assert [row["prompt"] for row in experience.rows] == [row["prompt"] for row in ROWS[:4] for _ in range(4)]
    assert [row["rewards"]["length_reward"] for row in experience.rows] == lengths.ravel().tolist()
    np.testing.assert_allclose([row["advantage"] for row in experience.rows], np.ravel(expected), atol=1e-6)
    assert experience.cursor == 4


@pytest.mark.quick
def test_mask_truncated_completions():
    plain, masked = collected(run_of()).batch, collected(run_of(mask_truncated_completions=True)).batch
    ended = np.array([row["ended"] for row in collected(run_of()).rows]).reshape(4, 4)
    assert 0 < ended.mean() < 1
    np.testing.assert_array_equal(masked.mask, np.asarray(plain.mask) & ended[:, :, None])


def silent_for(*numbers):
    def fn(completion_ids, number):
        return [0.5 if n in numbers else float(i % 4) for i, n in enumerate(number)]

    return fn


@pytest.mark.quick
def test_zero_signal_groups_are_replaced_and_metrics_describe_the_first_rollout():
    """Of prompts 0 to 3, then 4, 5, 0, 1, groups 1 and 3 have equal rewards; the batch is groups 0, 2, 4, 5."""
    sampled = [collected(run_of(), cursor=cursor).batch.mask.sum(-1) for cursor in (0, 4)]
    m = collected(run_of([silent_for(1, 3), length_reward], dynamic_sampling=True, reward_weights=[1.0, 0.5])).metrics
    assert m["dynamic_sampling/refills"] == 0, "with lengths as a second reward, no group has zero signal"
    assert m["reward"] == pytest.approx(m["rewards/fn/mean"] + 0.5 * m["rewards/length_reward/mean"])

    experience = collected(run_of(silent_for(1, 3), dynamic_sampling=True))
    assert [row["prompt"] for row in experience.rows[::4]] == ["ab", "def", "i", "jkl"], "groups 0 and 2, then 4 and 5"
    assert experience.cursor == 8
    assert np.asarray(experience.batch.counted).all()
    m = experience.metrics
    # In the first rollout, two groups have the reward 0.5 four times and two have 0, 1, 2, 3, with variance 5/3.
    assert m["reward"] == m["rewards/fn/mean"] == pytest.approx((2 * 0.5 + 2 * 1.5) / 4)
    assert m["reward_std"] == pytest.approx(2 * (5 / 3) ** 0.5 / 4)
    assert m["frac_reward_zero_std"] == 0.5
    lengths = np.asarray(sampled[0], float)
    assert m["completions/mean_length"] == pytest.approx(lengths.mean())
    assert (m["completions/min_length"], m["completions/max_length"]) == (lengths.min(), lengths.max())
    assert m["completions/clipped_ratio"] == np.mean([not row["ended"] for row in collected(run_of()).rows])
    assert m["num_tokens"] == sum(float(some.sum()) for some in sampled), "dropped groups count as sampled"
    assert m["dynamic_sampling/refills"] == 1
    assert m["dynamic_sampling/groups_without_signal"] == 3, "groups 1, 3 and 1 again"


@pytest.mark.quick
def test_zero_signal_groups_after_the_last_refill_do_not_count(monkeypatch):
    """After the last refill, zero-signal groups fill the batch without counting in the loss or metrics."""
    monkeypatch.setattr(settings, "MAX_REFILLS", 1)
    run = run_of(silent_for(0, 1, 2, 3, 4), dynamic_sampling=True)
    experience = collected(run)
    batch = experience.batch
    np.testing.assert_array_equal(batch.counted, [True, False, False, False])
    assert experience.rows[0]["prompt"] == "jkl"
    assert np.asarray(batch.mask[0]).any()
    assert not np.asarray(batch.mask[1:]).any()
    assert not np.asarray(batch.advantages[1:]).any()
    assert experience.metrics["dynamic_sampling/refills"] == 1
    assert experience.cursor == 8


def test_reference_is_scored_before_rewards_and_batch_is_on_the_host(monkeypatch):
    """Arrays to be packed, for the reference's log-probs or for an update, are never copied back from the device."""
    events, scored, score = [], [], PackedUpdater.log_probs
    spy = lambda self, params, *x: events.append("scores") or scored.append(x) or score(self, params, *x)
    monkeypatch.setattr(PackedUpdater, "log_probs", spy)
    reward = lambda completion_ids: events.append("rewards") or length_reward(completion_ids)
    batch = collected(run_of(reward, beta=0.1), keep_reference=True, keep_initial=True).batch
    assert events == ["scores", "scores", "rewards"]
    np.testing.assert_array_equal(batch.ref_log_probs, batch.initial_log_probs)
    # The reference is still equal to the policy at this point.
    np.testing.assert_allclose(batch.ref_log_probs, batch.sampling_log_probs, atol=1e-5)
    assert {type(x) for x in jax.tree.leaves((scored, batch))} == {np.ndarray}
    events.clear()
    collected(run_of(reward, beta=0.1, dynamic_sampling=True), keep_reference=True)
    assert events == ["rewards", "scores"], "dynamic sampling scores only the groups it keeps"


@pytest.mark.quick
def test_prefetching_does_not_change_the_completions():
    """Prefetched completions equal those sampled without prefetching, also from a checkpoint and in refills."""
    run = run_of()
    state = create_state(tiny_policy().params, run.optimizer, jax.random.key(0))
    source, alone = PrefetchedRollouts(run), collect(run, state, 4)
    collect(run, state, source=source)
    progress = Progress(step=1, cursor=source.cursor)
    restored = rollout_source(
        dataclasses.replace(run, config=dataclasses.replace(run.config, rollout_ahead=True)),
        state,
        progress,
        *source.to_checkpoint(),
    )
    changed = state.replace(params=tiny_policy(seed=1).params, step=jnp.int32(3))
    for again in (source, restored):
        second = collect(run, changed, source=again)
        chex.assert_trees_all_equal(second.batch, alone.batch)
        assert second.rows == alone.rows
        assert second.cursor == alone.cursor == 8
        assert again.prefetched is None, "the run ends after step 4"
    run = run_of(silent_for(1, 3), dynamic_sampling=True)
    source = PrefetchedRollouts(run)
    plain, first = collect(run, state), collect(run, state, source=source)
    chex.assert_trees_all_equal(plain.batch, first.batch)
    assert first.cursor == plain.cursor == 8
    chex.assert_trees_all_equal(collect(run, state, source=source).batch, collect(run, state, 8).batch)


@pytest.mark.parametrize(
    ("settings", "count"), [({}, 4 * 4), ({"num_iterations": 2}, 2 * 4), ({"dynamic_sampling": True}, 4 * 4 * 5)]
)
def test_stream_is_read_only_as_far_as_needed(settings, count):
    """A run reads as many rows of a stream as it needs, in its order; a resumed run reads the same rows.

    Each of the 4 steps samples 16 completions for 4 prompts. `datasets` shuffles a stream with a buffer.
    """
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    made = []

    def rows():
        for n in itertools.count():
            made.append(n)
            yield {"prompt": f"{n}"}

    stream = datasets.IterableDataset.from_generator(rows).shuffle(seed=3, buffer_size=5)
    expected = [row["prompt"] for row in itertools.islice(stream, count)]
    assert sorted(expected) != expected
    made.clear()
    for _ in range(2):
        run = run_of(rows=stream, **{"shuffle_dataset": True} | settings)
        assert [row["prompt"] for row in run.data.rows] == expected
    assert len(made) <= 2 * (count + 5 + 1), "the stream was read too far"
    mixed = ({"prompt": "a" * n} for n in (1, 90) * 16)
    run = run_of(rows=mixed, max_prompt_length=64, on_long_prompt="drop", **settings)
    assert len(run.data.rows) == 16, "dropped prompts are replaced with later ones"
    with pytest.raises(ValueError, match=r"dataset is an IterableDataset.*; set max_steps"):
        run_of(rows=stream, **settings | {"max_steps": -1})
