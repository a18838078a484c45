"""More than a hundred procedurally generated tasks with verifiers, from the `reasoning-gym` package."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence

from grpo_jax.messages import import_extra, show
from grpo_jax.rewards.contract import select_inputs
from grpo_jax.rewards.outcomes import PartialRewards
from grpo_jax.rewards.shipped import from_row
from grpo_jax.rewards.workers import isolated
from grpo_jax.types import Foreign, Json, Messages, RewardValues, Row, Suite

_PACKAGE = "reasoning-gym"
_COLUMNS = ("question", "answer", "metadata", "task", "settings", "answer_tag")


def reasoning_gym(
    task: str,
    *,
    size: int = 500,
    seed: int = 0,
    system_prompt: str | None = None,
    answer_tag: str | None = None,
    timeout: float | None = None,
    **settings: object,
) -> Suite:
    """Return a [reasoning-gym](https://github.com/open-thought/reasoning-gym) task, with its verifier as the reward.

    Row i is item i of `reasoning_gym.create_dataset(task, size=size, seed=seed, **settings)`. Most tasks generate it
    from `seed + i`, so datasets whose seeds differ by less than `size` share items. The reward is the verifier's score,
    between 0 and 1. The reward function reads the task from the row's columns, so rows from several tasks can be
    concatenated. The mean reward for each task is logged as the metric `reasoning_gym/<task>`.

    Args:
      task: task name, such as `chain_sum`.
      size: number of rows.
      seed: dataset seed.
      system_prompt: system prompt, or a key of `reasoning_gym.utils.SYSTEM_PROMPTS`, which all request `<answer>` tags.
      answer_tag: tag name. The answer is the content of the last `<answer_tag>…</answer_tag>`. If None, the tag name is
        "answer" for keys of `SYSTEM_PROMPTS`; otherwise the answer is the whole completion, stripped of whitespace.
      timeout: time limit in seconds for scoring a completion in a worker process (see `isolated`). If None, completions
        are scored in this process, without a limit. Some verifiers call `eval` on the completion.
      settings: task settings, such as `max_terms`.
    """
    utils = import_extra("reasoning_gym.utils", _PACKAGE)
    if answer_tag is None and system_prompt in utils.SYSTEM_PROMPTS:
        answer_tag = "answer"
    system = utils.SYSTEM_PROMPTS.get(system_prompt, system_prompt)
    instructions: Messages = [] if system is None else [{"role": "system", "content": system}]
    dataset = _dataset(task, settings, size, seed)
    rows = [
        {
            "prompt": [*instructions, {"role": "user", "content": item["question"]}],
            **{column: item[column] for column in ("question", "answer", "metadata")},
            "task": task,
            "settings": settings,
            "answer_tag": answer_tag,
        }
        for item in (dataset[index] for index in range(size))
    ]
    # Unpickling `extract_answer` in a worker imports reasoning-gym before the timeout starts.
    score = from_row(functools.partial(_score, extract=utils.extract_answer))
    if timeout is not None:
        score = isolated(score, timeout=timeout, completions_per_call=1)
    return Suite(rows=rows, reward_fns=[_ByTask(score)])


def _dataset(task: str, settings: Json, size: int, seed: int) -> Foreign:
    """Create a reasoning-gym dataset. Raises ValueError for unknown tasks and invalid settings."""
    factory = import_extra("reasoning_gym.factory", _PACKAGE)
    try:
        json.dumps(settings)  # raises TypeError for settings that cannot be passed to `_verifier`
        return factory.create_dataset(task, **settings, size=size, seed=seed)
    except (AssertionError, TypeError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise ValueError(f"task {task!r} cannot be created with settings {show(dict(settings))} ({problem})") from error


@functools.lru_cache(256)
def _verifier(task: str, settings: str) -> Callable[[str | None, Json], float]:
    """Return a task's `score_answer` method, which may depend on the settings."""
    return _dataset(task, json.loads(settings), 1, 0).score_answer


def _score(completion: str, row: Row, *, extract: Callable[..., str | None]) -> float:
    """Score a completion with the verifier of its row's task."""
    tag = row["answer_tag"]
    answer = completion.strip() if tag is None else extract(completion, tag_name=tag)
    return _verifier(row["task"], json.dumps(row["settings"], sort_keys=True))(answer, row)


@dataclasses.dataclass(frozen=True)
class _ByTask:
    """A reward function that calls `score`, in this process or a worker, and logs rewards separately for each task."""

    score: Callable[..., Foreign]
    __name__ = "reasoning_gym"

    @property
    def reward_arguments(self) -> dict[str, bool]:
        return dict.fromkeys(_COLUMNS, True)

    def __call__(
        self,
        *,
        completions: Sequence[str | Messages],
        log_metric: Callable[[str, Foreign], None] = lambda *_: None,
        **columns: Sequence[object],
    ) -> RewardValues:
        inputs = {"completions": completions} | {name: columns[name] for name in _COLUMNS}
        try:
            scores, failure = self.score(**select_inputs(self.score, inputs)), None
        except PartialRewards as partial:
            scores, failure = partial.values, partial
        for name, value in zip(inputs["task"], scores, strict=True):
            if value is not None:
                log_metric(f"reasoning_gym/{name}", value)
        if failure is not None:
            raise failure
        return scores
