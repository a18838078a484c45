"""GGUF files, as llama.cpp writes them: found, read with the package `gguf`, and handed on as a checkpoint.

Of such a file come the config.json that it means (`gguf_config`), its tensors under Hugging Face's names
(`gguf_tensors`), and here the tokenizer, its chat template, and the tokens that end a completion.
"""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from grpo_jax.hub.families import read_config
from grpo_jax.hub.files import Checkpoint
from grpo_jax.hub.gguf_config import read_header
from grpo_jax.hub.gguf_header import Header
from grpo_jax.hub.gguf_tensors import FACTORS, FileTensor, find_tensors
from grpo_jax.hub.policy import tokenizer_files
from grpo_jax.hub.tensors import tensor_plan
from grpo_jax.messages import some
from grpo_jax.types import Json, Tokenizer

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

NEEDS = "pip install 'grpo_jax[gguf]'"

ENDS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<turn|>",
    "<|tool_response>",
)
"""Tokens at which llama.cpp ends a completion, beside those that a file names: it names one, and a chat has others."""

_GPT2 = ("gpt-2", "olmo", "granite-docling", "smollm", "refact")
_LLAMA3 = ("glm4", "chatglm-bpe")
"""Values of tokenizer.ggml.pre that transformers does not list and splits as GPT-2 does: those for which that is right,
and those that split as Llama 3 does. llama.cpp takes the digits of `smollm` and `refact` apart first, which differs
where a number stands behind two blanks or more: ids are those of transformers' reading there too."""


def find_gguf(name_or_path: str | os.PathLike[str]) -> Path | None:
    """The GGUF file that a name means: its path, a directory or an installed package with one in it; else None.

    A package may be named as it is installed or as it is imported; it is not imported.

    Raises:
      ValueError: a directory or package with several GGUF files and no other weights.
    """
    path = Path(name_or_path).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return path
    if not path.is_dir():
        module = os.fspath(name_or_path).replace("-", "_")
        spec = importlib.util.find_spec(module) if re.fullmatch(r"[A-Za-z]\w*", module) else None
        if spec is None or not spec.submodule_search_locations:
            return None
        path = Path(next(iter(spec.submodule_search_locations)))
    elif any(path.glob("*.safetensors")):
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        names = some([file.name for file in files])
        raise ValueError(f"name_or_directory {os.fspath(name_or_path)!r} has several GGUF files: {names}; name one.")
    return files[0] if files else None


def read_gguf(path: Path) -> Checkpoint:
    """A GGUF file as a checkpoint, without a weight.

    Raises:
      ImportError: the package `gguf`, or a transformers that knows these tokenizers, is missing.
      ValueError: what is not known of the file, by name: architecture, keys, tensors, quantization types, tokenizer.
    """
    try:
        reader = _open(path)
        header = _header(reader)
        row, raw = read_header(header)
        config = read_config(raw)
        files = _file_tensors(path, reader)
        stored = find_tensors(tensor_plan(raw, config), files, row, config, header.architecture)
        tokenizer = _tokenizer(header.fields)
    except ValueError as error:
        raise ValueError(f"name_or_directory {str(path)!r}: {error}") from error
    ids = {key: value for key, value in raw.items() if key in ("bos_token_id", "pad_token_id")}
    return Checkpoint(
        raw=raw,
        generation_config={**ids, "eos_token_id": _end_ids(header.fields)},
        stored=stored,
        tokenizer=tokenizer,
        files={} if tokenizer is None else tokenizer_files(tokenizer),
    )


def gguf_config(path: Path) -> Json:
    """The config.json that a GGUF file means."""
    return read_header(_header(_open(path)))[1]


def _open(path: Path) -> GGUFReader:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ImportError(f"{str(path)!r} is a GGUF file, which the package gguf reads: {NEEDS}") from error

    class PlainReader(GGUFReader):
        """Its bytes without the bookkeeping of `np.memmap` at every slice: a vocabulary is 150 thousand of them."""

        data = property(lambda self: self._data, lambda self, mapped: setattr(self, "_data", np.asarray(mapped)))

    reader = PlainReader(path)
    if (parts := reader.get_field("split.count")) is not None and parts.contents() > 1:
        raise ValueError(f"it is one of {parts.contents()} parts (split.count); merge them: llama-gguf-split --merge.")
    return reader


