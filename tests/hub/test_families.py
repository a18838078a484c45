"""Every family compared with transformers if PyTorch is installed, and with stored logits otherwise.

The weights are generated from the tensors' names, so the golden file only contains logits. To write it again, with
PyTorch installed: `PYTHONPATH=tests/hub python -m test_families`, followed by names of cases to write only these.
"""

import dataclasses
import functools
import json
import re
import sys
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from grpo_jax.hub import policy as policy_module
from grpo_jax.hub.families import FAMILIES, family_of, read_config
from grpo_jax.hub.huggingface import from_pretrained, save_pretrained, stored_array
from grpo_jax.hub.policy import init_policy
from grpo_jax.hub.tensors import tensor_plan
from grpo_jax.models.context import empty_cache
from grpo_jax.models.experts import router_loss
from grpo_jax.types import Prompts
from grpo_jax.update.optimizer import is_decayed

GOLDEN = Path(__file__).parent / "golden" / "families.json"

SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
T = 20
WINDOW = 6
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
SLIDING = ["sliding_attention", "full_attention"]
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 12, "sliding_window": WINDOW}

# One case per family, with values for which each of the family's settings affects the logits.
CASES = {
    "qwen2": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16, "tie_word_embeddings": True}),
    "llama": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3}),
    "smollm3": ("SmolLM3ForCausalLM", {"no_rope_layer_interval": 2}),
    "mistral": ("MistralForCausalLM", {"sliding_window": WINDOW, "head_dim": 16}),
    "gemma2": ("Gemma2ForCausalLM", {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3ForCausalLM", {**GEMMA, "layer_types": SLIDING}),
    "phi3": ("Phi3ForCausalLM", {"partial_rotary_factor": 0.5, "sliding_window": WINDOW}),
    "glm4": ("Glm4ForCausalLM", {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 12}),
    "granite": ("GraniteForCausalLM", {"embedding_multiplier": 6.0, "logits_scaling": 0.4, "residual_multiplier": 0.7,
        "attention_multiplier": 0.3, "tie_word_embeddings": True}),
    "ministral3": ("Ministral3ForCausalLM", {"head_dim": 12, "sliding_window": WINDOW, "rope_parameters": {**YARN,
        "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}}),
    "olmo2": ("Olmo2ForCausalLM", {"rope_theta": 5e5}),
    "olmo3": ("Olmo3ForCausalLM", {"num_hidden_layers": 4, "sliding_window": WINDOW,
        "rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_theta": 1e4}}}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {"num_hidden_layers": 3, "head_dim": 16, "num_experts": 6,
        "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True, "mlp_only_layers": [1]}),
}  # fmt: skip
HYBRID = {
    "head_dim": 16, "partial_rotary_factor": 0.5, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
    "linear_key_head_dim": 5, "linear_value_head_dim": 7, "linear_conv_kernel_dim": 3,
}  # fmt: skip
SPARSE = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20,
}  # fmt: skip
DELTA = ["linear_attention", "full_attention"]
CASES |= {
    "qwen3_5": ("Qwen3_5ForCausalLM", {**HYBRID, "num_hidden_layers": 4, "tie_word_embeddings": True}),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", {**HYBRID, **SPARSE, "layer_types": DELTA}),
    "qwen3_next": ("Qwen3NextForCausalLM", {**HYBRID, **SPARSE, "num_hidden_layers": 3, "layer_types": [*DELTA,
        DELTA[0]], "mlp_only_layers": [2]}),
}  # fmt: skip

CASES["lfm2"] = (
    "Lfm2ForCausalLM",
    {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 10,
        "block_ffn_dim_multiplier": 1.1},
)  # fmt: skip
CASES["gpt_oss"] = (
    "GptOssForCausalLM", {"head_dim": 12, "num_hidden_layers": 4, "sliding_window": WINDOW, "num_local_experts": 5,
        "num_experts_per_tok": 3, "intermediate_size": 24, "swiglu_limit": 0.6, "rope_parameters": {**YARN,
        "truncate": False}},
)  # fmt: skip

# One layer of each kind has its own keys and values, and two layers share them.
GEMMA4 = {
    "hidden_size": 64, "head_dim": 12, "global_head_dim": 20, "num_hidden_layers": 4, "layer_types": SLIDING * 2,
    "sliding_window": WINDOW, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 10, "vocab_size_per_layer_input": 64, "final_logit_softcapping": 3.0,
}  # fmt: skip
CASES["gemma4"] = ("Gemma4ForCausalLM", GEMMA4)
CASES["gemma4_moe"] = (
    "Gemma4ForCausalLM", {**GEMMA4, "num_hidden_layers": 2, "layer_types": SLIDING, "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
        "enable_moe_block": True, "num_experts": 5, "top_k_experts": 3, "moe_intermediate_size": 24},
)  # fmt: skip

# Other values of config keys, for which only logits are compared.
VARIANTS = {
    "qwen2 windows": ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": WINDOW,
        "max_window_layers": 1}),
    "qwen3 yarn, old keys": ("Qwen3ForCausalLM", {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0,
        "original_max_position_embeddings": 16}}),
    "llama yarn mscale": ("LlamaForCausalLM", {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.3,
        "truncate": False, "beta_fast": 8}}),
    "llama linear": ("LlamaForCausalLM", {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}}),
    "llama dynamic, within": ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}),
    "llama dynamic, beyond": ("LlamaForCausalLM", {"max_position_embeddings": 8,
        "rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}),
    "llama gelu": ("LlamaForCausalLM", {"hidden_act": "gelu"}),
    "smollm3 windows": ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0], "use_sliding_window": True,
        "sliding_window": WINDOW, "attention_bias": True}),
    "gemma3, old keys": ("Gemma3ForCausalLM", {**GEMMA, "sliding_window_pattern": 2, "rope_theta": 1e6,
        "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    "phi3 longrope, within": ("Phi3ForCausalLM", {"original_max_position_embeddings": 32,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3, 4, 5]}}),
    "phi3 longrope, beyond": ("Phi3ForCausalLM", {"original_max_position_embeddings": 16,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3, 4, 5]}}),
    "lfm2 bias, old keys": ("Lfm2ForCausalLM", {"conv_bias": True, "conv_L_cache": 4, "full_attn_idxs": [1],
        "block_ff_dim": 40, "block_auto_adjust_ff_dim": False, "tie_embedding": False, "rope_theta": 1e4,
        "norm_eps": 1e-3}),
    "gemma4, keys for values": ("Gemma4ForCausalLM", {**GEMMA4, "attention_k_eq_v": True,
        "num_global_key_value_heads": 1}),
    "gemma4, more layers than share": ("Gemma4ForCausalLM", {**GEMMA4, "num_hidden_layers": 8,
        "layer_types": [*SLIDING, "full_attention", *SLIDING, SLIDING[0], *SLIDING]}),
    "gemma4 without sharing": ("Gemma4ForCausalLM", {**GEMMA4, "num_hidden_layers": 7, "num_kv_shared_layers": 0,
        "layer_types": None, "attention_bias": True, "hidden_size_per_layer_input": 0}),
    "gemma4, as transformers writes it": ("Gemma4ForCausalLM", {**{key: value for key,
        value in GEMMA4.items() if key != "global_head_dim"}, "per_layer_config": {str(i): {"head_dim": 16,
        "num_key_value_heads": 4} for i in (1, 3)}, "use_double_wide_mlp": False,
        "use_bidirectional_attention": "vision", "rope_parameters": {"full_attention": {"rope_type": "linear",
        "rope_theta": 1e4, "factor": 2.0}, "sliding_attention": {"rope_type": "proportional", "rope_theta": 1e3,
        "partial_rotary_factor": 0.5}}}),
    "olmo3, old keys": ("Olmo3ForCausalLM", {"layer_types": SLIDING, "sliding_window": WINDOW, "rope_theta": 5e5,
        "rope_scaling": {key: value for key, value in YARN.items() if key != "rope_theta"}, "attention_bias": True}),
    "qwen3_moe sparse step": ("Qwen3MoeForCausalLM", {"num_experts": 4, "num_experts_per_tok": 3,
        "moe_intermediate_size": 16, "decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": WINDOW}),
}  # fmt: skip


