"""The loop of every run: a batch → its updates (a reference sync belongs to its update) → evaluation → checkpoint.

`train` samples the batches and scores them (`collect`), `sft` takes them from a dataset (`run.examples`); all else is
the same code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from grpo_jax.config.config import GRPOConfig
from grpo_jax.messages import one_line
from grpo_jax.models.sharding import committed, fetch, gather_objects
from grpo_jax.policy import Policy
from grpo_jax.run.beginning import new_state
from grpo_jax.run.beside import Beside
from grpo_jax.run.checkpoint import RESUME, Checkpoints
from grpo_jax.run.collect import collect, request_of
from grpo_jax.run.evaluate import evaluate_encoded
from grpo_jax.run.examples import evaluate_examples, next_examples
from grpo_jax.run.kept_programs import keep_programs, where_kept
from grpo_jax.run.prepare import about
from grpo_jax.run.run import Run, SFTRun
from grpo_jax.run.run_dir import check_shared, keep_policy, locked
from grpo_jax.run.sample import Ahead
from grpo_jax.run.signals import Interrupted, StopSignals
from grpo_jax.types import Batch
from grpo_jax.update.not_finite import name_not_finite
from grpo_jax.update.state import TrainState, begin_iteration
from grpo_jax.watch.hints import Hints
from grpo_jax.watch.monitor import Callback, Monitor, Progress

if TYPE_CHECKING:  # optional: imported with `push_to_hub`
    from grpo_jax.run.publish import Publisher

_begin_iteration = jax.jit(begin_iteration, donate_argnames=("state",))


@dataclasses.dataclass
class _Loop:
    """Host side of the loop: progress, and the objects that log, stop, save and publish."""

    run: Run | SFTRun
    monitor: Monitor
    signals: StopSignals
    checkpoints: Checkpoints
    publisher: Publisher | None
    progress: Progress = dataclasses.field(default_factory=Progress)
    batch: Batch | None = None  # of the present iteration; None between iterations
    ahead: Ahead | None = None  # sampled already for the next iteration
    engine: Beside | None = None  # where an engine samples it
    warned_of_skipped: bool = False  # the first skipped update has been explained

    def stopping(self) -> bool:
        """Whether the run was asked to stop, by a signal or a callback, in any of its processes."""
        return any(gather_objects(self.signals.received is not None or self.monitor.stopped))

    def signalled(self) -> bool:
        """Whether a signal has asked the program to end, in any of its processes."""
        return any(gather_objects(self.signals.received is not None))

    def save(self, state: TrainState) -> None:
        """Write a checkpoint of this moment."""
        ahead, told = (None, None) if self.ahead is None else self.ahead
        self.checkpoints.save(state, self.progress, self.batch, ahead, told)


def run_loop(
    run: Run | SFTRun,
    policy: Policy,
    *,
    run_dir: str | Path | None,
    resume: str,
    callbacks: Sequence[Callback],
    donate: bool,
) -> TrainState:
    """Make all updates of a run that has been checked; arguments, result and errors as of `train`."""
    config, publisher = run.config, _check_run_dir(run, run_dir, resume)
    # All processes of a run write its checkpoints together; one of them holds the lock, logs and keeps what went wrong.
    alone, leads = jax.process_count() == 1, jax.process_index() == 0
    own_dir = run_dir if leads else None
    hints = Hints(config) if isinstance(config, GRPOConfig) else None
    state = committed(new_state(run, donate=donate))  # as one from a checkpoint is: both run the same programs
    run.policy.empty()  # our own object, whose params may be a copy on a mesh; the caller's is emptied below
    with (
        locked(own_dir),
        StopSignals(enabled=run_dir is not None, alone=alone) as signals,
        Checkpoints(run_dir, config, None if run_dir is None else about(run, state)) as checkpoints,
        Monitor(own_dir, config, callbacks=callbacks if leads else (), hints=hints, quiet=not leads) as monitor,
        contextlib.ExitStack() as threads,
    ):
        loop = _Loop(run, monitor, signals, checkpoints, publisher)
        if isinstance(run, Run) and run.samples_beside:
            loop.engine = threads.enter_context(Beside(run))
        state = checkpoints.target(state)  # only its shapes, if a checkpoint will be read: there is room for one state
        state = begin_or_resume(loop, state, resume)
        if publisher is not None:
            publisher.open()
        keep_policy(own_dir, run.policy)
        if donate:  # only now: a run that was refused has taken nothing
            policy.empty()
        evaluate_if_due(loop, state)
        ask_again(loop, state)
        while loop.progress.step < run.total_steps and not loop.stopping():
            if loop.batch is None:
                try:
                    take_ahead(loop, state)
                    state = _begin_iteration(state)  # one snapshot samples for all updates of an iteration
                    collect_batch(loop, state)
                except Interrupted:
                    break
                except Exception:
                    save_after_error(loop, state)
                    raise
            minibatch = next_minibatch(loop)
            state, metrics = make_update(loop, state, minibatch)
            log_if_due(loop)
            check_skipped(loop, state, minibatch, metrics)
            if not loop.stopping():
                evaluate_if_due(loop, state)
                save_if_due(loop, state)
        state = end_run(loop, state)
    if loop.signalled():
        signals.leave()
    return state


def _check_run_dir(run: Run | SFTRun, run_dir: str | Path | None, resume: str) -> Publisher | None:
    """Refuse what cannot be done with the run directory, before the run begins; return what pushes to the hub."""
    config = run.config
    if resume not in RESUME:
        raise ValueError(f"resume = {resume!r}: choose one of {', '.join(map(repr, RESUME))}")
    if run_dir is None and resume == "must":
        raise ValueError('resume = "must": there is no run_dir to go on in; give one')
    if run_dir is None and config.load_best_model_at_end:
        raise ValueError("load_best_model_at_end = True: there are no checkpoints to choose from; give run_dir")
    if config.report_to not in (None, "none"):
        from grpo_jax.watch.trackers import check_trackers

        check_trackers(config, run_dir)
    check_shared(run_dir)
    if not config.push_to_hub:
        return None
    from grpo_jax.run.publish import Publisher

    return Publisher(config, run.policy, run_dir)


def begin_or_resume(loop: _Loop, state: TrainState, resume: str) -> TrainState:
    """The state that the run goes on from: that of its newest checkpoint, with all that the loop needs, or `state`."""
    state, found, loop.batch, completions, transcript = loop.checkpoints.restore(state, resume)
    loop.ahead = None if completions is None else Ahead(completions, transcript)
    loop.progress = found or loop.progress
    data = loop.run.data
    loop.monitor.start(
        state,
        loop.progress,
        total_steps=loop.run.total_steps,
        num_rows=len(data.rows),
        num_dropped=len(data.dropped),
        resumed=found is not None,
        updates=loop.run.sizes.updates,
    )
    kept = keep_programs()
    if kept is not None and (where := where_kept(kept)) is not None:
        loop.monitor.say(where)
    return state


def end_run(loop: _Loop, state: TrainState) -> TrainState:
    """Save a stopped run and say where it stands; unless a signal ended it, push the policy and return the best."""
    progress = loop.progress
    if loop.stopping():
        loop.save(state)
    hurried = loop.signalled()
    loop.checkpoints.wait()
    best = loop.checkpoints.best(progress)
    loop.monitor.end(progress.step, loop.run.total_steps, best=best, hurry=loop.signals.hurry)
    if not hurried:
        state = loop.checkpoints.restore_best(state, progress)
        if loop.publisher is not None:
            loop.publisher.end(state.params, draw=loop.monitor.draw)
    return state


def ask_again(loop: _Loop, state: TrainState) -> None:
    """Ask the engine of a run that goes on for what it was at: no checkpoint waits for completions on their way."""
    run, progress = loop.run, loop.progress
    if loop.engine is not None and progress.asked:
        assert isinstance(run, Run), "which has an engine"
        key, cursor = jax.random.fold_in(state.key, 0), progress.cursor
        rows = run.numbers(cursor, run.sizes.prompts)
        loop.engine.begin(state.old_params, key, cursor, rows, request_of(run), loop.signals.interrupt)


def take_ahead(loop: _Loop, state: TrainState) -> None:
    """Wait for what the engine samples, while the policy that it is sampled from is still the old one of the state."""
    run, engine = loop.run, loop.engine
    if engine is None or not engine.busy:
        return
    assert isinstance(run, Run), "which has an engine"
    with loop.monitor.phase("rollout"):
        sampled = engine.result(state.old_params)
    loop.ahead = Ahead.of(sampled, run.data, run.numbers(loop.progress.cursor, run.sizes.prompts))
    loop.progress.asked = False


def collect_batch(loop: _Loop, state: TrainState) -> None:
    """Take an iteration's batch from the dataset, or sample and score it; `Interrupted` if a signal came first."""
    run, progress = loop.run, loop.progress
    sizes = run.sizes
    if isinstance(run, SFTRun):
        loop.batch, cursor, metrics = next_examples(run, progress.cursor)
        progress.collected(cursor, metrics)
        return
    experience = collect(
        run,
        state,
        progress.cursor,
        count=sizes.prompts,
        phase=loop.monitor.phase,
        ahead=loop.ahead,
        look_ahead=run.config.rollout_ahead and progress.step + sizes.updates < run.total_steps,
        engine=loop.engine,
        interrupt=loop.signals.interrupt,
    )
    progress.collected(experience.cursor, experience.metrics)
    loop.monitor.completions(progress.step + 1, experience.rows)
    loop.batch, loop.ahead = experience.batch, experience.ahead
    progress.asked = loop.engine is not None and loop.engine.busy


