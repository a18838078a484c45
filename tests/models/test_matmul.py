"""Products whose gradients are written by hand: those that JAX derives, in both forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.models.matmul import matmul, matmul_by_columns, matmul_transposed, scale_columns

CASES = [
    (matmul, lambda x, w: x @ w, lambda i, o: (i, o)),
    (matmul_transposed, lambda x, w: x @ w.T, lambda i, o: (o, i)),
    (scale_columns, lambda x, w: x * w[None], lambda i, o: (i,)),
]


@pytest.mark.parametrize(("product", "plain", "shape"), CASES, ids=[case[0].__name__ for case in CASES])
@pytest.mark.parametrize(("i", "o"), [(6, 4), (4, 6), (5, 3), (1, 1), (8, 8)])
def test_value_and_gradients(product, plain, shape, i, o):
    keys = jax.random.split(jax.random.key(0), 3)
    x, w = jax.random.normal(keys[0], (7, i)), jax.random.normal(keys[1], shape(i, o))
    y, pullback = jax.vjp(jax.jit(product), x, w)
    expected, reference = jax.vjp(plain, x, w)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    g = jax.random.normal(keys[2], y.shape)
    for got, want in zip(pullback(g), reference(g), strict=True):
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("product", [matmul, scale_columns])
def test_the_dtype_is_that_of_the_inputs(product):
    x, w = jnp.ones((4, 2), jnp.bfloat16), jnp.ones((2, 2) if product is matmul else (2,), jnp.bfloat16)
    y, pullback = jax.vjp(product, x, w)
    assert {y.dtype, *(g.dtype for g in pullback(y))} == {jnp.dtype("bfloat16")}


def test_a_product_by_columns_is_the_product_and_stays_one_by_columns():
    """XLA's own rewriting would turn it round: into x by the rows of the turned weights."""
    keys = jax.random.split(jax.random.key(0))
    x, w = jax.random.normal(keys[0], (3, 5)), jax.random.normal(keys[1], (5, 7))
    np.testing.assert_allclose(matmul_by_columns(x, w.T), x @ w, rtol=1e-5, atol=1e-6)
    text = jax.jit(matmul_by_columns).lower(x, w.T).compile().as_text()
    made = [line.split(" = ")[1].split("{")[0] for line in text.splitlines() if " dot(" in line]
    assert made == ["f32[7,3]"], text