def raw_config(name):
    """Return a case's config.json."""
    architecture, fields = {**CASES, **VARIANTS}[name]
    fields = {**SHAPE, "architectures": [architecture], "model_type": FAMILIES[architecture].model_type, **fields}
    return fields | {"dtype": "float32"}


def numpy_weight(name, shape, norm_center=1.0):
    """Return a weight that depends only on its name; norms are not 1 and biases not 0, so that all have an effect."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    draw = rng.standard_normal(shape).astype(np.float32)
    if len(shape) == 1:
        return draw * np.float32(0.3) + np.float32(norm_center if "norm" in name or "scalar" in name else 0)
    return draw * np.float32(1 / np.sqrt(shape[-1]))


def write_checkpoint(directory, raw, weight=numpy_weight):
    """Write a checkpoint in Hugging Face's layout with weights from `weight(name, shape, norm_center)`."""
    from safetensors.numpy import save_file

    directory.mkdir()
    config = read_config(raw)
    center = 1 - config.norm_offset
    tensors = {t.name: weight(t.name, t.shape, center) for t in tensor_plan(raw, config)}
    if config.query_scale == 1.0:  # Gemma 4 has no query scale: the query norm includes it
        tensors |= {name: x * np.float32(len(x) ** -0.5) for name, x in tensors.items() if "q_norm" in name}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(raw))
    return directory