def next_minibatch(loop: _Loop) -> Batch:
    """The minibatch of the next update, cut from the batch along B."""
    sizes, batch = loop.run.sizes, loop.batch
    assert batch is not None, "collected before its updates"
    index, count = loop.progress.updates_done % sizes.minibatches, sizes.prompts_per_update
    if sizes.minibatches == 1:
        return batch
    return jax.tree.map(lambda x: x[index * count : (index + 1) * count], batch)


def make_update(loop: _Loop, state: TrainState, minibatch: Batch) -> tuple[TrainState, dict[str, float]]:
    """One optimizer step (`update.packed`, of other models `update.step`), and its metrics."""
    run, progress = loop.run, loop.progress
    with loop.monitor.phase("update"):
        state, measured = run.updater.update(state, minibatch)
        metrics = {name: float(value) for name, value in fetch(measured).items()}
    if run.schedule is not None:
        metrics["learning_rate"] = float(run.schedule(progress.step))
    progress.updated(metrics)
    if progress.updates_done == run.sizes.updates:
        progress.updates_done, loop.batch = 0, None
    return state, metrics


def log_if_due(loop: _Loop) -> None:
    """Write the means since the last line, every `logging_steps` and after the last step."""
    config, progress = loop.run.config, loop.progress
    if config.logs_at(progress.step) or progress.step == loop.run.total_steps:
        line = progress.log_line()
        progress.measured(config.metric_for_best_model, line)
        loop.monitor.log(progress.step, line)
    else:
        loop.monitor.progressed(progress.step)


