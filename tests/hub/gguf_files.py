"""Small checkpoints, and the GGUF files that llama.cpp's script makes from them.

`golden/gguf.tar.xz` contains one file per case, written by llama.cpp's `convert_hf_to_gguf.py --outtype f16` (sources
in llama-cpp-python 0.3.36). The files have a vocabulary of 64 names and no tokenizer. To write the archive again, with
PyTorch and llama.cpp's sources: `PYTHONPATH=tests/hub python -m gguf_files LLAMA_CPP`.
"""

import json
import sys
import tarfile
import tempfile
import zlib
from pathlib import Path

import numpy as np
from test_families import CASES, GEMMA, raw_config, write_checkpoint

GOLDEN = Path(__file__).parent / "golden" / "gguf.tar.xz"

# Configs without keys that GGUF cannot represent; the other cases are those in `test_families`.
CHANGES = {
    "smollm3": {"no_rope_layer_interval": 4, "num_hidden_layers": 4},
    "mistral": {"sliding_window": None, "head_dim": 16},
    "gemma3": {**GEMMA, "query_pre_attn_scalar": 16, "num_hidden_layers": 7},
}  # fmt: skip
FILES = ["qwen2", "qwen3", "llama", "smollm3", "mistral", "gemma3"]


def config_of(name):
    """Return a case's config.json, as transformers 5 writes it."""
    raw = raw_config(name)
    if name in CHANGES:
        raw = {key: value for key, value in raw.items() if key not in CASES[name][1]} | CHANGES[name]
    return raw


def coarse_weight(name, shape, center):
    """Return a weight that depends on its name; its 17 values are exact in every dtype and compress well."""
    draw = np.random.default_rng(zlib.crc32(name.encode())).integers(-8, 9, shape).astype(np.float32)
    if len(shape) == 1:
        return draw / 32 + np.float32(center if "norm" in name or "scalar" in name else 0)
    return draw * np.float32(2.0 ** -(3 + round(np.log2(shape[-1]) / 2)))


def stored_file(name, directory):
    """Unpack a case's GGUF file and return its path."""
    with tarfile.open(GOLDEN) as archive:
        archive.extract(f"{name}.gguf", directory, filter="data")
    return directory / f"{name}.gguf"


def convert(llama_cpp, directory, target):
    """Write a GGUF file with llama.cpp's script, in which only the vocabulary is replaced."""
    sys.path[:0] = [str(llama_cpp / "gguf-py"), str(llama_cpp)]
    import gguf
    import torch
    from conversion import get_model_class

    def set_vocab(model):
        writer = model.impl.gguf_writer if hasattr(model, "impl") else model.gguf_writer
        writer.add_tokenizer_model("none")
        writer.add_token_list([f"t{i}" for i in range(64)])

    kind = get_model_class(json.loads((directory / "config.json").read_text())["architectures"][0])
    kind.set_vocab, kind.no_mtp = set_vocab, True
    # For Gemma 3, the script reads the number of tokens from tokenizer.json.
    vocabulary = {"model": {"vocab": {f"t{i}": i for i in range(64)}}, "added_tokens": []}
    (directory / "tokenizer.json").write_text(json.dumps(vocabulary))
    with torch.inference_mode():
        kind(directory, gguf.LlamaFileType.MOSTLY_F16, target).write()


def write_golden(llama_cpp, names):
    """Write the archive with the given cases."""
    with tempfile.TemporaryDirectory() as scratch, tarfile.open(GOLDEN, "w:xz", preset=9) as archive:
        for name in names:
            target = Path(scratch) / f"{name}.gguf"
            convert(llama_cpp, write_checkpoint(Path(scratch) / name, config_of(name), coarse_weight), target)
            archive.add(target, target.name)


if __name__ == "__main__":
    write_golden(Path(sys.argv[1]), sys.argv[2:] or FILES)