def rewrite(directory, change=lambda tensors: tensors, **config):
    """Change a checkpoint: `change` maps {name: tensor} to new tensors, and `config` updates config.json."""
    from safetensors.numpy import load_file, save_file

    tensors = change(load_file(directory / "model.safetensors"))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(raw | config))
    return directory


def tokens_and_lengths():
    """Return a batch of right-padded rows, all longer than the sliding window."""
    rng = np.random.default_rng(7)
    tokens, lengths = rng.integers(0, SHAPE["vocab_size"], (3, T)), np.array([T, 13, 9])
    return np.where(np.arange(T)[None] < lengths[:, None], tokens, 0), lengths


@functools.cache
def torch_model(directory, dtype="float32"):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed; the golden file is tested instead")
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=getattr(torch, dtype), attn_implementation="eager"
    )
    return model.eval()


def torch_logits(model, **kwargs):
    import torch

    tokens, lengths = tokens_and_lengths()
    mask = torch.tensor(np.arange(T)[None] < lengths[:, None]).long()
    with torch.no_grad():
        return model(torch.tensor(tokens), attention_mask=mask, **kwargs)


def greedy(model, params, tokens, lengths, steps):
    """Return greedy tokens [B, steps] and their logits [B, steps, V] from prefill and cached decode."""
    variables = {"params": params}
    last, prefix = model.apply(variables, Prompts(tokens, lengths), method="prefill")

    def step(carry, index):
        cache, logits = carry
        token = jnp.argmax(logits, axis=-1)
        hidden, cache = model.apply(variables, token[:, None, None], prefix, cache, index, method="hidden")
        return (cache, model.apply(variables, hidden[:, 0, 0], method="unembed")), (token, logits)

    first = model.apply(variables, last, method="unembed")
    cache = empty_cache(prefix.layers, 1, steps)
    _, (chosen, logits) = jax.lax.scan(step, (cache, first), jnp.arange(steps))
    return chosen.T, logits.transpose(1, 0, 2)


