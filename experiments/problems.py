"""reasoning-gym's problems as rows, and its verifiers as a reward function. No other package is needed.

`experiments.instruct` trains on these problems, and `experiments.real_model` times iterations on them, here and in TRL.
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
"""reasoning-gym tasks and their settings."""
LEARNT = tuple(TASKS)
GENERAL = "syllogism"
"""A reasoning-gym task that is not trained."""
EXAMPLES, SHOWN = 5_000_000, 100
"""Seed and number of the solved examples. One precedes each problem to show the form of an answer.

They differ, since the model would otherwise repeat the one example's answer, which is sometimes correct.
"""

Row = dict[str, Any]


@functools.cache
def problems(task: str, seed: int, size: int) -> Any:
    """Create a reasoning-gym dataset, which contains the problems and their verifier."""
    import reasoning_gym

    return reasoning_gym.create_dataset(task, seed=seed, size=size, **TASKS.get(task, {}))


def make_rows(tasks: Sequence[str], seed: int, size: int, *, without: Sequence[Row] = ()) -> list[Row]:
    """Convert problems to rows, alternating between the tasks. Each question occurs once.

    Args:
      tasks: names of reasoning-gym tasks.
      seed: seed for reasoning-gym; the same seed gives the same problems.
      size: number of problems to generate per task, before repeated questions and those in `without` are removed.
      without: rows whose questions are excluded.
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
    """Return the verifier's score for each completion, from 0 to 1.

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
    """Return the completion's text, or the last message's content."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def right(completions: Sequence[Any], task: Sequence[str], problem: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """Return 1 for each completion that the verifier scores 1, else 0."""
    return [float(value == 1) for value in score(completions, task, problem)]
