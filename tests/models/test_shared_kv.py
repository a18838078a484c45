"""Layers that use an earlier layer's keys and values, and heads of two sizes, in prefill, decode and packing."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_loop import PROMPTS, assert_same
from test_recurrent import assert_scored_as_drawn
from tiny import random_params

from experiments.bounds import Work
from grpo_jax.models import fused_step
from grpo_jax.models.config import StepCost, TransformerConfig, count_weights
from grpo_jax.models.context import empty_cache, num_slots, pad_slots
from grpo_jax.models.rope import Rope
from grpo_jax.models.transformer import Transformer, projections
from grpo_jax.update.state import apply_optimizer, create_state

# Two layers, and a third that uses the keys and values of the second.
SHAPE = TransformerConfig(
    *(24, 16, 32, 3, 4, 2, 6), windows=(3, None, None), local_rope=Rope(theta=100.0), norms="sandwich", qk_norm="head",
    query_scale=0.25, v_norm=True, full_heads=(1, 10), shared_kv_layers=1, shared_kv_mlp=64, layer_input_size=6,
    layer_scalar=True, initializer_range=0.2, attention_soft_cap=5.0, remat=True,
)  # fmt: skip


@functools.cache
def params():
    made = random_params(Transformer(SHAPE))
    for i in range(SHAPE.num_layers):
        made[f"layers_{i}"]["layer_scalar"] = jnp.array([0.6 + 0.1 * i])
    return made


def test_tiles_and_packed_sequences_agree():
    assert_same(SHAPE, dataclasses.replace(SHAPE, attention="tiles"), params(), 1e-5)


def test_samples_of_the_decode_kernel_are_scored_as_drawn(monkeypatch):
    monkeypatch.setattr(fused_step, "MIN_TILE_SIDE", 1)
    model = Transformer(dataclasses.replace(SHAPE, head_dim=8, full_heads=(1, 16), attention="interpreted"))
    assert_scored_as_drawn(model, random_params(model))


@pytest.mark.quick
def test_layer_with_shared_keys_has_no_cache():
    read = functools.partial(Transformer(SHAPE).apply, method="prefill")
    _, prefix = jax.eval_shape(read, {"params": params()}, PROMPTS)
    cache = empty_cache(prefix.layers, 3, 5)
    assert [len(layer) for layer in prefix.layers] == [len(layer) for layer in cache] == [2, 2, 0]
    assert [layer[0].shape[1:4:2] for layer in cache[:2]] == [(2, 6), (1, 10)]
    assert num_slots(pad_slots(cache, 9)) == 9
    assert set(params()["layers_2"]["self_attn"]) == {"q_proj", "q_norm", "o_proj"}
    pattern = dataclasses.replace(SHAPE, num_layers=7, windows=(None, 3, None, 3, None, 3, None), shared_kv_layers=3)
    assert [pattern.kv_source(i) for i in range(7)] == [0, 1, 2, 3, 2, 3, 2]


def test_counts_of_weights_keys_and_scores():
    kernels = sum(kernel.size for _, kernel in projections(params()))
    assert count_weights(SHAPE, head=False) == kernels
    step = StepCost.of(SHAPE, prompt_length=8, completion_length=100, itemsize=2)
    assert step.own == 100 * 2 * 2 * (2 * 6 + 2 * 1 * 10)
    work = dict(prompts=1, group=1, completion_length=1, itemsize=2)
    longer, shorter = (Work(SHAPE, prompt_length=n, **work).update_operations for n in (101, 100))
    assert longer - shorter == 6 * (kernels + 2 * 4 * (6 + 2 * 10) * 102)


def test_layer_scalar_is_not_trained():
    """Neither gradients nor weight decay change a layer scalar."""
    own = {"layers_2": {"layer_scalar": jnp.array([0.8])}, "norm": {"scale": jnp.ones(16)}}
    optimizer = optax.adamw(0.1, weight_decay=0.5)
    state = create_state(own, optimizer, jax.random.key(0))
    step = jax.jit(functools.partial(apply_optimizer, optimizer=optimizer))
    moved = step(state, jax.tree.map(jnp.ones_like, own), jnp.bool_(True)).params
    np.testing.assert_array_equal(moved["layers_2"]["layer_scalar"], own["layers_2"]["layer_scalar"])
    assert np.abs(moved["norm"]["scale"] - own["norm"]["scale"]).min() > 0.01
