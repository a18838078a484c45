"""The host-side state of a `train` or `sft` run: logging, signals, evaluation, checkpoints and publishing."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from grpo_jax.maths.checks import bound_log_probs
from grpo_jax.messages import one_line, show
from grpo_jax.models.sharding import fetch, gather_objects
from grpo_jax.run.checkpoint import RESUME_MODES, Checkpoints, Restored
from grpo_jax.run.compilation_cache import enable_compilation_cache
from grpo_jax.run.policy_checks import check_best_metric
from grpo_jax.run.resume import run_identity
from grpo_jax.run.run import BaseRun, Run, SFTRun
from grpo_jax.run.run_dir import check_processes_share_run_dir, locked, write_policy_files
from grpo_jax.run.signals import Interrupted, StopSignals
from grpo_jax.types import Batch, Params
from grpo_jax.update.state import TrainState
from grpo_jax.update.step import Updater
from grpo_jax.watch.monitor import Callback, Monitor, Progress
from grpo_jax.watch.writer import Line

if TYPE_CHECKING:
    from grpo_jax.run.collect import RolloutSource
    from grpo_jax.run.publish import Publisher


def check_run_dir(run: BaseRun, run_dir: str | Path | None, resume: str) -> None:
    """Raise ValueError if `resume`, `run_dir` or a setting that depends on `run_dir` is invalid."""
    if resume not in RESUME_MODES:
        raise ValueError(f"resume must be one of {', '.join(map(repr, RESUME_MODES))}; got {resume!r}")
    if run_dir is None and resume == "must":
        raise ValueError('resume="must" needs a run directory; pass run_dir')
    if run_dir is None and run.config.load_best_model_at_end:
        raise ValueError("load_best_model_at_end=True needs checkpoints to choose from; pass run_dir")
    if run.config.report_to not in (None, "none"):
        from grpo_jax.watch.trackers import check_trackers

        check_trackers(run.config, run_dir)
    if run.config.push_to_hub:
        from grpo_jax.run.publish import check_push

        check_push(run.policy, run_dir)
    check_processes_share_run_dir(run_dir)


@contextlib.contextmanager
def open_session(
    run: Run | SFTRun,
    run_dir: str | Path | None,
    state: TrainState,
    callbacks: Sequence[Callback] = (),
    hints: Callable[[Line], list[str]] | None = None,
) -> Iterator[Session]:
    """Open a run's `Session` for a `with` block. After the block, calls `StopSignals.exit` if a signal was received.

    `state` is the state at step 0. `hints` is a function that takes a line of metrics and returns a list of messages.
    Signals are deferred unless `run_dir` is None. Only process 0 locks the directory, logs and publishes.
    """
    for callback in callbacks:
        if not callable(callback):
            raise TypeError(f"callbacks must be functions of (step, metrics); got {type(callback).__name__}")
    identity = None if run_dir is None else run_identity(run, state)
    is_logging = jax.process_index() == 0
    log_dir = run_dir if is_logging else None
    publisher = None
    if run.config.push_to_hub:
        assert run_dir is not None  # ensured by `check_run_dir`
        from grpo_jax.run.publish import Publisher

        publisher = Publisher(run.config, run.policy, run_dir)
    with (
        locked(log_dir),
        StopSignals(enabled=run_dir is not None, single_process=jax.process_count() == 1) as signals,
        Checkpoints(run_dir, run.config, identity) as checkpoints,
        Monitor(
            log_dir, run.config, callbacks=callbacks if is_logging else (), hints=hints, quiet=not is_logging
        ) as monitor,
    ):
        session = Session(run, log_dir, monitor, signals, checkpoints, publisher)
        yield session
    if session.signalled():
        signals.exit()


@dataclasses.dataclass
class Session:
    """A run's progress, and the objects that log, stop, save and publish the run.

    `run_dir` is None in all processes except process 0. `train` and `sft` set `evaluate`, which maps params to metrics.
    """

    run: BaseRun
    run_dir: str | Path | None
    monitor: Monitor
    signals: StopSignals
    checkpoints: Checkpoints
    publisher: Publisher | None
    progress: Progress = dataclasses.field(default_factory=Progress)
    source: RolloutSource | None = None
    evaluate: Callable[[Params], dict[str, float]] | None = None
    _warned_of_skipped: bool = False

    def start(self, state: TrainState, resume: str, *, params_shared_with_caller: bool) -> Restored:
        """Restore the latest checkpoint, if any, and start logging. Returns a `Restored` with the starting state.

        A new run starts from `state`. See `train` for `resume`. Params shared with the caller survive a failed restore.
        """
        restored = self.checkpoints.restore(state, resume, keep_params=params_shared_with_caller)
        self.progress = restored.progress or self.progress
        data = self.run.data
        self.monitor.start(
            restored.state,
            self.progress,
            total_steps=self.run.total_steps,
            num_rows=len(data.blocks or data.rows),  # only SFT data has blocks (packed examples)
            # `encode_examples` has already warned of dropped SFT examples.
            num_dropped=0 if data.blocks else len(data.dropped),
            resumed=restored.progress is not None,
            updates=self.run.sizes.updates_per_iteration,
        )
        if (cache_dir := enable_compilation_cache()) is not None:
            self.monitor.display.say(
                f"compiled programs are cached in {cache_dir}; set JAX_ENABLE_COMPILATION_CACHE=0 to disable"
            )
        if self.publisher is not None:
            self.publisher.open()
        write_policy_files(self.run_dir, self.run.policy)
        return restored

    def stop_requested(self) -> bool:
        """Return whether a signal or a callback has requested a stop in any process."""
        return any(gather_objects(self.signals.received is not None or self.monitor.stopped))

    def signalled(self) -> bool:
        """Return whether any process has received SIGTERM or SIGINT."""
        return any(gather_objects(self.signals.received is not None))

    def should_continue(self) -> bool:
        """Return whether updates remain and no stop has been requested."""
        return self.progress.step < self.run.total_steps and not self.stop_requested()

    def record_batch(self, cursor: int, metrics: Mapping[str, float], records: Sequence[dict[str, Any]] = ()) -> None:
        """Add a batch's metrics to the next log line, set the cursor, and write the `records` of completions (GRPO)."""
        self.progress.count_batch(cursor, metrics)
        self.monitor.completions(self.progress.step + 1, records)

    def record_update(self, metrics: dict[str, float]) -> None:
        """Count an optimizer step. If a log line is due, log the means of the metrics since the previous line."""
        run, progress = self.run, self.progress
        if run.schedule is not None:
            metrics["learning_rate"] = float(run.schedule(progress.step))
        progress.count_update(metrics)
        if progress.updates_done == run.sizes.updates_per_iteration:
            progress.updates_done = 0
        if run.config.logs_at(progress.step) or progress.step == run.total_steps:
            line = progress.log_line()
            progress.set_metric(run.config.metric_for_best_model, line)
            self.monitor.log(progress.step, line)
        else:
            self.monitor.display.advance(progress.step)

    def check_skipped_updates(
        self, state: TrainState, minibatch: Batch, metrics: Mapping[str, float], batch: Batch | None
    ) -> None:
        """Warn about the first skipped update. Raise FloatingPointError after `max_skipped_updates` in succession."""
        run, progress = self.run, self.progress
        step, limit = progress.step, run.config.max_skipped_updates
        exceeded = limit is not None and progress.skipped >= limit
        if not metrics["update_skipped"] or (self._warned_of_skipped and not exceeded):
            return
        self._warned_of_skipped = True
        cause = describe_non_finite(run.updater, state.params, minibatch, metrics, run.policy.tokenizer)
        if exceeded:
            progress.skipped = 0  # so that a resumed run does not fail immediately
            self.save(state, batch)
            raise FloatingPointError(
                f"step {step}: the number of consecutive skipped updates reached max_skipped_updates = {limit}. The"
                f" loss or gradient was not finite; in the last update, {cause}. The skipped updates did not change"
                " the policy. Fix the cause and repeat the call with the same run_dir to resume"
            )
        warnings.warn(
            f"the update at step {step} was skipped: {cause}. The params and the optimizer state are unchanged. Further"
            " skipped updates are only counted in the metric update_skipped",
            RuntimeWarning,
            stacklevel=3,  # points to the caller of this method, in `train` or `sft`
        )

    def evaluate_if_due(self, state: TrainState, batch: Batch | None = None) -> None:
        """Evaluate before the first step, every `eval_steps` steps and after the last, but only once per step."""
        run, progress, config = self.run, self.progress, self.run.config
        step, metric_name = progress.step, config.metric_for_best_model
        due = step in (0, run.total_steps) or (config.eval_steps is not None and step % config.eval_steps == 0)
        if self.evaluate is None or not due or progress.evaluated == step:
            return
        try:
            with self.monitor.phase("evaluation"):
                metrics = self.evaluate(state.params)
        except Interrupted:  # the resumed run repeats the evaluation
            return
        except Exception:
            self.save_after_error(state, batch)
            raise
        progress.evaluated = step
        eval_metrics = {f"eval/{name}": value for name, value in metrics.items()}
        check_best_metric(config, metrics)
        progress.metric = None if metric_name in eval_metrics else progress.metric  # discard the previous value
        progress.set_metric(metric_name, eval_metrics)
        self.checkpoints.record_metric(progress)
        self.monitor.evaluation(step, metrics)

    def save(self, state: TrainState, batch: Batch | None = None) -> None:
        """Write a checkpoint with the state, the counters, and any unfinished batch and prefetched completions."""
        completions = metadata = None
        if self.source is not None:
            self.progress.in_progress = self.source.in_progress
            completions, metadata = self.source.to_checkpoint()
        self.checkpoints.save(state, self.progress, batch, completions, metadata)

    def save_if_due(self, state: TrainState, batch: Batch | None = None) -> None:
        """Write a checkpoint if one is due. If it is due because of `save_steps`, push its policy to the Hub."""
        step = self.progress.step
        if self.checkpoints.should_save(step):
            self.save(state, batch)
            if self.publisher is not None and self.checkpoints.is_save_step(step):
                self.publisher.checkpoint_saved(step, state.params, last=self.run.total_steps)

    def save_after_error(self, state: TrainState, batch: Batch | None = None) -> None:
        """Save a run that failed, unless it has no directory, is at step 0 or has several processes."""
        step = self.progress.step
        if step == 0 or self.run_dir is None or jax.process_count() > 1:
            return
        try:
            self.save(state, batch)
            self.checkpoints.wait()
        except Exception as error:
            self.monitor.display.say(f"step {step} could not be saved: {one_line(error)}")
        else:
            self.monitor.display.say(
                f"saved a checkpoint at step {step}. Fix the error and repeat the call to resume from there"
            )

    def end(self, state: TrainState, batch: Batch | None = None) -> TrainState:
        """Save the run if it was stopped, and return the final state.

        Unless a signal ended the run, the best state is loaded (`load_best_model_at_end`), and the policy is pushed to
        the Hub (`push_to_hub`).
        """
        progress = self.progress
        if self.stop_requested():
            self.save(state, batch)
        signalled = self.signalled()
        self.checkpoints.wait()
        self.monitor.end(progress.step, self.run.total_steps, best=self.checkpoints.best(progress))
        if not signalled:
            state = self.checkpoints.restore_best(state, progress)
            if self.publisher is not None:
                self.publisher.end(state.params, write_report=self.monitor.write_report)
        return state


