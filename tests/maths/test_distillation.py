"""Divergences from a teacher: expected gradients by enumeration, limits, bounds, and TRL's values."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.maths.supervised import (
    DIVERGENCES,
    distillation_loss_terms,
    divergence,
    sampled_divergence,
    top_k_divergence,
    with_rest,
)
from grpo_jax.maths.surrogates import LOSS_TYPES

GOLDEN = np.load(Path(__file__).parent / "golden" / "distillation.npz")

# One state, five tokens, and the policy softmax(θ); the closed forms are derived by hand and computed in NumPy.
THETA = np.array([0.3, -0.8, 0.5, 0.1, -0.2])
OLD = np.array([0.1, -0.2, 0.4, -0.5, 0.6])
softmax = lambda x: np.exp(x) / np.exp(x).sum()
P, P_OLD, Q = softmax(THETA), softmax(OLD), softmax(np.array([-0.4, 0.3, 0.9, 0.0, 0.2]))
M = 0.7 * P + 0.3 * Q
kl = lambda p, q: np.sum(p * np.log(p / q))


def pulled(weights):
    """Return Σ_a weights_a ∇θ p_a, with ∇θ p_a = p_a (e_a − p)."""
    return P * weights - P * np.sum(P * weights)


VALUES = {"reverse_kl": kl(P, Q), "forward_kl": kl(Q, P), "jsd": 0.3 * kl(Q, M) + 0.7 * kl(P, M)}
GRADIENTS = {
    "reverse_kl": pulled(np.log(P / Q) + 1),
    "forward_kl": P - Q,
    # ∂/∂p of 0.3·KL(q‖m) is −0.3·0.7·q/m; of 0.7·KL(p‖m) it is 0.7·(log p/m + 1 − 0.7·p/m).
    "jsd": pulled(-0.21 * Q / M + 0.7 * (np.log(P / M) + 1 - 0.7 * P / M)),
}


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_value_and_gradient_equal_the_closed_forms(kind):
    of = lambda theta: divergence(jax.nn.log_softmax(theta), jnp.log(jnp.asarray(Q)), kind=kind, alpha=0.3)
    value, gradient = jax.jit(jax.value_and_grad(of))(jnp.asarray(THETA, jnp.float32))
    np.testing.assert_allclose(value, VALUES[kind], atol=1e-6)
    np.testing.assert_allclose(gradient, GRADIENTS[kind], atol=1e-6)


@pytest.mark.parametrize("old", [None, OLD], ids=["on-policy", "off-policy"])
def test_sampled_divergence_is_the_reverse_kl_in_expectation(old):
    """The sampled divergence equals the reverse KL in expectation, in value and gradient."""
    drawn_by = P if old is None else P_OLD

    def of(theta):
        l = jax.nn.log_softmax(theta)[:, None]  # five completions of one token
        l_old = None if old is None else jnp.log(jnp.asarray(P_OLD))[:, None]
        far = sampled_divergence(l, l_old, jnp.log(jnp.asarray(Q))[:, None], jnp.ones((5, 1)))
        return jnp.sum(jnp.asarray(drawn_by) * far[:, 0])

    value, gradient = jax.jit(jax.value_and_grad(of))(jnp.asarray(THETA, jnp.float32))
    np.testing.assert_allclose(value, VALUES["reverse_kl"], atol=1e-6)
    np.testing.assert_allclose(gradient, GRADIENTS["reverse_kl"], atol=1e-6)


def test_divergences_ignore_the_effect_of_a_token_on_later_states():
    """The sampled and the full divergence have the same expected gradient, unlike the KL of completions."""
    rng = np.random.default_rng(1)
    logits, teacher = rng.normal(size=(4, 3)), rng.normal(size=(4, 3))  # state 0 leads to state 1 + token
    log_q = jax.nn.log_softmax(jnp.asarray(teacher))

    def expected(per_state):
        def of(theta):
            log_p = jax.nn.log_softmax(theta)
            visits = jnp.concatenate([jnp.ones(1), jax.lax.stop_gradient(jnp.exp(log_p[0]))])
            return jnp.sum(visits * per_state(log_p))

        return jax.jit(jax.grad(of))(jnp.asarray(logits, jnp.float32))

    def sampled(log_p):
        ones = jnp.ones(log_p.shape)
        return jnp.sum(jax.lax.stop_gradient(jnp.exp(log_p)) * sampled_divergence(log_p, None, log_q, ones), -1)

    def whole(theta):
        log_p = jax.nn.log_softmax(theta)
        return jnp.sum(jnp.concatenate([jnp.ones(1), jnp.exp(log_p[0])]) * divergence(log_p, log_q))

    full = expected(lambda log_p: divergence(log_p, log_q))
    np.testing.assert_allclose(expected(sampled), full, atol=1e-6)
    assert np.abs(jax.jit(jax.grad(whole))(jnp.asarray(logits, jnp.float32)) - full).max() > 1e-2


def test_jsd_converges_to_either_kl():
    log_p, log_q = (jnp.log(jnp.asarray(x, jnp.float32)) for x in (P, Q))
    near = lambda alpha: float(divergence(log_p, log_q, kind="jsd", alpha=alpha))
    assert near(1e-3) / 1e-3 == pytest.approx(VALUES["forward_kl"], rel=0.01)
    assert near(1 - 1e-3) / 1e-3 == pytest.approx(VALUES["reverse_kl"], rel=0.01)


@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize("k", [1, 2, 4])
def test_top_k_divergence_is_within_the_documented_bound(kind, k):
    """The divergence over the top k tokens and the rest is below the full divergence by the documented amount."""
    top = np.argsort(-Q)[:k]
    rest = np.setdiff1d(np.arange(5), top)
    log_p, log_q = (jnp.log(jnp.asarray(x, jnp.float32)) for x in (P, Q))
    of_k = float(top_k_divergence(log_p[top], log_q[top], kind=kind, alpha=0.3))
    less = VALUES[kind] - of_k
    r, s = P[rest].sum(), Q[rest].sum()
    exact = {"reverse_kl": r * kl(P[rest] / r, Q[rest] / s), "forward_kl": s * kl(Q[rest] / s, P[rest] / r)}
    if kind == "jsd":
        assert -1e-6 < less <= (0.7 * r + 0.3 * s) * np.log(2)
    else:
        assert less == pytest.approx(exact[kind], abs=1e-6)
    assert (abs(less) < 1e-6) == (k == 4)  # a rest of one token loses nothing


@pytest.mark.quick
def test_rest_of_a_full_distribution_is_tiny_and_finite():
    log_probs = jax.nn.log_softmax(jnp.array([30.0, 0.0, -30.0]))
    value, gradient = jax.value_and_grad(lambda x: with_rest(x)[-1])(log_probs)
    assert -17 < float(value) < -15
    assert np.isfinite(gradient).all()
    assert float(top_k_divergence(log_probs, log_probs)) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_divergence_is_finite_for_excluded_tokens(kind):
    log_p = jnp.array([0.0, -jnp.inf])
    value, gradient = jax.value_and_grad(lambda x: divergence(x, jnp.log(jnp.array([0.5, 0.5])), kind=kind))(log_p)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


def test_masked_tokens_do_not_affect_the_distillation_loss():
    l, mask = jnp.array([[-1.0, jnp.nan]]), jnp.array([[1, 0]])
    of = lambda l: distillation_loss_terms(sampled_divergence(l, l, jnp.array([[-2.0, jnp.inf]]), mask), mask)[0]
    value, gradient = jax.jit(jax.value_and_grad(of))(l)
    assert float(value) == pytest.approx(1.0)
    np.testing.assert_array_equal(gradient, [[1.0, 0.0]])


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_losses_of_parts_add_up_to_the_loss_of_the_batch(loss_type):
    rng = np.random.default_rng(0)
    per_token = rng.random((4, 6)).astype(np.float32)
    mask = np.arange(6) < np.array([[6], [2], [1], [4]])
    whole, sums = distillation_loss_terms(per_token, mask, coef=0.5, loss_type=loss_type)
    counts = {"num_rows": 4, "num_tokens": int(mask.sum()), "max_completion_length": 6}
    parts = [
        distillation_loss_terms(per_token[i], mask[i], coef=0.5, loss_type=loss_type, **counts)
        for i in (slice(0, 1), slice(1, 4))
    ]
    assert float(whole) == pytest.approx(sum(float(loss) for loss, _ in parts), rel=1e-5)
    assert float(sums["distillation_sum"]) == pytest.approx(float((per_token * mask).sum()), rel=1e-5)


def assert_golden(name, function):
    value, gradient = jax.jit(jax.value_and_grad(function))(jnp.asarray(GOLDEN["logits"]))
    np.testing.assert_allclose(value, GOLDEN[name], rtol=1e-5)
    np.testing.assert_allclose(gradient, GOLDEN[f"{name}/gradient"], atol=1e-6)


TEACHER = jax.nn.log_softmax(GOLDEN["teacher"])
COMPARED = GOLDEN["mask"] & GOLDEN["taught"][:, None]


@pytest.mark.parametrize("trainer", ["gkd", "distillation", "sdpo"])
@pytest.mark.parametrize("kind", DIVERGENCES)
def test_full_divergences_equal_trl(trainer, kind):
    """Divergences of full distributions equal TRL's: SDPO averages over completions, the other trainers over tokens."""
    mask, loss_type = (COMPARED, "grpo") if trainer == "sdpo" else (GOLDEN["mask"], "dapo")

    def of(logits):
        far = divergence(jax.nn.log_softmax(logits), TEACHER, kind=kind, alpha=0.3)
        return distillation_loss_terms(far, mask, loss_type=loss_type)[0]

    assert_golden(f"{trainer}_{kind}", of)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_top_k_divergences_equal_trl(kind):
    """Divergences over the top k tokens equal TRL's, which selects the policy's most probable tokens."""
    ids = jax.lax.top_k(jnp.asarray(GOLDEN["logits"]), 4)[1]
    take = lambda x: jnp.take_along_axis(x, ids, -1)

    def of(logits):
        far = top_k_divergence(take(jax.nn.log_softmax(logits)), take(TEACHER), kind=kind, alpha=0.3)
        return distillation_loss_terms(far, COMPARED, loss_type="grpo")[0]

    assert_golden(f"sdpo_topk_{kind}", of)


def test_sampled_divergence_has_the_gradient_of_trl():
    """The sampled divergence has TRL's gradient; the values differ, because TRL's is d·l and ours estimates the KL."""
    take = lambda x: jnp.take_along_axis(x, jnp.asarray(GOLDEN["tokens"])[..., None], -1)[..., 0]

    def of(logits):
        far = sampled_divergence(take(jax.nn.log_softmax(logits)), None, take(TEACHER), GOLDEN["mask"])
        return distillation_loss_terms(far, COMPARED, loss_type="grpo")[0]

    gradient = jax.jit(jax.grad(of))(jnp.asarray(GOLDEN["logits"]))
    np.testing.assert_allclose(gradient, GOLDEN["sdpo_sampled/gradient"], atol=1e-6)
