"""A rollout one iteration ahead: what samples, what is learnt from it, what runs beside what, and how it resumes."""

import sys
import threading

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import scored, tiny_policy

from grpo_jax import Batch, GRPOConfig, compute_advantages, generate, make_prompts, train
from grpo_jax.update.packed import PackedUpdater
from grpo_jax.update.step import train_step

G, T = 4, 6
ROWS = [{"prompt": text} for text in ["ab", "c", "def", "gh", "i", "jkl"]]


def lengths(completion_ids):
    return [float(sum(ids) % 7) for ids in completion_ids]


@pytest.mark.quick
def test_each_iteration_learns_from_samples_of_the_policy_of_the_one_before(monkeypatch):
    """Beside a sequence of the public pure functions, made by hand."""
    sampling = sys.modules["grpo_jax.run.sample"]
    sampled, seen, states, threads = threading.Semaphore(0), [], [], []
    real_generate, real_update = sampling.generate, PackedUpdater.update

    def spied_generate(*args, **how):
        completions = jax.block_until_ready(real_generate(*args, **how))
        threads.append(threading.current_thread() is threading.main_thread())
        sampled.release()
        return completions

    def spied_update(updater, state, batch):
        states.append(jax.tree.map(jnp.copy, state))
        return real_update(updater, state, batch)

    def reward(completion_ids):
        # Waits for its own completions and for the next ones: it would wait in vain if they were not sampled meanwhile.
        for _ in range([2, 1, 1, 0][len(seen)]):
            assert sampled.acquire(timeout=240), "the next completions are not sampled beside the rewards"
        assert threading.current_thread() is threading.main_thread()
        seen.append(completion_ids)
        return lengths(completion_ids)

    monkeypatch.setattr(sampling, "generate", spied_generate)
    monkeypatch.setattr(PackedUpdater, "update", spied_update)
    settings = {"num_generations": G, "max_completion_length": T, "beta": 0.1, "logging_steps": 1}
    config = GRPOConfig(**settings, max_steps=4, shuffle_dataset=False, rollout_ahead=True)
    lines, policy, optimizer = [], tiny_policy(), optax.sgd(0.5)  # unlike Adam, it does not blow up rounding
    keep = lambda step, metrics: lines.append(metrics)
    states.append(train(policy, ROWS, reward, config, callbacks=[keep], optimizer=optimizer))
    assert threads == [True, False, False, False], "four rollouts for four iterations: none at the end is for nothing"

    def ids_of(completions):
        rows = zip(completions.tokens.reshape(-1, T), completions.mask.reshape(-1, T), strict=True)
        return [np.asarray(tokens)[np.asarray(mask)].tolist() for tokens, mask in rows]

    how = {"num_generations": G, "max_completion_length": T, "eos_token_ids": policy.eos_token_ids}
    key = jax.random.fold_in(jax.random.key(config.seed), 0)
    off_policy = 0
    for i in range(4):
        numbers = [2 * i, 2 * i + 1]
        prompts = make_prompts([policy.tokenizer.encode(ROWS[n % len(ROWS)]["prompt"]) for n in numbers], length=32)
        at = lambda params: generate(policy.model, params, prompts, key, prompt_indices=jnp.array(numbers), **how)
        completions = at(states[max(i - 1, 0)].params)
        assert seen[i] == ids_of(completions)
        off_policy += ids_of(at(states[i].params)) != seen[i]
        batch = Batch(
            prompts,
            completions.tokens,
            completions.mask,
            compute_advantages(jnp.array(lengths(seen[i])).reshape(2, G)),
            completions.log_probs,
            scored(policy.model, policy.params, prompts, completions),
        )
        step = jax.jit(train_step, static_argnames=("model", "optimizer", "config", "on_policy"))
        after, metrics = step(states[i], batch, model=policy.model, optimizer=optimizer, config=config, on_policy=False)
        chex.assert_trees_all_close(after.params, states[i + 1].params, atol=2e-6)
        for name in ("loss", "kl", "ratio_max", "clip_fraction", "sampler_gap"):
            assert lines[i][name] == pytest.approx(float(metrics[name]), rel=1e-4, abs=2e-6), name
    assert off_policy == 3, "and samples of the present policy would have been others"
    assert lines[0]["ratio_max"] == pytest.approx(1, abs=1e-4), "the first iteration has nothing older to learn from"
    assert min(line["ratio_max"] for line in lines[1:]) > 1.01
