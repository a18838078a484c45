"""reasoning-gym: more than a hundred tasks, generated from a seed, each with a verifier that scores an answer."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from grpo_jax.messages import import_extra, nearest, show
from grpo_jax.rewards.contract import arguments_of, call_selected
from grpo_jax.rewards.outcomes import Faults, PartialRewards, give_scores
from grpo_jax.rewards.shipped import completion_text
from grpo_jax.rewards.workers import isolated
from grpo_jax.suites.suite import Foreign, Suite, check_whole_number
from grpo_jax.types import Json, Messages, Scores

_PACKAGE = "reasoning-gym"


def reasoning_gym(
    task: str | Mapping[str, Json | None],
    *,
    size: int = 500,
    seed: int = 0,
    system_prompt: str | None = None,
    answer_tag: str | None = None,
    timeout: float | None = None,
    **settings: object,
) -> Suite:
    """Return tasks of [reasoning-gym](https://github.com/open-thought/reasoning-gym), with its verifiers as the reward.

    Row i is `create_dataset(task, size=size, seed=seed, **settings)[i]` of the suite or, with several tasks, item i of
    its `composite`. Its columns are the suite's `question`, `answer` and `metadata`, and `task`, `settings` and
    `answer_tag`, from which the reward finds the verifier. The reward is the verifier's score of the answer, 0 to 1;
    the metric `reasoning_gym/<task>` is its mean for each task.

    Most items are generated from `seed + i`, so datasets whose seeds differ by less than `size` share items.

    Args:
      task: a name; or for several tasks `{name: settings}`, whose `weight` (default 1) is a share.
      size: rows.
      seed: of the suite.
      system_prompt: a text, or a name in `reasoning_gym.utils.SYSTEM_PROMPTS`, which require `<answer>`.
      answer_tag: the answer is the content of the last `<answer_tag>…</answer_tag>`. None: "answer" with one of the
        suite's system prompts, else the whole completion without white space around it.
      timeout: seconds in which a completion is scored, in a worker process (`isolated`). None: no limit, in this
        process; some verifiers call `eval` on the model's text.
      settings: of the task's config, such as `max_terms`; several tasks have them behind their names.

    Raises:
      ValueError: reasoning-gym is not installed; an unknown task or setting, or a value that the suite refuses.

    Example:
      >>> suite = reasoning_gym("chain_sum", size=2, seed=1, min_terms=2, max_terms=2)  # doctest: +SKIP
      >>> suite.rows[0]["prompt"], suite.rows[0]["answer"]  # doctest: +SKIP
      ([{'role': 'user', 'content': 'State the final answer to the following arithmetic problem: 23 + 91 ='}], '114')
    """
    if not isinstance(task, str) and settings:
        name = next(iter(settings))
        raise ValueError(
            f"{name}: several tasks have their settings behind their names: {{chain_sum: {{{name}: ...}}}}"
        )
    check_whole_number("size", size, 1)
    check_whole_number("seed", seed, 0)
    utils = import_extra("reasoning_gym.utils", _PACKAGE)
    if answer_tag is None and system_prompt in utils.SYSTEM_PROMPTS:
        answer_tag = "answer"
    system = utils.SYSTEM_PROMPTS.get(system_prompt, system_prompt)
    before: Messages = [] if system is None else [{"role": "system", "content": system}]
    if isinstance(task, str):
        dataset = _dataset(task, settings, size, seed)
        items: Iterator[_Item] = ((task, settings, dataset[index]) for index in range(size))
    else:
        items = _composite(task, size, seed)
    rows = [
        {
            "prompt": [*before, {"role": "user", "content": entry["question"]}],
            **{column: entry[column] for column in ("question", "answer", "metadata")},
            "task": name,
            "settings": own,
            "answer_tag": answer_tag,
        }
        for name, own, entry in items
    ]
    # The suite's function is sent to a worker by reference, which imports the suite before the timeout starts.
    score = functools.partial(_score, extract=utils.extract_answer)
    if timeout is None:
        return Suite(rows=rows, reward_fns=[_ByTask(score)])
    return Suite(rows=rows, reward_fns=[_ByTask(isolated(score, timeout=timeout, completions_per_call=1))])


_Item = tuple[str, Json, Foreign]
"""A task's name, its settings, and an item of the suite."""


def _composite(tasks: Mapping[str, Json | None], size: int, seed: int) -> Iterator[_Item]:
    """Yield the items of the suite's composite of several tasks."""
    composite = import_extra("reasoning_gym.composite", _PACKAGE)
    if not isinstance(tasks, Mapping) or not tasks:
        raise ValueError(f"reasoning_gym = {show(tasks)}: give the name of a task, or {{name: settings}} for several")
    specs, settings = [], {}
    for name, given in tasks.items():
        settings[name] = own = dict(given or {})
        weight = own.pop("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not weight > 0:
            raise ValueError(f"{name}.weight = {show(weight)}: give a positive number")
        _dataset(name, own, 1, seed)  # raises an error with the task's name
        specs.append(composite.DatasetSpec(name, weight, own))
    made = composite.CompositeDataset(composite.CompositeConfig(size=size, seed=seed, datasets=specs))
    for index in range(size):
        entry = made[index]
        name = entry["metadata"]["source_dataset"]
        yield name, settings[name], entry


def _dataset(task: str, settings: Json, size: int, seed: int) -> Foreign:
    """Return a dataset of the suite; raise ValueError for what it refuses."""
    factory = import_extra("reasoning_gym.factory", _PACKAGE)
    if task not in factory.DATASETS:
        near = nearest(task, factory.DATASETS)
        hint = f"did you mean {near!r}?" if near else "reasoning_gym.factory.DATASETS has their names"
        raise ValueError(f"reasoning-gym does not have the task {show(task)}; {hint}")
    _, config = factory.DATASETS[task]
    known = {field.name for field in dataclasses.fields(config)} - {"seed", "size"}
    for name in settings:
        if name not in known:
            near = nearest(name, known)
            hint = f"did you mean {near!r}?" if near else f"it has {', '.join(sorted(known)) or 'none'}"
            raise ValueError(f"{task}.{name}: no such setting of this task; {hint}")
    try:
        json.dumps(settings)  # rows pass them to the reward
        return factory.create_dataset(task, **settings, size=size, seed=seed)
    except (AssertionError, TypeError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise ValueError(f"reasoning-gym refuses {task} with {show(dict(settings))} ({problem})") from error


@functools.lru_cache(256)
def _verifier(task: str, settings: str) -> Callable[[str | None, Json], float]:
    """Return `score_answer` of a task; some tasks' depend on its settings."""
    verifier: Callable[[str | None, Json], float] = _dataset(task, json.loads(settings), 1, 0).score_answer
    return verifier


def _score(
    completions: Sequence[str | Messages],
    question: Sequence[str],
    answer: Sequence[str],
    metadata: Sequence[Json],
    task: Sequence[str],
    settings: Sequence[Json],
    answer_tag: Sequence[str | None],
    extract: Callable[..., str | None],
) -> Scores:
    """Score completions by the verifiers of the suite, given the columns of their rows."""
    values, faults = np.full(len(completions), np.nan), Faults()
    columns = zip(completions, question, answer, metadata, task, settings, answer_tag, strict=True)
    for index, (completion, asked, truth, about, name, own, tag) in enumerate(columns):
        text = completion_text(completion)
        found = text.strip() if tag is None else extract(text, tag_name=tag)
        try:
            score = _verifier(name, json.dumps(own, sort_keys=True))
            values[index] = score(found, {"question": asked, "answer": truth, "metadata": about})
        except Exception as error:
            faults[index] = error
    return give_scores(values, faults)


@dataclasses.dataclass(frozen=True)
class _ByTask:
    """`_score`, in this process or a worker, which also logs its mean for each task."""

    score: Callable[..., Foreign]
    __name__ = "reasoning_gym"

    @property
    def reward_arguments(self) -> dict[str, bool]:
        return arguments_of(self.score)

    def __call__(
        self,
        *,
        task: Sequence[str],
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Sequence[object],
    ) -> Scores:
        fault = None
        try:
            scores = call_selected(self.score, {"task": task, **columns})
        except PartialRewards as partial:
            scores, fault = partial.values, partial
        for name, value in zip(task, scores, strict=True):
            if log_metric is not None and value is not None:
                log_metric(f"reasoning_gym/{name}", value)
        if fault is not None:
            raise fault
        return scores
