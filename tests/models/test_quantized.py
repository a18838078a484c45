"""Quantized matrices: dequantized values, the product and its gradient, and the memory of programs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.models.layers import NF4, Quantized, matmul_quantized

temporaries = lambda function, *given: jax.jit(function).lower(*given).compile().memory_analysis().temp_size_in_bytes


def held(kind, fan_in=128, fan_out=96):
    """Return a quantized matrix with random codes, in one of the supported formats."""
    rng = np.random.default_rng(0)
    how = {"shape": (fan_in, fan_out), "dtype": "float32"}
    if kind == "int8":
        codes = rng.integers(-127, 128, (fan_out, fan_in)).astype(np.int8)
        return Quantized(jnp.array(codes), jnp.array(rng.random((fan_out, 1), np.float32)), block=fan_in, **how)
    codes, blocks = rng.integers(0, 256, (fan_out, fan_in // 2)).astype(np.uint8), (fan_out, fan_in // 64)
    if kind == "plain scales":
        return Quantized(jnp.array(codes), jnp.array(rng.random(blocks, np.float32)), block=64, **how)
    scales = rng.integers(0, 256, blocks).astype(np.uint8)
    count = -(-scales.size // 256)
    nested = tuple(jnp.array(rng.random(n, np.float32)) for n in (256, count, 1))
    return Quantized(jnp.array(codes), jnp.array(scales), nested, block=64, **how)


def by_hand(w):
    """Dequantize Wᵀ weight by weight."""
    codes, scales = np.asarray(w.codes).ravel(), np.asarray(w.scales).ravel()
    if w.nested is not None:
        levels, outer, offset = (np.asarray(x) for x in w.nested)
        scales = [levels[code] * outer[i // 256] + offset[0] for i, code in enumerate(scales)]
    if codes.dtype == np.uint8:
        codes = [NF4[half] for byte in codes for half in divmod(int(byte), 16)]
    fan_in, fan_out = w.shape
    rows = [np.float32(codes[i]) * scales[i // w.block] for i in range(fan_in * fan_out)]
    return np.array(rows, np.float32).reshape(fan_out, fan_in)


@pytest.mark.quick
@pytest.mark.parametrize(("kind", "fan_in"), [("nf4", 128), ("plain scales", 128), ("int8", 40)])
def test_dequantized_values_are_exact(kind, fan_in):
    w = held(kind, fan_in)
    rows, rounded, whole = jax.jit(lambda w: (w.rows(jnp.float32), w.matrix(jnp.bfloat16), w.matrix()))(w)
    np.testing.assert_array_equal(rows, by_hand(w))
    np.testing.assert_array_equal(rounded, by_hand(w).T.astype(jnp.bfloat16))
    assert (whole.dtype, whole.shape) == (w.dtype, w.shape)


@pytest.mark.parametrize(("dtype", "wide"), [("float32", False), ("bfloat16", False), ("bfloat16", True)])
def test_product_and_gradients_equal_those_of_the_dequantized_matrix(dtype, wide):
    w, x = held("nf4"), np.random.default_rng(0).standard_normal((5, 128), np.float32).astype(dtype)
    plain = by_hand(w).T.astype(dtype)
    ours = lambda x: jnp.sin(matmul_quantized(x, w, jnp.float32, wide)).sum()
    theirs = lambda x: jnp.sin(jnp.matmul(x, plain, preferred_element_type=jnp.float32)).sum()
    assert jax.eval_shape(lambda x: matmul_quantized(x, w, None, wide), x).dtype == x.dtype
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5 if dtype == "float32" else 0.05)

    def derivatives(of):
        along = np.ones_like(x)
        (value, grad), forwards = jax.jit(lambda x: (jax.value_and_grad(of)(x), jax.jvp(of, (x,), (along,))[1]))(x)
        return (value, forwards), np.float32(grad)

    (values, grad), (expected, reference) = derivatives(ours), derivatives(theirs)
    close(values, expected)
    close(grad, reference, atol=1e-4 if dtype == "float32" else 0.1)


def test_programs_dequantize_few_matrices_at_a_time():
    """Of eight quantized matrices, a program dequantizes at most two at a time, in gradients and in loops."""
    size = 512
    weights = [held("nf4", size, size).replace(codes=held("nf4", size, size).codes + jnp.uint8(i)) for i in range(8)]
    x = jnp.ones((4, size))

    def model(x, weights):
        for w in weights:
            x = jnp.tanh(matmul_quantized(x, w))
        return x.sum()

    def decode(x, weights):
        return jax.lax.fori_loop(0, 3, lambda _, x: x + model(x, weights), x)

    one = 4 * size * size
    assert temporaries(model, x, weights) < 3 * one
    assert temporaries(jax.grad(model), x, weights) < 3 * one
    assert temporaries(decode, x, weights) < 3 * one
