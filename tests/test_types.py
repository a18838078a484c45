"""Models as arguments to jitted functions: arrays are traced, and the rest is compared by equality."""

import jax
import jax.numpy as jnp
import pytest
from tiny import tiny_model

from grpo_jax.models.lora import LoraModel, init_adapters
from grpo_jax.types import as_argument


def traces_of(models, params, tokens):
    count = []

    @jax.jit
    def apply(model, params, tokens):
        count.append(1)
        return model.apply({"params": params}, tokens)

    return [apply(as_argument(model), params, tokens) for model in models], len(count)


@pytest.mark.quick
def test_models_are_compared_by_their_config_and_their_base_params_are_traced():
    """Equal models are compiled once, different ones separately, and an adapter's base params are not constants."""
    model, base = tiny_model()
    other, tokens = tiny_model(dtype="bfloat16")[0], jnp.ones((1, 3), jnp.int32)
    assert traces_of([model, type(model)(model.config), model], base, tokens)[1] == 1
    assert traces_of([model, other], base, tokens)[1] == 2
    adapters = init_adapters(jax.random.key(0), base, rank=2)
    doubled = jax.tree.map(lambda x: 2 * x, base)
    (one, other), traces = traces_of([LoraModel(base, model), LoraModel(doubled, model)], adapters, tokens)
    assert traces == 1
    assert not jnp.array_equal(one, other)
