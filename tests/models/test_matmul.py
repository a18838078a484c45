"""Products whose gradients are written by hand: those that JAX derives, in both forms."""

import functools
import re

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


@pytest.mark.quick
@pytest.mark.parametrize("product", [matmul, scale_columns])
def test_the_dtype_is_that_of_the_inputs(product):
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((4, 2), (2, 2) if product is matmul else (2,)))

    def value_and_gradients(x, w):
        y, pullback = jax.vjp(product, x, w)
        return y, pullback(y)

    assert {x.dtype for x in jax.tree.leaves(jax.eval_shape(value_and_gradients, x, w))} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize(("product", "plain", "shape"), CASES, ids=[case[0].__name__ for case in CASES])
@pytest.mark.parametrize(("i", "o"), [(6, 4), (1, 1)])
def test_values_gradients_forwards_twice_and_mapped(product, plain, shape, i, o):
    """Tangents, a gradient's tangents, and a map over both are those of the plain expression."""
    rng = np.random.default_rng(0)
    at, along = ((rng.standard_normal((5, i), np.float32), rng.standard_normal(shape(i, o), np.float32)) for _ in "ab")

    def derivatives(product, at, along):
        of = lambda x, w: jnp.sin(jax.checkpoint(product)(x, w)).sum()
        forwards = lambda along: jax.jvp(of, at, along)[1]
        twice = lambda along: jax.jvp(jax.grad(of, (0, 1)), at, along)[1]
        linear = jax.linearize(of, *at)[1]
        many = jax.tree.map(lambda x: jnp.stack([x, -2 * x, 0 * x]), (at, along))
        return (
            (product(*at), *jax.grad(of, (0, 1))(*at)),
            (forwards(along), linear(*along), twice(along), jax.grad(lambda x: linear(x, along[1]))(at[0])),
            (jax.vmap(forwards)(many[1]), jax.vmap(twice)(many[1]), jax.vmap(jax.grad(of, (0, 1)))(*many[0])),
            (jax.jvp(lambda x: of(x, at[1]), at[:1], along[:1])[1], jax.jacfwd(of, 1)(*at), jax.hessian(of, 1)(*at)),
        )

    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    ours, expected = (jax.jit(functools.partial(derivatives, of))(at, along) for of in (product, plain))
    jax.tree.map(close, ours, expected)


@pytest.mark.parametrize("product", [matmul, matmul_transposed])
def test_what_is_not_differentiated_costs_nothing(product):
    """The tangent of frozen weights is no product with zeros, nor their gradient one that is thrown away."""
    x = w = jnp.ones((8, 8))
    for of, frozen in ((lambda x: product(x, w), x), (lambda w: product(x, w), w)):
        for program in (lambda at, of=of: jax.jvp(of, (at,), (at,)), lambda at, of=of: jax.vjp(of, at)[1](at)):
            text = jax.jit(program).lower(frozen).compile().as_text()
            assert len(re.findall(r" dot\(", text)) <= 2, text


@pytest.mark.parametrize("product", [matmul, matmul_transposed, matmul_by_columns])
def test_sums_are_not_rounded_to_the_dtype_of_the_operands(product):
    """Σ of 256 + 1 ones is 257, which bfloat16 does not have; the gradients are in the operands' dtype all the same."""
    x, w = np.ones((2, 257), jnp.bfloat16), np.ones((257, 257), jnp.bfloat16)
    y, pullback = jax.vjp(lambda x, w: product(x, w, jnp.float32), x, w)
    assert y.dtype == jnp.float32
    np.testing.assert_array_equal(y, 257.0)
    assert {g.dtype for g in pullback(y)} == {jnp.dtype("bfloat16")}
    np.testing.assert_array_equal(product(x, w).astype(jnp.float32), 256.0)


def test_a_product_by_columns_is_the_product_and_stays_one_by_columns():
    """XLA's own rewriting would turn it round: into x by the rows of the turned weights."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((3, 5), np.float32), rng.standard_normal((5, 7), np.float32)
    compiled = jax.jit(matmul_by_columns).lower(x, w.T).compile()
    np.testing.assert_allclose(compiled(x, w.T), x @ w, rtol=1e-5, atol=1e-6)
    text = compiled.as_text()
    made = [line.split(" = ")[1].split("{")[0] for line in text.splitlines() if " dot(" in line]
    assert made == ["f32[7,3]"], text
