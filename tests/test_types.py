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
def test_equal_models_are_compiled_once_and_different_models_separately():
    model, params = tiny_model()
    same = type(model)(model.config)
    other, _ = tiny_model(dtype="bfloat16")
    tokens = jnp.ones((1, 3), jnp.int32)
    assert traces_of([model, same, model], params, tokens)[1] == 1
    assert traces_of([model, other], params, tokens)[1] == 2


def test_base_params_of_an_adapter_are_an_argument_not_a_constant():
    model, base = tiny_model()
    adapters = init_adapters(jax.random.key(0), base, rank=2)
    tokens = jnp.ones((1, 3), jnp.int32)
    doubled = jax.tree.map(lambda x: 2 * x, base)
    (one, other), traces = traces_of([LoraModel(base, model), LoraModel(doubled, model)], adapters, tokens)
    assert traces == 1
    assert not jnp.array_equal(one, other)
