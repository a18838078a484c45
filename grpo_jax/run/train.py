"""`train`: GRPO over a dataset of prompts. The loop of a run is the body of the function.

```
prepare ─► state, or checkpoint ─► while there are updates to make:
                                       collect a batch          (run.collect: rollout, rewards, advantages, log-probs)
                                       update with a minibatch  (update.packed, which also syncs the reference)
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
from grpo_jax.models.sharding import committed, fetch
from grpo_jax.policy import Policy
from grpo_jax.run.collect import collect
from grpo_jax.run.prepare import prepare
from grpo_jax.run.resume import as_begun, describe
from grpo_jax.run.run import Run, new_state
from grpo_jax.run.session import Session, check_run_dir, open_session
from grpo_jax.run.signals import Interrupted
from grpo_jax.run.sources import rollout_source
from grpo_jax.text.prompts import EncodedPrompts
from grpo_jax.text.sources import Dataset
from grpo_jax.types import AdvantageFn, Batch, Environments, Params, RewardFn
from grpo_jax.update.state import TrainState, begin_iteration
from grpo_jax.watch.monitor import Callback
from grpo_jax.watch.writer import reject_object_store

if TYPE_CHECKING:  # optional capabilities
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
    """Train a policy by GRPO.

    Args:
      policy: from `from_pretrained`; its params are copied, unless `donate` is True.
      dataset: rows with a `prompt` (text, or a list of messages) and any other columns, which are passed to reward
        functions by name: a list, a dataset, a file or a name on the hub (see `text.load_rows`).
      reward_fns: one or more reward functions with TRL's contract (`types.RewardFn`); may be [] with a `teacher`.
      config: the settings.
      eval_dataset: rows to evaluate on before the first step, every `eval_steps` and after the last step; or a dict of
        such datasets by name, with metrics such as `eval/<name>/reward`.
      run_dir: directory for metrics, completions, checkpoints and the report; None writes nothing. One process uses it
        at a time.
      resume: "auto" resumes the run in `run_dir`, if there is one, and ends in the same bytes as an uninterrupted run;
        "must" is an error if there is none, "never" if there is one. "changed" resumes like "auto" and accepts, with a
        warning, reward functions, tools and environments whose source has changed.
      callbacks: functions called as `callback(step, metrics)` after every logged step, see `watch.Callback`; one that
        raises `watch.StopRun` stops the run after a checkpoint.
      optimizer: an optax transformation instead of the config's AdamW, schedule and clip.
      tools: functions, sync or async, that the policy may call between its turns. The chat template shows their
        signatures and docstrings, and the policy reads their results before its next turn.
      environment_factory: a class or function without arguments that makes an environment for each completion
        (`types.Environment`), or a dict of these, chosen by a column `environment`. Its public methods are tools, or
        its `respond(text)` returns the text after a turn; `reset(**row)` may add to the prompt; `get_reward()` is a
        further reward, of weight 1 and named after the class. Reward functions with an argument `environments` receive
        them, except with `rollout_ahead`.
      sampler: an engine that samples instead of `generate`, see `run.sampler.Sampler`. Evaluations of the run use
        `generate`.
      advantage_fn: a function `f(rewards [B, G, K], mask [B, G, T], **context)` that returns the advantages, [B, G] or
        [B, G, T], instead of `advantage_estimator`, `scale_rewards` and `multi_objective_aggregation`. It is compiled.
        `types.AdvantageFn` lists the context.
      surrogate: a function of `maths.surrogates.Tokens` and `LossSettings` that returns the loss of each token,
        [..., T], instead of the surrogate of `loss_type`, which still determines the reduction to a scalar.
      teacher: a second source of learning, weighted by `distillation_coef`: another policy with the same tokenizer, of
        any size, quantized or not, which is placed on the run's mesh; or a scorer, which returns log-probs
        (`run.teacher.Scorer`).
      donate: train the arrays of `policy` in place instead of a copy, which saves a quarter of the memory of full
        fine-tuning with AdamW. Afterwards `policy` has no params, and using them raises an error; its model, tokenizer
        and files remain, for `policy.replace(params=state.params)`.

    Returns:
      The final `TrainState`, or with `load_best_model_at_end` the best checkpoint's;
      `save_pretrained(directory, policy.replace(params=state.params))` exports it.

    Raises:
      ValueError: arguments that cannot be used, before anything expensive runs; or settings, data or a model that
        differ from those of the run in `run_dir` and can change its numbers.
      RuntimeError: another process is using `run_dir`.
      FloatingPointError: `max_skipped_updates` updates in a row had a loss or gradient that is not finite.
      OSError: a checkpoint or a line could not be written. Earlier checkpoints are intact.
      SystemExit: on SIGTERM (status 143) and SIGINT (status 130; in a notebook a KeyboardInterrupt), after a
        checkpoint. An update in progress is completed; the resumed run repeats an unfinished rollout. Without a
        `run_dir`, signals have their usual effect.

    Example:
      A model of sixteen numbers, one for each pair of letters, learns in thirty steps to begin with a b:

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
    from grpo_jax.watch.hints import Hints

    reject_object_store(run_dir)
    run = prepare(
        policy,
        dataset,
        reward_fns,
        as_begun(config, run_dir),
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
    state = committed(new_state(run, donate=donate))  # like a checkpoint's arrays, so that both use the same programs
    run.policy.empty()  # not the caller's `policy`: a copy, whose params may be on a mesh
    description = None
    if run_dir is not None:  # what checkpoints of the same run have in common
        description = describe(run, state, eos_token_ids=run.policy.eos_token_ids, eval_data=run.eval_data)
    with open_session(run, run_dir, description, callbacks, Hints(run.config)) as session:
        restored = session.start(state, resume, donate=donate)
        if donate:  # not before: nothing is taken from the caller if the run is refused
            policy.empty()
        state, batch = restored.state, restored.batch
        progress, monitor, interrupt = session.progress, session.monitor, session.signals.interrupt
        if run.eval_data is not None:
            session.evaluate = functools.partial(_evaluate, run, run.eval_data, session)
        source = rollout_source(run, state, progress, restored.ahead, restored.transcript, interrupt=interrupt)
        with contextlib.closing(source) as session.source:
            session.evaluate_if_due(state, batch)
            while session.running():
                if batch is None:  # an iteration begins, with an update for each minibatch
                    try:
                        source.wait_pending(state)  # what an engine samples is scored by the params it samples from
                        state = _begin_iteration(state)  # old_params ← params, if the old policy is kept
                        batch, metrics, rows = collect(run, state, source, phase=monitor.phase, interrupt=interrupt)
                    except Interrupted:  # SIGTERM or SIGINT; the resumed run samples this batch again
                        break
                    except Exception:
                        session.save_after_error(state)
                        raise
                    session.log_batch(source.cursor, metrics, rows)
                minibatch = _minibatch(batch, progress.updates_done, run.sizes)
                with monitor.phase("update"):
                    state, measured = run.updater.update(state, minibatch)
                    metrics = {name: float(value) for name, value in fetch(measured).items()}
                session.log_update(metrics)
                if progress.updates_done == 0:  # reset by the last update of an iteration
                    batch = None
                session.check_skipped(state, minibatch, metrics, batch)
                if not session.stopping():
                    session.evaluate_if_due(state, batch)
                    session.save_if_due(state, batch)
            state = session.end(state, batch)  # saves the run, if it was stopped
    session.exit_if_signalled()  # SystemExit after SIGTERM or SIGINT
    return state


def _minibatch(batch: Batch, updates_done: int, sizes: Sizes) -> Batch:
    """The prompts of the batch, along B, for the iteration's next update."""
    if sizes.minibatches == 1:
        return batch
    index, count = updates_done % sizes.minibatches, sizes.prompts_per_update
    return jax.tree.map(lambda x: x[index * count : (index + 1) * count], batch)


def _evaluate(run: Run, data: EncodedPrompts, session: Session, params: Params) -> dict[str, float]:
    """The metrics of the held-out prompts, sampled by `generate`."""
    from grpo_jax.run.evaluate import evaluate_encoded

    metrics, _ = evaluate_encoded(
        run.policy,
        data,
        run.reward_fns,
        run.config,
        params=params,
        interaction=run.interaction,
        trainer_state=run.trainer_state(session.progress.step, session.progress.cursor),
        interrupt=session.signals.interrupt,
    )
    return metrics
