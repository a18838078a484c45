"""The weights of another engine's completions: by hand, and by the gradients that they are there for."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_enumeration import DTYPES, NO_CLIP, assert_gradient, complex_gradient, softmax

from grpo_jax.maths.correction import MODES, sampler_weights
from grpo_jax.maths.losses import grpo_loss

# Ratios π_old / π_sampler of two completions of at most three tokens.
RATIOS = np.array([[2.0, 0.5, 4.0], [0.25, 1.0, np.nan]])
MASK = np.array([[1, 1, 1], [1, 1, 0]])


def weights(**settings):
    old = jnp.log(jnp.where(MASK == 1, 0.2, jnp.nan))
    return np.asarray(sampler_weights(old, old - jnp.log(RATIOS), MASK, **settings))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("mode", "clip_max", "clip_min", "expected"),
    [
        ("token_truncate", 3.0, 0.4, [[2.0, 0.5, 3.0], [0.4, 1.0, 1.0]]),
        ("token_truncate", None, 0.6, [[2.0, 0.6, 4.0], [0.6, 1.0, 1.0]]),
        ("token_mask", 3.0, 0.4, [[2.0, 0.5, 0.0], [0.0, 1.0, 1.0]]),
        ("token_mask", None, None, [[2.0, 0.5, 4.0], [0.25, 1.0, 1.0]]),
        ("sequence_truncate", 3.0, 0.5, [3.0, 0.5]),
        ("sequence_mask", 3.0, None, [0.0, 0.25]),
        ("sequence_mask", None, 0.5, [4.0, 0.0]),
        ("sequence_mask", None, None, [4.0, 0.25]),
    ],
)
def test_weights_by_hand(mode, clip_max, clip_min, expected):
    np.testing.assert_allclose(weights(mode=mode, clip_max=clip_max, clip_min=clip_min), expected, rtol=1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rubbish", [np.nan, np.inf, -np.inf, 1e30])
def test_what_stands_under_the_mask_is_ignored(mode, rubbish):
    old, sampling = jnp.full((2, 3), -1.0), jnp.full((2, 3), -1.5)
    fill = lambda x, value: jnp.where(MASK == 1, x, value)
    got = [
        sampler_weights(fill(old, x), fill(sampling, y), MASK, mode=mode)
        for x, y in ((0, 0), (rubbish, 0), (0, rubbish))
    ]
    for other in got[1:]:
        np.testing.assert_array_equal(got[0], other)


def test_a_token_that_one_side_cannot_score_or_excludes():
    old, sampling = jnp.array([[-1.0, -2.0]]), jnp.array([[jnp.nan, -2.5]])
    mask = jnp.ones((1, 2))
    by_token = sampler_weights(old, sampling, mask, mode="token_truncate")
    np.testing.assert_allclose(by_token, [[1.0, np.exp(0.5)]], rtol=1e-5)
    assert float(sampler_weights(old, sampling, mask)[0]) == pytest.approx(np.exp(0.5))
    assert np.isnan(sampler_weights(sampling, old, mask)[0]), "what the trainer itself could not score is a fault"
    old, sampling = jnp.array([[-jnp.inf, -1.0]]), jnp.array([[-1.0, -jnp.inf]])
    found = sampler_weights(old, sampling, jnp.ones((1, 2)), mode="token_mask", clip_max=None)
    assert np.isfinite(found).all()
    assert found[0, 0] < 1e-8 < 1e8 < found[0, 1]


def test_dtypes_and_the_gradient():
    half = jnp.full((1, 2), -1.0, jnp.bfloat16)
    for mode in MODES:
        assert sampler_weights(half, half, jnp.ones((1, 2)), mode=mode).dtype == jnp.float32
        both = lambda x, y, mode=mode: sampler_weights(x, y, jnp.ones((1, 2)), mode=mode).sum()
        gradients = jax.grad(both, argnums=(0, 1))(jnp.full((1, 2), -1.0), jnp.full((1, 2), -1.1))
        assert not any(x.any() for x in gradients), "the weights are constants"


# By enumeration: an engine samples at another temperature, and returns its own log-probs ------------------------------

PARAMS = np.array([[0.4, -0.3, 0.9], [0.2, 0.7, -0.5], [-0.6, 0.1, 0.3], [1.0, 0.0, -1.0]])  # first; second after each
HOT = 1.6
PAIRS = np.array(list(itertools.product(range(3), repeat=2)))
STOPS = PAIRS[:, 0] == 2  # token 2 ends the completion: of its continuations the first stands for all
REWARD = np.array([1.0, -0.5, 0.3, 2.0, 0.0, -1.0, 0.7, 9.0, 9.0])
KEPT = ~STOPS | (PAIRS[:, 1] == 0)
PAIRS, STOPS, REWARD = PAIRS[KEPT], STOPS[KEPT], REWARD[KEPT]
ROW_MASK = np.stack([np.ones(len(PAIRS), bool), ~STOPS], axis=1)


def token_logs(params):
    l = np.log(softmax(params))
    return np.stack([l[0][PAIRS[:, 0]], l[1 + PAIRS[:, 0], PAIRS[:, 1]]], axis=1)


def total(params):
    return np.where(ROW_MASK, token_logs(params), 0).sum(1)


def objective(params):
    return np.sum(np.exp(total(params)) * REWARD)


def expected_loss(mode, old=PARAMS, explicit=True):
    """θ ↦ Σ_completions π_engine·loss, the weights by `mode` without bounds; None: no weights."""
    engine = old / HOT

    def function(params):
        dtype = params.dtype
        l = jax.nn.log_softmax(params)
        l = jnp.stack([l[0][PAIRS[:, 0]], l[1 + PAIRS[:, 0], PAIRS[:, 1]]], axis=1)
        hide = lambda x: jnp.asarray(np.where(ROW_MASK, x, np.nan), dtype)
        w = None
        if mode is not None:
            w = sampler_weights(hide(token_logs(old)), hide(token_logs(engine)), ROW_MASK, mode=mode, clip_max=None)

        def loss(i):
            row = lambda x: None if x is None else x[i][None]
            l_old = row(hide(token_logs(old))) if explicit else None
            how = {"loss_type": "dr_grpo", "max_completion_length": 1, "importance_weights": row(w), **NO_CLIP}
            how["importance_sampling_level"] = "trajectory"
            given = (row(jnp.asarray(REWARD, dtype)), row(jnp.asarray(ROW_MASK)))
            return grpo_loss(row(jnp.where(ROW_MASK, l, jnp.nan)), l_old, None, *given, **how)[0]

        p = jnp.asarray(np.exp(total(engine)), dtype)
        return jnp.sum(p * jax.vmap(loss)(jnp.arange(len(PAIRS))))

    return function


ON_POLICY = -complex_gradient(objective, PARAMS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("updates", "explicit"), [(0, True), (0, False), (1, True)])
def test_with_the_sequence_weights_the_expected_gradient_is_the_on_policy_one(dtype, updates, explicit):
    """Also after further updates, where ratio times weight is the ratio of the policy to the engine."""
    assert np.exp(total(PARAMS / HOT)).sum() == pytest.approx(1.0)
    mode, old = [("sequence_mask", PARAMS), ("sequence_truncate", PARAMS[::-1])][updates]
    assert_gradient(expected_loss(mode, old=old, explicit=explicit), PARAMS, ON_POLICY, dtype)


def test_without_a_correction_it_is_another_and_by_token_it_is_nearer():
    gradient = lambda mode: np.asarray(jax.grad(expected_loss(mode))(jnp.asarray(PARAMS, jnp.float32)))
    off = {
        mode: np.linalg.norm(gradient(mode) - ON_POLICY) / np.linalg.norm(ON_POLICY) for mode in (None, "token_mask")
    }
    assert off[None] > 0.1
    assert 1e-2 < off["token_mask"] < off[None], "token weights leave out the tokens before: near, and not exact"


@pytest.mark.parametrize("dtype", DTYPES)
def test_for_completions_of_one_token_the_token_weights_are_exact(dtype):
    theta, reward = PARAMS[3], np.array([1.0, -0.5, 2.0])
    engine = np.log(softmax(theta / HOT))
    old = np.log(softmax(theta))

    def function(theta, mode="token_truncate"):
        l = jax.nn.log_softmax(theta)[:, None]
        column = lambda x: jnp.asarray(x, theta.dtype)[:, None]
        mask = jnp.ones((3, 1))
        w = None if mode is None else sampler_weights(column(old), column(engine), mask, mode=mode, clip_max=1e3)

        def loss(i):
            how = {"importance_weights": None if w is None else w[i][None], "loss_type": "dr_grpo"}
            given = (jnp.asarray(reward)[i][None], mask[i][None])
            return grpo_loss(l[i][None], None, None, *given, **how, max_completion_length=1)[0]

        return jnp.sum(jnp.asarray(np.exp(engine), theta.dtype) * jax.vmap(loss)(jnp.arange(3)))

    expected = -complex_gradient(lambda x: np.sum(softmax(x) * reward), theta)
    assert_gradient(function, theta, expected, dtype)
    plain = jax.grad(lambda x: function(x, None))(jnp.asarray(theta, jnp.float32))
    assert np.abs(np.asarray(plain) - expected).max() > 1e-2
