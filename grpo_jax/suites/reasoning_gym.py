"""reasoning-gym: more than a hundred tasks, made from a seed, each with a verifier that scores an answer."""

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
    level: int | Sequence[int] | None = None,
    system_prompt: str | None = None,
    answer_tag: str | None = None,
    timeout: float | None = None,
    **settings: object,
) -> Suite:
    """Return tasks of [reasoning-gym](https://github.com/open-thought/reasoning-gym), with its verifiers as the reward.

    Row i is what the suite itself makes: `create_dataset(task, size=size, seed=seed, **settings)[i]`, or, of several
    tasks, item i of its own `composite`, which draws a task for each item by the weights. Its columns are `question`,
    `answer` and `metadata` as they come from there, `task`, the task's name, and `settings` and `answer_tag`, by which
    the reward finds the verifier; of one task also `level`, where that is given. The reward is the verifier's score of
    the answer, 0 to 1; `reasoning_gym/<task>` in the metrics is its mean for each task.

    Most items are drawn from `seed + i`: datasets whose seeds are nearer than their size share items. Give the seed of
    held-out tasks a distance of `size` at least.

    Args:
      task: a name; or for several `{name: settings}`, where `weight` (default 1) is a share, `level` as below, and the
        rest is the task's own.
      size: rows.
      seed: of the suite.
      level: of the difficulty, from 0 up: the suite's own curriculum of the task sets the settings that it knows. A
        list: as many rows of each of these levels, in this order, in which `shuffle_dataset=False` takes them.
      system_prompt: a text, or the name of one of the suite's own (`reasoning_gym.utils.SYSTEM_PROMPTS`), all of which
        ask for `<answer>`.
      answer_tag: the answer is what stands in the last `<answer_tag>…</answer_tag>`, found by the suite's own
        `extract_answer`. None: "answer" if one of the suite's system prompts is shown, else the whole completion
        without the white space around it.
      timeout: seconds in which a completion is scored, in a worker process that is killed after them (`isolated`).
        None: in this process, and however long it takes; some verifiers `eval` what the model has written.
      settings: of the task's own config, such as `max_terms`; of several tasks, each has them behind its name.

    Raises:
      ValueError: reasoning-gym is not installed; an unknown task or setting, or a value that it refuses; no such level.

    Example:
      >>> suite = reasoning_gym("chain_sum", size=2, seed=1, min_terms=2, max_terms=2)  # doctest: +SKIP
      >>> suite.rows[0]["prompt"], suite.rows[0]["answer"]  # doctest: +SKIP
      ([{'role': 'user', 'content': 'State the final answer to the following arithmetic problem: 23 + 91 ='}], '114')
    """
    if not isinstance(task, str) and (settings or level is not None):
        name = next(iter(settings), "level")
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
    items = _items(task, settings, level, size, seed) if isinstance(task, str) else _drawn(task, size, seed)
    rows = [
        {
            "prompt": [*before, {"role": "user", "content": entry["question"]}],
            **{name: entry[name] for name in ("question", "answer", "metadata")},
            "task": name,
            "settings": own,
            "answer_tag": answer_tag,
            **({"level": own["level"]} if isinstance(task, str) and "level" in own else {}),
        }
        for name, own, entry in items
    ]
    # The suite's own function goes to a worker by reference, which imports the suite before the time begins.
    score = functools.partial(_score, extract=utils.extract_answer)
    if timeout is None:
        return Suite(rows=rows, reward_fns=[_ByTask(score)])
    return Suite(rows=rows, reward_fns=[_ByTask(isolated(score, timeout=timeout, completions_per_call=1))])


_Item = tuple[str, Json, Foreign]
"""A task's name, its settings, and the item that the suite has made."""


def _items(task: str, settings: Json, level: int | Sequence[int] | None, size: int, seed: int) -> Iterator[_Item]:
    """Yield the items of one task, at one level after the other."""
    levels = [level] if level is None or isinstance(level, int) else list(level)
    if not levels:
        raise ValueError("level = []: give at least one")
    of_levels = [dict(settings) if one is None else {**settings, "level": one} for one in levels]
    made = [_dataset(task, own, size, seed) for own in of_levels]
    for index in range(size):
        which = index * len(levels) // size
        yield task, of_levels[which], made[which][index]


