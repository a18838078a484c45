"""`grpo-jax init`: writes a small example run as a starting point."""

from __future__ import annotations

import json
import string
from pathlib import Path

import jax

from grpo_jax.hub.huggingface import save_pretrained
from grpo_jax.hub.policy import init_policy, quiet_import
from grpo_jax.types import Tokenizer

_RUN = """\
# A first run, in this directory:
#
#     grpo-jax train my_run.yaml             # to resume, run it again
#     grpo-jax chat "runs/{name}" --say "cat: "
#
# Then replace the rows, the reward function and the model with your own.

model: model                      # a tiny randomly initialized model; or a name on the hub, or a directory
data: rows.jsonl                  # one JSON object per line; or a CSV or Parquet file, or a dataset on the hub
prompt: "{{word}}: "                # a template filled from a row's columns; for an instruct model, a list of messages
rewards: [rewards.py:in_word]     # a function in a file next to this one
run_dir: "runs/{name}"             # relative to the current directory: report.html, metrics.jsonl, checkpoints

max_steps: 100
num_generations: 8                # completions per prompt
per_device_train_batch_size: 8    # completions per micro-batch: one group
gradient_accumulation_steps: 8    # micro-batches per step: 8 prompts
max_completion_length: 8
learning_rate: 3e-3               # larger models need smaller values; see docs/recipes.md
lr_scheduler_type: constant       # allows max_steps to be raised later
"""

_REWARDS = '''\
"""The reward function of my_run.yaml."""


def in_word(completions, word, **columns):
    """Return, for each completion, the fraction of its characters that occur in its row's word.

    `completions` is a list of strings. Every column of rows.jsonl is passed as a list of the same length.
    """
    return [
        sum(character in letters for character in completion) / max(len(completion), 1)
        for completion, letters in zip(completions, word)
    ]
'''

_WORDS = ("cat", "bird", "hello", "moon", "apple", "jump", "quick", "water", "fox", "zebra")


def write_start(folder: str | Path) -> list[Path]:
    """Write a run file, ten rows, a reward function and a tiny model. Returns the paths of the first three.

    The task is to write letters that occur in a given word. Raises ValueError if one of the paths exists.
    """
    folder = Path(folder).expanduser()
    files = [folder / name for name in ("my_run.yaml", "rows.jsonl", "rewards.py")]
    existing = [path for path in (*files, folder / "model") if path.exists()]
    if existing:
        raise ValueError(f"{existing[0]} already exists; move or delete it, or pass a different directory")
    folder.mkdir(parents=True, exist_ok=True)
    save_pretrained(folder / "model", init_policy(_CONFIG, jax.random.key(0), tokenizer=_make_tokenizer()))
    rows = "".join(json.dumps({"word": word}) + "\n" for word in _WORDS)
    name = json.dumps(folder.resolve().name, ensure_ascii=False)[1:-1]  # JSON strings are valid in YAML
    for path, content in zip(files, (_RUN.format(name=name), rows, _REWARDS), strict=True):
        path.write_text(content, encoding="utf-8")
    return files


_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 98,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def _make_tokenizer() -> Tokenizer:
    """Return a byte-level tokenizer whose tokens are the printable ASCII characters."""
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, pre_tokenizers

    with quiet_import():
        from transformers import PreTrainedTokenizerFast

    characters = sorted(string.ascii_letters + string.digits + string.punctuation)
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", *characters, "Ġ", "Ċ"])}  # Ġ, Ċ: space, newline
    fast = Fast(models.BPE(vocab=vocab, merges=[]))
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="<pad>", eos_token="<eos>")
