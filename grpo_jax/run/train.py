"""The loop: rollout → rewards → advantages → μ updates → reference sync → evaluation → checkpoint."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import optax

from grpo_jax.config.config import GRPOConfig
from grpo_jax.config.sizes import Sizes
from grpo_jax.devices.sharding import fetch, gather_objects
from grpo_jax.hub.policy import Policy
from grpo_jax.hub.publish import Publisher
from grpo_jax.keep.checkpoint import RESUME, Checkpoints
from grpo_jax.keep.run_dir import locked
from grpo_jax.rewards.contract import reward_names
from grpo_jax.run.collect import collect
from grpo_jax.run.evaluate import evaluate
from grpo_jax.run.prepare import Run, about, new_state, prepare
from grpo_jax.run.rehearse import rehearse
from grpo_jax.run.replay import BadBatches
from grpo_jax.run.signals import Interrupted, StopSignals
from grpo_jax.types import Batch, Completions
from grpo_jax.update.packed import update
from grpo_jax.update.state import TrainState, begin_iteration
from grpo_jax.update.step import train_step
from grpo_jax.watch.monitor import Monitor
from grpo_jax.watch.progress import Progress
from grpo_jax.watch.trackers import check_trackers
from grpo_jax.watch.writer import Callback

__all__ = ["prepare", "train", "train_step"]

_begin_iteration = jax.jit(begin_iteration, donate_argnames=("state",))


def train(
    policy: Policy,
    dataset: Any,
    reward_fns: Callable[..., Any] | Sequence[Callable[..., Any]],
    config: GRPOConfig,
    *,
    eval_dataset: Any = None,
    run_dir: str | Path | None = None,
    resume: str = "auto",
    callbacks: Sequence[Callback] = (),
    optimizer: optax.GradientTransformation | None = None,
    dry_run: bool = False,
) -> TrainState:
    """Train a policy by GRPO.

    Args:
      policy: what `from_pretrained` returns; its params are copied, not changed.
      dataset: rows with a `prompt` (text, or a list of messages) and any other columns, which reward functions get
        under their own names.
      reward_fns: one or more reward functions with TRL's contract.
      config: the settings.
      eval_dataset: rows to evaluate on, before the first step, every `eval_steps`, and after the last.
      run_dir: where metrics, completions, checkpoints and the picture of the run are written; None writes nothing. It
        belongs to one process at a time.
      resume: "auto" goes on with the run that is found in `run_dir`, to the same bytes as if it had never stopped;
        "must" is an error if there is none, "never" if there is one.
      callbacks: functions called as `callback(step, metrics)` after every logged step, see `watch.Callback`.
      optimizer: an optax transformation in the place of the config's AdamW, schedule and clip.
      dry_run: deprecated: call `rehearse`, whose `DryRun` True returns.

    Returns:
      The final `TrainState`, or with `load_best_model_at_end` that of the best checkpoint;
      `save_pretrained(directory, policy.replace(params=state.params))` exports it.

    Raises:
      ValueError: anything wrong with the arguments, before anything expensive runs; so are settings, data or a model
        that differ from those of the run that is found, unless the difference cannot change its numbers.
      RuntimeError: another process is using `run_dir`.
      NotFiniteError: `max_skipped_updates` updates in a row had a loss or gradient that is not finite.
      OSError: a checkpoint or a line could not be written. What was whole before is still there.
      SystemExit: with the status 0, on SIGTERM or SIGINT, after a checkpoint: an update that has begun is finished,
        completions that nothing has been learned from yet are dropped, and the resumed run samples them again. A
        KeyboardInterrupt on SIGINT in a notebook. Without a `run_dir`, signals do what they always do.

    Example:
      A model of sixteen numbers (one for each pair of letters) learns to begin with a b, in thirty steps:

      >>> import jax.numpy as jnp
      >>> from tokenizers import Tokenizer, decoders, models, pre_tokenizers
      >>> from transformers import PreTrainedTokenizerFast
      >>> class Pairs:
      ...     def apply(self, variables, tokens):
      ...         return variables["params"]["logits"][tokens]
      >>> letters = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(".abc")}, unk_token="."))
      >>> letters.pre_tokenizer, letters.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
      >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token=".")
      >>> policy = Policy(Pairs(), {"logits": jnp.zeros((4, 4))}, tokenizer)
      >>> config = GRPOConfig(max_steps=30, max_completion_length=4, learning_rate=0.1)
      >>> def first(completions):
      ...     return [float(text.startswith("b")) for text in completions]
      >>> rows = [{"prompt": "a"}, {"prompt": "cab"}]
      >>> state = train(policy, rows, first, config)
      >>> evaluate(policy, rows, first, params=state.params, max_completion_length=4)[0]["first"]
      1.0
    """
    if dry_run:
        warnings.warn(
            "train(..., dry_run=True) is deprecated: call grpo_jax.rehearse(policy, dataset, reward_fns, config)",
            DeprecationWarning,
            stacklevel=2,
        )
        found: Any = rehearse(policy, dataset, reward_fns, config, eval_dataset=eval_dataset, optimizer=optimizer)
        return found
    check_resume(resume, run_dir)
    run = prepare(policy, dataset, reward_fns, config, eval_dataset=eval_dataset, optimizer=optimizer)
    publisher = check_outlets(run, config, run_dir)
    # All processes of a run write its checkpoints together; one of them holds the lock, logs and keeps what went wrong.
    leads = jax.process_index() == 0
    own_dir = run_dir if leads else None
    state, bad_batches = new_state(run), BadBatches(None if jax.process_count() > 1 else run_dir, run)
    with (
        locked(own_dir),
        StopSignals(enabled=run_dir is not None, alone=jax.process_count() == 1) as signals,
        Checkpoints(run_dir, config, None if run_dir is None else about(run, state)) as checkpoints,
        Monitor(own_dir, config, callbacks=callbacks if leads else (), quiet=not leads) as monitor,
    ):
        state, before, batch, ahead = checkpoints.restore(state, resume)
        progress, data = before or Progress(), run.task.data
        sizes = {"total_steps": run.total_steps, "num_rows": len(data.rows), "num_dropped": len(data.dropped)}
        monitor.start(state, progress, **sizes, resumed=before is not None)
        publisher.open()
        evaluate_if_due(run, state, progress, monitor, signals)
        while progress.step < run.total_steps and not stopping(signals):
            if batch is None:
                state = _begin_iteration(state)  # one snapshot samples for all updates of an iteration
                try:
                    batch, ahead = collect_batch(run, state, progress, monitor, signals, ahead=ahead)
                except Interrupted:
                    break
            index = progress.updates_done % run.sizes.slices
            minibatch = minibatch_of(batch, index, run.sizes)
            state = make_update(run, state, minibatch, progress, monitor, bad_batches, index=index)
            batch = batch if progress.updates_done else None  # 0: that was the iteration's last update
            log_if_due(run, progress, monitor)
            if config.max_skipped_updates is not None and progress.skipped >= config.max_skipped_updates:
                progress.skipped = 0  # the run that goes on from here may skip as many again
                checkpoints.save(state, progress, batch, ahead)
                raise bad_batches.error(state, minibatch, step=progress.step, index=index)
            if not stopping(signals):
                evaluate_if_due(run, state, progress, monitor, signals)
                save_if_due(run, state, progress, batch, ahead, checkpoints=checkpoints, publisher=publisher)
        stop = stopping(signals)
        if stop:
            checkpoints.save(state, progress, batch, ahead)
        checkpoints.wait()
        monitor.end(progress.step, run.total_steps, best=checkpoints.best(), hurry=signals.hurry)
        if not stop:
            state = checkpoints.restore_best(state)
            publisher.end(state.params)
    if stop or signals.received is not None:  # the second, while the pictures were drawn
        signals.leave()
    return state


def check_resume(resume: str, run_dir: str | Path | None) -> None:
    """Refuse another word than those of `resume`, and to go on where there is nothing."""
    if resume not in RESUME:
        raise ValueError(f"resume = {resume!r}: choose one of {', '.join(map(repr, RESUME))}")
    if run_dir is None and resume == "must":
        raise ValueError('resume = "must": there is no run_dir to go on in; give one')


def check_outlets(run: Run, config: GRPOConfig, run_dir: str | Path | None) -> Publisher:
    """Refuse what a run could not give out at its end, before it begins; what pushes its policy to the hub."""
    if run_dir is None and config.load_best_model_at_end:
        raise ValueError("load_best_model_at_end = True: there are no checkpoints to choose from; give run_dir")
    check_trackers(config, run_dir)
    return Publisher(config, run.policy, run_dir)


def stopping(signals: StopSignals) -> bool:
    """Whether the run was asked to stop; the signal may have come to another of its processes."""
    return any(gather_objects(signals.received is not None))


def collect_batch(
    run: Run,
    state: TrainState,
    progress: Progress,
    monitor: Monitor,
    signals: StopSignals,
    *,
    ahead: Completions | None,
) -> tuple[Batch, Completions | None]:
    """The batch of an iteration and what was sampled ahead for the next one; `Interrupted` if a signal comes first."""
    config, sizes = run.task.config, run.sizes
    experience = collect(
        run.task,
        state,
        progress.cursor,
        count=sizes.prompts,
        micro=run.micro,
        phase=monitor.phase,
        ahead=ahead,
        look_ahead=config.rollout_ahead and progress.step + sizes.updates < run.total_steps,
        interrupt=signals.interrupt,
    )
    progress.collected(experience.cursor, experience.metrics)
    monitor.completions(progress.step + 1, experience.rows)
    return experience.batch, experience.ahead


def minibatch_of(batch: Batch, index: int, sizes: Sizes) -> Batch:
    """The minibatch `index` of an iteration's batch, cut along B."""
    if sizes.slices == 1:
        return batch
    start, stop = index * sizes.prompts_per_update, (index + 1) * sizes.prompts_per_update
    return jax.tree.map(lambda x: x[start:stop], batch)


