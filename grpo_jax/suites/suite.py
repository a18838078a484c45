"""A suite as a run takes it: its rows, and who answers and who judges."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from grpo_jax.messages import show
from grpo_jax.types import Environments, RewardFn, Row

Foreign = Any
"""A module of a suite's own package, or an object of it: the package may not be here, and neither are its types."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suite:
    """Tasks of somebody else, in the arguments of `train`.

    ```
    suite = reasoning_gym("chain_sum", size=2000, seed=1)
    train(policy, suite.rows, suite.reward_fns, GRPOConfig(reward_weights=suite.reward_weights, ...),
          tools=suite.tools, environment_factory=suite.environment_factory)
    ```

    Attributes:
      rows: a dict for each task, with a `prompt` and the columns that its rewards take.
      reward_fns: reward functions of the suite's own; [] where its environments give the rewards.
      reward_weights: a weight for each of them; None for ones.
      tools: functions that the policy may call; None for none.
      environment_factory: what makes an environment for each completion; None for none.
    """

    rows: list[Row]
    reward_fns: list[RewardFn] = dataclasses.field(default_factory=list)
    reward_weights: list[float] | None = None
    tools: list[Callable[..., object]] | None = None
    environment_factory: Environments | None = None


def check_whole_number(name: str, value: object, least: int) -> None:
    """Raise a ValueError unless the value of a suite's argument is a whole number from `least` up."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} = {show(value)}: give a whole number from {least} up")
