"""A suite as the arguments of `train`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from grpo_jax.messages import show
from grpo_jax.types import Environments, RewardFn, Row

Foreign = Any
"""A module or object of a suite's package, which may not be installed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suite:
    """Tasks of another package, as arguments of `train`.

    ```
    suite = reasoning_gym("chain_sum", size=2000, seed=1)
    train(policy, suite.rows, suite.reward_fns, config, environment_factory=suite.environment_factory)
    ```

    Attributes:
      rows: a dict for each task, with a `prompt` and the columns that its rewards take.
      reward_fns: reward functions; empty if the environments give the rewards.
      reward_weights: a weight for each of them; None: ones.
      tools: functions that the policy may call.
      environment_factory: makes an environment for each completion.
    """

    rows: list[Row]
    reward_fns: list[RewardFn] = dataclasses.field(default_factory=list)
    reward_weights: list[float] | None = None
    tools: list[Callable[..., object]] | None = None
    environment_factory: Environments | None = None


def check_whole_number(name: str, value: object, least: int) -> None:
    """Raise ValueError unless an argument is a whole number from `least` up."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} = {show(value)}: give a whole number from {least} up")
