"""The converter for llama2.c's files, compared with the arithmetic of llama2.c's run.c, reimplemented in NumPy."""

import itertools
import struct
from pathlib import Path

import numpy as np
import pytest

from experiments.llama2c import Shape, convert, make_tokenizer, read_pieces
from grpo_jax import from_pretrained

TEXTS = [
    "",
    " ",
    "Once upon a time, there was a little girl named Lily.",
    "Two  spaces,\na line break\tand a tab.",
    "3 + 4 = 7 — naïve café ☃ 猫 🐈",
]
SHAPE = Shape(dim=16, hidden_dim=24, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=274, max_seq_len=12)
TEXT_PIECES = [" t", "he", " a", "er", " the", "her", " h", *" aehort☃"]  # best merge first; 259 + 15 = 274 pieces


def write_checkpoint(path: Path, *, tied: bool, seed: int = 0) -> dict[str, np.ndarray]:
    """Write a random checkpoint in the order of llama2.c's export; return its sections by llama2.c's names."""
    d, f, n, heads, kv_heads, v, longest = SHAPE
    kv = d // heads * kv_heads
    shapes = {"embed": (v, d), "rms_att": (n, d), "wq": (n, d, d), "wk": (n, kv, d), "wv": (n, kv, d), "wo": (n, d, d)}
    shapes |= {"rms_ffn": (n, d), "w1": (n, f, d), "w2": (n, d, f), "w3": (n, f, d), "rms_final": (d,)}
    shapes |= {"angles": (2, longest, d // heads // 2)} | ({} if tied else {"wcls": (v, d)})
    draw = np.random.default_rng(seed)
    sections = {name: draw.normal(0, 0.5, size).astype("<f4") for name, size in shapes.items()}
    header = SHAPE if tied else SHAPE._replace(vocab_size=-v)
    path.write_bytes(struct.pack("<7i", *header) + b"".join(array.tobytes() for array in sections.values()))
    return sections


def write_tokenizer(path: Path) -> list[bytes]:
    """Write a tokenizer with the 256 bytes and `TEXT_PIECES`, as llama2.c's tokenizer.py does."""
    pieces = [b"<unk>", b"\n<s>\n", b"\n</s>\n"] + [b"<0x%02X>" % byte for byte in range(256)]
    entries = [(0.0, piece) for piece in pieces] + [(-float(i), p.encode()) for i, p in enumerate(TEXT_PIECES)]
    packed = b"".join(struct.pack("<fi", score, len(piece)) + piece for score, piece in entries)
    path.write_bytes(struct.pack("<i", max(len(piece) for _, piece in entries)) + packed)
    return [piece for _, piece in entries]


def run_c_forward(w: dict[str, np.ndarray], tokens: list[int]) -> np.ndarray:
    """Compute logits [T, V] like run.c: token by token, rotating neighboring pairs (2i, 2i+1)."""
    d, _, n, heads, kv_heads, _, _ = SHAPE
    h = d // heads
    norm = lambda x, weight: weight * x / np.sqrt((x * x).mean() + 1e-5)
    keys, values, out = [[[] for _ in range(n)] for _ in range(2)] + [[]]

    def rotate(x, position):
        x = x.copy()
        for i in range(0, len(x), 2):
            angle = position / 10000 ** ((i % h) / h)
            c, s = np.cos(angle), np.sin(angle)
            x[i], x[i + 1] = x[i] * c - x[i + 1] * s, x[i] * s + x[i + 1] * c
        return x

    for position, token in enumerate(tokens):
        x = w["embed"][token].astype(np.float64)
        for i in range(n):
            y = norm(x, w["rms_att"][i])
            q = rotate(w["wq"][i] @ y, position)
            keys[i].append(rotate(w["wk"][i] @ y, position))
            values[i].append(w["wv"][i] @ y)
            parts = []
            for head in range(heads):
                at = head // (heads // kv_heads) * h
                scores = np.array([q[head * h : head * h + h] @ k[at : at + h] for k in keys[i]]) / np.sqrt(h)
                weights = np.exp(scores - scores.max())
                parts.append(sum(a * v[at : at + h] for a, v in zip(weights / weights.sum(), values[i], strict=True)))
            x = x + w["wo"][i] @ np.concatenate(parts)
            y = norm(x, w["rms_ffn"][i])
            gate = w["w1"][i] @ y
            x = x + w["w2"][i] @ (gate / (1 + np.exp(-gate)) * (w["w3"][i] @ y))
        out.append(w.get("wcls", w["embed"]) @ norm(x, w["rms_final"]))
    return np.stack(out)


def run_c_encode(pieces: list[tuple[str, float]], text: str) -> list[int]:
    """Encode like run.c: prepend a space, split into characters or bytes, then apply the best leftmost merge."""
    vocab = {piece: i for i, (piece, _) in enumerate(pieces)}
    ids = []
    for character in " " + text if text else "":
        ids += [vocab[character]] if character in vocab else [byte + 3 for byte in character.encode()]
    while True:
        joined = [pieces[a][0] + pieces[b][0] for a, b in itertools.pairwise(ids)]
        found = [(pieces[vocab[whole]][1], -i) for i, whole in enumerate(joined) if whole in vocab]
        if not found:
            return [1, *ids]
        i = -max(found)[1]
        ids[i : i + 2] = [vocab[joined[i]]]


@pytest.mark.parametrize("tied", [True, False], ids=["shared embedding", "own output matrix"])
def test_converted_model_computes_what_run_c_computes(tmp_path, tied):
    weights = write_checkpoint(tmp_path / "model.bin", tied=tied)
    write_tokenizer(tmp_path / "tok.bin")
    convert(tmp_path / "model.bin", tmp_path / "tok.bin", tmp_path / "hf")
    policy = from_pretrained(tmp_path / "hf")
    tokens = [1, 5, 264, 30, 261, 7, 7, 269]
    logits = policy.model.apply({"params": policy.params}, np.array([tokens], np.int32))[0]
    np.testing.assert_allclose(logits, run_c_forward(weights, tokens), atol=2e-4)
    assert policy.eos_token_ids == (1,)
    assert policy.pad_token_id == 0


@pytest.mark.quick
def test_tokenizer_encodes_as_run_c_and_decodes_to_the_text(tmp_path):
    write_tokenizer(tmp_path / "tok.bin")
    pieces = read_pieces(tmp_path / "tok.bin", SHAPE.vocab_size)
    tokenizer = make_tokenizer(pieces, SHAPE.max_seq_len)
    # "her" may be merged as he + r or as h + er.
    for text in [*TEXTS, "the other hers hher theer", "<0x0A>"]:
        ids = tokenizer(text)["input_ids"]
        assert ids == run_c_encode(pieces, text)
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.model_max_length == SHAPE.max_seq_len
