"""Recurrent layers: their state depends only on the real tokens, however they are computed."""

import functools

import jax
import numpy as np
import pytest
from tiny import scored, tiny_model

from grpo_jax import generate, make_prompts
from grpo_jax.models.config import ConvShape, DeltaShape, StepCost, count_weights, state_bytes
from grpo_jax.models.context import RecurrentState
from grpo_jax.models.recurrent import Positions, convolve, last_tokens
from grpo_jax.models.transformer import projections
from grpo_jax.rollout.decode_plan import BURST
from grpo_jax.types import Prompts

B, T = 2, 5


@functools.cache
def hybrid():
    """Return a model with one recurrent layer of each kind, before and after an attention layer.

    The norm after a memory amplifies the rounding of tiny values, so `rms_norm_eps` is large. Gates multiply rounding
    errors, so `residual_scale` is small.
    """
    shapes = {"delta": DeltaShape(2, 4, key_dim=6, value_dim=5, kernel=4), "conv": ConvShape(16, kernel=4, bias=True)}
    settings = {"attention_gate": True, "residual_scale": 0.5, "rms_norm_eps": 1e-2}
    return tiny_model(layers=3, mixers=("delta", "attention", "conv"), **shapes, **settings)


@pytest.mark.quick
def test_convolution_and_its_tail_by_hand():
    rng = np.random.default_rng(0)
    x, tail = rng.standard_normal((1, 2, T, 3)), rng.standard_normal((1, 1, 3, 3))
    kernel = rng.standard_normal((4, 3))
    before, count = np.array([[1, 3]]), np.array([[3, 1]])  # empty slots before the tokens; number of tokens
    run = Positions(np.arange(T) - before[..., None], count)
    x, kernel, tail = map(np.float32, (x, kernel, tail))
    y, after = jax.jit(lambda: (convolve(x, kernel, tail, run), last_tokens(x, tail, run)))()
    for g in range(2):
        begin, end = before[0, g], before[0, g] + count[0, g]
        line = np.concatenate([tail[0, 0], x[0, g, begin:end]])
        for i in range(count[0, g]):
            np.testing.assert_allclose(y[0, g, begin + i], (line[i : i + 4] * kernel).sum(axis=0), atol=1e-5)
        np.testing.assert_allclose(after[0, g], line[-3:], atol=1e-6)


def test_counts_of_weights_and_states():
    model, params = hybrid()
    kernels = sum(kernel.size for _, kernel in projections(params))
    assert count_weights(model.config, head=False) == kernels
    prompts = Prompts(np.zeros((B, 6), int), np.full(B, 6))
    _, prefix = jax.eval_shape(functools.partial(model.apply, method="prefill"), {"params": params}, prompts)
    states = [layer for layer in prefix.layers if isinstance(layer, RecurrentState)]
    size = 4 * sum(x.size for x in jax.tree.leaves(states)) / B
    assert state_bytes(model.config, 4) == size
    cost_of = functools.partial(StepCost.of, model.config, prompt_length=8, itemsize=4, weight_itemsize=4)
    steps = [cost_of(completion_length=n) for n in (100, 200)]
    assert steps[0].state == steps[1].state == 2 * size
    assert steps[1].own == 2 * steps[0].own == 200 * 2 * 2 * 8 * 4  # only one layer has keys


def assert_scored_as_drawn(model, params):
    """Assert that sampled log-probs equal scores, with two batches, compaction, and a growing cache."""
    prompts = make_prompts([[3, 4, 5, 6, 7], [6], [7, 8], [9, 3, 2, 1], [1, 1], [2, 5]])
    how = {"num_generations": 4, "max_completion_length": 3 * BURST, "eos_token_ids": (3, 5)}
    some = generate(model, params, prompts, jax.random.key(0), batch_size=8, **how)
    lengths = some.mask.sum(axis=-1)
    assert lengths.min() < BURST < lengths.max()
    np.testing.assert_allclose(scored(model, params, prompts, some), some.log_probs, atol=1e-5)


def test_sampled_log_probs_equal_scores_in_every_slot():
    assert_scored_as_drawn(*hybrid())
