"""Loading and saving checkpoints: layouts, storage dtypes, invalid input, and interrupted saves."""

import copy
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import tokenizers
from test_families import rewrite, write_checkpoint
from tiny import tiny_tokenizer

from grpo_jax.hub import huggingface, weights
from grpo_jax.hub.files import atomic_directory, check_replaceable
from grpo_jax.hub.huggingface import from_pretrained, load_tokenizer, save_pretrained
from grpo_jax.hub.peft import add_lora, save_lora
from grpo_jax.hub.policy import init_policy
from grpo_jax.policy import Policy
from grpo_jax.run.run_dir import write_policy_files

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 96, "hidden_size": 16,
    "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "tie_word_embeddings": True, "eos_token_id": 2, "pad_token_id": 0, "a_key_of_another_program": [1, 2],
}  # fmt: skip
TEXT = "sort 3 1 2 <answer> 1 2 3 </answer>"
equal = lambda a, b: jax.tree.all(jax.tree.map(lambda x, y: x.dtype == y.dtype and np.array_equal(x, y), a, b))
text = lambda name, content: lambda directory: (directory / name).write_text(content)
tensors = lambda change: lambda directory: rewrite(directory, change)
config = lambda **changes: lambda directory: rewrite(directory, **changes)


def byte_level_tokenizer():
    tokenizer = copy.copy(tiny_tokenizer())
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return tokenizer


@pytest.fixture(scope="module")
def policy():
    return init_policy({**QWEN3, "vocab_size": 300}, jax.random.key(0), tokenizer=byte_level_tokenizer())


@pytest.fixture
def checkpoint(tmp_path):
    """Return a directory with weights and no tokenizer."""
    return write_checkpoint(tmp_path / "model", QWEN3)


def stored(directory):
    """Return {name: (dtype, shape, bytes)} for all weight files, read without the code under test."""
    found = [entry for path in directory.glob("*.safetensors") for entry in safetensors.deserialize(path.read_bytes())]
    return {name: (entry["dtype"], entry["shape"], bytes(entry["data"])) for name, entry in found}


def test_new_policy_and_its_files_survive_a_round_trip(policy, tmp_path):
    save_pretrained(tmp_path / "a", policy)
    loaded = from_pretrained(tmp_path / "a")
    assert equal(loaded.params, policy.params)
    assert loaded.model.config == policy.model.config
    assert dict(loaded.config) == dict(policy.config)
    assert loaded.config["a_key_of_another_program"] == [1, 2]
    assert loaded.files == policy.files
    ids = loaded.tokenizer(TEXT)["input_ids"]
    assert ids == policy.tokenizer(TEXT)["input_ids"]
    assert loaded.tokenizer.decode(ids) == TEXT
    assert loaded.tokenizer.chat_template == policy.tokenizer.chat_template
    assert (loaded.eos_token_ids, loaded.pad_token_id) == ((2,), 0)
    odd = b'{"eos_token_id": [2, 5], "temperature":0.6,  "top_p": 0.95}'
    (tmp_path / "a" / "generation_config.json").write_bytes(odd)
    (tmp_path / "a" / "chat_template.jinja").write_bytes(b"{{ messages[0]['content'] }}  \n")
    loaded = from_pretrained(tmp_path / "a")
    assert loaded.eos_token_ids == (2, 5)
    assert loaded.generation_config["temperature"] == 0.6
    save_pretrained(tmp_path / "b", loaded)
    assert json.loads((tmp_path / "b" / "generation_config.json").read_text()) == json.loads(odd)
    for name in policy.files:
        assert (tmp_path / "b" / name).read_bytes() == (tmp_path / "a" / name).read_bytes(), name


@pytest.mark.parametrize("tied", [True, False])
def test_sharded_checkpoint_has_the_same_tensors(tied, tmp_path):
    policy = from_pretrained(write_checkpoint(tmp_path / "numpy", {**QWEN3, "tie_word_embeddings": tied}))
    save_pretrained(tmp_path / "one", policy)
    save_pretrained(tmp_path / "many", policy, max_shard_size="4KB")
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert stored(tmp_path / "one") == stored(tmp_path / "many")
    assert ("lm_head.weight" in stored(tmp_path / "one")) == (not tied)
    assert equal(from_pretrained(tmp_path / "one").params, from_pretrained(tmp_path / "many").params)
    (second,) = (tmp_path / "many").glob("model-00002-of-*.safetensors")
    second.unlink()
    with pytest.raises(FileNotFoundError, match=rf"lacks {second.name}; add"):
        from_pretrained(tmp_path / "many")


