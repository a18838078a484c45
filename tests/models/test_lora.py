"""Adapters: base + adapter compared with the merged model, dropout, targets, and the adapters' reference."""

import functools

import jax
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict

from grpo_jax.hub.peft import add_lora, merge_lora
from grpo_jax.hub.policy import init_policy
from grpo_jax.maths.reference import mixup, sync_reference
from grpo_jax.models.lora import TARGETS, init_adapters, merge_adapters, sync_adapter_products
from grpo_jax.types import as_jit_argument
from grpo_jax.update.state import apply_optimizer, create_state

SHAPE = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "initializer_range": 0.3}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2}
SHAPE |= dict.fromkeys(["bos_token_id", "eos_token_id", "pad_token_id"])
ARCHITECTURES = {"plain": "Qwen2ForCausalLM", "recurrent": "Lfm2ForCausalLM", "shared": "Gemma4ForCausalLM"}
OWN = {
    "recurrent": {"full_attn_idxs": [1], "block_auto_adjust_ff_dim": False},
    "shared": {  # the last layer uses the keys and values of the second
        "num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "num_kv_shared_layers": 1, "use_double_wide_mlp": True, "head_dim": 8, "global_head_dim": 12,
        "sliding_window": 5, "hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 40,
    },
}  # fmt: skip

TOKENS = np.random.default_rng(0).integers(0, 40, (2, 7))
logits = lambda policy, rngs=None: apply(as_jit_argument(policy.model), policy.params, rngs)


@functools.cache
def base_policy(kind="plain"):
    return init_policy({**SHAPE, "architectures": [ARCHITECTURES[kind]], **OWN.get(kind, {})}, jax.random.key(0))


def lora_policy(kind="plain", **options):
    """Return a policy with adapters as after training: B is not zero."""
    policy = add_lora(base_policy(kind), jax.random.key(1), **{"rank": 3, "alpha": 6.0, **options})
    draw = lambda leaf: 0.1 * jax.random.normal(jax.random.key(leaf.size), leaf.shape)
    filled = lambda path, leaf: draw(leaf) if path[-1].key == "b" else leaf
    return policy.replace(params=jax.tree_util.tree_map_with_path(filled, policy.params))


@jax.jit
def apply(model, params, rngs):
    return model.apply({"params": params}, TOKENS, rngs=rngs)


@pytest.mark.parametrize("kind", list(ARCHITECTURES))
def test_adapters_equal_the_merged_weights(kind):
    """New adapters leave the logits unchanged, and trained adapters give the logits of the merged weights."""
    policy = add_lora(base_policy(kind), jax.random.key(1), rank=3)
    np.testing.assert_array_equal(logits(policy), logits(base_policy(kind)))
    trained = lora_policy(kind)
    assert np.abs(logits(trained) - logits(policy)).max() > 0.1
    np.testing.assert_allclose(logits(trained), logits(merge_lora(trained)), atol=1e-5)


def test_adapter_gradients_follow_from_the_merged_weights():
    """Gradients are dL/dA = s (dL/dW) Bᵀ and dL/dB = s Aᵀ (dL/dW), with dL/dW from the merged model."""
    policy, merged = lora_policy(), merge_lora(lora_policy())

    def loss(model, params):
        return jax.nn.log_softmax(model.apply({"params": params}, TOKENS))[..., 3].mean()

    ours = jax.jit(jax.grad(functools.partial(loss, policy.model)))(policy.params)
    full = flatten_dict(jax.jit(jax.grad(functools.partial(loss, merged.model)))(merged.params))
    leaves = flatten_dict(policy.params)
    for path, grad in flatten_dict(ours).items():
        of_kernel = full[(*path[:-1], "kernel")]
        a, b = (leaves[(*path[:-1], name)] for name in "ab")
        expected = of_kernel @ b.T if path[-1] == "a" else a.T @ of_kernel
        np.testing.assert_allclose(grad, policy.model.scale * expected, atol=1e-6, err_msg="/".join(path))


