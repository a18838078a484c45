"""Problems of reasoning-gym as rows, and its verifiers as a reward function; needs nothing else that is installed.

`experiments.instruct` learns them, and `experiments.real_model` times an iteration on them, here and in TRL.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

TASKS: dict[str, dict[str, Any]] = {
    "needle_haystack": {"min_num_statements": 2, "max_num_statements": 3},
    "family_relationships": {"min_family_size": 3, "max_family_size": 4},
}
"""Tasks of reasoning-gym and their settings."""
LEARNT = tuple(TASKS)
GENERAL = "syllogism"
"""A task of the suite that is not learnt."""
EXAMPLES, SHOWN = 5_000_000, 100
"""Seed and number of the solved problems; one precedes each problem, to show the form of an answer.

Not the same one before all: its answer would be what the model says, and is rewarded for now and then.
"""

Row = dict[str, Any]


@functools.cache
def problems(task: str, seed: int, size: int) -> Any:
    """Problems of the suite, with their verifier."""
    import reasoning_gym

    return reasoning_gym.create_dataset(task, seed=seed, size=size, **TASKS.get(task, {}))


def make_rows(tasks: Sequence[str], seed: int, size: int, *, without: Sequence[Row] = ()) -> list[Row]:
    """Problems as rows, a task after the other in turns, each question once.

    Args:
      tasks: names of the suite.
      seed: of the suite; the same seed makes the same problems.
      size: problems that are made of each task; those that come twice, or stand in `without`, are left out.
      without: rows whose questions are not to be made.
    """
    seen = {row["prompt"][-1]["content"] for row in without}
    each: list[list[Row]] = []
    for task in tasks:
        each.append([])
        for index in range(size):
            question = _says("user", problems(task, seed, size)[index]["question"])
            if question["content"] not in seen:
                seen.add(question["content"])
                shown = problems(task, EXAMPLES, SHOWN)[index % SHOWN]
                before = [_says("user", shown["question"]), _says("assistant", shown["answer"])]
                each[-1].append({"prompt": [*before, question], "task": task, "problem": [seed, size, index]})
    return [row for rows in itertools.zip_longest(*each) for row in rows if row is not None]


def _says(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text.strip()}


def score(completions: Sequence[Any], task: Sequence[str], problem: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """What the suite's verifier gives each completion, from 0 to 1.

    Example:
      >>> row = make_rows(["chain_sum"], seed=1, size=1)[0]
      >>> answer = problems("chain_sum", 1, 1)[0]["answer"]
      >>> score([f" {answer}", "no idea"], [row["task"]] * 2, [row["problem"]] * 2)
      [1.0, 0.0]
    """
    scores = []
    for completion, name, (seed, size, index) in zip(completions, task, problem, strict=True):
        made = problems(name, seed, size)
        scores.append(float(made.score_answer(_text(completion).strip(), made[index])))
    return scores


def _text(completion: Any) -> str:
    """What the model said, of a text or a conversation."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def right(completions: Sequence[Any], task: Sequence[str], problem: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """1 for what the verifier takes for the answer, else 0."""
    return [float(value == 1) for value in score(completions, task, problem)]
