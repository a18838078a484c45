"""GRPO training on a dataset of prompts. The body of `train` is the training loop.

```
prepare ─► new or restored state ─► until the last step:
                                       collect a batch          (run.collect: rollout, rewards, advantages, log-probs)
                                       update on a minibatch    (update.packed; also syncs the reference)
                                       log, evaluate, save      (run.session)
```
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import optax

from grpo_jax.config.config import GRPOConfig
from grpo_jax.config.settings import Sizes
from grpo_jax.maths.surrogates import Surrogate
from grpo_jax.models.sharding import commit_to_devices, fetch
from grpo_jax.policy import Policy
from grpo_jax.run.collect import collect
from grpo_jax.run.prepare import prepare
from grpo_jax.run.resume import with_saved_gradient_checkpointing
from grpo_jax.run.run import Run, new_state
from grpo_jax.run.session import Session, check_run_dir, open_session
from grpo_jax.run.signals import Interrupted
from grpo_jax.run.sources import rollout_source
from grpo_jax.text.prompts import EncodedPrompts
from grpo_jax.text.sources import Dataset
from grpo_jax.types import AdvantageFn, Batch, Environments, Params, RewardFn
from grpo_jax.update.state import TrainState, begin_iteration
from grpo_jax.watch.monitor import Callback
from grpo_jax.watch.writer import absolute_run_dir

if TYPE_CHECKING:  # imported at runtime only when a run needs them
    from grpo_jax.run.sampler import Sampler
    from grpo_jax.run.teacher import Scorer

_begin_iteration = jax.jit(begin_iteration, donate_argnames=("state",))


def train(
    policy: Policy,
    dataset: Dataset,
    reward_fns: RewardFn | Sequence[RewardFn],
    config: GRPOConfig,
    *,
    eval_dataset: Dataset | None = None,
    run_dir: str | Path | None = None,
    resume: str = "auto",
    callbacks: Sequence[Callback] = (),
    optimizer: optax.GradientTransformation | None = None,
    tools: Sequence[Callable[..., Any]] | None = None,
    environment_factory: Environments | None = None,
    sampler: Sampler | None = None,
    advantage_fn: AdvantageFn | None = None,
    surrogate: Surrogate | None = None,
    teacher: Policy | Scorer | None = None,
    donate: bool = False,
) -> TrainState:
    """Train a policy with GRPO.

    Args:
      policy: policy to train, as returned by `from_pretrained`. Its params are copied unless `donate` is True.
      dataset: rows to train on, as a list, a dataset, a file or the name of a hub dataset (see `load_rows`). Each
        row has a `prompt` (a string or a list of messages). Other columns are passed to reward functions by name.
      reward_fns: one or more reward functions with TRL's signature (`types.RewardFn`); may be [] with a `teacher`.
      config: training settings.
      eval_dataset: rows to evaluate on before the first step, every `eval_steps` steps and after the last step. Also
        accepts a dict of such datasets, keyed by name; their metrics have names such as `eval/<name>/reward`.
      run_dir: directory for metrics, completions, checkpoints and the report. If None, no files are written. Only
        one run can use a directory at a time.
      resume: how to resume. "auto" resumes the run in `run_dir`, if any; the final state is bit-identical to an
        uninterrupted run's. "must" raises an error if there is no checkpoint; "never" raises one if
        `run_dir` already contains a run.
      callbacks: functions called as `callback(step, metrics)` after every logged step (see `watch.Callback`). If one
        raises `watch.StopRun`, the run saves a checkpoint and stops.
      optimizer: optax transformation that replaces the config's AdamW, learning rate schedule and gradient clipping.
      tools: sync or async functions that the policy may call between its turns. The chat template shows their
        signatures and docstrings, and their results are appended to the context before the policy's next turn.
      environment_factory: class or function without arguments that creates an environment for each completion
        (`types.Environment`), or a dict of factories, selected by the dataset column `environment`. An environment's
        public methods are tools. Its `respond(text)`, if defined, returns the text to append after a turn without tool
        calls. `reset(**row)` may return text to append to the prompt. `get_reward()` returns an additional reward,
        which is named after the class and has weight 1 by default. Reward functions with an argument `environments`
        receive the environments, except with prefetching (`rollout_ahead`).
      sampler: inference engine to sample with instead of `generate` (see `run.sampler.Sampler`), except in evaluations.
      advantage_fn: function `f(rewards [B, G, K], mask [B, G, T], **context)` that returns advantages of shape [B, G]
        or [B, G, T]. It is compiled, and replaces `advantage_estimator`, `scale_rewards` and
        `multi_objective_aggregation`. `types.AdvantageFn` lists the context.
      surrogate: function of `maths.surrogates.SurrogateInputs` and `LossSettings` that returns the loss per token,
        [..., T]. It replaces `loss_type`'s surrogate; `loss_type` still determines the reduction to a scalar.
      teacher: teacher to distill from, weighted by `distillation_coef`. Either a policy of any size, possibly
        quantized, with the same tokenizer (it is placed on the run's mesh), or a scorer, which returns log-probs
        (`run.teacher.Scorer`).
      donate: whether to update the arrays of `policy` in place instead of copying them. With AdamW, this saves a
        quarter of the memory for params and optimizer state. Ignored if `teacher` shares arrays with `policy`. Any use
        of `policy.params` then raises an error. Other fields remain, so `policy.replace(params=state.params)` works.

    Returns:
      The final `TrainState`, or the best checkpoint's state with `load_best_model_at_end`. Export it with
      `save_pretrained(directory, policy.replace(params=state.params))`.

    Raises:
      ValueError: if an argument is invalid (raised before any expensive work), or if `run_dir` contains a run with
        different settings, data or model that affect its results.
      RuntimeError: if another run is using `run_dir`.
      FloatingPointError: if the loss or gradient was not finite in `max_skipped_updates` consecutive updates.
      OSError: if a checkpoint or log line could not be written. Previous checkpoints are intact.
      SystemExit: with `run_dir`, after SIGTERM (status 143) or SIGINT (status 130; KeyboardInterrupt in a notebook).
        The current update or reward call is completed first (with several processes, the current batch and one update).
        A checkpoint is then saved. A resumed run repeats an unfinished rollout and its rewards.

    Example:
      A bigram model with 16 parameters learns in 30 steps to start completions with "b":

      >>> import jax.numpy as jnp
      >>> from tokenizers import Tokenizer, decoders, models, pre_tokenizers
      >>> from transformers import PreTrainedTokenizerFast
      >>> from grpo_jax import evaluate
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
    from grpo_jax.watch.hints import MetricHints  # messages about problems that the metrics show

    run_dir = absolute_run_dir(run_dir)
    run = prepare(
        policy,
        dataset,
        reward_fns,
        with_saved_gradient_checkpointing(config, run_dir),  # a resumed run keeps its automatic choice
        eval_dataset=eval_dataset,
        optimizer=optimizer,
        tools=tools,
        environment_factory=environment_factory,
        sampler=sampler,
        advantage_fn=advantage_fn,
        surrogate=surrogate,
        teacher=teacher,
    )
    check_run_dir(run, run_dir, resume)
    donate = donate and not _shares_params(policy, teacher)  # the teacher's arrays must stay intact
    # Commit the arrays to devices. Restored arrays are committed, and would otherwise need different programs.
    state = commit_to_devices(new_state(run, donate=donate))
    run.policy.release_params()  # drops only the run's reference; the caller's `policy` is a separate object
    with open_session(run, run_dir, state, callbacks, MetricHints(run.config)) as session:
        restored = session.start(state, resume, params_shared_with_caller=donate)
        if donate:  # only now, so that the caller's policy is intact if restoring a checkpoint fails
            policy.release_params()
        state, batch = restored.state, restored.batch
        progress, monitor, signals = session.progress, session.monitor, session.signals
        if run.eval_data is not None:
            session.evaluate = functools.partial(_evaluate, run, run.eval_data, session)
        source = rollout_source(
            run, state, progress, restored.prefetched_completions, restored.prefetched_metadata, signals.check
        )
        with contextlib.closing(source) as session.source:
            session.evaluate_if_due(state, batch)  # a signal ends the evaluation without an exception
            while session.should_continue():
                if batch is None:  # start of an iteration
                    try:
                        source.wait_pending(state)  # uses old_params, which the next line overwrites
                        state = _begin_iteration(state)  # old_params ← params, if the old policy is kept
                        batch, metrics, records = collect(run, state, source, monitor.phase, signals.check)
                    except Interrupted:  # SIGTERM or SIGINT; the resumed run samples this batch again
                        break
                    except Exception:
                        session.save_after_error(state)
                        raise
                    session.record_batch(source.cursor, metrics, records)  # updates `progress`, and logs `records`
                minibatch = _minibatch(batch, progress.updates_done, run.sizes)  # `updates_done`: updates on this batch
                with monitor.phase("update"):
                    state, measured = run.updater.update(state, minibatch)
                    metrics = {name: float(value) for name, value in fetch(measured).items()}
                session.record_update(metrics)  # increments `step` and `updates_done`, and logs if due
                if progress.updates_done == 0:  # reset after the iteration's last update
                    batch = None
                session.check_skipped_updates(state, minibatch, metrics, batch)
                if not session.stop_requested():
                    session.evaluate_if_due(state, batch)
                    session.save_if_due(state, batch)
            state = session.end(state, batch)  # saves after a stop; after a signal, `open_session` raises SystemExit
    return state


def _shares_params(policy: Policy, teacher: Policy | Scorer | None) -> bool:
    """Return whether any array in a teacher's params or its adapters' base model is also in the policy's params."""
    ids = {id(leaf) for leaf in jax.tree.leaves(policy.params)}
    return isinstance(teacher, Policy) and any(id(x) in ids for x in jax.tree.leaves((teacher.model, teacher.params)))


def _minibatch(batch: Batch, updates_done: int, sizes: Sizes) -> Batch:
    """Return the slice of the batch along B for the iteration's next update."""
    first = updates_done % sizes.minibatches * sizes.prompts_per_update
    return jax.tree.map(lambda x: x[first : first + sizes.prompts_per_update], batch)


def _evaluate(run: Run, data: EncodedPrompts, session: Session, params: Params) -> dict[str, float]:
    """Sample completions for the evaluation prompts with `generate` and return their metrics."""
    from grpo_jax.run.evaluate import evaluate_encoded

    return evaluate_encoded(
        run.policy,
        data,
        run.reward_fns,
        run.config,
        params=params,
        episode_setup=run.episode_setup,
        trainer_state=run.trainer_state(session.progress.step, session.progress.cursor),
        check_interrupt=session.signals.check,
    )[0]
