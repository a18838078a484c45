"""The loop: rollout → rewards → advantages → μ updates → reference sync → evaluation → checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import optax

from grpo_jax.checkpoint import RESUME, Checkpoints
from grpo_jax.collect import Task, collect
from grpo_jax.config import GRPOConfig, Sizes, check_run
from grpo_jax.evaluate import evaluate
from grpo_jax.models.huggingface import Policy
from grpo_jax.models.lora import LoraModel
from grpo_jax.models.transformer import Transformer
from grpo_jax.monitor import Monitor
from grpo_jax.optimizer import make_optimizer, make_schedule
from grpo_jax.packed import update
from grpo_jax.progress import Progress
from grpo_jax.prompts import EncodedPrompts, encode_prompts, load_rows
from grpo_jax.report import Callback
from grpo_jax.resume import describe
from grpo_jax.rewards import check_reward_fns
from grpo_jax.run_dir import locked
from grpo_jax.signals import StopSignals
from grpo_jax.state import TrainState, begin_iteration, create_state
from grpo_jax.types import Batch, Model
from grpo_jax.update import train_step

__all__ = ["prepare", "train", "train_step"]

_begin_iteration = jax.jit(begin_iteration, donate_argnames=("state",))


@dataclasses.dataclass(frozen=True)
class Run:
    """All that a run needs and never changes. That one exists means that its arguments have been checked."""

    policy: Policy
    task: Task
    eval_data: EncodedPrompts | None
    sizes: Sizes
    total_steps: int
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule | None

    @property
    def micro(self) -> tuple[int, int]:
        """(prompts, completions a prompt) of one micro-batch."""
        return self.sizes.micro_prompts, self.sizes.micro_completions


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
      callbacks: functions called as `callback(step, metrics)` after every logged step, see `report.Callback`.
      optimizer: an optax transformation in the place of the config's AdamW, schedule and clip.

    Returns:
      The final `TrainState`; `save_pretrained(directory, policy.replace(params=state.params))` exports it.

    Raises:
      ValueError: anything wrong with the arguments, before anything expensive runs; so are settings, data or a model
        that differ from those of the run that is found, unless the difference cannot change its numbers.
      RuntimeError: another process is using `run_dir`.
      OSError: a checkpoint or a line could not be written. What was whole before is still there.
      SystemExit: with the status 0, on SIGTERM or SIGINT, after the step in hand and a checkpoint; a KeyboardInterrupt
        on SIGINT in a notebook. Without a `run_dir`, signals do what they always do.
    """
    if resume not in RESUME:
        raise ValueError(f"resume = {resume!r}: choose one of {', '.join(map(repr, RESUME))}")
    if run_dir is None and resume == "must":
        raise ValueError('resume = "must": there is no run_dir to go on in; give one')
    run = prepare(policy, dataset, reward_fns, config, eval_dataset=eval_dataset, optimizer=optimizer)
    state = new_state(run)
    with (
        locked(run_dir),
        Checkpoints(run_dir, config, None if run_dir is None else about(run, state)) as checkpoints,
        Monitor(run_dir, config, callbacks=callbacks) as monitor,
        StopSignals(enabled=run_dir is not None) as signals,
    ):
        state, found, batch = checkpoints.restore(state, resume)
        progress, data = found or Progress(), run.task.data
        monitor.start(
            state,
            progress,
            total_steps=run.total_steps,
            num_rows=len(data.rows),
            num_dropped=len(data.dropped),
            resumed=found is not None,
        )
        evaluate_if_due(run, state, progress, monitor)
        while progress.step < run.total_steps and not signals.received:
            if batch is None:
                # One snapshot samples for the whole iteration; all its updates learn from the same completions.
                state = _begin_iteration(state)
                experience = collect(
                    run.task, state, progress.cursor, count=run.sizes.prompts, micro=run.micro, phase=monitor.phase
                )
                progress.collected(experience.cursor, experience.metrics)
                monitor.completions(progress.step + 1, experience.rows)
                batch = experience.batch
            with monitor.phase("update"):
                state, measured = update(
                    state,
                    slice_of(batch, progress.updates_done % run.sizes.slices, run.sizes),
                    model=run.task.model,
                    optimizer=run.optimizer,
                    config=config,
                    on_policy=run.sizes.updates == 1,
                    micro=run.micro,
                )
                metrics = {name: float(value) for name, value in jax.device_get(measured).items()}
            if run.schedule is not None:
                metrics["learning_rate"] = float(run.schedule(progress.step))
            if config.max_kl_old is not None:
                metrics["moved_too_far"] = float(metrics["approx_kl_old"] > config.max_kl_old)
            progress.updated(metrics)
            if progress.updates_done == run.sizes.updates or metrics.get("moved_too_far"):
                batch, progress.updates_done = None, 0
            if progress.step % config.logging_steps == 0 or progress.step == run.total_steps:
                line = progress.log_line()
                progress.measured(config.metric_for_best_model, line)
                monitor.log(progress.step, line)
            if not signals.received:
                evaluate_if_due(run, state, progress, monitor)
                if checkpoints.due(progress.step, run.total_steps):
                    checkpoints.save(state, progress, batch)
        if signals.received:
            checkpoints.save(state, progress, batch)
        checkpoints.wait()
        monitor.end(progress.step, run.total_steps, best=checkpoints.best())
        if signals.received:
            signals.leave()
    return state