def _shape(tensor: ReaderTensor) -> tuple[int, ...]:
    return tuple(int(n) for n in reversed(tensor.shape))


def _header(reader: GGUFReader) -> Header:
    """The keys of a file, a float32 as the shortest decimal that means it, as config.json has it; and its shapes."""
    from gguf import GGUFValueType

    fields = {}
    for key, field in reader.fields.items():
        value = field.contents()
        fields[key] = float(str(np.float32(value))) if field.types == [GGUFValueType.FLOAT32] else value
    if "general.architecture" not in fields:
        raise ValueError("GGUF key 'general.architecture' is missing.")
    factors = {each.name: np.array(each.data, np.float32) for each in reader.tensors if each.name in FACTORS}
    return Header(fields, {each.name: _shape(each) for each in reader.tensors}, factors)


def _file_tensors(path: Path, reader: GGUFReader) -> dict[str, FileTensor]:
    """The tensors of the file by name.

    Raises:
      ValueError: a quantization type that the package gguf does not read.
    """
    from gguf import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    for kind in {tensor.tensor_type for tensor in reader.tensors}:
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError as error:
            names = some([tensor.name for tensor in reader.tensors if tensor.tensor_type == kind], most=1)
            raise ValueError(f"the package gguf does not read the quantization {kind.name} of {names}.") from error
    return {
        tensor.name: FileTensor(
            path, _shape(tensor), int(tensor.tensor_type), int(tensor.data_offset), GGML_QUANT_SIZES[tensor.tensor_type]
        )
        for tensor in reader.tensors
    }


def _end_ids(fields: Json) -> list[int]:
    """Ids of the tokens that end a completion; what the file names comes first."""
    tokens = fields.get("tokenizer.ggml.tokens", [])
    named = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    kinds = fields.get("tokenizer.ggml.token_type", [])
    control = [i for i, kind in enumerate(kinds) if kind == 3 and tokens[i] in ENDS]
    if any(tokens[i] == "<|return|>" for i in control):  # gpt-oss: it ends a channel, and not the completion
        control = [i for i in control if tokens[i] != "<|end|>"]
    return list(dict.fromkeys(i for i in (*named, *control) if i is not None))


def _tokenizer(fields: Json) -> Tokenizer | None:
    """The tokenizer of the file, as transformers makes it of a GGUF file's vocabulary; None where it has none."""
    kind = fields.get("tokenizer.ggml.model", "none")
    if kind == "none":
        return None
    try:
        from transformers import PreTrainedTokenizerFast
        from transformers.integrations.gguf import gguf_tokenizer_mapping as made
    except ImportError as error:
        raise ImportError(f"transformers is too old for the tokenizers of GGUF files: {NEEDS}") from error
    split = fields.get("tokenizer.ggml.pre")
    known = {*made.GGUF_PRE_TOKENIZER_SPLITS, *_GPT2, *_LLAMA3}
    if kind not in ("gpt2", "llama", "gemma4"):
        raise ValueError(f"tokenizer.ggml.model is {kind!r}, which is not supported; supported: gpt2, llama, gemma4.")
    if kind == "gpt2" and split not in known:
        raise ValueError(
            f"tokenizer.ggml.pre is {split!r}, which is not supported; supported: {', '.join(sorted(known))}."
        )
    names = made.GGUF_TOKENIZER_MAPPING["tokenizer"]
    parts = {name: fields[f"tokenizer.{key}"] for key, name in names.items() if f"tokenizer.{key}" in fields}
    if split in _LLAMA3:
        parts["pre_tokenizer_type"] = "llama3"
    backend, _ = made.convert_gguf_tokenizer(fields["general.architecture"], parts)

    def special(name: str) -> str | None:
        token = fields.get(f"tokenizer.ggml.{name}_token_id")
        return None if token is None else parts["tokens"][token]

    # Of sentencepiece's, older files have no flag. Gemma 4's chat template writes the token itself.
    begins = fields.get("tokenizer.ggml.add_bos_token", kind == "llama") and kind != "gemma4"
    tokenizer: Tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=special("bos"),
        eos_token=special("eos"),
        unk_token=special("unknown"),
        pad_token=special("padding"),
        add_bos_token=begins,
        add_eos_token=fields.get("tokenizer.ggml.add_eos_token", False),
        chat_template=fields.get("tokenizer.chat_template"),
    )
    return tokenizer
