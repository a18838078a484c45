"""What is recomputed is not kept: the compiler's own account on a CPU, and the gradients of the function itself."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import random_params

from grpo_jax.models.block import recomputed
from grpo_jax.models.config import TransformerConfig
from grpo_jax.models.transformer import Transformer

CONFIG = TransformerConfig(32, 64, 512, num_layers=6, num_heads=4, num_kv_heads=2, head_dim=16)


def compiled(**changes):
    """The gradient of a loss with respect to the params, compiled; and the params."""
    model = Transformer(dataclasses.replace(CONFIG, **changes))
    tokens = np.arange(4 * 64).reshape(4, 64) % 32
    params = random_params(model)
    loss = lambda params: jax.nn.log_softmax(model.apply({"params": params}, tokens))[..., 3].mean()
    return jax.jit(jax.grad(loss)).lower(params).compile(), params


def test_recomputed_layers_hold_the_activations_of_one():
    """Of 256 tokens and 6 layers: gate, up and their product have 512 numbers a token; attention keeps more."""
    (kept, params), (again, _) = compiled(), compiled(remat=True, remat_on_cpu=True)
    inner = 3 * 256 * 512 * 4  # bytes of a layer's MLP
    temporaries = [program.memory_analysis().temp_size_in_bytes for program in (kept, again)]
    assert temporaries[0] > 5 * inner
    assert temporaries[1] < temporaries[0] / 3
    flops = [program.cost_analysis()["flops"] for program in (kept, again)]
    assert 1.2 < flops[1] / flops[0] < 1.4, "a forward pass more beside one and a backward pass"
    chex.assert_trees_all_close(kept(params), again(params), rtol=1e-4, atol=1e-7)


def function(weights, x, others):
    y = jnp.tanh(x @ weights["w"] + others["bias"][None])[:, others["at"]] * weights["numbers"][None]
    return y, {"sum": jnp.sin(y).sum(), "at": others["at"]}


def test_gradients_are_those_of_the_function_whatever_is_among_its_arguments():
    def loss(apply):
        def of(w, x, bias):
            others = {"bias": bias, "at": jnp.array([2, 0, 1]), "none": None}
            y, found = apply({"w": w, "numbers": jnp.arange(3)}, x, others)
            return (y**2).sum() + found["sum"]

        return of

    arguments = jnp.linspace(-1, 1, 6).reshape(2, 3), jax.random.normal(jax.random.key(0), (4, 2)), jnp.ones(3)
    for argnums in ((0, 1, 2), (1,), (0,)):
        plain = jax.jit(jax.value_and_grad(loss(function), argnums))(*arguments)
        again = jax.jit(jax.value_and_grad(loss(recomputed(function)), argnums))(*arguments)
        chex.assert_trees_all_close(plain, again, rtol=1e-6)


@pytest.mark.quick
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_gradient_that_is_not_finite_stays_so(bad):
    gradient = jax.grad(lambda x: recomputed(lambda _, x: jnp.sin(x))(1.0, x)[0] * bad)(jnp.ones(3))
    assert not np.isfinite(gradient[0])