def describe_non_finite(
    updater: Updater, params: Params, batch: Batch, metrics: Mapping[str, float], tokenizer: Any = None
) -> str:
    """Return a description of the first non-finite value in a skipped update, with its prompt and completion.

    `params` are the params before the update. All processes of a run must call this function together.
    """
    batch = fetch(batch)
    used = batch.mask if batch.advantages.ndim == 3 else batch.mask.any(axis=-1)
    inputs = {
        "the advantage": np.where(used, batch.advantages, 0),
        "the sampler's log-prob": batch.sampling_log_probs,
        "the old log-prob": batch.old_log_probs,
        "the reference's log-prob": batch.ref_log_probs,
        "the initial policy's log-prob": batch.initial_log_probs,
        "the policy's log-prob": fetch(updater.log_probs(params, batch.prompts, batch.tokens, batch.mask)),
    }
    for name, values in inputs.items():
        if values is None:
            continue
        # Log-probs of −inf are valid, because the loss clips them. Infinite advantages are not.
        array = np.asarray(values if name == "the advantage" else bound_log_probs(values, batch.mask))
        if not np.isfinite(array).all():
            at = tuple(int(i) for i in np.argwhere(~np.isfinite(array))[0])
            where = ", ".join(f"{axis} {i}" for axis, i in zip(("prompt", "completion", "token"), at, strict=False))
            return f"{name} is {array[at]} at {where} of the batch{_decoded(batch, at[0], at[1], tokenizer)}"
    names = ("policy_loss", "kl_in_loss", "loss", "grad_norm")
    bad = next(name for name in names if not np.isfinite(metrics.get(name, 0.0)))
    return f"the metric {bad} is {metrics[bad]}, although all advantages and log-probs in the batch are finite"


def _decoded(batch: Batch, prompt: int, completion: int, tokenizer: Any) -> str:
    """Return the decoded prompt and completion in parentheses, or "" if there is no tokenizer."""
    if tokenizer is None:
        return ""
    prompt_ids = batch.prompts.tokens[prompt, : batch.prompts.lengths[prompt]]
    completion_ids = batch.tokens[prompt, completion][batch.mask[prompt, completion]]
    return f" (prompt {show(tokenizer.decode(prompt_ids))}, completion {show(tokenizer.decode(completion_ids))})"
