"""The SFT loss compared with NumPy, and with GRPO with advantages of 1."""

import jax
import numpy as np
import pytest

from grpo_jax.maths.metrics import finalize_metrics, merge_metrics
from grpo_jax.maths.supervised import likelihood_loss, likelihood_loss_terms

pytestmark = pytest.mark.quick

RNG = np.random.default_rng(0)
L = -RNG.exponential(1.0, (3, 5)).astype(np.float32)
MASK = np.array([[1, 1, 1, 0, 0], [1, 0, 1, 1, 1], [0, 0, 0, 0, 0]])


def test_values_and_gradients_equal_numpy_and_ignore_masked_tokens():
    l = L.astype(np.float64)[MASK == 1]
    np.testing.assert_allclose(likelihood_loss(L, MASK), -l.mean(), rtol=1e-6)
    np.testing.assert_allclose(likelihood_loss(L, MASK, loss_type="dft"), -(np.exp(l) * l).mean(), rtol=1e-6)
    assert float(likelihood_loss(L, 0 * MASK)) == 0
    grads = jax.grad(lambda l: likelihood_loss(l, MASK, loss_type="dft"))(L)
    np.testing.assert_allclose(grads, -np.exp(L) * MASK / MASK.sum(), rtol=1e-6)
    with_nan = np.where(MASK, L, np.nan)
    value, grads = jax.value_and_grad(lambda l: likelihood_loss(l, MASK))(with_nan)
    assert float(value) == float(likelihood_loss(L, MASK))
    assert np.isfinite(grads).all()


def test_likelihood_losses_of_parts_add_up():
    H = RNG.uniform(0, 1, L.shape).astype(np.float32)
    first = (RNG.uniform(0, 1, L.shape) < 0.5).astype(np.float32)
    arrays = (L, H, first, MASK)
    whole = likelihood_loss_terms(*arrays, loss_type="nll", num_tokens=7)
    parts = [likelihood_loss_terms(*(x[i : i + 1] for x in arrays), loss_type="nll", num_tokens=7) for i in range(3)]
    merged = merge_metrics(merge_metrics(parts[0][1], parts[1][1]), parts[2][1])
    np.testing.assert_allclose(sum(loss for loss, _ in parts), whole[0], rtol=1e-6)
    for name, value in finalize_metrics(whole[1]).items():
        np.testing.assert_allclose(finalize_metrics(merged)[name], value, rtol=1e-6)
    assert float(finalize_metrics(merged)["tokens"]) == 7
    np.testing.assert_allclose(finalize_metrics(merged)["entropy"], H[MASK == 1].mean(), rtol=1e-6)
    assert 0 < first[MASK == 1].mean() < 1
    np.testing.assert_allclose(finalize_metrics(merged)["mean_token_accuracy"], first[MASK == 1].mean(), rtol=1e-6)
