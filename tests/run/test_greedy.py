"""ReMax: the baseline is the reward of a greedy completion of the same prompt, and of nothing else."""

import jax
import numpy as np
import pytest
from test_collect import POLICY, ROWS, collected, run_of
from test_resume import Cut, assert_same_run, cut_at
from test_resume import run as run_in
from test_turns_run import experience_of
from tiny import tiny_policy

from grpo_jax import generate, make_prompts
from grpo_jax.run.collect import collect
from grpo_jax.run.prepare import prepare
from grpo_jax.run.run import Arguments
from grpo_jax.update.state import create_state

REMAX = {"advantage_estimator": "remax", "scale_rewards": "none"}


def residue(completion_ids):
    return [float(sum(ids) % 7) for ids in completion_ids]


def residues(tokens, mask):
    """`residue` of an array of completions [B, G, T]."""
    return np.where(mask, tokens, 0).sum(-1) % 7


def greedy_residues(rows, length=8):
    """Of the greedy completion of each row, by a rollout made by hand."""
    prompts = make_prompts(POLICY.tokenizer([row["prompt"] for row in rows])["input_ids"], length=32)
    settings = {"num_generations": 1, "max_completion_length": length, "temperature": 0.0}
    ids = POLICY.eos_token_ids
    out = generate(POLICY.model, tiny_policy().params, prompts, jax.random.key(9), eos_token_ids=ids, **settings)
    return residues(np.asarray(out.tokens), np.asarray(out.mask))[:, 0]


@pytest.mark.quick
def test_the_baseline_is_the_reward_of_a_greedy_completion():
    calls = []

    def second(completion_ids, number):
        calls.append(len(completion_ids))
        return [None if n == 2 else -2.0 * x for x, n in zip(residue(completion_ids), number, strict=True)]

    run = run_of([residue, second], reward_weights=[1.0, 0.25], **REMAX)
    experience = collected(run)
    of_batch = residues(np.asarray(experience.batch.tokens), np.asarray(experience.batch.mask))
    greedy = greedy_residues(ROWS[:4])
    share = np.array([0.5, 0.5, 1, 0.5])  # of the third row the second function says nothing
    np.testing.assert_allclose(experience.batch.advantages, (of_batch - greedy[:, None]) * share[:, None], atol=1e-6)
    assert len(set(greedy)) > 1
    assert np.any(np.asarray(experience.batch.advantages).sum(1)), "the mean of a group is not its baseline"
    assert calls == [16, 4], "reward functions see groups, and then the greedy completions by themselves"
    plain = collected(run_of([residue, second], reward_weights=[1.0, 0.25]))
    np.testing.assert_array_equal(plain.batch.tokens, experience.batch.tokens)
    m = experience.metrics
    assert m["reward_greedy"] == pytest.approx(np.mean(greedy * share), rel=1e-6)
    assert m["reward"] == plain.metrics["reward"]
    assert m["num_tokens"] == plain.metrics["num_tokens"] + 4 * 8, "none of the greedy ones ends early"


def test_another_engine_is_asked_for_greedy_completions_too():
    asked = []

    def sampler(temperature, num_generations, **others):
        asked.append((temperature, num_generations))
        return generate(temperature=temperature, num_generations=num_generations, **others)

    config = run_of(**REMAX).config
    run = prepare(Arguments(POLICY, ROWS, residue, config, sampler=sampler))
    state = create_state(tiny_policy().params, run.optimizer, jax.random.key(0))
    found = collect(run, state, 0, count=run.sizes.prompts)
    assert asked == [(1.0, 4), (0.0, 1)]
    np.testing.assert_allclose(found.batch.advantages, collected(run_of(residue, **REMAX)).batch.advantages, atol=1e-6)


def test_the_greedy_completion_of_several_turns_has_an_environment_of_its_own():
    _, _, plain = experience_of()
    _, _, experience = experience_of(**REMAX)
    np.testing.assert_array_equal(experience.batch.tokens, plain.batch.tokens)
    rewards = np.array([row["rewards"]["Game"] for row in experience.rows]).reshape(2, 4)
    baselines = rewards - experience.batch.advantages
    np.testing.assert_allclose(baselines, baselines[:, :1].repeat(4, 1), atol=1e-6)
    assert experience.metrics["reward_greedy"] == pytest.approx(baselines[:, 0].mean(), rel=1e-6)
    assert np.isin(np.round(baselines[:, 0], 5), range(5)).all()


def test_a_run_ahead_with_greedy_baselines_resumes_to_the_same_bytes(tmp_path):
    settings = {"rollout_ahead": True, "dynamic_sampling": False, "max_steps": 6, "num_iterations": 2, **REMAX}
    settings |= {"eval_steps": None, "logging_steps": 1}
    whole = run_in(tmp_path / "whole", **settings)
    with pytest.raises(Cut):
        run_in(tmp_path / "cut", callbacks=[cut_at(3)], **settings)
    assert_same_run(run_in(tmp_path / "cut", **settings), whole, tmp_path / "cut", tmp_path / "whole")