def check_skipped(loop: _Loop, state: TrainState, minibatch: Batch, metrics: dict[str, float]) -> None:
    """Warn of the first skipped update, and raise a `FloatingPointError` after `max_skipped_updates` in a row, saved.

    The error names the value that was not finite. A resumed run may skip as many again.
    """
    run, progress = loop.run, loop.progress
    step, most = progress.step, run.config.max_skipped_updates
    ends = most is not None and progress.skipped >= most
    if not metrics["update_skipped"] or (loop.warned_of_skipped and not ends):
        return
    loop.warned_of_skipped = True
    cause = name_not_finite(run.updater, state.params, minibatch, metrics, run.policy.tokenizer)
    if ends:
        progress.skipped = 0
        loop.save(state)
        raise FloatingPointError(
            f"step {step}: {most} updates in a row were skipped (max_skipped_updates), because loss or gradient was not"
            f" finite; in the last one {cause}. The policy is unchanged since the first of them; fix the cause and call"
            " train again with the same run_dir to resume"
        )
    warnings.warn(
        f"step {step} was skipped, params and optimizer state are unchanged: {cause}. Further skipped updates are"
        " counted in the metric update_skipped",
        RuntimeWarning,
        stacklevel=4,  # the call of `train`
    )


def save_if_due(loop: _Loop, state: TrainState) -> None:
    """Write a checkpoint, and push the policy of one of `save_steps` to the hub where the config says so."""
    step = loop.progress.step
    if loop.checkpoints.due(step):
        loop.save(state)
        if loop.publisher is not None and loop.checkpoints.scheduled(step):
            loop.publisher.saved(step, state.params, last=loop.run.total_steps)


def save_after_error(loop: _Loop, state: TrainState) -> None:
    """Save a run that a reward function, an environment or an engine is about to end; the first error is what is seen.

    Of several processes the others may be anywhere, and a checkpoint is written by all together: there is none.
    """
    step = loop.progress.step
    if step == 0 or not loop.checkpoints.enabled or jax.process_count() > 1:
        return
    try:
        loop.save(state)
        loop.checkpoints.wait()
    except Exception as failed:
        loop.monitor.say(f"step {step} could not be saved: {one_line(failed)}")
    else:
        loop.monitor.say(
            f"step {step} is saved: once the cause is fixed, the same call goes on from there (with"
            ' resume="changed" if a reward function or environment was edited)'
        )


def evaluate_if_due(loop: _Loop, state: TrainState) -> None:
    """Evaluate before the first step, at every multiple of `eval_steps`, and after the last step."""
    run, progress, config = loop.run, loop.progress, loop.run.config
    step, best = progress.step, config.metric_for_best_model
    due = step in (0, run.total_steps) or (config.eval_steps is not None and step % config.eval_steps == 0)
    if run.eval_data is None or not due or progress.evaluated == step:
        return
    try:
        with loop.monitor.phase("evaluation"):
            metrics = _evaluate(loop, run, state)
    except Interrupted:  # the run that goes on makes it again
        return
    except Exception:
        save_after_error(loop, state)
        raise
    progress.evaluated = step
    measured = {f"eval/{name}": value for name, value in metrics.items()}
    if best is not None and best.startswith("eval/") and best not in measured:
        raise ValueError(f"metric_for_best_model = {best!r}: an evaluation measures {', '.join(measured)}; name one")
    progress.measured(best, measured)
    loop.checkpoints.measured(progress)
    loop.monitor.evaluation(step, metrics)


def _evaluate(loop: _Loop, run: Run | SFTRun, state: TrainState) -> dict[str, float]:
    """The metrics of an evaluation: of examples their loss, else the rewards of completions."""
    if isinstance(run, SFTRun):
        return evaluate_examples(run, state.params, interrupt=loop.signals.interrupt)
    assert run.eval_data is not None, "asked by the caller"
    metrics, _ = evaluate_encoded(
        run.policy,
        run.eval_data,
        run.reward_fns,
        run.config,
        params=state.params,
        interaction=run.interaction,
        trainer_state=run.trainer_state(loop.progress.step, loop.progress.cursor),
        interrupt=loop.signals.interrupt,
    )
    return metrics