@pytest.fixture(scope="module", params=list(CASES))
def case(request, tmp_path_factory):
    """Return (name, directory with the NumPy checkpoint, policy)."""
    root = tmp_path_factory.mktemp(request.param)
    directory = write_checkpoint(root / "numpy", raw_config(request.param))
    return request.param, directory, from_pretrained(directory)


@pytest.fixture(scope="module")
def decoded(case):
    """Return greedy tokens [B, 32], their logits [B, 32, V] with a cache, and logits [B, T + 32, V] without one."""
    _, _, policy = case
    tokens, lengths = tokens_and_lengths()
    chosen, cached = jax.jit(functools.partial(greedy, policy.model, steps=32))(policy.params, tokens, lengths)
    apply, logits = jax.jit(policy.model.apply), []
    for b, n in enumerate(lengths):
        whole = np.concatenate([tokens[b, :n], chosen[b], np.zeros(T - n, int)])
        logits.append(apply({"params": policy.params}, whole[None])[0])
    return chosen, cached, np.stack(logits)


@pytest.mark.quick
def test_there_is_a_case_for_each_family():
    assert {architecture for architecture, _ in CASES.values()} == set(FAMILIES)


def test_random_weights_are_made_per_shape_on_a_gpu(monkeypatch):
    """On a GPU, random weights are made by one program per shape, and equal the CPU's weights up to rounding."""
    raw = raw_config("qwen2")
    plain = init_policy(raw, jax.random.key(0)).params
    monkeypatch.setattr(policy_module, "platform_of", lambda: ("gpu", 9.0))
    monkeypatch.setattr(policy_module.jax, "jit", lambda *_, **__: pytest.fail("one program for all shapes"))
    ours = init_policy(raw, jax.random.key(0)).params
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7), ours, plain)
    other = init_policy(raw, jax.random.key(1)).params
    assert any((x != y).any() for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(other), strict=True))


def test_logits_and_greedy_tokens_equal_the_golden_file(case, decoded):
    stored = json.loads(GOLDEN.read_text())[case[0]]
    chosen, _, logits = decoded
    assert logits.dtype == jnp.float32
    last = np.stack([logits[b, n - 1] for b, n in enumerate(tokens_and_lengths()[1])])
    np.testing.assert_allclose(last, stored["last_logits"], atol=1e-4)
    np.testing.assert_array_equal(chosen, stored["greedy"])


def test_cached_decode_equals_the_uncached_forward(decoded):
    """Decoding with a cache gives the logits of a forward pass without one, in every family."""
    _, cached, logits = decoded
    for b, n in enumerate(tokens_and_lengths()[1]):
        np.testing.assert_allclose(cached[b], logits[b, n - 1 : n + 31], atol=1e-5)


def test_checkpoint_written_by_pytorch_gives_the_same_logits(case, tmp_path):
    """A checkpoint that PyTorch wrote gives the logits of transformers in every family."""
    _, directory, _ = case
    model = torch_model(directory)
    model.save_pretrained(tmp_path / "torch")
    check_logits(from_pretrained(tmp_path / "torch"), model)


def check_logits(policy, model):
    tokens, lengths = tokens_and_lengths()
    ours, theirs = jax.jit(policy.model.apply)({"params": policy.params}, tokens), torch_logits(model).logits.numpy()
    for b, n in enumerate(lengths):
        np.testing.assert_allclose(ours[b, :n], theirs[b, :n], atol=1e-4)


def test_saved_checkpoint_is_byte_equal_in_pytorch(case, tmp_path):
    """A saved checkpoint loads into PyTorch with the same bytes as the original, in every family."""
    _, directory, policy = case
    before = torch_model(directory).state_dict()
    save_pretrained(tmp_path / "ours", policy, max_shard_size="10KB")
    after = torch_model(tmp_path / "ours").state_dict()
    assert list(before) == list(after)
    for name, tensor in before.items():
        assert tensor.numpy().tobytes() == after[name].numpy().tobytes(), name