@pytest.mark.quick
@pytest.mark.parametrize("factor", [1, 2])
def test_stored_head_that_differs_from_the_embedding_is_kept(factor, checkpoint, tmp_path):
    """A stored head that differs from the embedding is kept despite a tied config, and exported as untied."""
    table = "model.embed_tokens.weight"
    rewrite(checkpoint, lambda found: found | {"lm_head.weight": factor * found[table]})
    policy = from_pretrained(checkpoint)
    assert policy.model.config.tie_word_embeddings == (factor == 1)
    save_pretrained(tmp_path / "again", policy)
    assert json.loads((tmp_path / "again" / "config.json").read_text())["tie_word_embeddings"] == (factor == 1)
    if factor == 2:
        assert stored(tmp_path / "again") == stored(checkpoint)


@pytest.mark.quick
def test_current_tokenizer_is_written(policy, tmp_path):
    """Checkpoints, adapters and `grpo-jax export` get the policy's current tokenizer, including its chat template."""
    save_pretrained(tmp_path / "a", policy)
    templated, other = from_pretrained(tmp_path / "a"), byte_level_tokenizer()
    templated.tokenizer.chat_template, other.chat_template = "{{ messages }}", "{{ messages }}!"
    for used in (templated, templated.replace(tokenizer=other), templated.replace(tokenizer=other, files={})):
        for write in (save_pretrained, lambda path, used: save_lora(path, add_lora(used, jax.random.key(0), rank=1))):
            write(tmp_path / "b", used)
            assert load_tokenizer(tmp_path / "b").chat_template == used.tokenizer.chat_template
        write_policy_files(tmp_path, used)
        assert load_tokenizer(tmp_path / "policy").chat_template == used.tokenizer.chat_template
    named = from_pretrained(tmp_path / "a")
    named.tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    named.tokenizer.save_pretrained(tmp_path / "a")  # writes the second template to a subdirectory
    for used in (named, from_pretrained(tmp_path / "a")):
        save_pretrained(tmp_path / "c", used)
        assert load_tokenizer(tmp_path / "c").chat_template == named.tokenizer.chat_template


@pytest.mark.quick
@pytest.mark.parametrize(("name", "value"), [("add_bos_token", True), ("model_max_length", 77)])
def test_modified_tokenizer_is_written(name, value, checkpoint, tmp_path):
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.bos_token = "<eos>"
    tokenizer.save_pretrained(checkpoint)
    changed = from_pretrained(checkpoint)
    setattr(changed.tokenizer, name, value)
    save_pretrained(tmp_path / "out", changed)
    found, wanted = load_tokenizer(tmp_path / "out"), changed.tokenizer
    assert found("a")["input_ids"] == wanted("a")["input_ids"] == ([1] if name == "add_bos_token" else []) + [66]
    assert found.model_max_length == wanted.model_max_length


@pytest.mark.parametrize(("dtype", "header"), [("float32", "F32"), ("bfloat16", "BF16"), ("float16", "F16")])
def test_storage_dtypes_are_byte_equal_after_a_round_trip(dtype, header, checkpoint, tmp_path):
    policy = from_pretrained(checkpoint)
    save_pretrained(tmp_path / "a", policy, dtype=dtype)
    loaded = from_pretrained(tmp_path / "a", dtype="bfloat16" if dtype == "bfloat16" else "float32")
    save_pretrained(tmp_path / "b", loaded, dtype=dtype)
    assert {entry[0] for entry in stored(tmp_path / "a").values()} == {header}
    assert stored(tmp_path / "a") == stored(tmp_path / "b")
    assert json.loads((tmp_path / "a" / "config.json").read_text())["dtype"] == dtype
    older = policy.replace(config=policy.config | {"torch_dtype": "float64", "dtype": "float64"})
    save_pretrained(tmp_path / "older", older, dtype=dtype)
    named = json.loads((tmp_path / "older" / "config.json").read_text())
    assert named["torch_dtype"] == named["dtype"] == dtype
    as_stored = jax.tree.map(lambda x: np.asarray(x).astype(dtype), policy.params)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, np.asarray(y).astype(dtype)), as_stored, loaded.params)


def test_dtype_and_param_dtype_of_a_loaded_policy(checkpoint):
    for param_dtype in ("bfloat16", "float32"):
        policy = from_pretrained(checkpoint, dtype="bfloat16", param_dtype=param_dtype)
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(policy.params)} == {param_dtype}
        hidden = functools.partial(policy.model.apply, method="hidden")
        assert jax.eval_shape(hidden, {"params": policy.params}, np.zeros((1, 1, 2), int))[0].dtype == jnp.bfloat16


