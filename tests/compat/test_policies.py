"""The trainer's policy: dtype, adapters from a PEFT config, the tokenizer's EOS, and saving."""

import copy
import json
import types

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from tiny import tiny_policy, tiny_tokenizer

from grpo_jax import add_lora, from_pretrained, save_pretrained
from grpo_jax.compat.policies import load_policy, with_adapters, with_tokenizer, write_into
from grpo_jax.hub.policy import files_of

pytestmark = pytest.mark.quick
adapted = lambda policy: {"/".join(path[:-1]) for path in flatten_dict(policy.params)}


def peft_config(**fields):
    return types.SimpleNamespace(
        **{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], **fields}
    )


@pytest.mark.parametrize(("fields", "message"), [
    ({"use_dora": True, "bias": "all"}, r"unsupported fields: bias = 'all', use_dora = True; remove"),
    ({"init_lora_weights": False}, "init_lora_weights = False"),
    ({"peft_type": "ADALORA"}, "peft_config must be a LoraConfig; got SimpleNamespace"),
    ({"target_modules": ["q_proj", "lm_head"]}, r"list projections \(down_proj, .*; got 'lm_head'"),
    ({"target_modules": None}, "target_modules must list projections .*; got None"),
    ({"target_modules": r".*\.q_proj"}, "or be 'all-linear'"),
], ids=lambda x: next(iter(x)) if isinstance(x, dict) else "")  # fmt: skip
def test_unsupported_peft_config_is_rejected(fields, message):
    with pytest.raises(ValueError, match=message):
        with_adapters(tiny_policy(), peft_config(**fields), seed=0)


@pytest.mark.filterwarnings("ignore")  # peft's own warnings
def test_adapted_modules_match_peft(tmp_path):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    peft = pytest.importorskip("peft", reason="peft is not installed")
    import transformers

    save_pretrained(tmp_path, tiny_policy())
    for targets in ("all-linear", ["q_proj", "mlp.up_proj"]):
        config = peft.LoraConfig(r=4, lora_alpha=6, use_rslora=True, task_type="CAUSAL_LM", target_modules=targets)
        ours = with_adapters(tiny_policy(), config, seed=0)
        theirs = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(tmp_path), config)
        layers = {x: y for x, y in theirs.named_modules() if isinstance(y, peft.tuners.lora.Linear)}
        names = {name.rsplit("model.", 1)[1].replace("layers.", "layers_").replace(".", "/") for name in layers}
        assert adapted(ours) == names
        assert {layer.scaling["default"] for layer in layers.values()} == {ours.model.scale}


def test_dtype_is_given_or_read_from_the_checkpoint(tmp_path):
    save_pretrained(tmp_path / "half", tiny_policy(), dtype="bfloat16")
    save_pretrained(tmp_path / "full", tiny_policy())

    def dtypes(name, dtype):
        policy, compute = load_policy(tmp_path / name, dtype, "auto")
        return {leaf.dtype.name for leaf in jax.tree.leaves(policy.params)}, compute

    assert dtypes("full", None) == dtypes("full", "auto") == dtypes("half", None) == ({"float32"}, "auto")
    assert dtypes("half", "auto") == ({"bfloat16"}, "bfloat16")
    with pytest.raises(ValueError, match="model_init_kwargs sets dtype 'float32', but model is a Policy"):
        load_policy(tiny_policy(), "float32", "auto")


def test_tokenizer_eos_also_ends_completions():
    policy, other = tiny_policy(), copy.deepcopy(tiny_tokenizer())
    assert with_tokenizer(policy, None) is policy
    other.eos_token = "!"
    files = {"preprocessor_config.json": b"{}", "tokenizer.json": b"from the checkpoint"}
    ours = with_tokenizer(policy.replace(files=files), other)
    assert ours.eos_token_ids == (other.eos_token_id, 1)
    written = files_of(ours)
    assert json.loads(written["tokenizer_config.json"])["eos_token"] == "!"
    assert written["tokenizer.json"] != files["tokenizer.json"]
    assert written["preprocessor_config.json"] == b"{}"


def test_model_replaces_an_earlier_one_and_keeps_other_files(tmp_path):
    policy = tiny_policy()
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "model-00001-of-00002.safetensors").write_text("an earlier model")
    (tmp_path / "adapter_config.json").write_text("{}")
    write_into(tmp_path, policy, None)
    names = {path.name for path in tmp_path.iterdir()}
    assert names >= {"run.json", "config.json", "model.safetensors", "tokenizer.json"}
    assert not names & {".model", "model-00001-of-00002.safetensors", "adapter_config.json"}
    jax.tree.map(np.testing.assert_array_equal, from_pretrained(tmp_path).params, policy.params)
    adapted = add_lora(policy, jax.random.key(0), rank=2)
    write_into(tmp_path / "lora", adapted, "me/base")
    assert json.loads((tmp_path / "lora" / "adapter_config.json").read_text())["base_model_name_or_path"] == "me/base"
    assert (tmp_path / "lora" / "tokenizer.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()
