"""Layers as a loop: the numbers of the layers one after another, in a program that does not grow with their number."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import random_params

from grpo_jax.maths.sampling import Sampling
from grpo_jax.models.layers import DeltaShape, LayerKind, TransformerConfig
from grpo_jax.models.lora import LoraModel, init_adapters
from grpo_jax.models.packing import pack
from grpo_jax.models.scoring import read_prompts, score_completions, score_packed
from grpo_jax.models.transformer import Transformer, repeats
from grpo_jax.types import Prompts

PLAIN = TransformerConfig(24, 16, 32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, initializer_range=0.3)
FOUR = dataclasses.replace(PLAIN, num_layers=4)
EXPERTS = {"num_experts": 4, "num_experts_per_token": 2, "expert_size": 16}
SHAPES = {
    "a pattern and a rest": dataclasses.replace(PLAIN, num_layers=5, windows=(3, None) * 2 + (3,)),
    "experts in every second": dataclasses.replace(FOUR, **EXPERTS, expert_layers=(False, True) * 2),
    "recurrent in every second": dataclasses.replace(
        FOUR, mixers=("delta", "attention") * 2, delta=DeltaShape(2, 4, 6, 5)
    ),
    "bfloat16, made again": dataclasses.replace(PLAIN, dtype="bfloat16", remat=True),
}
PROMPTS = Prompts(jnp.array([[3, 4, 5, 6], [7, 8, 0, 0]]), jnp.array([4, 2]))
TOKENS = jax.random.randint(jax.random.key(0), (2, 3, 8), 0, 24)
MASK = jnp.arange(8).reshape(1, 1, 8) < jnp.array([[8, 3, 5], [1, 8, 6]])[..., None]


def scores(model, params):
    """Log-probs side by side and packed, [2, 3, 8] each."""
    how = {"sampling": Sampling(), "with_entropy": False}
    padded, *_ = score_completions(model, params, PROMPTS, TOKENS, MASK, **how)
    read = read_prompts(model, params, PROMPTS)
    found = jnp.zeros(MASK.shape)
    (sequence,) = pack(np.asarray(TOKENS), np.asarray(MASK), size=40, block=4)
    found = sequence.add_to(found, score_packed(model, params, read, PROMPTS.lengths, sequence, **how)[0])
    return padded, found


@pytest.mark.parametrize("name", SHAPES)
def test_a_loop_has_the_numbers_of_its_layers(name):
    """Layers as a loop have the numbers of the layers, in a program that does not grow with them."""
    shape = SHAPES[name]
    params = random_params(Transformer(shape))

    def values_and_gradient(looped):
        model = Transformer(dataclasses.replace(shape, loop_layers=looped))

        def loss(params):
            values = scores(model, params)
            return sum((x * MASK).sum() for x in values), values

        gradient, values = jax.jit(jax.grad(loss, has_aux=True))(params)
        return values, gradient

    (values, gradient), (expected, of_layers) = values_and_gradient(True), values_and_gradient(False)
    tolerance = 0.15 if shape.dtype == "bfloat16" else 1e-5
    for x, y in zip(values, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=tolerance)
    np.testing.assert_allclose(*values, atol=10 * tolerance)
    scale = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(of_layers))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=tolerance * scale), gradient, of_layers)


def test_adapters_in_a_loop():
    base = random_params(Transformer(PLAIN))
    adapters = init_adapters(jax.random.key(1), base, rank=2)
    adapters = jax.tree.map(lambda x: jax.random.normal(jax.random.key(2), x.shape) * 0.1, adapters)
    looped = Transformer(dataclasses.replace(PLAIN, loop_layers=True))
    of = lambda model, params: jax.jit(functools.partial(scores, model))(params)[0]
    values = [of(LoraModel(base, model, 2.0), adapters) for model in (Transformer(PLAIN), looped)]
    np.testing.assert_allclose(*values, atol=1e-5)
    assert np.abs(values[0] - of(Transformer(PLAIN), base)).max() > 0.05, "the adapters do something"


def test_the_program_of_a_loop_does_not_grow_with_its_layers():
    @functools.cache
    def products(layers, looped):
        shape = dataclasses.replace(PLAIN, num_layers=layers, loop_layers=looped)
        params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), random_params(Transformer(shape)))
        loss = lambda params: score_completions(
            Transformer(shape), params, PROMPTS, TOKENS, MASK, Sampling(), with_entropy=False
        )[0].sum()
        return jax.jit(jax.grad(loss)).lower(params).compile().as_text().count(" dot(")

    assert products(6, True) == products(2, True)
    assert products(6, False) > 2 * products(2, False)


@pytest.mark.quick
def test_what_is_repeated():
    local, full, sparse = LayerKind(window=4), LayerKind(), LayerKind(sparse=True)
    assert repeats([full] * 24) == (1, 24)
    assert repeats(([local] * 5 + [full]) * 4 + [local] * 2) == (6, 4)
    assert repeats([full, sparse, sparse]) == (1, 1), "the first is alone, and the others come after it"
    assert repeats([sparse, sparse]) == (1, 2)
    assert repeats([]) == (1, 1)
