"""Experts on a mesh: each device sorts its own rows, and the results equal those on one device."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.models.config import TransformerConfig
from grpo_jax.models.experts import MixtureOfExperts
from grpo_jax.models.sharding import make_mesh, place

SHAPE = TransformerConfig(
    *(32, 16, 32, 1, 2, 1, 8), num_experts=8, num_experts_per_token=2, expert_size=16, expert_layers=(True,),
    initializer_range=0.3,
)  # fmt: skip
BIASED = dataclasses.replace(SHAPE, expert_bias=True, expert_swiglu=(1.7, 1.5))
X = np.random.default_rng(0).standard_normal((8, 2, 5, 16), np.float32)


def random_params_of(shape):
    x = jax.ShapeDtypeStruct((1, 1, 1, shape.hidden_size), np.float32)
    params = jax.eval_shape(MixtureOfExperts(shape).init, jax.random.key(1), x)["params"]
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda x: np.float32(rng.normal(0, 0.3, x.shape)), params)


def value_and_gradients(shape, params, x):
    def loss(params, x):
        y = MixtureOfExperts(shape).apply({"params": params}, x)
        return jnp.sin(y).sum() / max(1, x.size // X.size), y

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(params, x)


def assert_as_on_one_device(on_mesh, params, x):
    """Assert that values and gradients are the same on the mesh and without; return the params on the mesh."""
    placed = place({"mlp": params}, on_mesh.mesh)["mlp"]
    (_, expected), (of_params, of_x) = value_and_gradients(dataclasses.replace(on_mesh, mesh=None), params, x)
    (_, y), (grads, grad_x) = value_and_gradients(on_mesh, placed, x)
    np.testing.assert_allclose(y, expected, atol=1e-5)
    np.testing.assert_allclose(grad_x, of_x, atol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), grads, of_params)
    return placed


def gathers_kernels(shape, placed, x):
    """Return whether the compiled program gathers at least half of a kernel."""
    apply = jax.jit(lambda params, x: MixtureOfExperts(shape).apply({"params": params}, x))
    text = apply.lower(placed, x).compile().as_text()
    gathered = re.findall(r"= f32\[([\d,]+)\]\S* all-gather", text)
    return any(math.prod(map(int, size.split(","))) >= placed["experts"]["gate_proj"].size // 2 for size in gathered)


ONE_EACH = X[:, :1, :1]  # one token per completion, as in a decode


@pytest.mark.parametrize(("axes", "x", "shape", "gathered"), [
    ({"fsdp": 8}, X, SHAPE, True),
    ({"fsdp": 8}, X[:3], BIASED, False),
    ({"data": 4, "tensor": 2}, X, SHAPE, None),
    ({"data": 2, "fsdp": 2, "tensor": 2}, np.tile(X[:3], (1, 1, 2, 1)), BIASED, True),
    ({"data": 2, "fsdp": 2, "tensor": 2}, ONE_EACH, BIASED, False),
])  # fmt: skip
def test_experts_on_a_mesh_equal_one_device(axes, x, shape, gathered):
    """Experts on a mesh equal one device. Kernels are gathered if smaller than the rows; otherwise rows are sent."""
    on_mesh = dataclasses.replace(shape, mesh=make_mesh(axes))
    placed = assert_as_on_one_device(on_mesh, random_params_of(shape), x)
    if gathered is not None:
        assert gathers_kernels(on_mesh, placed, x) == gathered


def dense_products(shape, x):
    """Count the products in a GPU program that multiply all rows by the matrices of all experts."""
    params = jax.eval_shape(MixtureOfExperts(shape).init, jax.random.key(0), x)["params"]
    jaxpr = jax.make_jaxpr(lambda params, x: MixtureOfExperts(shape).apply({"params": params}, x))(params, x)
    return str(jaxpr).count("ragged_dot_general[")


@pytest.mark.parametrize(("channels", "fsdp", "dense"), [(64, 4, 0), (64, 8, 0), (40, 4, 3)], ids=str)
def test_rows_are_sent_on_gpus_if_their_channels_have_a_kernel(channels, fsdp, dense):
    """Rows are sent if a device's channels (64 / 4 = 16) have a kernel; with 64 / 8 = 8, kernels are gathered."""
    shape = dataclasses.replace(SHAPE, hidden_size=channels, attention="interpreted")
    x = np.random.default_rng(2).standard_normal((8, 1, 1, channels), np.float32)
    params = jax.tree.map(lambda leaf: leaf / 3, random_params_of(shape))
    on_mesh = dataclasses.replace(shape, mesh=make_mesh({"fsdp": fsdp}, jax.devices()[:fsdp]))
    placed = assert_as_on_one_device(on_mesh, params, x)
    assert dense_products(on_mesh, x) == dense_products(shape, x) == dense
    assert gathers_kernels(on_mesh, placed, x) == (fsdp == 8)


@pytest.mark.quick
def test_partial_sums_are_not_rounded_before_they_are_added():
    """In bfloat16, each device's partial products stay float32 until they are summed over devices."""
    shape = dataclasses.replace(SHAPE, dtype="bfloat16", mesh=make_mesh({"fsdp": 8}))
    apply = lambda params, x: MixtureOfExperts(shape).apply({"params": params}, x)
    jaxpr = str(jax.make_jaxpr(apply)(random_params_of(SHAPE), X[:, :1, :1]))
    sums = re.findall(r"((?:\w+:\w+\[16,16\]\s+)+)= psum\w*\[[^]]*'fsdp'", jaxpr)
    assert re.findall(r":(\w+)\[", " ".join(sums)) == ["f32", "f32"]
    alone = dataclasses.replace(shape, mesh=make_mesh({"data": 8}))
    apply = lambda params, x: MixtureOfExperts(alone).apply({"params": params}, x)
    jaxpr = jax.make_jaxpr(apply)(random_params_of(SHAPE), X[:, :1, :1])
    assert "psum" not in str(jaxpr), "an axis with one device needs no sum"
