"""Importance weights for completions sampled by another engine: values by hand, and expected gradients."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from precision import x64
from test_enumeration import DTYPES, NO_CLIP, assert_gradient, complex_gradient, softmax

from grpo_jax.maths.losses import grpo_loss
from grpo_jax.maths.surrogates import SAMPLER_WEIGHT_MODES, sampler_weights

# Ratios π_old / π_sampler for two completions of up to three tokens.
RATIOS = np.array([[2.0, 0.5, 4.0], [0.25, 1.0, np.nan]])
MASK = np.array([[1, 1, 1], [1, 1, 0]])
numpy_logs = lambda params, rows: np.where(rows[1], token_logs(params, lambda x: np.log(softmax(x)), rows[0]), 0)


def weights(**settings):
    old = jnp.log(jnp.where(MASK == 1, 0.2, jnp.nan))
    return np.asarray(sampler_weights(old, old - jnp.log(RATIOS), MASK, **settings))


@pytest.mark.quick
@pytest.mark.parametrize(("mode", "clip_max", "clip_min", "expected"), [
    ("token_truncate", 3.0, 0.4, [[2.0, 0.5, 3.0], [0.4, 1.0, 1.0]]),
    ("token_truncate", None, 0.6, [[2.0, 0.6, 4.0], [0.6, 1.0, 1.0]]),
    ("token_mask", 3.0, 0.4, [[2.0, 0.5, 0.0], [0.0, 1.0, 1.0]]),
    ("token_mask", None, None, [[2.0, 0.5, 4.0], [0.25, 1.0, 1.0]]),
    ("sequence_truncate", 3.0, 0.5, [3.0, 0.5]),
    ("sequence_mask", 3.0, None, [0.0, 0.25]),
    ("sequence_mask", None, 0.5, [4.0, 0.0]),
    ("sequence_mask", None, None, [4.0, 0.25]),
])  # fmt: skip
def test_weights_by_hand(mode, clip_max, clip_min, expected):
    np.testing.assert_allclose(weights(mode=mode, clip_max=clip_max, clip_min=clip_min), expected, rtol=1e-5)
    bounds = {"mode": mode, "clip_max": clip_max, "clip_min": clip_min}
    alone = sampler_weights(jnp.zeros(3), -jnp.log(RATIOS[0]), MASK[0], **bounds)  # a single completion
    np.testing.assert_allclose(alone, expected[0], rtol=1e-5)


@pytest.mark.parametrize(("mode", "expected"), [("token_mask", [[1, 1], [0, 0]]), ("sequence_mask", [1, 0])])
def test_weights_at_a_bound_are_kept_and_masked_tokens_have_weight_one(mode, expected):
    """Bounds that exclude 1 apply to sampled tokens only, and a weight equal to a bound is inside."""
    zeros, mask = jnp.zeros((2, 2)), jnp.array([[0, 0], [1, 1]])
    for bounds in ({"clip_min": 1.5, "clip_max": None}, {"clip_max": 0.5}):
        np.testing.assert_array_equal(sampler_weights(zeros, zeros, mask, mode=mode, **bounds), expected)
    np.testing.assert_array_equal(
        sampler_weights(zeros, zeros, mask, mode=mode, clip_min=1.0, clip_max=1.0), np.ones_like(expected)
    )


@pytest.mark.parametrize("mode", SAMPLER_WEIGHT_MODES)
@pytest.mark.parametrize("rubbish", [np.nan, np.inf, -np.inf, 1e30])
def test_masked_values_are_ignored(mode, rubbish):
    old, sampling = jnp.full((2, 3), -1.0), jnp.full((2, 3), -1.5)
    fill = lambda x, value: jnp.where(MASK == 1, x, value)
    got = [
        sampler_weights(fill(old, x), fill(sampling, y), MASK, mode=mode)
        for x, y in ((0, 0), (rubbish, 0), (0, rubbish))
    ]
    for other in got[1:]:
        np.testing.assert_array_equal(got[0], other)


def test_tokens_with_nan_or_infinite_log_probs_on_one_side():
    old, sampling = jnp.array([[-1.0, -2.0]]), jnp.array([[jnp.nan, -2.5]])
    mask = jnp.ones((1, 2))
    by_token = sampler_weights(old, sampling, mask, mode="token_truncate")
    np.testing.assert_allclose(by_token, [[1.0, np.exp(0.5)]], rtol=1e-5)
    assert float(sampler_weights(old, sampling, mask)[0]) == pytest.approx(np.exp(0.5))
    assert np.isnan(sampler_weights(sampling, old, mask)[0]), "a NaN in the trainer's own log-probs must propagate"
    old, sampling = jnp.array([[-jnp.inf, -1.0]]), jnp.array([[-1.0, -jnp.inf]])
    found = sampler_weights(old, sampling, jnp.ones((1, 2)), mode="token_mask", clip_max=None)
    assert np.isfinite(found).all()
    assert found[0, 0] < 1e-8 < 1e8 < found[0, 1]


def test_dtypes_and_the_gradient():
    half = jnp.full((1, 2), -1.0, jnp.bfloat16)
    for mode in SAMPLER_WEIGHT_MODES:
        assert sampler_weights(half, half, jnp.ones((1, 2)), mode=mode).dtype == jnp.float32
        both = lambda x, y, mode=mode: sampler_weights(x, y, jnp.ones((1, 2)), mode=mode).sum()
        gradients = jax.jit(jax.grad(both, argnums=(0, 1)))(jnp.full((1, 2), -1.0), jnp.full((1, 2), -1.1))
        assert not any(x.any() for x in gradients), "the weights are constants"
    with x64():  # the weights have the dtype of the old log-probs
        old, sampling = jnp.zeros((1, 2), jnp.float32), jnp.zeros((1, 2), jnp.float64)
        assert sampler_weights(old, sampling, jnp.ones((1, 2))).dtype == jnp.float32


# By enumeration: an engine samples at another temperature and returns its own log-probs -------------------------------

PARAMS = np.array([[0.4, -0.3, 0.9], [0.2, 0.7, -0.5], [-0.6, 0.1, 0.3], [1.0, 0.0, -1.0]])  # first; second after each
HOT = 1.6
PAIRS = np.array(list(itertools.product(range(3), repeat=2)))
STOPS = PAIRS[:, 0] == 2  # token 2 ends the completion; the first continuation represents all of them
REWARD = np.array([1.0, -0.5, 0.3, 2.0, 0.0, -1.0, 0.7, 9.0, 9.0])
KEPT = ~STOPS | (PAIRS[:, 1] == 0)
# (tokens, mask, reward) for all completions of up to two tokens, and for all completions of one token.
TWO = PAIRS[KEPT], np.stack([np.ones(9, bool), ~STOPS], axis=1)[KEPT], REWARD[KEPT]
ONE = PAIRS[::3], np.array([[True, False]] * 3), REWARD[:3]


def token_logs(params, log_softmax, tokens, stack=np.stack):
    l = log_softmax(params)
    return stack([l[0][tokens[:, 0]], l[1 + tokens[:, 0], tokens[:, 1]]], axis=1)


def objective(params, rows=TWO):
    return np.sum(np.exp(numpy_logs(params, rows).sum(1)) * rows[2])


def expected_loss(mode, old=PARAMS, explicit=True, rows=TWO):
    """Return θ ↦ Σ_completions π_engine·loss with the weights of `mode`, unbounded; None means no weights."""
    engine, (tokens, there, reward) = old / HOT, rows

    def function(params):
        dtype = params.dtype
        l = token_logs(params, jax.nn.log_softmax, tokens, jnp.stack)
        old_l, engine_l = (jnp.asarray(np.where(there, numpy_logs(x, rows), np.nan), dtype) for x in (old, engine))
        w = None if mode is None else sampler_weights(old_l, engine_l, there, mode=mode, clip_max=None)

        def loss(i):
            row = lambda x: None if x is None else x[i][None]
            how = {"loss_type": "dr_grpo", "max_completion_length": 1, "importance_weights": row(w), **NO_CLIP}
            how["importance_sampling_level"] = "trajectory"
            given = (row(jnp.asarray(reward, dtype)), row(jnp.asarray(there)))
            return grpo_loss(row(jnp.where(there, l, jnp.nan)), row(old_l) if explicit else None, None, *given, **how)[
                0
            ]

        p = jnp.asarray(np.exp(numpy_logs(engine, rows).sum(1)), dtype)
        return jnp.sum(p * jax.vmap(loss)(jnp.arange(len(tokens))))

    return function


ON_POLICY = -complex_gradient(objective, PARAMS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("updates", "explicit"), [(0, True), (0, False), (1, True)])
def test_sequence_weights_give_the_on_policy_gradient(dtype, updates, explicit):
    """Sequence weights give the on-policy expected gradient, including after further updates."""
    assert np.exp(numpy_logs(PARAMS / HOT, TWO).sum(1)).sum() == pytest.approx(1.0)
    mode, old = [("sequence_mask", PARAMS), ("sequence_truncate", PARAMS[::-1])][updates]
    assert_gradient(expected_loss(mode, old=old, explicit=explicit), PARAMS, ON_POLICY, dtype)


def off_by(mode, on_policy, rows=TWO):
    gradient = np.asarray(jax.jit(jax.grad(expected_loss(mode, rows=rows)))(jnp.asarray(PARAMS, jnp.float32)))
    return np.linalg.norm(gradient - on_policy) / np.linalg.norm(on_policy)


def test_token_weights_are_exact_for_one_token_and_reduce_the_error_for_two():
    off = {mode: off_by(mode, ON_POLICY) for mode in (None, "token_mask")}
    assert off[None] > 0.1
    assert 1e-2 < off["token_mask"] < off[None], "token weights ignore earlier tokens: closer, but not exact"
    expected = -complex_gradient(lambda params: objective(params, ONE), PARAMS)
    assert_gradient(expected_loss("token_truncate", explicit=False, rows=ONE), PARAMS, expected)
    assert off_by(None, expected, ONE) > 1e-2