@pytest.mark.quick
def test_params_own_their_memory_and_are_read_completely(checkpoint, monkeypatch):
    """Loaded params can be donated: their buffers are not owned by NumPy or shared between leaves."""
    params = from_pretrained(checkpoint).params
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(params)]
    assert len(set(pointers)) == len(pointers)
    doubled = jax.jit(lambda tree: jax.tree.map(lambda x: 2 * x, tree), donate_argnums=0)(params)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(doubled))
    whole = from_pretrained(checkpoint).params
    monkeypatch.setattr(weights, "BLOCK", 100)
    assert equal(from_pretrained(checkpoint).params, whole)


@pytest.mark.quick
@pytest.mark.parametrize(("generation", "config", "eos", "pad"), [
    ({"eos_token_id": [7, 8], "pad_token_id": 3}, {"eos_token_id": 9, "pad_token_id": 4}, (7, 8), 3),
    ({}, {"eos_token_id": 9}, (9,), 9),
    ({"eos_token_id": None, "pad_token_id": -1}, {"eos_token_id": None}, (), 0),
])  # fmt: skip
def test_eos_and_pad_ids_come_from_the_first_config_that_has_them(generation, config, eos, pad):
    policy = Policy(None, None, None, config, generation)
    assert (policy.eos_token_ids, policy.pad_token_id) == (eos, pad)


# Invalid input: each message says what was found and how to fix it.


def cut(directory):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


BIAS = {"model.layers.0.self_attn.q_proj.bias": np.ones(16, "f4")}


@pytest.mark.parametrize(("spoil", "message"), [
    (lambda path: (path / "config.json").unlink(), r"does not contain config\.json"),
    (text("config.json", "{"), r"config\.json is not valid JSON"),
    (lambda path: (path / "model.safetensors").rename(path / "pytorch_model.bin"),
        r"lacks model\.safetensors; convert PyTorch .* \(pytorch_model\.bin\) to safetensors"),
    (cut, r"model\.safetensors: SafetensorError: Error while deserializing"),
    (text("model.safetensors", "PK and more"), r"model\.safetensors: SafetensorError: Error while deserializing"),
    (config(architectures=["MambaForCausalLM"]),
        r"must contain exactly one of Qwen2ForCausalLM, .*; got \['MambaForCausalLM'\]"),
    (tensors(lambda found: {k: v for k, v in found.items() if "layers.1.mlp.up" not in k}),
        r"missing: model\.layers\.1\.mlp\.up_proj\.weight\."),
    (tensors(lambda found: found | BIAS), r"unexpected: model\.layers\.0\.self_attn\.q_proj\.bias\."),
    (config(intermediate_size=20),
        r"of the wrong shape: .*mlp\.down_proj\.weight has shape \[16, 24\], not \[16, 20\].* and 1 more"),
    (tensors(lambda found: {k: v.astype("f8") for k, v in found.items()}),
        r"must have one of the dtypes F32, F16, BF16; got float64"),
    (text("tokenizer.json", "{}"), r"tokenizer that transformers cannot load or use"),
    (text("model.safetensors", "version https://git-lfs.github.com/"), r"safetensors is a Git LFS pointer"),
    (lambda path: (path / "config.json").rename(path / "adapter_config.json"),
        r"model' contains an adapter, not a model: load its base model.*load_lora\('.*', policy\)"),
    # Sizes are compared before any array is allocated.
    (config(num_hidden_layers=10**9), r"config\.json: .*'num_hidden_layers' is 1,000,000,000, .* layers .* is 2"),
    (config(vocab_size=10**12), r"config\.json: config key 'vocab_size' is 1,000,000,.* longest tensor axis is 96"),
    # The file is named for every exception that its parser raises.
    (config(rope_parameters=[1]), r"/config\.json: \w+Error: "),
    (text("config.json", "[]"), r"/config\.json contains \[\], not a JSON object"),
])  # fmt: skip
def test_message_names_the_problem_of_a_directory(spoil, message, checkpoint):
    spoil(checkpoint)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        from_pretrained(checkpoint)