def mean_log_prob(model, params, tokens, lengths):
    log_probs = jax.nn.log_softmax(model.apply({"params": params}, tokens)[:, :-1])
    chosen = jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1)[..., 0]
    mask = jnp.arange(1, tokens.shape[1])[None] < lengths[:, None]
    return jnp.sum(jnp.where(mask, chosen, 0)) / mask.sum()


def test_gradients_of_every_parameter_agree_with_pytorch(case):
    """The gradient of every parameter agrees with PyTorch in every family."""
    _, directory, policy = case
    model = torch_model(directory)
    import torch

    tokens, lengths = tokens_and_lengths()
    grads = jax.jit(jax.grad(functools.partial(mean_log_prob, policy.model)))(policy.params, tokens, lengths)
    leaves = flatten_dict(grads)
    ours = {tensor.name: stored_array(tensor, leaves) for tensor in tensor_plan(policy.config, policy.model.config)}

    mask = torch.tensor(np.arange(T)[None] < lengths[:, None])
    model.zero_grad()
    logits = model(torch.tensor(tokens), attention_mask=mask.long()).logits
    chosen = logits[:, :-1].log_softmax(-1).gather(-1, torch.tensor(tokens)[:, 1:, None])[..., 0]
    (chosen * mask[:, 1:]).sum().div(mask[:, 1:].sum()).backward()
    theirs = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad.numpy()
        if name in ours:
            theirs[name] = grad
            continue
        stem, kind = name.rsplit(".", 1)
        for e, expert in enumerate(grad):  # transformers stores a layer's experts in one tensor
            halves = {"gate_proj": 0, "up_proj": 1} if kind == "gate_up_proj" else {kind: 0}
            for projection, half in halves.items():
                theirs[f"{stem}.{e}.{projection}.weight"] = np.split(expert, len(halves))[half]
    for name, fixed in model.named_buffers():  # PyTorch does not train buffers
        if name in ours:
            assert fixed.abs() > 0.1
            assert not ours.pop(name).any(), name
    assert set(ours) == set(theirs)
    for name in ours:
        np.testing.assert_allclose(ours[name], theirs[name], atol=1e-4, err_msg=name)
        assert np.abs(theirs[name]).max() > 1e-3, f"{name} has a gradient near 0: a wrong one would pass"


@pytest.mark.parametrize("name", list(VARIANTS))
def test_logits_agree_with_pytorch_for_other_config_values(name, tmp_path):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    directory = write_checkpoint(tmp_path / "numpy", raw_config(name))
    check_logits(from_pretrained(directory), torch_model(directory))


def test_unused_tensors_are_ignored_only_if_the_family_lists_them(tmp_path):
    unread = "model.layers.3.self_attn.k_proj.weight"  # this layer uses another layer's keys
    for name, tensor, message in (
        ("qwen3_5", "mtp.fc.weight", None),
        ("qwen2", "lm_head.weight", r"of the wrong shape: lm_head.weight has shape \[4, 4\]"),
        ("qwen2", "model.layers.0.self_attn.rotary_emb.inv_freq", None),
        ("qwen3", "mtp.fc.weight", "unexpected: mtp.fc.weight"),
        ("gemma4", unread, None),
        ("gemma4", unread.replace("k_proj", "o_norm"), "unexpected: model.layers.3.self_attn.o_norm"),
    ):
        directory = write_checkpoint(tmp_path / f"{name} {tensor}", raw_config(name))
        rewrite(directory, lambda tensors, tensor=tensor: tensors | {tensor: np.ones((4, 4), np.float32)})
        if message is None:
            assert from_pretrained(directory).params
            continue
        with pytest.raises(ValueError, match=message):
            from_pretrained(directory)


