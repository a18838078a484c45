"""Recomputed layers on a CPU: memory as counted by the compiler, and gradients."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import random_params

from grpo_jax.models.block import cpu_remat
from grpo_jax.models.config import TransformerConfig
from grpo_jax.models.transformer import Transformer

CONFIG = TransformerConfig(32, 64, 512, num_layers=6, num_heads=4, num_kv_heads=2, head_dim=16)


def compiled(**changes):
    """Return the compiled gradient of a loss with respect to the params, and the params."""
    model = Transformer(dataclasses.replace(CONFIG, **changes))
    tokens = np.arange(4 * 64).reshape(4, 64) % 32
    params = random_params(model)
    loss = lambda params: jax.nn.log_softmax(model.apply({"params": params}, tokens))[..., 3].mean()
    return jax.jit(jax.grad(loss)).lower(params).compile(), params


def test_recomputation_keeps_the_activations_of_one_layer():
    """With recomputation, the activations of only one of six layers are in memory at a time."""
    (kept, params), (again, _) = compiled(), compiled(remat=True, remat_on_cpu=True)
    inner = 3 * 256 * 512 * 4  # bytes in a layer's MLP: gate, up and their product
    temporaries = [program.memory_analysis().temp_size_in_bytes for program in (kept, again)]
    assert temporaries[0] > 5 * inner
    assert temporaries[1] < temporaries[0] / 3
    flops = [program.cost_analysis()["flops"] for program in (kept, again)]
    assert 1.2 < flops[1] / flops[0] < 1.4, "one additional forward pass"
    chex.assert_trees_all_close(kept(params), again(params), rtol=1e-4, atol=1e-7)


@pytest.mark.quick
@pytest.mark.parametrize("bad", [1.0, np.inf, np.nan])
def test_recomputed_gradients_equal_the_plain_gradients(bad):
    """Recomputed gradients equal the plain ones, also if not finite; integer and None arguments are allowed."""

    def gradients(wrap):
        def function(variables, x, context):
            return jnp.sin(variables["w"] * x)[context["at"]] * bad

        def loss(w, x):
            return wrap(function)({"w": w}, x, {"at": jnp.array([2, 0]), "none": None}).sum()

        return jax.grad(loss, (0, 1))(jnp.ones(3), jnp.linspace(0.5, 1, 3))

    again = gradients(cpu_remat)
    assert all(np.isfinite(x).all() == np.isfinite(bad) for x in again)
    if np.isfinite(bad):
        chex.assert_trees_all_close(again, gradients(lambda function: function), rtol=1e-6)
