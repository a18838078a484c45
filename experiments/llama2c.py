"""Convert llama2.c's checkpoint and tokenizer files to Hugging Face's layout.

    python -m experiments.llama2c stories260K.bin tok512.bin DIRECTORY
    python -c "from experiments.llama2c import widen_heads; widen_heads('DIRECTORY', 'WIDE')"    # for vLLM on a CPU

Time: one second. Expect: a directory that `from_pretrained` and transformers load, with bit-identical weights.

The format is the "legacy" format in export.py of https://github.com/karpathy/llama2.c;
https://huggingface.co/karpathy/tinyllamas has such files for models trained on TinyStories.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Shape", "convert", "make_tokenizer", "read_checkpoint", "read_pieces", "widen_heads"]

UNK, BOS = 0, 1
"""Token ids. A story begins with BOS and ends where the next story's BOS would follow, so BOS also serves as EOS."""


class Shape(NamedTuple):
    """Header of a checkpoint, seven int32. A negative vocabulary size means that the output matrix is not tied."""

    dim: int
    hidden_dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    max_seq_len: int


def read_checkpoint(path: str | Path) -> tuple[Shape, dict[str, np.ndarray]]:
    """Read a checkpoint.

    Returns:
      The header, and the tensors by Hugging Face's names, with the rows of W_q and W_k in Hugging Face's order.

    Raises:
      ValueError: if the file's size does not match its header.
    """
    data = Path(path).read_bytes()
    header = Shape(*struct.unpack_from("<7i", data))
    shape = header._replace(vocab_size=abs(header.vocab_size))
    d, f, n, v = shape.dim, shape.hidden_dim, shape.n_layers, shape.vocab_size
    head = d // shape.n_heads
    kv = head * shape.n_kv_heads
    layers = "model.layers.{}."
    tied = header.vocab_size > 0
    # In file order. None marks the tables of rotary angles, which are skipped since they follow from the shape.
    sections: list[tuple[str | None, tuple[int, ...]]] = [
        ("model.embed_tokens.weight", (v, d)),
        (layers + "input_layernorm.weight", (n, d)),
        (layers + "self_attn.q_proj.weight", (n, d, d)),
        (layers + "self_attn.k_proj.weight", (n, kv, d)),
        (layers + "self_attn.v_proj.weight", (n, kv, d)),
        (layers + "self_attn.o_proj.weight", (n, d, d)),
        (layers + "post_attention_layernorm.weight", (n, d)),
        (layers + "mlp.gate_proj.weight", (n, f, d)),
        (layers + "mlp.down_proj.weight", (n, d, f)),
        (layers + "mlp.up_proj.weight", (n, f, d)),
        ("model.norm.weight", (d,)),
        (None, (2, shape.max_seq_len, head // 2)),
        *([] if tied else [("lm_head.weight", (v, d))]),
    ]
    expected = 28 + 4 * sum(math.prod(size) for _, size in sections)
    if len(data) != expected:
        raise ValueError(
            f"{path} has {len(data)} bytes, and its header {header} needs {expected}: it is another kind of file."
        )
    numbers, tensors = np.frombuffer(data, "<f4", offset=28), {}
    for name, size in sections:
        array, numbers = numbers[: math.prod(size)].reshape(size), numbers[math.prod(size) :]
        if name is None:
            continue
        stacked = name.startswith(layers)
        for i, tensor in enumerate(array if stacked else [array]):
            if "q_proj" in name or "k_proj" in name:
                tensor = _halves(tensor, head)
            tensors[name.format(i)] = np.ascontiguousarray(tensor)
    return shape, tensors


def _halves(matrix: np.ndarray, head_dim: int) -> np.ndarray:
    """Reorder each head's rows: llama2.c rotates rows (2i, 2i+1) as a pair, Hugging Face (i, i + head_dim/2)."""
    heads = matrix.reshape(-1, head_dim // 2, 2, matrix.shape[-1])
    return heads.swapaxes(1, 2).reshape(matrix.shape)


def read_pieces(path: str | Path, vocab_size: int) -> list[tuple[str, float]]:
    """Read a tokenizer's pieces and their scores in order of id: <unk>, <s>, </s>, 256 bytes, then text."""
    data, at, pieces = Path(path).read_bytes(), 4, []
    for _ in range(vocab_size):
        score, length = struct.unpack_from("<fi", data, at)
        pieces.append((data[at + 8 : at + 8 + length].decode(), score))
        at += 8 + length
    if at != len(data):
        raise ValueError(
            f"{path} has more pieces than the checkpoint's {vocab_size}: the two files do not belong together."
        )
    # llama2.c writes BOS and EOS with line breaks around them.
    return [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *pieces[3:]]


def make_tokenizer(pieces: Sequence[tuple[str, float]], max_length: int) -> Any:
    """Create an equivalent transformers tokenizer: a BPE with byte fallback that puts BOS before every text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    vocab = {piece: i for i, (piece, _) in enumerate(pieces)}
    # SentencePiece merges the adjacent pair that forms the piece with the highest score, however that piece is split.
    merges = [
        (piece[:cut], piece[cut:])
        for piece, _ in sorted(pieces[259:], key=lambda entry: -entry[1])
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    unk, bos = pieces[UNK][0], pieces[BOS][0]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unk, fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Prepend(" ")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair="$A $B:1", special_tokens=[(bos, BOS)]
    )
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (unk, bos)])
    names = {"unk_token": unk, "pad_token": unk, "bos_token": bos, "eos_token": bos}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=max_length, **names)


def convert(checkpoint: str | Path, tokenizer: str | Path, directory: str | Path) -> None:
    """Write a llama2.c model as a checkpoint in Hugging Face's layout.

    Args:
      checkpoint: file with the weights, such as stories260K.bin.
      tokenizer: file with the pieces, such as tok512.bin.
      directory: output directory, created if it does not exist.
    """
    from safetensors.numpy import save_file

    shape, tensors = read_checkpoint(checkpoint)
    pieces = read_pieces(tokenizer, shape.vocab_size)
    tokens = {"bos_token_id": BOS, "eos_token_id": BOS, "pad_token_id": UNK}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.dim,
        "intermediate_size": shape.hidden_dim,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "head_dim": shape.dim // shape.n_heads,
        "max_position_embeddings": shape.max_seq_len,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        **tokens,
    }
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    for name, content in (("config.json", config), ("generation_config.json", tokens)):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    make_tokenizer(pieces, shape.max_seq_len).save_pretrained(directory)


def widen_heads(source: str | Path, target: str | Path, head_dim: int = 32) -> None:
    """Write a copy of a Llama checkpoint with wider heads that computes the same function.

    vLLM's attention on CPUs requires heads of at least 32 channels, and stories260K's have 8. The new channels are
    zeros, the existing ones keep their rotary angles, and W_q is scaled so that the attention scores do not change.

    Args:
      source: directory of a single-file checkpoint in Hugging Face's layout.
      target: directory to create.
      head_dim: channels per head, a multiple of the current number.
    """
    from safetensors.numpy import load_file, save_file

    source, target = Path(source), Path(target)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    size = config["head_dim"]
    # Pair i rotates by base^(-2i / head_dim), so pair i · head_dim / size of the wide head keeps the angle of pair i.
    turned = [i * head_dim // size + half * head_dim // 2 for half in (0, 1) for i in range(size // 2)]

    def widened(w: np.ndarray, places: Sequence[int]) -> np.ndarray:
        wide = np.zeros((len(w) // size, head_dim, w.shape[1]), w.dtype)
        wide[:, places] = w.reshape(-1, size, w.shape[1])
        return wide.reshape(-1, w.shape[1])

    tensors = load_file(source / "model.safetensors")
    for name, w in tensors.items():
        if "q_proj" in name:  # scores are divided by √head_dim
            tensors[name] = widened(w, turned) * np.sqrt(head_dim / size, dtype=w.dtype)
        elif "k_proj" in name:
            tensors[name] = widened(w, turned)
        elif "v_proj" in name:
            tensors[name] = widened(w, range(size))
        elif "o_proj" in name:
            tensors[name] = np.ascontiguousarray(widened(w.T, range(size)).T)
    target.mkdir(parents=True)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps({**config, "head_dim": head_dim}, indent=2) + "\n", encoding="utf-8")
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, target / name)


def main(argv: Sequence[str] | None = None) -> None:
    """Convert the files given on the command line."""
    parser = argparse.ArgumentParser(prog="python -m experiments.llama2c", description=(__doc__ or "").split("\n")[0])
    for name in ("checkpoint", "tokenizer", "directory"):
        parser.add_argument(name, type=Path)
    convert(**vars(parser.parse_args(argv)))


if __name__ == "__main__":
    main()
