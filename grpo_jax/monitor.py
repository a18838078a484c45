"""What the loop tells the outside: one object that passes it on to files, callbacks, the stopwatch and the screen."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from grpo_jax.config import GRPOConfig
from grpo_jax.display import Display
from grpo_jax.models.transformer import count_parameters
from grpo_jax.progress import Progress
from grpo_jax.report import Callback, Phases, RunWriter, check_callbacks, describe_run, notify
from grpo_jax.state import TrainState

__all__ = ["Monitor"]

KL_WINDOW = 50
"""Logged steps over which a KL has to go on rising before a hint is given."""


class Monitor:
    """Files, callbacks, stopwatch and display of one run; a context manager, which draws the picture at its end."""

    def __init__(
        self, run_dir: str | Path | None, config: GRPOConfig, *, callbacks: Sequence[Callback] = (), quiet: bool = False
    ):
        self.phase = Phases()
        self._config = config
        self._writer = RunWriter(run_dir)
        self._callbacks = check_callbacks(callbacks)
        self._display = Display(quiet=quiet)
        self._tokens = 0.0
        self._kl_to_reference: list[float] = []
        self._kl_is_watched = not config.sync_ref_model

    def __enter__(self) -> Monitor:
        self._display.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._display.__exit__(*error)
        self._writer.report()

    def start(
        self,
        state: TrainState,
        progress: Progress,
        *,
        total_steps: int,
        num_rows: int,
        num_dropped: int = 0,
        resumed: bool = False,
    ) -> None:
        """Say what the run will be, and cut the files of an earlier part of it back to where it goes on."""
        self._writer.truncate(progress.step if resumed else -1, evaluated=progress.evaluated == progress.step)
        self._writer.config(self._config)
        self._display.say(
            describe_run(
                self._config,
                num_rows=num_rows,
                num_parameters=count_parameters(state.params),
                state_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(state)),
                device=jax.devices()[0].device_kind,
            )
        )
        if num_dropped:
            self._display.say(f"{num_dropped} rows are left out: their prompts are longer than max_prompt_length")
        if resumed:
            self._display.say(f"going on after step {progress.step}")
        self._display.start(total_steps, step=progress.step)
        self._tokens = float(progress.tokens)
        self.phase.take()

    def completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Keep the completions that the update which makes `step` will learn from."""
        self._writer.completions(step, rows)
        if self._config.log_completions and step % self._config.logging_steps == 0:
            self._display.completions(rows, self._config.num_completions_to_print)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a line of metrics and show it."""
        seconds = self.phase.take()
        tokens, self._tokens = metrics["num_tokens"] - self._tokens, metrics["num_tokens"]
        rate = {"tokens_per_second": tokens / seconds["seconds/total"]} if seconds["seconds/total"] > 0 else {}
        self._emit(step, {**metrics, **rate, **seconds})
        if "kl" in metrics:
            self._watch_kl(metrics["kl"])

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the line of an evaluation and show it."""
        self._emit(step, {f"eval/{name}": value for name, value in metrics.items()})

    def end(self, step: int, total_steps: int, *, best: tuple[int, float] | None = None) -> None:
        """Say what there is at the end, and how to go on if that is not the end of the run."""
        if best is not None:
            self._display.say(f"best checkpoint: step {best[0]} ({self._config.metric_for_best_model} {best[1]:.4g})")
        if step < total_steps:
            self._display.say(
                f"stopped after step {step} of {total_steps} and saved: to go on, call train again with this run_dir"
            )

    def _emit(self, step: int, line: Mapping[str, float]) -> None:
        self._writer.metrics(step, line)
        notify((self._display, *self._callbacks), step, line)

    def _watch_kl(self, kl: float) -> None:
        """Warn once when the KL to a frozen reference has risen for a long stretch (what TR-DPO was made for)."""
        if not self._kl_is_watched:
            return
        history = self._kl_to_reference = [*self._kl_to_reference, kl][-KL_WINDOW:]
        fifth = KL_WINDOW // 5
        if len(history) < KL_WINDOW:
            return
        means = [sum(history[i : i + fifth]) / fifth for i in range(0, KL_WINDOW, fifth)]
        if all(later > earlier for earlier, later in itertools.pairwise(means)) and means[-1] > 2 * means[0]:
            warnings.warn(
                f"the KL to the frozen reference has risen over the last {KL_WINDOW} logged steps, from "
                f"{means[0]:.3g} to {means[-1]:.3g} nats a token: sync_ref_model=True lets the reference follow, a "
                "larger beta or a smaller learning_rate holds the policy back",
                stacklevel=4,
            )
            self._kl_is_watched = False
