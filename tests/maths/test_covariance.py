"""Clip-Cov and KL-Cov choose by hand tables, and in the mean over all random choices of the paper; ties share."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.maths.covariance import covariance_share
from grpo_jax.maths.losses import grpo_loss
from grpo_jax.maths.surrogates import LossSettings

L = np.log(np.array([[0.9, 0.05, 0.6, 0.3], [0.8, 0.02, 0.5, 0.1], [0.4, 0.7, 0.2, 0.01]]))
A = np.array([1.5, -1.0, -0.9])
MASK = np.array([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1]], bool)


def covariances(l=L, advantages=A, mask=MASK):
    tokens = np.broadcast_to(advantages[:, None], l.shape)
    return (tokens - tokens[mask].mean()) * (l - l[mask].mean())


def share(old=None, l=L, advantages=A, mask=MASK, **settings):
    junk = np.where(mask, l, np.nan)
    return np.asarray(covariance_share(jnp.asarray(junk), old, jnp.asarray(advantages), mask, LossSettings(**settings)))


@pytest.mark.quick
@pytest.mark.parametrize(("ratio", "count"), [(0.0002, 1), (0.2, 2), (0.3, 3), (3 / 11, 3), (1.0, 11)])
def test_kl_cov_takes_the_tokens_of_the_largest_covariance(ratio, count):
    ordered = sorted(np.argwhere(MASK).tolist(), key=lambda at: -covariances()[tuple(at)])
    expected = np.zeros(L.shape)
    for i, t in ordered[:count]:
        expected[i, t] = 1
    np.testing.assert_array_equal(share(loss_type="kl_cov", kl_cov_ratio=ratio), expected)


@pytest.mark.quick
def test_tokens_that_tie_for_the_last_places_share_them():
    l = np.log(np.array([[0.9, 0.9], [0.9, 0.1]]))
    mask = np.ones((2, 2), bool)
    got = share(l=l, advantages=np.array([1.0, 0.0]), mask=mask, loss_type="kl_cov", kl_cov_ratio=0.25)
    # The token that is neither likely nor good counts with the likely and good ones; two of the three places are gone.
    np.testing.assert_allclose(got, [[0, 0], [0, 1]])
    got = share(l=l, advantages=np.array([1.0, 0.0]), mask=mask, loss_type="kl_cov", kl_cov_ratio=0.5)
    np.testing.assert_allclose(got, [[0.5, 0.5], [0, 1]])
    nothing = share(l=l, advantages=np.zeros(2), mask=mask, loss_type="kl_cov", kl_cov_ratio=0.5)
    np.testing.assert_allclose(nothing, 0.5)


@pytest.mark.quick
def test_clip_cov_is_the_mean_over_all_random_choices():
    """Loss and gradient of every subset of N of the n tokens in the band, as the paper draws them, on average."""
    band = MASK & (covariances() > 0.1) & (covariances() < 2.5)
    at, chosen = np.argwhere(band), 2
    assert len(at) == 4
    rng = np.random.default_rng(0)
    old = jnp.asarray(L + rng.uniform(-0.1, 0.1, L.shape), jnp.float32)

    def run(**settings):
        loss = lambda l: grpo_loss(l, old, None, jnp.asarray(A), MASK, **settings)[0]
        return jax.value_and_grad(loss)(jnp.asarray(L, jnp.float32))

    value, gradient = run(loss_type="clip_cov", clip_cov_ratio=0.2, clip_cov_lb=0.1, clip_cov_ub=2.5)
    draws = []
    for some in itertools.combinations(at.tolist(), chosen):
        kept = np.ones(L.shape, bool)
        kept[tuple(np.transpose(some))] = False
        draws.append(run(selected=kept, top_entropy_quantile=0.5, entropies=jnp.ones(L.shape)))
    assert len(draws) == 6
    assert float(value) == pytest.approx(np.mean([float(draw) for draw, _ in draws]), rel=1e-5)
    np.testing.assert_allclose(gradient, np.mean([x for _, x in draws], axis=0), rtol=1e-5, atol=1e-7)
    assert np.abs(draws[0][1] - gradient).max() > 1e-2


@pytest.mark.quick
def test_clip_cov_leaves_the_whole_band_out_where_there_is_room():
    band = MASK & (covariances() > 0.1) & (covariances() < 2.5)
    np.testing.assert_array_equal(
        share(loss_type="clip_cov", clip_cov_ratio=0.9, clip_cov_lb=0.1, clip_cov_ub=2.5), band
    )
    np.testing.assert_array_equal(share(loss_type="clip_cov", clip_cov_ratio=0.9, clip_cov_lb=50, clip_cov_ub=60), 0)


@pytest.mark.quick
def test_what_the_clip_has_stopped_is_not_left_out_again():
    cov = covariances()
    (i, t), other = sorted(np.argwhere(MASK & (cov > 0.1) & (cov < 2.5)).tolist(), key=lambda at: A[at[0]])[-2:]
    settings = {"loss_type": "clip_cov", "clip_cov_ratio": 0.9, "clip_cov_lb": 0.1, "clip_cov_ub": 2.5}
    moved = np.zeros(L.shape)
    moved[i, t], moved[tuple(other)] = np.sign(A[i]) * 0.5, -np.sign(A[other[0]]) * 0.5
    got = share(old=jnp.asarray(L - moved), **settings)
    assert (got[i, t], got[tuple(other)]) == (0, 1), "of two that have moved, the one that the clip has not stopped"
    at = tuple(np.argwhere(MASK & (cov > 0.1) & (cov < 2.5) & (A < 0)[:, None])[0])
    up = np.zeros(L.shape)
    up[at] = 0.5  # a bad completion's token that has become likelier: `delta` alone has stopped it
    first, second = (share(old=jnp.asarray(L - up), delta=cap, **settings)[at] for cap in (None, 1.1))
    assert first > second == 0


@pytest.mark.quick
@pytest.mark.parametrize("loss_type", ["clip_cov", "kl_cov"])
def test_the_share_has_no_gradient_and_a_part_of_it_is_a_part_of_the_loss(loss_type):
    settings = {"loss_type": loss_type, "clip_cov_ratio": 0.2, "clip_cov_lb": 0.2, "kl_cov_ratio": 0.3}
    old = jnp.asarray(L - 0.05, jnp.float32)

    def run(rows, **more):
        loss = lambda l: grpo_loss(l, old[rows], None, jnp.asarray(A)[rows], MASK[rows], **settings, **more)[0]
        return jax.grad(loss)(jnp.asarray(L, jnp.float32)[rows])

    whole = covariance_share(jnp.asarray(L), old, jnp.asarray(A), MASK, LossSettings(**settings))
    assert 0 < whole.sum() < MASK.sum()
    parts = [run(slice(i, i + 1), cov_share=whole[i : i + 1], num_tokens=11, num_rows=3) for i in range(3)]
    np.testing.assert_allclose(np.concatenate(parts), run(slice(None)), rtol=1e-5)
    by_share = jax.grad(lambda l: covariance_share(l, None, jnp.asarray(A), MASK, LossSettings(**settings)).sum())
    np.testing.assert_array_equal(by_share(jnp.asarray(L)), 0)


@pytest.mark.quick
def test_kl_cov_pulls_back_the_tokens_that_it_chooses_and_no_other():
    settings = {"loss_type": "kl_cov", "kl_cov_ratio": 0.3, "ppo_kl_coef": 2.0, "normalizer": 1}
    chosen = share(loss_type="kl_cov", kl_cov_ratio=0.3) == 1

    def gradient(step):
        loss = lambda l: grpo_loss(l, jnp.asarray(L - step, jnp.float32), None, jnp.asarray(A), MASK, **settings)[0]
        return np.asarray(jax.grad(loss)(jnp.asarray(L, jnp.float32)))

    plain = np.where(MASK, -A[:, None], 0)
    for step in (0.3, -0.3):
        pull = np.where(chosen, 2.0 * np.sign(step), 0)
        np.testing.assert_allclose(gradient(step), plain * np.exp(step) + pull, rtol=1e-5)
    for rounding in (0.0, 5e-5, -5e-5):
        np.testing.assert_allclose(gradient(rounding), plain, rtol=1e-4)
