"""The schedule of checkpoints, the best of them and those that are kept, by their steps alone.

A checkpoint is scheduled at each multiple of `save_steps` and at the last step. Those that a stop, an error or the
clock (`save_minutes`) adds are there to go on from: none of them becomes the best, and beside scheduled ones none takes
a place of `save_total_limit` (`kept_of` has the rule). So a run that was interrupted ends with the checkpoints, and
with the best, of one that was not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_jax.config.sft import Config


def is_scheduled(config: Config, step: int, last: int | None) -> bool:
    """Whether an undisturbed run, whose last step is `last`, has a checkpoint of this step.

    Example:
      >>> from grpo_jax import GRPOConfig
      >>> [step for step in range(9) if is_scheduled(GRPOConfig(save_steps=3), step, 8)]
      [3, 6, 8]
    """
    return step == last or (config.save_steps is not None and step > 0 and step % config.save_steps == 0)


def best_of(
    config: Config, steps: Sequence[int], metrics: Mapping[str, float], last: int | None
) -> tuple[int, float] | None:
    """Step and metric of the best scheduled checkpoint, the later of two as good; None if none was measured.

    Example:
      >>> from grpo_jax import GRPOConfig
      >>> best_of(GRPOConfig(metric_for_best_model="loss", save_steps=2), [2, 4, 5], {"2": 0.1, "4": 0.1, "5": 0.0}, 8)
      (4, 0.1)
    """
    sign = 1 if config.best_is_greatest else -1
    measured = [(sign * metrics[str(step)], step) for step in steps if str(step) in metrics]
    value, step = max((one for one in measured if is_scheduled(config, one[1], last)), default=(0.0, None))
    return None if step is None else (step, sign * value)


def kept_of(config: Config, steps: Sequence[int], metrics: Mapping[str, float], last: int | None) -> set[int]:
    """The steps whose checkpoints are kept.

    As many of the newest scheduled ones as `save_total_limit` says (None: all), the best, and what is newer than all
    scheduled ones, at most as many too (None: one). Where `save_steps` is None there is no schedule, and with a limit
    all take places.

    Example:
      >>> from grpo_jax import GRPOConfig
      >>> [sorted(kept_of(GRPOConfig(save_steps=2, save_total_limit=n), [2, 4, 5, 6, 7], {}, 8)) for n in (1, None)]
      [[6, 7], [2, 4, 6, 7]]
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