def prepare(
    policy: Policy,
    dataset: Any,
    reward_fns: Callable[..., Any] | Sequence[Callable[..., Any]],
    config: GRPOConfig,
    *,
    eval_dataset: Any = None,
    optimizer: optax.GradientTransformation | None = None,
) -> Run:
    """Check the arguments of `train` against each other, and derive what follows from them."""
    if not isinstance(config, GRPOConfig):
        raise ValueError(
            f"config must be a GRPOConfig; got {type(config).__name__} (GRPOConfig.from_dict takes a dict)."
        )
    if not isinstance(policy, Policy):
        raise ValueError(f"policy must be what from_pretrained returns, a Policy; got {type(policy).__name__}.")
    if policy.tokenizer is None:
        raise ValueError(
            "policy has no tokenizer: its checkpoint has no tokenizer files. Set policy.replace(tokenizer=...)."
        )
    if not policy.eos_token_ids:
        raise ValueError(
            "policy has no EOS token, so no completion could ever end: give eos_token_id in generation_config.json, "
            "config.json or the tokenizer, or policy.replace(generation_config={'eos_token_id': ...})."
        )
    reward_fns = [reward_fns] if callable(reward_fns) else list(reward_fns)
    rows = load_rows(dataset)
    check_reward_fns(reward_fns, rows[0])
    encoding: dict[str, Any] = {
        "max_prompt_length": config.max_prompt_length,
        "on_long_prompt": config.on_long_prompt,
        "chat_template_kwargs": config.chat_template_kwargs,
    }
    data = encode_prompts(rows, policy.tokenizer, **encoding)
    eval_data = None
    if eval_dataset is not None:
        eval_rows = load_rows(eval_dataset, argument="eval_dataset")
        check_reward_fns(reward_fns, eval_rows[0])
        eval_data = encode_prompts(eval_rows, policy.tokenizer, argument="eval_dataset", **encoding)
    longest = max(len(ids) for ids in data.token_ids)
    model = with_settings(policy.model, config)
    shape = model.config if isinstance(model, Transformer | LoraModel) else None
    largest = max(max(ids) for ids in data.token_ids)
    if shape is not None and largest >= shape.vocab_size:
        raise ValueError(
            f"policy.tokenizer gives the token id {largest}, and the model has a vocabulary of {shape.vocab_size}: "
            "the two do not belong together."
        )
    check_run(
        config,
        num_devices=1,
        num_rows=len(data.rows),
        num_reward_fns=len(reward_fns),
        num_eval_rows=None if eval_data is None else len(eval_data.rows),
        longest_prompt=longest,
        context_length=None if shape is None else shape.max_position_embeddings,
    )
    total_steps = config.total_steps(len(data.rows))
    return Run(
        policy=policy.replace(model=model),
        task=Task(
            model=model,
            tokenizer=policy.tokenizer,
            eos_token_ids=policy.eos_token_ids,
            pad_token_id=policy.pad_token_id,
            data=data,
            prompt_length=-(-longest // config.padding) * config.padding,
            reward_fns=reward_fns,
            config=config,
        ),
        eval_data=eval_data,
        sizes=config.sizes(),
        total_steps=total_steps,
        optimizer=make_optimizer(config, total_steps) if optimizer is None else optimizer,
        schedule=make_schedule(config, total_steps) if optimizer is None else None,
    )


def about(run: Run, state: TrainState) -> dict[str, Any]:
    """What the run is begun with, for its checkpoints."""
    task = run.task
    return describe(
        task.config,
        data=task.data,
        reward_fns=task.reward_fns,
        model=task.model,
        state=state,
        total_steps=run.total_steps,
        own_optimizer=run.schedule is None,
    )


def with_settings(model: Model, config: GRPOConfig) -> Model:
    """The model with the config's compute dtype and recomputation; a model of the user's own is left as it is."""
    if not isinstance(model, Transformer | LoraModel):
        return model
    shape = dataclasses.replace(model.config, dtype=config.compute_dtype, remat=config.gradient_checkpointing)
    decoder = Transformer(shape)
    return dataclasses.replace(model, model=decoder) if isinstance(model, LoraModel) else decoder


def new_state(run: Run) -> TrainState:
    """The state at step 0, holding only what this config will read."""
    config = run.task.config
    return create_state(
        run.policy.params,
        run.optimizer,
        jax.random.key(config.seed),
        keep_old=run.sizes.updates > 1,
        keep_reference=config.beta > 0,
        keep_initial=config.sync_ref_model,
        entropy_coef=config.entropy_coef,
        # The adaptive bonus acts on a measured entropy, and nothing has been measured yet.
        entropy_bonus=0.0 if config.use_adaptive_entropy else None,
    )


def slice_of(batch: Batch, index: int, sizes: Sizes) -> Batch:
    """The optimizer batch `index` of an iteration's batch, cut along B."""
    if sizes.slices == 1:
        return batch
    start, stop = index * sizes.prompts_per_update, (index + 1) * sizes.prompts_per_update
    return jax.tree.map(lambda x: x[start:stop], batch)


def evaluate_if_due(run: Run, state: TrainState, progress: Progress, monitor: Monitor) -> None:
    """Evaluate before the first step, at every multiple of `eval_steps`, and after the last step."""
    config, step = run.task.config, progress.step
    due = step in (0, run.total_steps) or (config.eval_steps is not None and step % config.eval_steps == 0)
    if run.eval_data is None or not due or progress.evaluated == step:
        return
    group = config.eval_generations
    with monitor.phase("evaluation"):
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
        )
    progress.evaluated = step
    best, measured = config.metric_for_best_model, {f"eval/{name}": value for name, value in metrics.items()}
    if best is not None and best.startswith("eval/") and best not in measured:
        raise ValueError(f"metric_for_best_model = {best!r}: an evaluation measures {', '.join(measured)}; name one")
    progress.measured(best, measured)
    monitor.evaluation(step, metrics)
