"""`grpo-jax init`: a folder with a run that works at once, to be changed piece by piece into one's own."""

from __future__ import annotations

import json
from pathlib import Path

import jax

from grpo_jax.hub.huggingface import save_pretrained
from grpo_jax.hub.policy import init_policy, quiet_import
from grpo_jax.types import Tokenizer

RUN = "my_run.yaml"

_RUN = """\
# A run to begin with, in this folder:
#
#     grpo-jax train my_run.yaml                       # again: it goes on where it stopped
#     grpo-jax chat runs/{name} --say "{cue}"
#
# Then put your own rows, your own reward and your own model in their places, one after another.

model: {model}
data: rows.jsonl                  # one JSON object on each line; or a file of CSV or Parquet, or a dataset of the hub
prompt: {prompt}
rewards: [rewards.py:{reward}]    # a function of the file beside this one
run_dir: runs/{name}               # in the folder that grpo-jax is called in: report.html, metrics.jsonl, checkpoints

max_steps: 100
num_generations: 8                # completions of each prompt
per_device_train_batch_size: 8    # completions at a time: a group
gradient_accumulation_steps: 8    # prompts of a step
max_completion_length: {length}
learning_rate: {rate}             # the smaller the model, the larger: README has a table
lr_scheduler_type: constant       # so that max_steps may be raised later
"""

_LETTERS = '''\
"""The reward of my_run.yaml: edit this file, or name a function of another one."""


def in_word(completions, word, **columns):
    """Each completion's share of characters that are letters of its row's word.

    `completions` has a text for each completion; every column of rows.jsonl comes as a list of the same length.
    """
    return [
        sum(character in letters for character in completion) / max(len(completion), 1)
        for completion, letters in zip(completions, word)
    ]
'''

_SUMS = '''\
"""The reward of my_run.yaml: edit this file, or name a function of another one."""

import re


def right(completions, answer, **columns):
    """1 for each completion that is the number of its row alone, 0.3 where that is its last number, else 0.

    `completions` has a list of messages for each completion; every column of rows.jsonl comes as a list of that length.
    """
    rewards = []
    for completion, truth in zip(completions, answer):
        text = completion[0]["content"].strip()
        numbers = re.findall(r"-?\\d+", text)
        rewards.append(1.0 if text == truth else 0.3 if numbers and numbers[-1] == truth else 0.0)
    return rewards
'''

_WORDS = ("cat", "bird", "hello", "moon", "apple", "jump", "quick", "water", "fox", "zebra")
_PAIRS = ((17, 25), (9, 8), (31, 12), (5, 46), (28, 14), (33, 30), (7, 19), (22, 41), (50, 13), (16, 16))


def write_start(folder: str | Path, model: str | None = None) -> list[Path]:
    """Write a run, ten rows and a reward function into a new folder, and return the files, the run first.

    An existing file is a ValueError. `model` is an instruct checkpoint, which learns to answer sums with the number
    only. None writes a tiny model of fresh weights too, which learns to write the letters of a given word.
    """
    folder = Path(folder).expanduser()
    files = [folder / name for name in (RUN, "rows.jsonl", "rewards.py")]
    there = [path for path in (*files, *([] if model else [folder / "model"])) if path.exists()]
    if there:
        raise ValueError(f"{there[0]} is there already: give a new folder, or move it away")
    folder.mkdir(parents=True, exist_ok=True)
    if model is None:
        save_pretrained(folder / "model", init_policy(_CONFIG, jax.random.key(0), tokenizer=_letters()))
    rows = [{"question": f"{a} + {b}", "answer": str(a + b)} for a, b in _PAIRS] if model else []
    rows = rows or [{"word": word} for word in _WORDS]
    about = _ABOUT_SUMS | {"model": json.dumps(model)} if model else _ABOUT_LETTERS
    run = _RUN.format_map(about | {"name": folder.resolve().name})
    contents = (run, "".join(json.dumps(row) + "\n" for row in rows), _LETTERS if model is None else _SUMS)
    for path, content in zip(files, contents, strict=True):
        path.write_text(content, encoding="utf-8")
    return files


_ABOUT_LETTERS = {
    "model": "model                      # a tiny one of fresh weights; or a name on the hub, or a directory",
    "cue": "cat: ",
    "prompt": '"{word}: "                # made of a row\'s columns; or a list of messages, for an instruct model',
    "reward": "in_word",
    "length": 8,
    "rate": "3e-3",
}
_ABOUT_SUMS = {
    "cue": "What is 12 + 30? Answer with the number only.",
    "prompt": '[{role: user, content: "What is {question}? Answer with the number only."}]',
    "reward": "right",
    "length": 24,
    "rate": "1e-5",
}
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


def _letters() -> Tokenizer:
    """A tokenizer whose tokens are the printable characters of ASCII."""
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, pre_tokenizers

    with quiet_import():
        from transformers import PreTrainedTokenizerFast

    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    named = ["<pad>", "<eos>", *[c for c in characters if c.isascii()], "Ġ", "Ċ"]
    fast = Fast(models.BPE(vocab={token: i for i, token in enumerate(dict.fromkeys(named))}, merges=[]))
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="<pad>", eos_token="<eos>")
