"""GGUF files, as llama.cpp writes them: found by name, and read with the package `gguf` as a `Checkpoint`.

`gguf_config` makes config.json from the header, `gguf_tensors` maps the tensors; here are the tokenizer with its chat
template and the tokens that end a completion. `_parsed` is the one place where the file's faults get its name.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from grpo_jax.hub.families import read_config
from grpo_jax.hub.files import POINTER, Checkpoint, is_fault, is_pointer
from grpo_jax.hub.gguf_config import Header, read_header
from grpo_jax.hub.gguf_tensors import FACTORS, FileTensor, find_tensors
from grpo_jax.hub.policy import tokenizer_files
from grpo_jax.hub.tensors import tensor_plan
from grpo_jax.messages import one_line, some
from grpo_jax.types import Json, Tokenizer

if TYPE_CHECKING:
    from gguf import GGUFReader

NEEDS = "pip install 'grpo_jax[gguf]'"

ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>",
    "<|end_of_text|>", "<turn|>", "<|tool_response>",
)  # fmt: skip
"""Tokens at which llama.cpp ends a completion, in addition to the ones that a file names."""

_GPT2 = ("gpt-2", "olmo", "granite-docling", "smollm", "refact")
_LLAMA3 = ("glm4", "chatglm-bpe")
"""Values of tokenizer.ggml.pre that transformers does not list and splits as GPT-2 does: the ones for which that is
right, and the ones that split as Llama 3 does. llama.cpp splits the digits of `smollm` and `refact` first, which
differs where a number follows two blanks or more; ids are transformers' there."""


def find_gguf(name_or_path: str | os.PathLike[str]) -> Path | None:
    """Return the GGUF file that a name means: its path, a directory or an installed package with one in it; else None.

    A package may be named as it is installed or as it is imported; it is not imported. A piece of a split file, and
    several GGUF files without other weights, are a ValueError.
    """
    name, path = os.fspath(name_or_path), Path(name_or_path).expanduser()
    if path.is_file() and (part := re.search(r"\.gguf[.-]?(part-?\d+(of\d+)?|split-?[a-z]+)$", path.name, re.I)):
        whole = path.name[: part.start()] + ".gguf"
        raise ValueError(
            f"name_or_directory {name!r} is one piece of a GGUF file; join them in order, `cat {whole}.* > {whole}`,"
            f" and name {whole}."
        )
    if path.is_file() and _is_gguf(path):
        return path
    if not path.is_dir():
        module = name.replace("-", "_")
        spec = importlib.util.find_spec(module) if re.fullmatch(r"[A-Za-z]\w*", module) else None
        if spec is None or not spec.submodule_search_locations:
            return None
        path = Path(next(iter(spec.submodule_search_locations)))
    elif any(path.glob("*.safetensors")):
        return None
    files = sorted(filter(_is_gguf, path.iterdir()))
    if len(files) > 1:
        names = some([file.name for file in files])
        raise ValueError(f"name_or_directory {name!r} has several GGUF files: {names}; name one.")
    return files[0] if files else None


def _is_gguf(path: Path) -> bool:
    return path.suffix.lower() == ".gguf"


def read_gguf(path: Path) -> Checkpoint:
    """A GGUF file as a checkpoint, before any weight is read.

    Raises:
      ImportError: the package `gguf`, or a transformers that supports these tokenizers, is missing.
      ValueError: naming the file, and what in it cannot be read or is not supported: architecture, key, tensor,
        quantization type, tokenizer.
    """
    with _parsed(path) as (reader, header):
        row, raw = read_header(header)
        config = read_config(raw)
        files = _tensors(path, reader, header)
        stored = find_tensors(tensor_plan(raw, config), files, row, config, header.architecture)
        tokenizer = _tokenizer(header.fields)
        ends = _end_ids(header.fields)
    ids = {key: value for key, value in raw.items() if key in ("bos_token_id", "pad_token_id")}
    return Checkpoint(
        raw=raw,
        generation_config={**ids, "eos_token_id": ends},
        stored=stored,
        tokenizer=tokenizer,
        files={} if tokenizer is None else tokenizer_files(tokenizer),
    )


