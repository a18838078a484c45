"""What the loop tells the outside: one object that passes it on to files, callbacks, the stopwatch and the screen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from grpo_jax.config import GRPOConfig
from grpo_jax.models.transformer import count_parameters
from grpo_jax.report import Callback, Phases, RunWriter, check_callbacks, describe_run, notify
from grpo_jax.state import TrainState

__all__ = ["Monitor"]


class Monitor:
    """Files, callbacks, stopwatch and display of one run; a context manager, which draws the picture at its end."""

    def __init__(self, run_dir: str | Path | None, callbacks: Sequence[Callback] = ()):
        self.phase = Phases()
        self._writer = RunWriter(run_dir)
        self._callbacks = check_callbacks(callbacks)
        self._waiting: dict[str, float] = {}
        self._tokens = 0.0

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *_: Any) -> None:
        self._writer.report()

    def start(self, config: GRPOConfig, state: TrainState, *, num_rows: int, dropped: int) -> None:
        """Say what the run will be, and cut the files of an earlier part of it back to where it goes on."""
        step = int(state.step)
        self._writer.truncate(step if step else -1)
        self._writer.config(config)
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        print(
            describe_run(
                config,
                num_rows=num_rows,
                num_parameters=count_parameters(state.params),
                state_bytes=size,
                device=jax.devices()[0].device_kind,
            )
        )
        if dropped:
            print(f"{dropped} rows were left out: their prompts are longer than max_prompt_length.")
        if step:
            print(f"continuing at step {step}")

    def completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Keep the completions that were sampled at `step`."""
        self._writer.completions(step, rows)

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep an evaluation; it is logged with the next line, or alone before the first step."""
        self._waiting |= metrics
        if step == 0:
            self._emit(step, {})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a line of metrics and show it."""
        seconds = self.phase.take()
        metrics = {**metrics, **seconds}
        if seconds["seconds/total"] > 0:
            metrics["tokens_per_second"] = (metrics["num_tokens"] - self._tokens) / seconds["seconds/total"]
        self._tokens = metrics["num_tokens"]
        self._emit(step, metrics)

    def _emit(self, step: int, metrics: Mapping[str, float]) -> None:
        line = {**metrics, **self._waiting}
        self._waiting = {}
        self._writer.metrics(step, line)
        notify(self._callbacks, step, line)
        shown = ("reward", "kl", "completions/mean_length", "tokens_per_second", "seconds/total")
        parts = [f"{name} {line[name]:.4g}" for name in shown if math.isfinite(line.get(name, math.nan))]
        parts += [f"{name} {value:.3f}" for name, value in line.items() if name.startswith("eval/")]
        print(f"step {step}: " + " · ".join(parts))
