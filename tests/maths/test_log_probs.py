"""Reductions of logits: one pass equals several, and derivatives equal a plain expression's."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.maths import log_probs
from grpo_jax.maths.log_probs import log_probs_and_entropy, reduce_logits

RNG = np.random.default_rng(0)
LOGITS = (5 * RNG.standard_normal((4, 37))).astype(np.float32)
LOGITS[0, 3] = LOGITS[1, 1:] = LOGITS[2, ::2] = -np.inf  # excluded tokens; row 1 has a single token
TOKENS = np.array([0, 0, 1, 36])


def plain(logits, tokens):
    log_p = jax.nn.log_softmax(logits)
    plogp = jnp.where(jnp.isneginf(log_p), 0, jnp.exp(log_p) * jnp.where(jnp.isneginf(log_p), 0, log_p))
    logit = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1), -plogp.sum(axis=-1), logit


@pytest.mark.quick
@pytest.mark.parametrize("compute", [log_probs._in_passes, log_probs._in_one_pass])
def test_reductions_equal_float64(compute):
    with np.errstate(divide="ignore", invalid="ignore"):
        p = np.exp(LOGITS.astype(np.float64))
        p /= p.sum(axis=-1, keepdims=True)
        expected = np.log(np.exp(LOGITS.astype(np.float64)).sum(-1)), -np.where(p > 0, p * np.log(p), 0).sum(-1)
    expected = *expected, LOGITS[np.arange(4), TOKENS]
    for found, wanted in zip(compute(jnp.asarray(LOGITS), jnp.asarray(TOKENS)), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=2e-6)


@pytest.mark.quick
def test_infinite_and_missing_logits_are_not_hidden():
    logits = jnp.array([[0.0, np.inf], [0.0, np.nan], [-np.inf, -np.inf]])
    for compute in (log_probs._in_passes, log_probs._in_one_pass):
        assert not np.isfinite(compute(logits, jnp.zeros(3, jnp.int32))[0]).any()


def test_derivatives_equal_a_plain_expression():
    """First and second derivatives agree, inside a loop and under `jax.checkpoint`; excluded tokens have none."""
    weights = RNG.standard_normal((3, 4)).astype(np.float32)
    along = RNG.standard_normal(LOGITS.shape).astype(np.float32)

    def derivatives(function):
        def total(logits):
            values = jax.lax.map(lambda xs: jax.checkpoint(function)(*xs), (logits, TOKENS))
            return (weights * jnp.stack(values)).sum()

        gradient, curved = jax.jvp(jax.grad(total), (LOGITS,), (along,))
        return gradient, curved, jax.jvp(total, (LOGITS,), (along,))[1], jax.vmap(function)(LOGITS[None], TOKENS[None])

    found, expected = derivatives(reduce_logits), derivatives(plain)
    assert (found[0][~np.isfinite(LOGITS)] == 0).all()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-5), found, expected)


@pytest.mark.quick
def test_accelerators_reduce_the_logits_once():
    """The value takes one reduction over the vocabulary, of four operands, and the gradient none."""
    tokens, logits = jnp.zeros(4, jnp.int32), jax.ShapeDtypeStruct(LOGITS.shape, jnp.float32)

    def total(logits):
        return jnp.stack(log_probs_and_entropy(logits, tokens)).sum()

    text = jax.jit(jax.grad(total)).trace(logits).lower(lowering_platforms=("cuda",)).as_text()
    over_vocabulary = [line for line in re.findall(r"stablehlo\.reduce\(.*", text) if "4x37" in line]
    assert len(over_vocabulary) == 1
    assert over_vocabulary[0].count(" init: ") == 4
