"""Sampling: tokens follow the requested distribution, log-probs are exact, and excluded tokens are never drawn."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from scipy import stats

from grpo_jax.maths import sampling
from grpo_jax.maths.sampling import Sampling, draw_tokens, process_logits, sample_tokens

SETTINGS = {
    "plain": {}, "temperature": {"temperature": 0.6}, "hot": {"temperature": 1.7}, "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8}, "min_p": {"min_p": 0.1},
    "all": {"temperature": 1.2, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
}  # fmt: skip


def reference_distribution(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=None):
    """Compute the processed distribution by its definition, token by token, in NumPy float64."""
    probs = np.exp(logits.astype(np.float64) / temperature)
    probs /= probs.sum()
    order = np.argsort(-probs, kind="stable")
    if top_k:
        probs[order[top_k:]] = 0
        probs /= probs.sum()
    if top_p < 1:
        mass = 0.0
        for token in order:
            if mass >= top_p:
                probs[token] = 0
            mass += probs[token]
        probs /= probs.sum()
    if min_p is not None:
        probs[probs < min_p * probs.max()] = 0
        probs /= probs.sum()
    return probs


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("vocab", [7, 100])
def test_processed_distribution_equals_its_definition(name, vocab):
    logits = np.random.default_rng(vocab).normal(size=vocab) * 2
    probs = jax.jit(lambda x: jax.nn.softmax(process_logits(x, Sampling(**SETTINGS[name]))))(logits)
    np.testing.assert_allclose(probs, reference_distribution(logits, **SETTINGS[name]), atol=2e-6)


@pytest.mark.parametrize("name", SETTINGS)
def test_frequencies_pass_a_chi_square_and_log_probs_are_exact(name):
    """The frequencies of 50,000 draws with fixed keys pass a chi-squared test against the processed distribution."""
    vocab, draws = 50, 50_000
    logits = np.random.default_rng(3).normal(size=vocab) * 1.5
    expected = reference_distribution(logits, **SETTINGS[name])
    draw = jax.jit(lambda key, row: sample_tokens(key, jnp.broadcast_to(row, (draws, vocab)), **SETTINGS[name]))
    tokens, log_probs = draw(jax.random.key(1), jnp.array(logits, jnp.float32))
    np.testing.assert_allclose(log_probs, np.log(expected[tokens]), atol=5e-6)
    counts = np.bincount(np.asarray(tokens), minlength=vocab)
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    assert stats.chisquare(counts[kept], expected[kept] * draws).pvalue > 1e-4


def test_rare_tokens_in_a_large_vocabulary_have_the_expected_frequency():
    """Rare tokens in a large vocabulary are drawn uniformly, both across blocks and within each block."""
    vocab, draws = 32768, 100_000
    logits = jnp.full((vocab,), jnp.log(1e-3 / (vocab - 1))).at[0].set(jnp.log(1 - 1e-3))
    u = jax.random.uniform(jax.random.key(0), (draws, 2))
    draw = jax.jit(lambda u, row: jax.lax.map(lambda v: draw_tokens(v, row)[0], u, batch_size=1000))
    tail = np.asarray(draw(u, logits))
    tail = tail[tail > 0]
    assert abs(len(tail) - 100) < 5 * 10
    assert stats.kstest(tail / vocab, "uniform").pvalue > 1e-4


@pytest.mark.parametrize(("shape", "axis"), [((100, 500), 0), ((5, 100, 100), 1)])
def test_vocabulary_may_be_any_axis(shape, axis):
    logits = jax.random.normal(jax.random.key(0), shape).at[3 if axis == 0 else np.s_[:, 3]].set(-jnp.inf)
    u = jax.random.uniform(jax.random.key(1), (*np.delete(shape, axis), 2))
    tokens, log_probs = jax.jit(draw_tokens, static_argnames="axis")(u, logits, axis=axis)
    same, also = jax.jit(draw_tokens)(u, jnp.moveaxis(logits, axis, -1))
    np.testing.assert_array_equal(tokens, same)
    np.testing.assert_allclose(log_probs, also, atol=1e-6)


@pytest.mark.quick
def test_temperature_zero_is_greedy_with_log_probs_at_temperature_one():
    logits = jax.random.normal(jax.random.key(0), (6, 9))
    sample = jax.jit(sample_tokens, static_argnames=("temperature", "top_k"))
    tokens, log_probs = sample(jax.random.key(1), logits, temperature=0)
    np.testing.assert_array_equal(tokens, logits.argmax(-1))
    np.testing.assert_allclose(log_probs, jax.nn.log_softmax(logits).max(-1), atol=1e-6)
    np.testing.assert_array_equal(tokens, sample(jax.random.key(1), logits, top_k=1)[0])


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2.0**-24])
def test_token_with_probability_zero_is_never_drawn(u):
    tokens, log_probs = jax.jit(draw_tokens)(np.full((10, 2), u, np.float32), jnp.where(np.eye(10), -3.0, -jnp.inf))
    np.testing.assert_array_equal(tokens, np.arange(10))
    np.testing.assert_allclose(log_probs, 0, atol=1e-6)


def test_extreme_logits_stay_finite_and_half_precision_is_computed_in_float32():
    logits = jnp.array([[1e30, -1e30, 0.0], [-1e30, -1e30, -1e30], [80.0, 88.0, -200.0]])
    sample = jax.jit(sample_tokens)
    tokens, log_probs = sample(jax.random.key(0), logits)
    assert np.isfinite(log_probs).all()
    assert tokens[0] == 0
    logits = (jax.random.normal(jax.random.key(0), (5, 16)) * 2).astype(jnp.bfloat16)
    tokens, log_probs = sample(jax.random.key(1), logits)
    assert (tokens.dtype, log_probs.dtype) == (jnp.int32, jnp.float32)
    expected = jax.nn.log_softmax(logits.astype(jnp.float32))
    np.testing.assert_allclose(log_probs, jnp.take_along_axis(expected, tokens[:, None], 1)[:, 0], atol=1e-6)


@pytest.mark.quick
def test_kept_tokens_survive_every_filter():
    logits = jnp.array([[5.0, 1.0, 0.0, -4.0]])
    processed = process_logits(logits, Sampling(top_k=1.0, top_p=0.5, min_p=0.9), keep=jnp.array([3]))
    np.testing.assert_array_equal(processed, [[5.0, -jnp.inf, -jnp.inf, -4.0]])


class Variants(chex.TestCase, parameterized.TestCase):
    @chex.variants(with_jit=True, without_jit=True, with_pmap=True)
    def test_sample_tokens(self):
        logits = jax.random.normal(jax.random.key(1), (3, 20))
        tokens, log_probs = self.variant(sample_tokens)(jax.random.split(jax.random.key(0), 3), logits)
        keys = jax.random.split(jax.random.key(0), 3)
        alone = [jax.jit(sample_tokens)(key, row) for key, row in zip(keys, logits, strict=True)]
        np.testing.assert_array_equal(tokens, [int(t) for t, _ in alone])
        np.testing.assert_allclose(log_probs, [float(l) for _, l in alone], atol=1e-6)
        chex.assert_type([tokens, log_probs], [jnp.int32, jnp.float32])


@pytest.mark.quick
def test_masses_of_blocks_in_one_pass_equal_those_in_two():
    """Accelerators compute the blocks' masses in one pass; excluded tokens and blocks have no mass."""
    parts = 20 * jax.random.normal(jax.random.key(0), (3, 4, 50))
    parts = parts.at[0, 1].set(-jnp.inf).at[:, :, ::3].set(-jnp.inf)
    for axis, x in ((2, parts), (1, jnp.moveaxis(parts, 0, -1))):
        (top, masses), (same, also) = (f(x, axis) for f in (sampling._masses_in_passes, sampling._masses_in_one_pass))
        np.testing.assert_array_equal(top, same)
        np.testing.assert_allclose(masses, also, rtol=2e-6)
        assert float(jnp.moveaxis(also, 1 - axis, 0).min()) == 0 < float(also.max())
