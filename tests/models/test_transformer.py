"""The decoder: causality, and agreement between the different ways of computing the same logits."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import random_params

from grpo_jax.models import block, transformer
from grpo_jax.models.config import ConvShape, DeltaShape, TransformerConfig
from grpo_jax.models.experts import router_loss
from grpo_jax.models.rope import Rope, check_rope_length, rope_frequencies
from grpo_jax.models.transformer import Transformer
from grpo_jax.types import Prompts

PLAIN = TransformerConfig(*(40, 32, 48, 2, 4, 2, 8), qk_norm="head", initializer_range=0.3)
# All switches that affect attention, in one model.
RICH = dataclasses.replace(
    PLAIN, windows=(3, None), local_rope=Rope(theta=100.0, fraction=0.5, pairs=True), rotary_layers=(True, False),
    rope=Rope(growth=(0.4, 2)), norms="sandwich", norm_offset=1.0, qkv_bias=True, attention_soft_cap=5.0,
    attention_sinks=True, logit_soft_cap=4.0, embedding_scale=3.0, residual_scale=0.8, logit_scale=2.0,
)  # fmt: skip
# The last layer uses the keys and values of an earlier layer.
SHARED = dataclasses.replace(
    PLAIN, num_layers=3, windows=(3, None, None), initializer_range=0.25, local_rope=Rope(theta=100.0),
    rope=Rope(kind="proportional", scaling=(("factor", 1.0), ("partial_rotary_factor", 0.5))), norms="sandwich",
    query_scale=0.3, v_norm=True, full_heads=(1, 12), values_are_keys=True, shared_kv_layers=1, shared_kv_mlp=64,
    rms_norm_eps=1e-2,  # so that norms amplify the rounding of small values less
    layer_input_size=6, layer_scalar=True, num_experts=4, num_experts_per_token=2, expert_size=16,
    expert_layers=(False, True, False), parallel_experts=True,
)  # fmt: skip
# One recurrent layer of each kind, and experts. Gates multiply rounding errors, so the residual scale is small.
RECURRENT = dataclasses.replace(
    PLAIN, num_layers=3, mixers=("delta", "attention", "conv"),
    delta=DeltaShape(2, 4, key_dim=6, value_dim=5, kernel=4), conv=ConvShape(32, kernel=4, bias=True),
    attention_gate=True, residual_scale=0.5, rms_norm_eps=1e-2, norms="post",
    num_experts=4, num_experts_per_token=2, expert_size=16, expert_layers=(False, True, False),
)  # fmt: skip
CONFIGS = {"rich": RICH, "shared": SHARED, "recurrent": RECURRENT}

B, G, P, T = 2, 3, 6, 5
LENGTHS = np.array([6, 2])  # the second is shorter than a convolution's window


of_each = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


@functools.cache
def make(config):
    model = Transformer(config)
    return model, jax.jit(model.init)(jax.random.key(1), jnp.zeros((1, 2), jnp.int32))["params"]


def batch():
    rng = np.random.default_rng(3)
    return rng.integers(0, 40, (B, P)), rng.integers(0, 40, (B, G, T))


@of_each
def test_inputs_affect_only_logits_at_their_position_and_after(config):
    """Replacing the token at one position changes the logits at this position and after it, and no earlier logits."""
    model = Transformer(dataclasses.replace(config, windows=None))
    tokens = np.where(np.eye(7, 6, -1, dtype=bool), 30, np.arange(6))  # row 1 + i has another token at position i
    logits = np.asarray(jax.jit(model.apply)({"params": random_params(model)}, tokens))
    for i, moved in enumerate(np.abs(logits[1:] - logits[0]).max(axis=-1)):
        assert (moved[i:] > 1e-3).all(), f"position {i} does not affect all later logits: {moved}"
        assert (moved[:i] < 1e-5).all(), f"position {i} affects earlier logits: {moved}"


@functools.partial(jax.jit, static_argnames="model")
def group_logits(model, params, prompt, rows, lengths=LENGTHS):
    """Return logits [B, G, T+1, V] for the last prompt token and every completion token, with a shared prompt."""
    variables = {"params": params}
    last, prefix = model.apply(variables, Prompts(prompt, lengths), method="prefill")
    hidden, _ = model.apply(variables, rows, prefix, method="hidden")
    last = jnp.broadcast_to(last[:, None, None], (*hidden.shape[:2], 1, hidden.shape[-1]))
    return model.apply(variables, jnp.concatenate([last, hidden], axis=2), method="unembed")


@functools.partial(jax.jit, static_argnames="model")
def plain_logits(model, params, prompt, rows, lengths=LENGTHS):
    """Return the same logits from concatenated prompts and completions, with each prompt repeated."""
    b, g, t = rows.shape
    slot = jnp.arange(prompt.shape[1] + t)[None]
    padded = jnp.pad(jnp.broadcast_to(prompt[:, None], (b, g, prompt.shape[1])), ((0, 0), (0, 0), (0, t)))
    offset = jnp.broadcast_to(jnp.clip(slot - lengths[:, None], 0, t - 1)[:, None], padded.shape)
    whole = jnp.where((slot < lengths[:, None])[:, None], padded, jnp.take_along_axis(rows, offset, axis=2))
    logits = model.apply({"params": params}, whole.reshape(b * g, -1)).reshape(*padded.shape, -1)
    kept = (lengths[:, None] - 1 + jnp.arange(t + 1)[None])[:, None, :, None]
    return jnp.take_along_axis(logits, jnp.broadcast_to(kept, (b, g, t + 1, 1)), axis=2)


@of_each
def test_shared_prompt_equals_concatenated_sequences(config):
    """With a shared prompt, logits and gradients equal those of each prompt and completion concatenated."""
    model, params = make(config)
    prompt, rows = batch()
    weights = np.random.default_rng(0).standard_normal((B, G, T + 1, 40)).astype(np.float32) / 100

    def loss(logits_of, params):
        logits = logits_of(model, params, prompt, rows)
        return jnp.sum(jax.nn.log_softmax(logits) * weights), logits

    both = [jax.jit(jax.grad(functools.partial(loss, of), has_aux=True))(params) for of in (group_logits, plain_logits)]
    grads, logits = zip(*both, strict=True)
    # The two programs round differently, depending on the CPU: 1.14e-5 was measured for a logit of 2.2.
    np.testing.assert_allclose(*logits, rtol=2e-6, atol=1e-5)
    chex.assert_trees_all_close(*grads, rtol=1e-7, atol=2e-5)


@pytest.mark.parametrize(("changes", "kinds"), [({}, 1), ({"windows": (None, 3, 3, None, 3, 3)}, 2)])
def test_each_kind_of_layer_is_traced_once(monkeypatch, changes, kinds):
    """Tracing a model traces each kind of layer once, however many layers it has."""
    traced = []
    attention = block.group_attention
    monkeypatch.setattr(block, "group_attention", lambda *args, **how: traced.append(1) or attention(*args, **how))
    # A shape that no other test has traced.
    model = Transformer(dataclasses.replace(PLAIN, vocab_size=41, num_layers=6, **changes))
    tokens = jnp.zeros((B, T), jnp.int32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens)
    traced.clear()
    jax.jit(jax.grad(lambda params: model.apply(params, tokens).mean())).trace(shapes)
    assert len(traced) == kinds


@pytest.mark.parametrize("config", [RICH, RECURRENT], ids=["rich", "recurrent"])
def test_bfloat16_compute_gives_close_float32_logits(config):
    model, params = make(config)
    tokens = batch()[0]
    half = Transformer(dataclasses.replace(config, dtype="bfloat16"))
    logits, exact = jax.jit(lambda params: [of.apply({"params": params}, tokens) for of in (half, model)])(params)
    assert logits.dtype == jnp.float32
    assert jax.tree.leaves(jax.eval_shape(half.init, jax.random.key(0), tokens))[0].dtype == jnp.float32
    error = np.linalg.norm(logits - exact) / np.linalg.norm(exact)
    assert 1e-5 < error < 0.1


HEADS = [(True, ""), (False, ""), (True, "_columns"), (False, "of wᵀ")]


@pytest.mark.parametrize(("tied", "of"), HEADS, ids=["tied", "head", "tied, columns", "head, columns"])
def test_logits_are_not_rounded_to_bfloat16(tied, of):
    """Logits are float32 products of bfloat16 operands, by rows and columns, and not rounded to multiples of 1/8."""
    model, params = make(dataclasses.replace(PLAIN, tie_word_embeddings=tied, dtype="bfloat16"))
    table = np.abs(params["embed_tokens"]["embedding"] if tied else params["lm_head"]["kernel"].T)
    table = 24 * table / table.sum(axis=1, keepdims=True)
    params = {**params, "embed_tokens": {"embedding": table}} if tied else {**params, "lm_head": {"kernel": table.T}}
    hidden = np.random.default_rng(2).uniform(0.8, 1.2, (9, 32)).astype(jnp.bfloat16)
    exact = np.float64(hidden) @ np.float64(table.astype(jnp.bfloat16)).T
    assert 16 < exact.min() < exact.max() < 32
    variables = {"params": params}
    if of == "of wᵀ":
        variables, of = variables | {"columns": transformer.kernels_by_columns(params, model.config.dtype)}, ""
    # Operations run one by one, because in one program XLA for CPUs may skip the rounding between two of them.
    logits = model.apply(variables, hidden, method=f"unembed{of}")
    logits = np.asarray(logits.T if of else logits)
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, exact, rtol=1e-5)
    assert np.mean(logits == logits.astype(jnp.bfloat16)) < 0.1


def test_gradient_is_finite_for_rows_of_one_token():
    model, params = make(PLAIN)
    loss = lambda params: group_logits(model, params, np.array([[3]]), np.array([[[5]]]), np.array([1])).sum()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.jit(jax.grad(loss))(params)))


def test_lengths_that_change_the_rotary_frequencies_are_refused():
    check_rope_length(Rope(kind="longrope", scaling=(("original_max_position_embeddings", 8),)), 8)
    with pytest.raises(ValueError, match=r"up to 9 tokens .* beyond 8 .* rope_type 'longrope'.* Limit .* to 8"):
        check_rope_length(Rope(kind="longrope", scaling=(("original_max_position_embeddings", 8),)), 9)
    rope = Rope(kind="dynamic", scaling=(("factor", 2.0), ("max_position_embeddings", 8)))
    model, params = make(dataclasses.replace(PLAIN, rope=rope))
    assert jax.eval_shape(model.apply, {"params": params}, np.zeros((1, 20), int)).shape == (1, 20, 40)
    prompt, rows = batch()
    with pytest.raises(ValueError, match=r"up to 11 tokens .* beyond 8 .* rope_type 'dynamic'.* Limit .* to 8"):
        group_logits(model, params, prompt, rows)
    short, plain = (of(model, params, prompt[:, :3], rows, np.array([3, 2])) for of in (group_logits, plain_logits))
    np.testing.assert_allclose(short, plain, atol=1e-5)


def test_router_loss_by_hand():
    """`router_loss` by hand: two of three tokens count, and logits (2, 0) and (1, 0) select expert 0; k = 1, E = 2."""
    sown = {"mlp": {"logits": (np.array([[[2.0, 0.0], [1.0, 0.0], [-9.0, 9.0]]]),)}}
    p0 = (1 / (1 + np.exp(-2.0)) + 1 / (1 + np.exp(-1.0))) / 2
    loss = jax.jit(router_loss, static_argnames="num_experts_per_token")
    value = loss(sown, np.array([[True, True, False]]), num_experts_per_token=1)
    np.testing.assert_allclose(value, 2 * p0, rtol=1e-6)


@pytest.mark.quick
def test_bad_input_is_refused():
    model, params = make(PLAIN)
    with pytest.raises(ValueError, match=r"tokens must have shape \[B, T\]; got \(3,\)"):
        model.apply({"params": params}, jnp.zeros(3, jnp.int32))
    with pytest.raises(ValueError, match=r"rope\.kind must be one of .*'yarn'.*; got 'spiral'"):
        rope_frequencies(Rope(kind="spiral"), 8)
