"""Callback objects of transformers, called with what a run tells: its logged steps, evaluations, beginning and end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from grpo_jax.compat.records import TrainerControl, TrainerState
from grpo_jax.types import Tokenizer
from grpo_jax.watch.trackers import Callback, StopRun

_CALLED = ("on_init_end", "on_train_begin", "on_log", "on_evaluate", "on_train_end")
_EACH_STEP = "on_step_end"
_NOT_NEEDED = {"RichProgressCallback", "ProgressCallback", "PrinterCallback", "NotebookProgressCallback"}
_ELSEWHERE = {
    "LogCompletionsCallback": "log_completions=True shows them, and completions.jsonl holds them",
    "SyncRefModelCallback": "sync_ref_model=True moves the reference",
    "TensorBoardCallback": 'report_to="tensorboard"',
    "WandbCallback": 'report_to="wandb"',
    "TrackioCallback": 'report_to="trackio"',
}


class RichProgressCallback:
    """TRL's name of a display; a run has one, and a trainer leaves this out."""


class Teller(Protocol):
    """A trainer, as callback objects are told of it."""

    @property
    def args(self) -> object:
        """Its arguments."""
        ...

    @property
    def state(self) -> TrainerState:
        """Its state."""
        ...

    @property
    def model(self) -> object:
        """Its model."""
        ...

    @property
    def processing_class(self) -> Tokenizer | None:
        """Its tokenizer."""
        ...


def events_of(callback: object) -> set[str]:
    """The events that a callback object answers: its methods `on_…` but for those of `TrainerCallback` itself."""
    found = set()
    for kind in type(callback).__mro__:
        if kind.__name__ == "TrainerCallback":
            break
        found |= {name for name in vars(kind) if name.startswith("on_")}
    return found


def check_callback(callback: object, logging_steps: int) -> object | None:
    """Return a callback, an object of a class that is given; None for one that shows what the run shows already.

    Raises:
      ValueError: an object that waits for events that there are none of here; each is named.
    """
    callback = callback() if isinstance(callback, type) else callback
    name = type(callback).__name__
    events = events_of(callback)
    if callable(callback) and not events:
        return callback
    if name in _NOT_NEEDED:
        return None
    if name in _ELSEWHERE:
        raise ValueError(f"callbacks has a {name}: {_ELSEWHERE[name]}; leave it out")
    if not events:
        raise ValueError(
            f"callbacks has a {name}: give a function of (step, metrics), or an object with methods such as on_log"
        )
    called = {*_CALLED, *([_EACH_STEP] if logging_steps == 1 else [])}
    never = sorted(events - called)
    if never:
        more = "; with logging_steps=1 on_step_end is called too" if _EACH_STEP in never else ""
        raise ValueError(
            f"callbacks has a {name} with {', '.join(never)}, which nothing here calls: {', '.join(_CALLED)} are"
            f" called, on_log after each logged step{more}"
        )
    return callback


class Told:
    """A callback of `train` that passes what it hears to callback objects of transformers.

    Args:
      callbacks: the objects.
      trainer: who they are told of.
      named: returns the numbers of a line by TRL's names.
    """

    def __init__(
        self, callbacks: list[object], trainer: Teller, named: Callable[[Mapping[str, float]], dict[str, float]]
    ):
        self._callbacks, self._trainer, self._named = callbacks, trainer, named
        self.control = TrainerControl()

    def tell(
        self, event: str, *, logs: dict[str, float] | None = None, metrics: dict[str, float] | None = None
    ) -> None:
        """Call a method of each object that has it."""
        state = self._trainer.state
        for callback in self._callbacks:
            method = getattr(callback, event, None)
            if method is not None:
                answer = method(
                    self._trainer.args,
                    state,
                    self.control,
                    model=self._trainer.model,
                    processing_class=self._trainer.processing_class,
                    logs=logs,
                    metrics=metrics,
                )
                self.control = answer or self.control

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        """Tell of a logged step or an evaluation.

        Raises:
          StopRun: one of the objects has set `control.should_training_stop`.
        """
        logs = self._named(metrics)
        held_out = any(name.startswith("eval/") for name in metrics)
        if not held_out:
            self.tell(_EACH_STEP)
        self.tell("on_log", logs=logs)
        if held_out:
            self.tell("on_evaluate", metrics=logs)
        if self.control.should_training_stop:
            raise StopRun


def functions_of(callbacks: list[object]) -> list[Callback]:
    """Those that are called as `callback(step, metrics)`."""
    return [callback for callback in callbacks if callable(callback) and not events_of(callback)]