def test_router_loss_equals_pytorch(tmp_path):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    directory = write_checkpoint(tmp_path / "numpy", raw_config("qwen3_moe"))
    theirs = torch_logits(torch_model(directory), output_router_logits=True).aux_loss.item()
    policy = from_pretrained(directory)
    tokens, lengths = tokens_and_lengths()
    for remat in (False, True):
        model = policy.model.clone(config=dataclasses.replace(policy.model.config, remat=remat))
        _, state = jax.jit(functools.partial(model.apply, mutable=["router"]))({"params": policy.params}, tokens)
        mask = np.arange(T)[None] < lengths[:, None]
        assert len(jax.tree.leaves(state["router"])) == 2
        ours = router_loss(state["router"], mask, num_experts_per_token=2)
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


BAD_VALUES = [
    ("Qwen2ForCausalLM", {"hidden_act": "relu6"}, r"'hidden_act' must be .*silu.*; got 'relu6'"),
    ("Qwen2ForCausalLM", {"layer_types": ["full_attention", "linear_attention"]},
        r"'layer_types' must be .*; got .*linear_attention"),
    ("Qwen2ForCausalLM", {"num_key_value_heads": 3}, r"'num_key_value_heads' must be .*num_attention_heads = 4; got 3"),
    ("Qwen2ForCausalLM", {"vocab_size": None}, r"'vocab_size' must be a positive integer; got None"),
    ("Qwen2ForCausalLM", {"quantization_config": {"bits": 4}},
        r"'quantization_config' is \{'bits': 4\}: .*without a quant_method"),
    *(("Qwen2ForCausalLM", {key: {"quant_method": method, "bits": 4}},
        rf"'{key}' is .*quantized with {method} are not.* Load the original bfloat16 .* quantize='nf4'") for key,
        method in [*(("quantization_config", method) for method in ("fp8", "awq", "gptq", "compressed-tensors",
        "mxfp4")), ("compression_config", "compressed-tensors")]),
    ("Qwen2ForCausalLM", {"rope_scaling": {"type": "mrope"}},
        r"'rope_scaling.rope_type' must be .*yarn.*; got 'mrope'"),
    ("Qwen2ForCausalLM", {"rope_parameters": {"rope_type": "linear"}}, r"'rope_parameters.factor' is missing"),
    ("MistralForCausalLM", {"layer_types": SLIDING}, r"'layer_types' must be absent or null; got "),
    ("LlamaForCausalLM", {"partial_rotary_factor": 0.5},
        r"'partial_rotary_factor' must be 1.0 .*Glm4ForCausalLM.*; got 0.5"),
    ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 0},
        "must be a positive integer .*; got 0"),
    ("Gemma2ForCausalLM", {"sliding_window": None}, r"'sliding_window' must be a positive integer .*; got None"),
    ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, r"'attn_logit_softcapping' must be .*; got 50.0"),
    ("Gemma3ForCausalLM", {"rope_parameters": {"rope_theta": 1e6}}, r"'rope_parameters' must be .*'full_attention'"),
    ("Gemma4ForCausalLM", {"use_bidirectional_attention": "all"},
        r"'use_bidirectional_attention' must be 'vision'; got 'all'"),
    ("Gemma4ForCausalLM", {**GEMMA4, "num_kv_shared_layers": 3},
        r"'num_kv_shared_layers' must be small enough .*; got 3"),
    ("Gemma4ForCausalLM", {**GEMMA4, "per_layer_config": {"0": {"head_dim": 8}}},
        r"'per_layer_config' must be .*no values for other layers"),
    ("Ministral3ForCausalLM", {"rope_parameters": YARN},
        r"'rope_parameters' must be a dict with positive llama_4_scaling_beta and .*; got {"),
    ("Olmo3ForCausalLM", {"rope_theta": 1e6}, r"'rope_theta' must be 500000.0 .*; got 1000000.0"),
    ("SmolLM3ForCausalLM", {"no_rope_layers": [1]}, r"'no_rope_layers' must be .*; got \[1\]"),
    ("Qwen3_5ForCausalLM", {"layer_types": SLIDING}, r"'layer_types' must be .*'linear_attention' per layer"),
    ("Qwen3_5ForCausalLM", {"linear_num_value_heads": 24}, r"a multiple of linear_num_key_heads = 16; got 24"),
    ("Qwen3_5ForCausalLM", {"hidden_act": "gelu"}, r"'hidden_act' must be 'silu'; got 'gelu'"),
    ("Lfm2ForCausalLM", {"layer_types": SLIDING}, r"'layer_types' must be .*'full_attention', 'conv' per layer"),
    ("Qwen3MoeForCausalLM", {"num_experts_per_tok": 200},
        r"'num_experts_per_tok' must be between 1 and the number of experts \(128\); got 200"),
]  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize(("architecture", "fields", "message"), BAD_VALUES)
def test_unsupported_config_values_are_named(architecture, fields, message):
    with pytest.raises(ValueError, match=message):
        read_config({**SHAPE, "architectures": [architecture], **fields})