def gguf_config(path: Path) -> Json:
    """The config.json that a GGUF file means."""
    with _parsed(path) as (_, header):
        return read_header(header)[1]


@contextlib.contextmanager
def _parsed(path: Path) -> Iterator[tuple[GGUFReader, Header]]:
    """A file's reader and header; a fault in the file, here or in the block, becomes a ValueError that names it."""
    try:
        reader = _open(path)
        yield reader, _header(reader)
    except ImportError:
        raise
    except ValueError as error:
        raise ValueError(f"name_or_directory {str(path)!r}: {error}") from error
    except BaseException as error:  # keys of another type, for example
        if not is_fault(error):
            raise
        raise ValueError(f"name_or_directory {str(path)!r}: {_damaged(path, error)}") from error


def _damaged(path: Path, error: BaseException) -> str:
    """The fault of a file that cannot be parsed, and the fix."""
    if is_pointer(path):
        return f"it is {POINTER}."
    with path.open("rb") as file:
        start = file.read(4)
    if not start.startswith(b"GGUF"):
        return f"it is not a GGUF file: it begins with {start!r}, not with b'GGUF'."
    return f"it is cut off or damaged; download it again (it has {path.stat().st_size:,} bytes; {one_line(error)})."


def _open(path: Path) -> GGUFReader:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ImportError(f"{str(path)!r} is a GGUF file, which the package gguf reads: {NEEDS}") from error

    class PlainReader(GGUFReader):
        """Holds plain arrays: slices of an `np.memmap` take four times as long, and a vocabulary is 150 thousand."""

        data = property(lambda self: self._data, lambda self, mapped: setattr(self, "_data", np.asarray(mapped)))

    try:
        reader = PlainReader(path)
    except Exception as error:
        raise ValueError(_damaged(path, error)) from error
    if (parts := reader.get_field("split.count")) is not None and parts.contents() > 1:
        raise ValueError(f"it is one of {parts.contents()} parts (split.count); merge them: llama-gguf-split --merge.")
    return reader


def _header(reader: GGUFReader) -> Header:
    """The keys of a file, each float32 as its shortest decimal, as in a config.json; the tensors' shapes; factors."""
    from gguf import GGUFValueType

    fields = {}
    for key, field in reader.fields.items():
        value = field.contents()
        fields[key] = float(str(np.float32(value))) if field.types == [GGUFValueType.FLOAT32] else value
    shapes = {each.name: tuple(reversed(each.shape.tolist())) for each in reader.tensors}
    return Header(fields, shapes, {each.name: np.array(each.data) for each in reader.tensors if each.name in FACTORS})


def _tensors(path: Path, reader: GGUFReader, header: Header) -> dict[str, FileTensor]:
    """Return the tensors of the file by name; ValueError for a quantization that the package gguf does not read."""
    from gguf import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    for kind, name in {tensor.tensor_type: tensor.name for tensor in reversed(reader.tensors)}.items():
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError as error:
            raise ValueError(f"the package gguf does not read the quantization {kind.name} of {name}.") from error
    return {
        each.name: FileTensor(path, header.shapes[each.name], int(each.tensor_type), int(each.data_offset))
        for each in reader.tensors
    }


def _end_ids(fields: Json) -> list[int]:
    """Ids of the tokens that end a completion; the ones that the file names come first."""
    tokens, kinds = fields.get("tokenizer.ggml.tokens", []), fields.get("tokenizer.ggml.token_type", [])
    named = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    control = [i for i, kind in enumerate(kinds) if kind == 3 and tokens[i] in ENDS]
    if any(tokens[i] == "<|return|>" for i in control):  # gpt-oss: <|end|> ends a channel, not the completion
        control = [i for i in control if tokens[i] != "<|end|>"]
    return list(dict.fromkeys(i for i in (*named, *control) if i is not None))


def _tokenizer(fields: Json) -> Tokenizer | None:
    """The tokenizer that transformers makes of a GGUF file's vocabulary; None if the file has none."""
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

    # Older sentencepiece files have no flag. Gemma 4's chat template writes the token itself.
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
