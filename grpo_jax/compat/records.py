"""The progress of a trainer by TRL's names: its state, its log, what `train` returns, and the files of results."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from grpo_jax.compat.stand_ins import not_here
from grpo_jax.types import Json
from grpo_jax.watch.writer import Line

_STATE = {
    "best_metric": "the run prints its best checkpoint; metric_for_best_model is in log_history",
    "best_model_checkpoint": "load_best_model_at_end=True leaves the best policy in trainer.policy",
    "total_flos": "`grpo_jax.plan` says what a step computes",
}


@dataclasses.dataclass
class TrainerState:
    """`trainer.state`: how far the run is.

    Attributes:
      global_step: optimizer steps up to the last logged one.
      max_steps: optimizer steps of the whole run; 0 before it.
      epoch: times that the dataset was gone through.
      num_train_epochs: that the whole run makes, rounded up.
      num_input_tokens_seen: tokens that the policy drew.
      log_history: the logged lines by TRL's names, each with its `step` and `epoch`.
      is_world_process_zero: whether this process is the one that logs; so is `is_local_process_zero`.
    """

    global_step: int = 0
    max_steps: int = 0
    epoch: float = 0.0
    num_train_epochs: int = 0
    num_input_tokens_seen: int = 0
    log_history: list[dict[str, float]] = dataclasses.field(default_factory=list)
    logging_steps: int = 10
    is_world_process_zero: bool = True
    is_local_process_zero: bool = True

    def __getattr__(self, name: str) -> object:
        raise not_here("trainer.state", name, _STATE)


@dataclasses.dataclass
class TrainerControl:
    """TRL's `control` of callbacks, of which `should_training_stop` is obeyed after a logged step."""

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False


class _Output(NamedTuple):
    global_step: int
    training_loss: float
    metrics: dict[str, float]


class TrainOutput(_Output):
    """The result of `trainer.train()`: `global_step`, `training_loss` and `metrics`, as in TRL."""

    def __getattr__(self, name: str) -> object:
        raise not_here("what train() returns", name, dict.fromkeys([name], "trainer.train_state is the TrainState"))


def state_of(
    lines: Iterable[Line],
    *,
    max_steps: int,
    num_rows: int,
    logging_steps: int,
    reward_names: Iterable[str],
    leads: bool,
) -> TrainerState:
    """Return the state that the lines of a run's metrics come to.

    Example:
      >>> lines = [{"step": 0, "eval/right": 0.5}, {"step": 2, "loss": 0.1, "num_prompts": 4, "num_tokens": 30}]
      >>> state = state_of(lines, max_steps=4, num_rows=8, logging_steps=2, reward_names=["right"], leads=True)
      >>> state.global_step, state.epoch, state.log_history[0]
      (2, 0.5, {'eval_rewards/right/mean': 0.5, 'epoch': 0.0, 'step': 0})
    """
    names, history = set(reward_names), []
    epoch, tokens, step = 0.0, 0, 0
    for line in lines:
        numbers = {name: math.nan if value is None else value for name, value in line.items()}
        step, tokens = int(numbers["step"]), int(numbers.get("num_tokens", tokens))
        epoch = numbers["num_prompts"] / num_rows if "num_prompts" in numbers else epoch
        history.append({**trl_names(numbers, names), "epoch": epoch, "step": step})
    whole = max_steps * epoch / step if step else 0.0
    return TrainerState(
        global_step=step,
        max_steps=max_steps,
        epoch=epoch,
        num_train_epochs=-int(-whole // 1),
        num_input_tokens_seen=tokens,
        log_history=history,
        logging_steps=logging_steps,
        is_world_process_zero=leads,
        is_local_process_zero=leads,
    )


def trl_names(metrics: Mapping[str, float], reward_names: Iterable[str]) -> dict[str, float]:
    """Return the numbers of a line of metrics, but for its step, by TRL's names.

    Example:
      >>> trl_names({"eval/right": 1.0, "eval/mean_length": 3.0, "eval/reward": 1.0}, ["right"])
      {'eval_rewards/right/mean': 1.0, 'eval_completions/mean_length': 3.0, 'eval_reward': 1.0}
      >>> trl_names({"step": 3, "loss": 0.5, "seconds/total": 2.0}, [])
      {'loss': 0.5, 'seconds/total': 2.0, 'step_time': 2.0}
    """
    of_rewards, named = set(reward_names), {}
    for name, value in metrics.items():
        held_out = re.fullmatch(r"eval/(.+)", name)
        if held_out:
            named[f"eval_{evaluation_name(held_out[1], of_rewards)}"] = value
        elif name != "step":
            named[name] = value
    if "seconds/total" in metrics:
        named["step_time"] = metrics["seconds/total"]
    return named


def evaluation_name(name: str, reward_names: Iterable[str]) -> str:
    """TRL's name of a number that an evaluation measures, without its `eval_`."""
    if name in reward_names:
        return f"rewards/{name}/mean"
    return f"completions/{name}" if name in ("mean_length", "clipped_ratio") else name


def output_of(state: TrainerState, *, seconds: float, completions_per_step: float, begun_at: int) -> TrainOutput:
    """Return what `train()` returns of a run that stands at `state` and has taken `seconds` since step `begun_at`.

    Example:
      >>> state = TrainerState(4, 4, 1.0, log_history=[{"loss": 1.0, "step": 2}, {"loss": 0.5, "step": 4}])
      >>> output_of(state, seconds=2.0, completions_per_step=8.0, begun_at=0).metrics["train_steps_per_second"]
      2.0
    """
    total, before = 0.0, 0
    for line in state.log_history:  # a line is the mean over the steps since the one before
        if "loss" in line:
            total, before = total + line["loss"] * (line["step"] - before), int(line["step"])
    loss = total / before if before else 0.0
    steps = state.global_step - begun_at
    metrics = {
        "train_runtime": seconds,
        "train_samples_per_second": steps * completions_per_step / seconds if seconds else 0.0,
        "train_steps_per_second": steps / seconds if seconds else 0.0,
        "train_loss": loss,
        "epoch": state.epoch,
    }
    return TrainOutput(state.global_step, loss, metrics)


def print_metrics(split: str, metrics: Mapping[str, float]) -> None:
    """Print the numbers of a split, one a line."""
    print(f"***** {split} metrics *****")
    width = max(map(len, metrics), default=0)
    for name in sorted(metrics):
        value = metrics[name]
        print(f"  {name:<{width}} = {value:.4f}" if isinstance(value, float) else f"  {name:<{width}} = {value}")


def write_metrics(directory: Path, split: str, metrics: Mapping[str, float], *, combined: bool = True) -> None:
    """Write the numbers of a split into its `_results.json`, and beside those of others into `all_results.json`."""
    directory.mkdir(parents=True, exist_ok=True)
    _write(directory / f"{split}_results.json", dict(metrics))
    if combined:
        together = directory / "all_results.json"
        before = json.loads(together.read_text(encoding="utf-8")) if together.exists() else {}
        _write(together, {**before, **metrics})


def write_state(directory: Path, state: TrainerState) -> None:
    """Write `trainer_state.json`."""
    directory.mkdir(parents=True, exist_ok=True)
    _write(directory / "trainer_state.json", dataclasses.asdict(state))


def _write(path: Path, values: Json) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