@pytest.mark.quick
def test_missing_keys_and_unsupported_architectures_are_named():
    with pytest.raises(ValueError, match="'hidden_size' is missing; a Qwen2ForCausalLM"):
        read_config({"architectures": ["Qwen2ForCausalLM"], "vocab_size": 8})
    for names in (["BertForMaskedLM"], [], None):
        with pytest.raises(ValueError, match=r"'architectures' must contain exactly one of .*Qwen2For.*Qwen3MoeFor"):
            family_of({"architectures": names})


def write_golden(names):
    """Store PyTorch's logits and greedy tokens for the named cases, or for all if `names` is empty."""
    import tempfile

    import torch

    golden = json.loads(GOLDEN.read_text()) if names else {}
    tokens, lengths = tokens_and_lengths()
    for name in names or CASES:
        with tempfile.TemporaryDirectory() as root:
            model = torch_model(write_checkpoint(Path(root) / name, raw_config(name)))
            logits = torch_logits(model).logits.numpy()
            rows = [torch.tensor(tokens[b : b + 1, :n]) for b, n in enumerate(lengths)]
            kwargs = {"max_new_tokens": 32, "do_sample": False, "pad_token_id": 0}
            outs = [model.generate(row, attention_mask=torch.ones_like(row), **kwargs) for row in rows]
        golden[name] = {
            "last_logits": [[round(float(x), 5) for x in logits[b, n - 1]] for b, n in enumerate(lengths)],
            "greedy": [out[0, n:].tolist() for out, n in zip(outs, lengths, strict=True)],
        }
    rows = ",\n".join(f" {json.dumps(name)}: {json.dumps(entry)}" for name, entry in golden.items())
    GOLDEN.write_text("{\n" + rows + "\n}\n")


def test_weight_decay_applies_to_the_same_parameters_as_in_transformers(case):
    """`weight_decay` applies to the same parameters as in transformers, in every family."""
    _, directory, policy = case
    model = torch_model(directory)
    import transformers

    theirs = set(transformers.Trainer.get_decay_parameter_names(None, model))
    trained = {name for name, _ in model.named_parameters()}
    whole = lambda name: re.sub(r"experts\.\d+\.(gate|up)_proj.weight", "experts.gate_up_proj", name)
    checked = set()
    for tensor in tensor_plan(policy.config, policy.model.config):
        # transformers stores a layer's experts in one tensor.
        name = re.sub(r"experts\.\d+\.down_proj.weight", "experts.down_proj", whole(tensor.name))
        if name in trained:
            checked.add(name)
            assert {is_decayed("/".join(part.path)) for part in tensor.parts} == {name in theirs}, name
    assert checked == trained


if __name__ == "__main__":
    write_golden(sys.argv[1:])
