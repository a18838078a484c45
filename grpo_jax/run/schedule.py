"""The schedule of checkpoints, the best of them and those that are kept, by their steps alone.

Checkpoints are scheduled at each multiple of `save_steps` and at the last step. Others (a stop, an error,
`save_minutes`) are only for resuming: an interrupted run ends with the same checkpoints as an undisturbed one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_jax.config.sft import Config


def is_scheduled(config: Config, step: int, last: int | None) -> bool:
    """Whether an undisturbed run, whose last step is `last`, has a checkpoint of this step."""
    return step == last or (config.save_steps is not None and step > 0 and step % config.save_steps == 0)


def best_of(
    config: Config, steps: Sequence[int], metrics: Mapping[str, float], last: int | None
) -> tuple[int, float] | None:
    """Step and metric of the best scheduled checkpoint, the later of two equal ones; None if none was measured."""
    sign = 1 if config.best_is_greatest else -1
    measured = [(sign * metrics[str(step)], step) for step in steps if str(step) in metrics]
    value, step = max((one for one in measured if is_scheduled(config, one[1], last)), default=(0.0, None))
    return None if step is None else (step, sign * value)


def kept_of(config: Config, steps: Sequence[int], metrics: Mapping[str, float], last: int | None) -> set[int]:
    """The steps whose checkpoints are kept.

    Those are the newest `save_total_limit` scheduled ones (None: all), the best, and of those newer than all scheduled
    ones as many again (None: one). Without `save_steps` there is no schedule, and a limit applies to all.
    """
    limit, steps = config.save_total_limit, sorted(steps)
    unplanned = config.save_steps is None and limit is not None
    planned = [step for step in steps if unplanned or is_scheduled(config, step, last)]
    best = best_of(config, steps, metrics, last)
    beside = [step for step in steps if step > max(planned, default=-1)]
    return {*planned[-(limit or 0) :], *beside[-(limit or 1) :], *([] if best is None else best[:1])}


@dataclasses.dataclass
class Retention:
    """A preservation policy of orbax by `kept_of`, with the metrics of the present moment."""

    config: Config
    last: int | None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def should_preserve(self, checkpoints: Sequence[Any], *, context: object) -> list[bool]:
        """Whether each of some checkpoints is kept."""
        steps = [checkpoint.step for checkpoint in checkpoints]
        kept = kept_of(self.config, steps, self.metrics, self.last)
        return [step in kept for step in steps]
