"""A trainer's tokenizer decides what ends a completion, and its model is written where the script says."""

import copy
import json

import jax
import numpy as np
import pytest
from test_readme import chat_checkpoint
from tiny import tiny_policy, tiny_tokenizer

from grpo_jax import add_lora, from_pretrained
from grpo_jax.compat.policies import with_tokenizer, write_into
from grpo_jax.watch.writer import read_settings


def tokenizer_ending_with(char):
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.eos_token = char
    return tokenizer


@pytest.mark.quick
def test_the_eos_of_the_tokenizer_ends_completions_beside_those_of_the_files():
    policy = tiny_policy()
    assert with_tokenizer(policy) is policy
    other = tokenizer_ending_with("!")
    with pytest.warns(UserWarning, match=r"'!' \(\d+\), ends completions too; the model's files name \[1\] alone"):
        ours = with_tokenizer(policy, other)
    assert ours.eos_token_ids == (other.eos_token_id, 1)
    assert with_tokenizer(ours).eos_token_ids == ours.eos_token_ids  # and nothing more is said
    files = {"preprocessor_config.json": b"{}", "tokenizer.json": b"of the checkpoint"}
    with pytest.warns(UserWarning, match="ends completions too"):
        ours = with_tokenizer(policy.replace(files=files), other)
    assert json.loads(ours.files["tokenizer_config.json"])["eos_token"] == "!"
    assert ours.files["tokenizer.json"] != files["tokenizer.json"]
    assert ours.files["preprocessor_config.json"] == b"{}"


@pytest.mark.filterwarnings("ignore")  # of transformers and ours
@pytest.mark.parametrize("in_files", [1, [1], [1, 5], None], ids=str)
def test_the_eos_ids_are_those_of_trl(in_files, tmp_path):
    """TRL's own trainer on the same checkpoint, with a tokenizer that ends with another token than its files."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    pytest.importorskip("datasets", reason="datasets is not installed")
    import datasets
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(chat_checkpoint(tmp_path))
    model.generation_config.eos_token_id = in_files
    theirs = trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **kwargs: [0.0] * len(completions),
        args=trl.GRPOConfig(output_dir=str(tmp_path / "theirs"), report_to=[], bf16=False, use_cpu=True),
        train_dataset=datasets.Dataset.from_list([{"prompt": "a"}]),
        processing_class=tokenizer_ending_with("!"),
    )
    raw = {key: value for key, value in tiny_policy().config.items() if key != "eos_token_id"}
    policy = tiny_policy().replace(generation_config={"eos_token_id": in_files}, config=raw)
    assert set(with_tokenizer(policy, tokenizer_ending_with("!")).eos_token_ids) == set(theirs.eos_token_ids)


@pytest.mark.quick
def test_a_model_is_written_beside_what_is_there_and_in_the_place_of_one_before(tmp_path):
    policy = tiny_policy()
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "model-00001-of-00002.safetensors").write_text("of an earlier model")
    (tmp_path / "adapter_config.json").write_text("{}")
    # A run of an earlier version had its settings where a model has its own.
    (tmp_path / "config.json").write_text('{"config": {"beta": 0.5}}')
    write_into(tmp_path, policy)
    names = {path.name for path in tmp_path.iterdir()}
    assert names >= {"notes.txt", "run.json", "config.json", "model.safetensors", "tokenizer.json"}
    assert not names & {".model", "model-00001-of-00002.safetensors", "adapter_config.json"}
    assert read_settings(tmp_path) == {"config": {"beta": 0.5}}
    for _ in range(2):  # again, over itself
        again = from_pretrained(tmp_path)
        jax.tree.map(np.testing.assert_array_equal, again.params, policy.params)
        assert again.eos_token_ids == policy.eos_token_ids
        write_into(tmp_path, policy)


@pytest.mark.filterwarnings("ignore")  # peft's own
def test_adapters_are_written_with_their_tokenizer_and_the_name_of_their_base(tmp_path):
    model = chat_checkpoint(tmp_path)
    policy = add_lora(from_pretrained(model), jax.random.key(0), rank=2)
    write_into(tmp_path / "out", policy, base_name=str(model))
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(model)
    assert not (tmp_path / "out" / "config.json").exists()
    pytest.importorskip("torch", reason="PyTorch is not installed")
    peft = pytest.importorskip("peft", reason="peft is not installed")
    import transformers

    transformers.utils.logging.disable_progress_bar()
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")
    assert sum("lora_A" in name for name, _ in loaded.named_parameters()) == 7
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == policy.tokenizer.chat_template is not None
