"""Arguments of `train` for the tasks of a suite."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from grpo_jax.types import Environments, RewardFn, Row

Foreign = Any
"""A module or object of an optional package."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suite:
    """Tasks of a different package as arguments of `train`, with the same names.

    `rows` contains a dict for each task, with a `prompt` and the columns of the rewards. `reward_fns` is empty if
    environments return the rewards.
    """

    rows: list[Row]
    reward_fns: list[RewardFn] = dataclasses.field(default_factory=list)
    reward_weights: list[float] | None = None
    tools: list[Callable[..., object]] | None = None
    environment_factory: Environments | None = None