@pytest.mark.quick
def test_missing_directories_and_unsupported_dtypes_are_named(policy, tmp_path):
    for name in (tmp_path / "nothing", "./nothing"):
        with pytest.raises(FileNotFoundError, match=r"nothing' is not a directory; pass an existing directory"):
            from_pretrained(name)
    with pytest.raises(FileNotFoundError, match=r"'nobody/nothing' is not a local directory and could not"):
        from_pretrained("nobody/nothing")
    for argument in ("dtype", "param_dtype"):
        with pytest.raises(ValueError, match=rf"{argument} must be 'float32' or 'bfloat16'; got 'float64'"):
            from_pretrained("nowhere", **{argument: "float64"})
    for load in (functools.partial(from_pretrained, "nowhere"), functools.partial(init_policy, {}, jax.random.key(0))):
        with pytest.raises(ValueError, match=r"dtype must be .*; got 'float16': gradients below 6e-8 are 0"):
            load(dtype="float16")
    with pytest.raises(ValueError, match=r"dtype must be 'float32', .* or None; got 'int8'"):
        save_pretrained(tmp_path, policy, dtype="int8")


def test_params_that_do_not_match_the_config_are_not_saved(policy, tmp_path):
    params = {**policy.params, "norm": {"scale": jnp.ones(3)}, "extra": {"kernel": jnp.zeros((2, 2))}}
    message = r"unexpected: extra/kernel; of the wrong shape: norm/scale has shape \[3\], not \[16\]"
    with pytest.raises(ValueError, match=message):
        save_pretrained(tmp_path / "model", policy.replace(params=params))
    del params["norm"]
    with pytest.raises(ValueError, match=r"not match policy.config: missing: norm/scale; unexpected: extra/kernel"):
        save_pretrained(tmp_path / "model", policy.replace(params=params))
    more = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 3, "moe_intermediate_size": 8}
    moe = init_policy({**policy.config, **more, "num_experts_per_tok": 2}, jax.random.key(0))
    two = jax.tree.map(lambda x: x[:2] if x.ndim == 3 else x, moe.params)
    with pytest.raises(ValueError, match=r"experts/down_proj has shape \[2, 8, 16\], not \[3, 8, 16\]"):
        save_pretrained(tmp_path / "model", moe.replace(params=two))
    assert not list(tmp_path.iterdir())


def home_made(checkpoint, model):
    """Give the checkpoint a tokenizer that transformers mistakes for Qwen's byte-level BPE."""
    words = tokenizers.Tokenizer(model)
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(checkpoint / "tokenizer.json"))
    (checkpoint / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer", "pad_token": "<unk>"}')


def test_misidentified_tokenizer_is_loaded_from_its_file_or_refused(checkpoint):
    home_made(checkpoint, tokenizers.models.WordLevel({"<unk>": 0, "fox": 1, "is": 2}, unk_token="<unk>"))
    tokenizer = from_pretrained(checkpoint).tokenizer
    assert tokenizer("fox is fox")["input_ids"] == [1, 2, 1]
    assert tokenizer.pad_token_id == 0
    home_made(checkpoint, tokenizers.models.BPE())
    with pytest.raises(ValueError, match=r"encodes .* to no ids.*a token for unknown words"):
        from_pretrained(checkpoint)


def test_failed_save_keeps_the_old_checkpoint(policy, checkpoint, tmp_path, monkeypatch):
    before = stored(checkpoint)
    fail = lambda *args: (_ for _ in ()).throw(OSError("disk full"))
    monkeypatch.setattr(huggingface, "write_json", fail)
    with pytest.raises(OSError, match="disk full"):
        save_pretrained(checkpoint, policy)
    with pytest.raises(OSError, match="disk full"):
        save_pretrained(tmp_path / "new", policy)
    assert stored(checkpoint) == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.quick
def test_only_checkpoint_files_are_replaced_and_only_when_complete(tmp_path):
    target = tmp_path / "a" / "b"
    for content in ("old", "new"):
        with atomic_directory(target) as scratch:
            (scratch / "file").write_text(content)
            (scratch / "file").chmod(0o600)  # as safetensors creates it
            assert not target.exists() or (target / "file").read_text() == "old"
        assert (target / "file").read_text() == content
        assert (target / "file").stat().st_mode & 0o777 == 0o644
    assert [path.name for path in target.parent.iterdir()] == ["b"]
    check_replaceable(tmp_path / "new")
    folder = tmp_path / "c"
    folder.mkdir()
    for name in ("config.json", "model-1.safetensors", "tokenizer.json", "adapter_config.json"):
        (folder / name).touch()
    check_replaceable(folder)
    (folder / "notes").mkdir()
    with pytest.raises(FileExistsError, match=r"contains files that do not belong to a checkpoint \(notes\)"):
        check_replaceable(folder)
    (folder / "thesis.tex").touch()
    with pytest.raises(FileExistsError, match=r"is a file or symbolic link"):
        check_replaceable(folder / "thesis.tex")