def make_update(
    run: Run,
    state: TrainState,
    minibatch: Batch,
    progress: Progress,
    monitor: Monitor,
    bad_batches: BadBatches,
    *,
    index: int,
) -> TrainState:
    """One optimizer step on the iteration's minibatch `index`, noted in `progress`, and where it was skipped, kept."""
    config = run.task.config
    with monitor.phase("update"):
        state, measured = update(
            state,
            minibatch,
            model=run.task.model,
            optimizer=run.optimizer,
            config=config,
            on_policy=config.on_policy,
            micro=run.micro,
        )
        metrics = {name: float(value) for name, value in fetch(measured).items()}
    if run.schedule is not None:
        metrics["learning_rate"] = float(run.schedule(progress.step))
    if config.max_kl_old is not None:
        metrics["moved_too_far"] = float(metrics["approx_kl_old"] > config.max_kl_old)
    progress.updated(metrics)
    if metrics["update_skipped"]:
        bad_batches.note(state, minibatch, step=progress.step, index=index)
    if progress.updates_done == run.sizes.updates or metrics.get("moved_too_far"):
        progress.updates_done = 0
    return state


def log_if_due(run: Run, progress: Progress, monitor: Monitor) -> None:
    """Write the means since the last line, every `logging_steps` and after the last step."""
    config = run.task.config
    if config.logs_at(progress.step) or progress.step == run.total_steps:
        line = progress.log_line()
        progress.measured(config.metric_for_best_model, line)
        monitor.log(progress.step, line)


