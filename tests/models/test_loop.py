"""Layers in a loop: the same results as unrolled layers, in a program whose size does not grow with their number."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import random_params

from grpo_jax.hub.tensors import abstract_params
from grpo_jax.maths.sampling import Sampling
from grpo_jax.models.config import ConvShape, LayerKind, TransformerConfig
from grpo_jax.models.lora import LoraModel, init_adapters
from grpo_jax.models.packing import SequenceShape, pack
from grpo_jax.models.scoring import prefill_prompts, score_completions, score_packed
from grpo_jax.models.transformer import Transformer, repeating_pattern
from grpo_jax.types import Prompts

PLAIN = TransformerConfig(24, 16, 32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, initializer_range=0.3)
# A pattern of unlike layers, and a rest.
UNLIKE = dataclasses.replace(
    PLAIN, num_layers=5, mixers=("attention", "conv") * 2 + ("attention",), conv=ConvShape(16), remat=True,
    windows=(3, None) * 2 + (3,), expert_layers=(False, True) * 2 + (False,), num_experts=2, num_experts_per_token=1,
    expert_size=16,
)  # fmt: skip
PROMPTS = Prompts(np.array([[3, 4, 5, 6], [7, 8, 0, 0]]), np.array([4, 2]))
TOKENS = np.asarray(jax.random.randint(jax.random.key(0), (2, 3, 8), 0, 24))
MASK = np.arange(8) < np.array([[8, 3, 5], [1, 8, 6]])[..., None]


HOW = {"sampling": Sampling(), "with_entropy": False}


def padded(model, params):
    """Return log-probs of completions side by side, [2, 3, 8]."""
    return score_completions(model, params, PROMPTS, TOKENS, MASK, **HOW)[0] * MASK


def packed(model, params):
    """Return the same log-probs from a packed sequence."""
    (sequence,) = pack(SequenceShape(40, 4, 8, whole=True), TOKENS, MASK)
    read = prefill_prompts(model, params, PROMPTS)
    log_probs, *_ = score_packed(model, params, read, PROMPTS.lengths, sequence, **HOW)
    return sequence.add_rows_to_batch(jnp.zeros(MASK.shape), log_probs) * MASK


def assert_same(shape, other, params, tolerance):
    """Assert that one shape's padded and packed log-probs and gradients equal the other shape's packed ones."""

    def loss(params, shape, way, also):
        others = [way(Transformer(shape), jax.lax.stop_gradient(params)) for way in also]
        log_probs = way(Transformer(shape), params)
        return log_probs.sum(), [log_probs, *others]

    compiled = jax.jit(jax.grad(loss, has_aux=True), static_argnums=(1, 2, 3))
    gradient, found = compiled(params, shape, padded, (packed,))
    expected, (values,) = compiled(params, other, packed, ())
    for log_probs in found:
        np.testing.assert_allclose(log_probs, values, atol=tolerance)
    scale = max(float(np.abs(x).max()) for x in jax.tree.leaves(expected))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=tolerance * scale), gradient, expected)


def test_looped_layers_equal_unrolled_layers():
    """Layers in a loop give the same log-probs, padded and packed, and gradients as unrolled layers."""
    params = random_params(Transformer(UNLIKE))
    assert_same(dataclasses.replace(UNLIKE, loop_layers=True), UNLIKE, params, 1e-5)


def test_adapters_in_looped_layers():
    base = random_params(Transformer(PLAIN))
    adapters = init_adapters(jax.random.key(1), base, rank=2)
    adapters = jax.tree.map(lambda x: np.float32(np.random.default_rng(2).normal(0, 0.1, x.shape)), adapters)
    looped = Transformer(dataclasses.replace(PLAIN, loop_layers=True))
    of = lambda model, params: jax.jit(functools.partial(padded, model))(params)
    values = [of(LoraModel(base, model, 2.0), adapters) for model in (Transformer(PLAIN), looped)]
    np.testing.assert_allclose(*values, atol=1e-5)
    assert np.abs(values[0] - of(Transformer(PLAIN), base)).max() > 0.05, "the adapters must have an effect"


def test_program_of_a_loop_does_not_grow_with_its_layers():
    def products(layers, looped):
        model = Transformer(dataclasses.replace(PLAIN, num_layers=layers, loop_layers=looped))
        loss = lambda params: model.apply({"params": params}, PROMPTS.tokens).sum()
        return jax.jit(jax.grad(loss)).lower(abstract_params(model.config)).compile().as_text().count(" dot(")

    assert products(4, True) == products(2, True)
    assert products(4, False) > 1.5 * products(2, False)


@pytest.mark.quick
def test_period_and_number_of_repeats():
    local, full, sparse = LayerKind(window=4), LayerKind(), LayerKind(sparse=True)
    assert repeating_pattern([full] * 24) == (1, 24)
    assert repeating_pattern(([local] * 5 + [full]) * 4 + [local] * 2) == (6, 4)
    assert repeating_pattern([full, sparse, sparse]) == (1, 1), "the period must start at the first layer"
    assert repeating_pattern([sparse, sparse]) == (1, 2)
    assert repeating_pattern([]) == (1, 1)