def test_dropout_applies_only_to_adapters_and_only_with_a_key_and_keeps_the_mean():
    policy = lora_policy(dropout=0.5)
    still = lora_policy()
    np.testing.assert_array_equal(logits(policy), logits(still))
    one, same, other = (logits(policy, rngs={"dropout": jax.random.key(n)}) for n in (0, 0, 1))
    np.testing.assert_array_equal(one, same)
    assert np.abs(one - other).max() > 0.01
    base = policy.replace(params={})
    np.testing.assert_array_equal(logits(base, rngs={"dropout": jax.random.key(0)}), logits(base_policy()))
    policy = lora_policy(dropout=0.25, targets=r"layers_1/mlp/down_proj")
    sample = lambda key: policy.model.apply({"params": policy.params}, TOKENS, rngs={"dropout": key})
    sampled = jax.jit(jax.vmap(sample))(jax.random.split(jax.random.key(3), 2000))
    still, spread = logits(lora_policy(targets=r"layers_1/mlp/down_proj")), sampled.std(axis=0)
    assert np.abs(sampled.mean(axis=0) - still).max() < 6 * spread.max() / np.sqrt(2000) + 0.02


def test_targets_choose_projections():
    names = lambda tree: {"/".join(path[:-1]) for path in flatten_dict(tree)}
    chosen = lambda targets: names(init_adapters(jax.random.key(0), base_policy().params, rank=1, targets=targets))
    assert len(chosen(TARGETS)) == 14
    of_conv = init_adapters(jax.random.key(0), base_policy("recurrent").params, rank=1)["layers_0"]
    assert names(of_conv) == {"conv/in_proj", "conv/out_proj", *(f"mlp/{p}_proj" for p in ("gate", "up", "down"))}
    assert chosen(r".*/(q|v)_proj") == {f"layers_{i}/self_attn/{p}_proj" for i in (0, 1) for p in "qv"}
    assert chosen("lm_head") == {"lm_head"}


@pytest.mark.quick
@pytest.mark.parametrize(("options", "message"), [
    ({"rank": 0}, "rank must be at least 1; got 0"),
    ({"targets": ["q_proj"]}, r"targets must be a regular expression, such as .*; got \['q_proj'\]"),
    ({"dropout": 1.0}, r"dropout must be in \[0, 1\); got 1\.0"),
    ({"targets": "q_proj"}, "targets must match the full path of a projection, such as 'l.*; got 'q_proj'"),
])  # fmt: skip
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        lora_policy(**options)


@pytest.mark.parametrize(
    ("alpha", "rank", "columns"),
    [(0.9, 2, 12), (0.6, 4, 32), (0.6, 32, 32), (0.6, 40, 32), (1.0, 2, 2)],
    ids=["side by side", "as a matrix", "of full rank", "of a higher rank", "copied"],
)
def test_adapter_reference_moves_like_the_merged_weights(alpha, rank, columns):
    """Over 24 syncs, more than its factors hold, the reference equals merged weights mixed in float64 at each sync."""
    base, scale, every = base_policy().params, 2.0, 2
    optimizer, key = optax.sgd(1.0), jax.random.key(1)
    adapters = init_adapters(key, base, rank=rank)
    state = create_state(adapters, optimizer, key, keep_reference=True, adapter_mixup_alpha=alpha)
    a = state.ref_params["layers_0"]["self_attn"]["q_proj"]["a"]
    assert a.shape == (32, columns)
    merge, mix = jax.jit(merge_adapters), jax.jit(mixup)
    merged = lambda tree: {path: np.float64(x) for path, x in flatten_dict(merge(base, tree, scale)).items()}
    rng = np.random.default_rng(1)
    noise = lambda: jax.tree.map(lambda x: np.float32(rng.normal(0, 0.1, x.shape)), adapters)
    mixed = {"sync_every": every, "sync_alpha": alpha, "sync": sync_adapter_products if alpha < 1 else sync_reference}
    step = jax.jit(lambda state, g: apply_optimizer(state, g, True, optimizer, **mixed))
    begin = expected = merged(adapters)
    factors = adapters
    for n in range(1, 49):
        state = step(state, noise())
        if n % every == 0:
            own = merged(state.params)
            expected = {path: alpha * own[path] + (1 - alpha) * x for path, x in expected.items()}
            factors = mix(factors, state.params, alpha)
        if n in (1, 2, 3, 24, 48):
            got, mixed_factors = merged(state.ref_params), merged(factors)
            for path, x in expected.items():
                np.testing.assert_allclose(got[path], x, atol=3e-6 + 3e-6 * np.abs(x).max())
    if alpha < 1:
        path = ("layers_0", "self_attn", "q_proj", "kernel")
        off = np.linalg.norm(mixed_factors[path] - expected[path]) / np.linalg.norm(expected[path] - begin[path])
        assert off > 1e-3, "mixing the factors A and B must give different weights"