def save_if_due(
    run: Run,
    state: TrainState,
    progress: Progress,
    batch: Batch | None,
    ahead: Completions | None,
    *,
    checkpoints: Checkpoints,
    publisher: Publisher,
) -> None:
    """Write a checkpoint, and push the policy to the hub where the config says so."""
    if checkpoints.due(progress.step, run.total_steps):
        checkpoints.save(state, progress, batch, ahead)
        publisher.saved(progress.step, state.params, last=run.total_steps)


def total_reward(run: Run, metrics: dict[str, float]) -> float:
    """The weighted sum of the reward functions' means, over those that scored anything; NaN where none did."""
    names = reward_names(run.task.reward_fns)
    weights = run.task.config.reward_weights or [1.0] * len(names)
    scored = [weight * metrics[name] for name, weight in zip(names, weights, strict=True)]
    scored = [value for value in scored if not math.isnan(value)]
    return sum(scored) if scored else math.nan


def evaluate_if_due(run: Run, state: TrainState, progress: Progress, monitor: Monitor, signals: StopSignals) -> None:
    """Evaluate before the first step, at every multiple of `eval_steps`, and after the last step."""
    config, step = run.task.config, progress.step
    due = step in (0, run.total_steps) or (config.eval_steps is not None and step % config.eval_steps == 0)
    if run.eval_data is None or not due or progress.evaluated == step:
        return
    group = config.eval_generations
    # An evaluation that a signal ends is made again by the run that goes on.
    with contextlib.suppress(Interrupted), monitor.phase("evaluation"):
        metrics, _ = evaluate(
            run.policy,
            run.eval_data,
            run.task.reward_fns,
            params=state.params,
            num_generations=group,
            max_completion_length=config.max_completion_length,
            temperature=config.eval_temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            min_p=config.min_p,
            batch_size=config.per_device_eval_batch_size // group,
            pad_to_multiple_of=config.padding,
            seed=config.seed,
            on_reward_error=config.on_reward_error,
            trainer_state=run.task.trainer_state(step, progress.cursor),
            interrupt=signals.interrupt,
        )
        progress.evaluated = step
    if progress.evaluated != step:
        return
    best = config.metric_for_best_model
    if best == "eval/reward" and "reward" not in metrics:
        metrics["reward"] = total_reward(run, metrics)  # not always: it would repeat a single function's
    measured = {f"eval/{name}": value for name, value in metrics.items()}
    if best is not None and best.startswith("eval/") and best not in measured:
        raise ValueError(f"metric_for_best_model = {best!r}: an evaluation measures {', '.join(measured)}; name one")
    progress.measured(best, measured)
    monitor.evaluation(step, metrics)
