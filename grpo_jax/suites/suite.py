"""A suite's tasks in the form that `train` accepts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from grpo_jax.types import Environments, RewardFn, Row

Foreign = Any
"""Type of modules and objects from optional packages."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suite:
    """Tasks from an external package, as arguments for `train`.

    `rows`, the dataset, contains a dict with a `prompt` for each task. `reward_fns` is empty if environments return the
    rewards. `reward_weights` is a field of the config.
    """

    rows: list[Row]
    reward_fns: list[RewardFn] = dataclasses.field(default_factory=list)
    reward_weights: list[float] | None = None
    tools: list[Callable[..., object]] | None = None
    environment_factory: Environments | None = None
