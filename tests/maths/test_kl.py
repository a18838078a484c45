"""KL estimators: values and derivatives by hand, and extreme log-probs."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from precision import x64

from grpo_jax.maths.kl import kl_divergence

pytestmark = pytest.mark.quick


def value_and_derivative(d, estimator, ref=-3.0):
    function = lambda l: kl_divergence(l, jnp.asarray(ref, l.dtype), estimator=estimator)
    return [float(x) for x in jax.value_and_grad(function)(jnp.asarray(ref + d))]


# d: (value, derivative with respect to l), computed by hand.
TABLE = {
    "k1": {-2.0: (-2.0, 1.0), 0.0: (0.0, 1.0), 0.5: (0.5, 1.0), 30.0: (30.0, 1.0)},
    "k2": {-2.0: (2.0, -2.0), 0.0: (0.0, 0.0), 0.5: (0.125, 0.5), 30.0: (450.0, 30.0)},
    "k3": {
        -2.0: (math.exp(2.0) - 3.0, 1 - math.exp(2.0)),
        0.0: (0.0, 0.0),
        0.5: (math.exp(-0.5) - 0.5, 1 - math.exp(-0.5)),
        30.0: (29.0 + math.exp(-30.0), 1 - math.exp(-30.0)),
    },
}


@pytest.mark.parametrize(("estimator", "d"), [(name, d) for name, row in TABLE.items() for d in row])
def test_values_and_derivatives_equal_those_computed_by_hand(estimator, d):
    with x64():
        # −3 + d − (−3) has a rounding error of 1e-16, which k3 inherits.
        assert value_and_derivative(d, estimator) == pytest.approx(TABLE[estimator][d], abs=1e-14)
    assert value_and_derivative(d, estimator) == pytest.approx(TABLE[estimator][d], rel=1e-6, abs=1e-6)


def test_k3_is_exact_near_zero_and_bounded_where_it_would_overflow():
    # A direct exp(−d) − 1 + d would be 0 or 6e-8 in float32; the exact value is 5e-11.
    d = 2.0**-17
    value = kl_divergence(jnp.array([-1.0 + d], jnp.float32), jnp.array([-1.0], jnp.float32))
    assert float(value[0]) == pytest.approx(d**2 / 2, rel=1e-2)
    at_the_bound = math.exp(20.0) - 21.0, 1 - math.exp(20.0)
    for d in (-20.0, -25.0, -1e3, -1e30):
        assert value_and_derivative(d, "k3") == pytest.approx(at_the_bound, rel=1e-5)
    # Just inside the bound, and on the side without a bound.
    assert value_and_derivative(-19.0, "k3") == pytest.approx((math.exp(19.0) - 20.0, 1 - math.exp(19.0)), rel=1e-5)
    assert value_and_derivative(2.9e3, "k3", ref=-3e3) == pytest.approx((2899.0, 1.0), rel=1e-5)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_minus_infinity_counts_as_minus_ten_thousand(estimator):
    infinite, floor = jnp.array([-jnp.inf, -jnp.inf, -1.0]), jnp.array([-1e4, -1e4, -1.0])
    other = jnp.array([-1.0, -jnp.inf, -jnp.inf]), jnp.array([-1.0, -1e4, -1e4])
    values, gradient = jax.value_and_grad(lambda l: kl_divergence(l, other[0], estimator=estimator).sum())(infinite)
    expected = kl_divergence(floor, other[1], estimator=estimator)
    assert float(values) == float(expected.sum())
    assert float(expected[1]) == 0.0, "both policies exclude the token, so the KL is 0"
    assert np.all(np.isfinite(gradient))
    derivative = {"k1": 1.0, "k2": -9999.0, "k3": 1 - math.exp(20)}[estimator]
    assert float(gradient[0]) == pytest.approx(derivative, rel=1e-5)


def test_policy_has_a_gradient_below_the_floor_and_the_reference_has_none():
    gradient = jax.grad(lambda l: kl_divergence(l, jnp.array(-1.0), estimator="k1"))(jnp.array(-2e4))
    assert float(gradient) == 1.0
    gradient = jax.grad(lambda ref: kl_divergence(jnp.array([-1.0]), ref).sum())(jnp.array([-2.0]))
    assert float(gradient[0]) == 0.0


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_half_precision_is_computed_in_float32(dtype):
    l, ref = jnp.array([-1.0, -2.5], dtype), jnp.array([-1.5, -0.25], dtype)
    value = kl_divergence(l, ref)
    assert value.dtype == jnp.float32
    np.testing.assert_array_equal(value, kl_divergence(l.astype(jnp.float32), ref.astype(jnp.float32)))


def test_result_has_the_precision_of_the_policy():
    with x64():
        policy, reference = jnp.array([-1.0], jnp.float64), jnp.array([-1.5], jnp.float32)
        assert kl_divergence(reference, policy).dtype == jnp.float32
        value = kl_divergence(policy, reference)
        assert value.dtype == jnp.float64
        assert float(value[0]) == pytest.approx(math.exp(-0.5) - 0.5, abs=1e-15)
