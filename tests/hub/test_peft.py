"""Adapters in PEFT's format: saving, loading, and compatibility with peft."""

import functools
import json
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import save_file
from test_families import write_checkpoint
from test_lora import ARCHITECTURES, OWN, SHAPE, TOKENS, logits
from test_quantize import trained

from grpo_jax.hub.families import FAMILIES
from grpo_jax.hub.huggingface import from_pretrained, save_pretrained
from grpo_jax.hub.peft import add_lora, load_lora, merge_lora, save_lora
from grpo_jax.models.lora import TARGETS

lora_policy = lambda kind="plain", **options: trained(base_policy(kind), std=0.2, rank=3, **options)


@functools.cache
def base_policy(kind="plain", **changes):
    architecture = ARCHITECTURES[kind]
    raw = {**SHAPE, "architectures": [architecture], "model_type": FAMILIES[architecture].model_type}
    with tempfile.TemporaryDirectory() as parent:
        return from_pretrained(write_checkpoint(Path(parent, "model"), {**raw, **OWN.get(kind, {}), **changes}))


@pytest.mark.parametrize("kind", list(ARCHITECTURES))
@pytest.mark.parametrize("targets", [TARGETS, r"layers_1/self_attn/(q|v)_proj|layers_\d/mlp/up_proj"])
def test_adapters_survive_a_round_trip(kind, targets, tmp_path):
    policy = lora_policy(kind, targets=targets)
    save_lora(tmp_path / "adapter", policy, base_name="somewhere")
    loaded = load_lora(tmp_path / "adapter", base_policy(kind))
    assert (loaded.model.scale, loaded.model.model) == (policy.model.scale, policy.model.model)
    ours, wanted = (flatten_dict(jax.tree.map(np.asarray, x.params)) for x in (loaded, policy))
    assert ours.keys() >= wanted.keys()
    for path in [path[:-1] for path in ours if path[-1] == "a"]:  # fused projections share A and split B by rows
        product, expected = (x[(*path, "a")] @ x[(*path, "b")] if (*path, "a") in x else 0 for x in (ours, wanted))
        np.testing.assert_allclose(product, expected, atol=1e-6)
    if kind == "plain":
        jax.tree.map(np.testing.assert_array_equal, loaded.params, policy.params)


def peft_and_base(kind, tmp_path):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("peft", reason="peft is not installed")
    import transformers

    save_pretrained(tmp_path / "base", base_policy(kind))
    return torch, transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()


@pytest.mark.filterwarnings("ignore")  # warnings from peft
@pytest.mark.parametrize("kind", list(ARCHITECTURES))
@pytest.mark.parametrize("targets", [TARGETS, r"layers_1/self_attn/(q|v)_proj|layers_\d/mlp/up_proj"])
def test_peft_loads_our_adapters(kind, targets, tmp_path):
    torch, base = peft_and_base(kind, tmp_path)
    import peft

    policy = lora_policy(kind, targets=targets)
    save_lora(tmp_path / "adapter", policy)
    model = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    with torch.no_grad():
        theirs = model(torch.tensor(TOKENS)).logits.numpy()
    np.testing.assert_allclose(logits(policy), theirs, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", list(ARCHITECTURES))
@pytest.mark.parametrize(
    "options", [{}, {"use_rslora": True, "rank_pattern": {"o_proj": 2}, "alpha_pattern": {"o_proj": 9}}]
)
def test_adapters_from_peft_are_loaded(kind, options, tmp_path):
    torch, base = peft_and_base(kind, tmp_path)
    import peft

    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules="all-linear", init_lora_weights=False, **options)
    model = peft.get_peft_model(base, config).eval()
    model.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        theirs = model(torch.tensor(TOKENS)).logits.numpy()
    ours = logits(load_lora(tmp_path / "adapter", base_policy(kind)))
    assert np.abs(ours - logits(base_policy(kind))).max() > 0.1
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.quick
def test_invalid_uses_of_adapters_are_refused(tmp_path):
    policy = lora_policy()
    save_lora(tmp_path / "adapter", policy)
    for again in (lambda: add_lora(policy, jax.random.key(0)), lambda: load_lora(tmp_path / "adapter", policy)):
        with pytest.raises(ValueError, match=r"policy already has adapters; merge them with `merge_lora"):
            again()
    with pytest.raises(ValueError, match=r"policy has adapters; write them with `save_lora`"):
        save_pretrained(tmp_path / "model", policy)
    for plain in (lambda: merge_lora(base_policy()), lambda: save_lora(tmp_path / "x", base_policy())):
        with pytest.raises(ValueError, match=r"policy does not have adapters; add them with `add_lora"):
            plain()
    with pytest.raises(FileNotFoundError, match=r"lacks adapter_config\.json or adapter_model\.safetensors"):
        load_lora(tmp_path, base_policy())


@pytest.mark.quick
@pytest.mark.parametrize(("changes", "message"), [
    *(({key: value}, f"config key '{key}' must be .*; got ") for key, value in (("peft_type", "IA3"),
        ("bias", "all"), ("use_dora", True), ("modules_to_save", ["lm_head"]), ("layer_replication", [[0, 1]]))),
    *(({"init_lora_weights": name}, f"'init_lora_weights' must .*; '{name.lower()}' changes")
      for name in ("pissa_niter_4", "OLoRA")),
    ({"lora_alpha": 0}, "config key 'lora_alpha' must be a positive number; got 0"),
    ({"r": None}, "config key 'r' must be a positive number; got None"),
    ({"lora_alpha": "6"}, "config key 'lora_alpha' must be .*; got '6'"),
    ({"alpha_pattern": {"o_proj": []}}, r"config key 'alpha_pattern.o_proj' must be a non-negative .*; got \[\]"),
    ({"alpha_pattern": {"(": 2}}, "rror: missing \\), unterminated"),
])  # fmt: skip
def test_unsupported_adapters_are_refused_with_the_file_name(changes, message, tmp_path):
    save_lora(tmp_path / "adapter", lora_policy())
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=rf"adapter_config\.json: .*{message}"):
        load_lora(tmp_path / "adapter", base_policy())


@pytest.mark.quick
def test_adapter_next_to_a_model_gives_a_warning(tmp_path):
    save_pretrained(tmp_path / "model", base_policy())
    save_lora(tmp_path / "adapter", lora_policy())
    for path in (tmp_path / "adapter").iterdir():
        path.rename(tmp_path / "model" / path.name)
    with pytest.warns(UserWarning, match=r"model' also contains an adapter that is not loaded; load it with"):
        policy = from_pretrained(tmp_path / "model")
    assert load_lora(tmp_path / "model", policy).model.scale == 2.0


def test_adapters_for_another_base_are_refused(tmp_path):
    save_lora(tmp_path / "a", lora_policy())
    wide, short = base_policy(intermediate_size=40), base_policy(num_hidden_layers=1)
    with pytest.raises(ValueError, match=r"mlp\.down_proj maps 48 → 3 → 32, .* maps 40 → 32; load the adapter's base"):
        load_lora(tmp_path / "a", wide)
    with pytest.raises(ValueError, match=r"for projections the policy lacks \(.*layers\.1"):
        load_lora(tmp_path / "a", short)
    save_file({}, tmp_path / "a" / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"a' has no adapters; pass"):
        load_lora(tmp_path / "a", base_policy())
