"""Products of rows with their group's matrix: the kernels equal `jax.lax.ragged_dot` in values and gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_fused import arrays

from grpo_jax.models import ragged
from grpo_jax.models.attention_tiles import attention_implementation
from grpo_jax.models.config import TransformerConfig
from grpo_jax.models.experts import MixtureOfExperts
from grpo_jax.models.ragged import ragged_dot

KERNEL = "triton" if attention_implementation("auto") in ("triton", "mosaic") else "interpreted"


def one_by_one(x, w, sizes):
    group = np.repeat(np.arange(len(sizes)), sizes)
    return np.stack([np.asarray(row) @ np.asarray(w[e]) for row, e in zip(x, group, strict=True)])


def value_and_gradients(implementation, x, w, sizes, upstream):
    def weighted(x, w):
        value = ragged_dot(x, w, jnp.asarray(sizes), implementation)
        return (value * upstream).sum(), value

    gradients, value = jax.jit(jax.grad(weighted, argnums=(0, 1), has_aux=True))(x, w)
    return value, *gradients


@pytest.mark.parametrize(("sizes", "inner", "outer"), [
    pytest.param([5, 0, 17, 40], 16, 32, id="an expert without rows, tiles of several groups"),
    pytest.param([0, 0, 64, 0], 48, 16, id="all rows for one expert, a side that is not a power of two"),
    pytest.param([1, 0, 0, 1, 0, 1, 0, 0, 1, 1, 0, 0], 32, 48, id="fewer rows than experts"),
    pytest.param([200, 56], 96, 160, id="groups of several tiles, sides of several tiles"),
    pytest.param([3], 16, 16, id="one expert"),
])  # fmt: skip
def test_kernels_equal_the_ragged_products_of_jax(sizes, inner, outer):
    n, e = sum(sizes), len(sizes)
    x, w, upstream = arrays((n, inner), (e, inner, outer), (n, outer))
    found = value_and_gradients(KERNEL, x, w, sizes, upstream)
    np.testing.assert_allclose(found[0], one_by_one(x, w, sizes), atol=1e-4)
    for ours, plain in zip(found, value_and_gradients("xla", x, w, sizes, upstream), strict=True):
        np.testing.assert_allclose(ours, plain, atol=1e-4)


def test_bfloat16_rows_are_summed_in_float32():
    """Products of bfloat16 rows are summed in float32: 512 ones give 512, not 256."""
    x, w = jnp.ones((16, 512), jnp.bfloat16), jnp.ones((1, 512, 16), jnp.bfloat16)
    out = ragged_dot(x, w, jnp.array([16]), KERNEL)
    assert out.dtype == jnp.bfloat16
    assert (out == 512).all()


@pytest.mark.quick
def test_sizes_that_no_tile_divides_are_left_to_jax(monkeypatch):
    monkeypatch.setattr(ragged, "_ragged_dot", lambda *_: pytest.fail("a kernel was used"))
    x, w = arrays((6, 12), (2, 12, 16))
    np.testing.assert_allclose(ragged_dot(x, w, jnp.array([2, 4]), "triton"), one_by_one(x, w, [2, 4]), atol=1e-5)


def test_mixture_of_experts_with_kernels():
    """A mixture of experts has the plain values and gradients with kernels."""
    expert = {"expert_bias": True, "expert_swiglu": (1.7, 1.5), "num_experts": 4, "num_experts_per_token": 2}
    plain = TransformerConfig(*(32, 16, 32, 1, 2, 1, 8), expert_size=32, expert_layers=(True,), **expert)
    (x,) = arrays((1, 1, 70, 16))
    params = jax.eval_shape(MixtureOfExperts(plain).init, jax.random.key(1), x)["params"]
    params = jax.tree.map(lambda leaf: 0.3 * arrays(leaf.shape)[0], params)

    def of(attention):
        layer = MixtureOfExperts(dataclasses.replace(plain, attention=attention))
        loss = lambda params, x: jnp.sin(layer.apply({"params": params}, x)).sum()
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(params, x)

    same = lambda ours, plain: np.testing.assert_allclose(ours, plain, rtol=1e-6, atol=1e-5)
    jax.tree.map(same, of(KERNEL), of("einsum"))
