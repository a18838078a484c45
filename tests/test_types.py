"""Models as arguments to jitted functions: arrays are traced, and the rest is compared by equality."""

import jax
import jax.numpy as jnp
import pytest
from tiny import tiny_model, tiny_tokenizer

from grpo_jax import GRPOConfig, Policy, add_lora, save_pretrained, train
from grpo_jax.models.lora import LoraModel, init_adapters
from grpo_jax.types import as_jit_argument


def traces_of(models, params, tokens):
    count = []

    @jax.jit
    def apply(model, params, tokens):
        count.append(1)
        return model.apply({"params": params}, tokens)

    return [apply(as_jit_argument(model), params, tokens) for model in models], len(count)


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


class WithoutBatch:
    def apply(self, variables, tokens):
        return variables["params"][tokens[0]]


class Failing:
    def apply(self, variables, tokens):
        raise KeyError("dropout")


def train_by(model):
    policy = Policy(model, jnp.zeros((300, 4)), tiny_tokenizer())
    return train(policy, [{"prompt": "ab"}], lambda completions: [0.0], GRPOConfig(num_generations=2, max_steps=1))


@pytest.mark.quick
@pytest.mark.parametrize(("call", "message"), [
    (lambda: train_by(object()), r"model must have an `apply` method; got object\. A model is called as"),
    (lambda: train_by(Failing()), r"apply raised KeyError: .*\. A model is called as .*without a dropout key"),
    (lambda: train_by(WithoutBatch()), r"returned .*\(3, 4\).* for tokens of shape \[2, 3\]\. A model is called"),
    (lambda: add_lora(Policy(Failing(), {}), jax.random.key(0)), "created by from_pretrained .* model is a Failing"),
    (lambda: save_pretrained("x", Policy(Failing(), {})), "written as a checkpoint; its model is a Failing"),
])  # fmt: skip
def test_models_that_cannot_be_called_or_saved_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
