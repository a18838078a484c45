"""Helpers that write a small run's files (checkpoint, rows, reward functions, RUN.yaml) and run commands."""

import contextlib
import functools
import io
import json
from pathlib import Path

import yaml
from tiny import tiny_policy

from grpo_jax import save_pretrained
from grpo_jax.cli.main import main

REWARDS = """
from grpo_jax.rewards import from_row

@from_row
def early(completion, row):
    return sum(character < "n" for character in completion) / 4

def broken(completions, **columns):
    raise KeyError("a bug in user code")
"""
VALUES = """
model: model
data: rows.jsonl
eval_data: {path: rows.jsonl, rows: 2}
prompt: 'say {question}: '
rewards: ['judging.py:early', {accuracy_reward: answer}]
num_generations: 2
per_device_train_batch_size: 2
max_completion_length: 4
max_steps: 2
learning_rate: 0.01
lr_scheduler_type: constant
logging_steps: 1
seed: 0
"""


def write_run(folder: Path, **changes) -> Path:
    """Write the files of a two-step run and return its RUN.yaml; a key changed to None is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model").exists():
        save_pretrained(folder / "model", tiny_policy())
    questions = [{"question": letter * n, "answer": letter} for letter in "ab" for n in (1, 2)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    (folder / "judging.py").write_text(REWARDS)
    values = yaml.safe_load(VALUES) | {"run_dir": str(folder / "run")} | changes
    path = folder / "my_run.yaml"
    path.write_text(yaml.safe_dump({name: value for name, value in values.items() if value is not None}))
    return path


def run(*arguments) -> str:
    """Run a command and return its standard output."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        main([str(argument) for argument in arguments])
    return printed.getvalue()


lines_of = functools.partial(map, json.loads)
