"""Metrics of the step and columns of `completions.jsonl` that reward functions log beside their rewards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from grpo_jax.rewards.contract import RewardError, SetupError, TrainerState, own_copy

OWN_METRICS = {"step", "num_tokens", "num_prompts", "tokens_per_second", "tokens", "rows", "padding_share"}
OWN_METRICS |= {"reward", "reward_std", "frac_reward_zero_std", "learning_rate", "update_skipped"}
OWN_METRICS |= {"loss", "policy_loss", "aux_loss", "grad_norm", "sampler_gap", "ratio_mean", "ratio_max"}
OWN_METRICS |= {"kl", "kl_in_loss", "kl_initial", "kl_bounded_tokens", "approx_kl_old"}
OWN_METRICS |= {"entropy", "entropy_bonus", "entropy_coef", "selected_entropy", "selected_tokens"}
OWN_METRICS |= {"clip_fraction", "clip_fraction_low", "clip_fraction_high", "clip_fraction_delta"}
"""Metrics that a run logs after the reward functions were called; those of the rollout are at hand by then."""

_OWN_KINDS = ("eval/", "seconds/", "sampler/", "dynamic_sampling/")

OWN_COLUMNS = ("step", "prompt", "completion", "turns", "rewards", "turn_rewards", "advantage", "ended")
"""Columns of `completions.jsonl`."""


class NameTaken(SetupError):
    """A reward function logs something under a name of the run's own."""


def check_metrics(logged: Iterable[str], own: Iterable[str]) -> None:
    """Raise `NameTaken` if a metric that was logged has the name of one of the run's own."""
    taken = sorted({*logged} & {*own})
    if taken:
        raise NameTaken(f"log_metric({taken[0]!r}, ...): this is the name of a metric of the run, log it under another")


class Extras:
    """The arguments of reward functions besides lists, and what functions log by them; one for each batch."""

    def __init__(self, state: TrainerState | None = None):
        self._state = state or TrainerState()
        self._values: dict[str, list[float]] = {}
        self._columns: dict[str, list[Any]] = {}

    def given(self) -> dict[str, Any]:
        """The extras by their names, for `compute_rewards`."""
        return {"trainer_state": self._state, "log_metric": self.log_metric, "log_extra": self.log_extra}

    def log_metric(self, name: str, value: float) -> None:
        """Log a number with the metrics of the step; of several under one name the mean.

        A name of the run's own raises `NameTaken`, which ends the run whatever `on_error` is.
        """
        check_metrics([name], [name] if name.startswith(_OWN_KINDS) else OWN_METRICS)
        self._values.setdefault(name, []).append(float(value))

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Keep a value for each completion in `completions.jsonl`; a column of the run's own raises `NameTaken`."""
        if column in OWN_COLUMNS:
            raise NameTaken(f"log_extra({column!r}, ...): completions.jsonl has this column, choose another name")
        self._columns[column] = own_copy(list(values))

    def values(self) -> dict[str, list[float]]:
        """All numbers that were logged, by their names."""
        return {name: list(values) for name, values in self._values.items()}

    def rows(self, count: int) -> list[dict[str, Any]]:
        """Take what was kept since the last call, as one dict for each of `count` completions."""
        columns, self._columns = self._columns, {}
        for column, values in columns.items():
            if len(values) != count:
                raise RewardError(f"log_extra({column!r}, ...) has {len(values)} values for {count} completions.")
        return [{column: values[index] for column, values in columns.items()} for index in range(count)]

    def __reduce__(self) -> Any:
        raise TypeError(
            "log_metric and log_extra work in the process that trains: a reward function in workers cannot take them."
        )