def _drawn(tasks: Mapping[str, Json | None], size: int, seed: int) -> Iterator[_Item]:
    """Yield the items of the suite's own composite of several tasks."""
    composite = import_extra("reasoning_gym.composite", _PACKAGE)
    if not isinstance(tasks, Mapping) or not tasks:
        raise ValueError(f"reasoning_gym = {show(tasks)}: give the name of a task, or {{name: settings}} for several")
    weights, of_tasks = {}, {}
    for name, given in tasks.items():
        own = dict(given or {})
        weights[name] = own.pop("weight", 1.0)
        if isinstance(weights[name], bool) or not isinstance(weights[name], int | float) or not weights[name] > 0:
            raise ValueError(f"{name}.weight = {show(weights[name])}: give a positive number")
        of_tasks[name] = own
        _dataset(name, own, 1, seed)  # refused with its name
    specs = [composite.DatasetSpec(name, weights[name], _config(name, own)) for name, own in of_tasks.items()]
    made = composite.CompositeDataset(composite.CompositeConfig(size=size, seed=seed, datasets=specs))
    for index in range(size):
        entry = made[index]
        name = entry["metadata"]["source_dataset"]
        yield name, of_tasks[name], entry


def _dataset(task: str, settings: Json, size: int, seed: int) -> Foreign:
    """Make a dataset of the suite, or say what it refuses."""
    factory = import_extra("reasoning_gym.factory", _PACKAGE)
    if task not in factory.DATASETS:
        near = nearest(task, factory.DATASETS)
        hint = f"did you mean {near!r}?" if near else "reasoning_gym.factory.DATASETS has their names"
        raise ValueError(f"reasoning-gym has no task {show(task)}; {hint}")
    _, config = factory.DATASETS[task]
    known = {field.name for field in dataclasses.fields(config)} - {"seed", "size"}
    for name in settings:
        if name not in known | {"level"}:
            near = nearest(name, known)
            hint = f"did you mean {near!r}?" if near else f"it has {', '.join(sorted(known)) or 'none'}"
            raise ValueError(f"{task}.{name}: no such setting of this task; {hint}")
    own = _config(task, settings)
    try:
        json.dumps(settings)  # rows carry them to the reward
        return factory.create_dataset(task, **own, size=size, seed=seed)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"reasoning-gym refuses {task} with {show(own)} ({type(error).__name__}: {error})") from error


def _config(task: str, settings: Json) -> dict[str, Foreign]:
    """Return the settings of a task's config, with those that a level of its curriculum stands for."""
    own = dict(settings)
    level = own.pop("level", None)
    if level is None:
        return own
    factory = import_extra("reasoning_gym.factory", _PACKAGE)
    if not factory.has_curriculum(task):
        raise ValueError(f"{task}.level = {show(level)}: the suite has no curriculum of this task; leave it out")
    curriculum = factory.create_curriculum(task)
    last = max(len(attribute.levels) for attribute in curriculum.attributes.values()) - 1
    if isinstance(level, bool) or not isinstance(level, int) or not 0 <= level <= last:
        raise ValueError(f"{task}.level = {show(level)}: its curriculum has the levels 0 to {last}")
    curriculum.set_global_level(level)
    made = curriculum.generate_configuration()
    of_level = {name: getattr(made, name) for name in _set_by(curriculum)}
    if both := sorted(of_level.keys() & own.keys()):
        raise ValueError(f"{task}.{both[0]}: the level sets it too; give one of the two")
    return own | of_level


def _set_by(curriculum: Foreign) -> list[str]:
    """Return the names of the settings that a curriculum sets."""
    fields = ("field_name", "lower_field_name", "upper_field_name")
    named = [getattr(attribute, field, None) for attribute in curriculum.attributes.values() for field in fields]
    return [name for name in named if name is not None]


@functools.lru_cache(256)
def _verifier(task: str, settings: str) -> Callable[[str | None, Json], float]:
    """Return `score_answer` of a task; some have settings of their own."""
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
    """Score completions by the verifiers of the suite; beside them the columns of their rows."""
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
    """`_score`, here or in a worker, which also logs its mean for each task."""

    score: Callable[..., Foreign]
    __name__ = "reasoning_gym"

    @property
    def reward_arguments(self) -> dict[str, bool]:
        """Most columns hide behind `**columns`."""
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
