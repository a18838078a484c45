"""One iteration's experience: prompts → completions → rewards → advantages → `Batch`.

The n-th prompt of a run is the n-th entry of the epochs, shuffled or not, and its samples come from the keys of n: the
cursor is one integer.

While the reward functions run on the host, the device computes the reference's log-probs (with `dynamic_sampling`
afterwards, because rewards choose the groups), and with `rollout_ahead` the next completions (`streams.beside`). It
then holds the training state (`run.beginning.new_state`), a frozen base, a teacher and, without `donate`, the caller's
params; the prompts' keys and values with one packed sequence; and the caches of the next rollout. The caches of this
iteration's rollout are freed, and its tokens and log-probs are on the host.

```
rollout_ahead    device: sample 1 from θ0 │ sample 2 from θ0 │ update 1 │ sample 3 from θ1 │ update 2 │ sample 4 …
                 host:                    │ rewards of 1     │          │ rewards of 2     │          │ rewards of 3 …
```

An engine that takes its params beforehand samples during the update too (`run.beside`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import numpy as np

from grpo_jax.config import settings
from grpo_jax.config.config import GRPOConfig
from grpo_jax.maths.advantages import compute_advantages
from grpo_jax.models.packing import lengths_of
from grpo_jax.models.sharding import fetch
from grpo_jax.models.streams import beside
from grpo_jax.rewards.calls import means_of
from grpo_jax.rewards.contract import check_metrics, reward_names
from grpo_jax.rollout.ends import TurnEnds
from grpo_jax.run.beside import Beside
from grpo_jax.run.run import Run
from grpo_jax.run.sample import Ahead, Sampled, sample
from grpo_jax.run.sampler import Request, mismatch
from grpo_jax.run.scores import Groups, completion_rows, of_all_processes, rollout_metrics, score_own, zero_signal
from grpo_jax.run.seams import context_of, place_parts
from grpo_jax.run.teacher import with_teacher
from grpo_jax.types import Batch, Completions, Params, Prompts
from grpo_jax.update.objective import sampling_of
from grpo_jax.update.state import TrainState

Phase = Callable[[str], AbstractContextManager[None]]

_jit_advantages = jax.jit(
    compute_advantages, static_argnames=("weights", "estimator", "scale_rewards", "multi_objective_aggregation")
)


@dataclasses.dataclass(frozen=True)
class Experience:
    """A batch with its metrics and lines for the log.

    Attributes:
      batch: the whole iteration's `Batch`, [B, G, T], in NumPy's arrays.
      cursor: prompts used since the start of the run, after this iteration.
      metrics: of the rollout; with `dynamic_sampling` as in `_with_signal`.
      rows: one dict per completion: prompt, completion, rewards, advantage (the mean over tokens), ended.
      ahead: completions of the prompts from `cursor` on, for the next iteration; None without `look_ahead`.
    """

    batch: Batch
    cursor: int
    metrics: dict[str, float]
    rows: list[dict[str, Any]]
    ahead: Ahead | None = None


class _Round(NamedTuple):
    """One rollout with its rewards."""

    groups: Groups
    metrics: dict[str, float]
    batch: Batch | None  # its advantages still 0; None with dynamic_sampling, where rewards choose its groups
    cursor: int  # prompts used since the start of the run, after this round
    ahead: Ahead | None  # completions of the next round; None without `look_ahead`, and while an engine is at them


@dataclasses.dataclass(frozen=True)
class _Rollouts:
    """Rollouts of `count` prompts each, as `collect` was asked for them."""

    run: Run
    request: Request
    params: Params
    key: jax.Array
    step: int
    count: int
    phase: Phase
    look_ahead: bool
    interrupt: Callable[[], None]
    engine: Beside | None

    def rounds(
        self, cursor: int, ahead: Ahead | None, begin: Callable[[Prompts, Completions], Batch] | None
    ) -> Iterator[_Round]:
        """Round after round: the device's work is begun first, and then the rewards are computed."""
        run, config = self.run, self.run.config
        names = reward_names(run.reward_fns)
        while True:
            start, cursor = cursor, cursor + self.count
            sampled = self.sampled(start, ahead)
            measured = dict(getattr(run.sampler, "measured", {}))  # before the engine begins with others
            coming_rows = run.numbers(cursor, self.count) if self.look_ahead else []
            if self.look_ahead and self.engine is not None:
                with self.phase("rollout"):
                    self.engine.begin(self.params, self.key, cursor, coming_rows, self.request, self.interrupt)
            if config.rollout_ahead:  # in the first iteration too: environments of waiting completions are not kept
                sampled = sampled._replace(environments=None)
            batch = None
            if begin is not None:
                with self.phase("reference"):
                    batch = begin(sampled.prompts, sampled.completions)

            def sample_next(batch: Batch | None = batch, cursor: int = cursor, rows: list[int] = coming_rows) -> Ahead:
                jax.block_until_ready(batch)  # two threads' programs at once could reach a mesh's devices out of order
                return Ahead.of(self.sample(cursor, rows), run.data, rows)

            here = self.look_ahead and self.engine is None
            with beside(sample_next) if here else contextlib.nullcontext() as coming:
                with self.phase("rewards"):
                    own = score_own(
                        run.policy.tokenizer,
                        run.reward_fns,
                        sampled,
                        on_error=config.on_reward_error,
                        trainer_state=run.trainer_state(self.step, start),
                    )
                with self.phase("rollout"):
                    ahead = None if coming is None else coming.result()
            with self.phase("rewards"):
                scores = of_all_processes(own, run.reward_fns)
            lines, g = completion_rows(scores, names, sampled, weighed=True), scores.values.shape[1]
            of_groups = [lines[i : i + g] for i in range(0, len(lines), g)]
            parts = place_parts(run.own_advantages, scores, sampled, names)
            groups = Groups(of_groups, sampled.prompts, sampled.completions, scores.values, parts)
            metrics = scores.stats | rollout_metrics(config, groups, sampled.present) | sampled.metrics | measured
            check_metrics(scores.metrics, metrics)
            yield _Round(groups, means_of(scores.metrics) | metrics, batch, cursor, ahead)

    def sampled(self, start: int, ahead: Ahead | None) -> Sampled:
        """The completions of the prompts from `start` on, wherever they are sampled."""
        run, rows = self.run, self.run.numbers(start, self.count)
        if ahead is not None:
            return ahead.sampled(run.data, rows, self.request)
        if self.engine is not None and self.engine.busy:
            with self.phase("rollout"):
                return self.engine.result(self.params)
        with self.phase("rollout"):
            return self.sample(start, rows)

    def sample(self, cursor: int, rows: list[int]) -> Sampled:
        """Completions of these rows, the prompts from `cursor` on."""
        return sample(
            self.run.policy.model,
            self.params,
            self.run.data,
            rows,
            self.key,
            self.request,
            prompt_indices=cursor + np.arange(self.count),
            interrupt=self.interrupt,
            updater=self.run.updater,
        )


def request_of(run: Run) -> Request:
    """How a run asks for the completions that it learns from."""
    config = run.config
    return Request(
        num_generations=config.num_generations,
        max_completion_length=config.max_completion_length,
        sampling=sampling_of(config),
        eos_token_ids=run.policy.eos_token_ids,
        pad_token_id=run.policy.pad_token_id,
        prompt_length=run.prompt_length,
        padding=config.padding,
        batch_size=config.rollout_batch_size,
        interaction=run.interaction,
        sampler=run.sampler,
        policy=run.policy,
        ends=TurnEnds.of(config),
    )


def _with_signal(rounds: Iterator[_Round], config: GRPOConfig, count: int) -> tuple[_Round, np.ndarray]:
    """Returns `count` groups whose rewards differ, sampling further prompts for groups without signal (DAPO).

    Sampling stops after `MAX_REFILLS` further rounds. Missing groups are then filled with zero-signal groups, which are
    not counted in the loss, its denominators and batch statistics. Returns the rounds merged into one, and [count]
    bool, which groups count. Metrics are those of the first round, whose prompts are not selected; costs are summed
    over rounds.
    """
    taken = [next(rounds)]
    groups = taken[0].groups
    while True:
        kept = ~zero_signal(groups.rewards, config)
        if kept.sum() >= count or len(taken) > settings.MAX_REFILLS:
            break
        taken.append(next(rounds))
        groups = groups.join(taken[-1].groups)
    order = np.argsort(~kept, kind="stable")[:count]
    first, last = taken[0], taken[-1]
    costs = [name for name in first.metrics if name.startswith("rewards/") and name.endswith(("/errors", "/seconds"))]
    metrics = first.metrics | {name: sum(one.metrics[name] for one in taken) for name in ("num_tokens", *costs)}
    metrics["dynamic_sampling/refills"] = float(len(taken) - 1)
    metrics["dynamic_sampling/groups_without_signal"] = float((~kept).sum())
    return last._replace(groups=groups.take(order), metrics=metrics), kept[order]


def collect(
    run: Run,
    state: TrainState,
    cursor: int,
    *,
    count: int,
    phase: Phase = lambda name: contextlib.nullcontext(),
    ahead: Ahead | None = None,
    look_ahead: bool = False,
    engine: Beside | None = None,
    interrupt: Callable[[], None] = lambda: None,
) -> Experience:
    """Sample, score and weigh one iteration's completions; the arrays are on the host, cut as the updater needs them.

    Args:
      state: completions are sampled from `old_params`, or from `params` if no old policy is kept.
      cursor: prompts used since the start of the run.
      count: B, prompts of the iteration.
      phase: `phase(name)` is a context in which that part of the work is timed.
      ahead: completions of the prompts from `cursor` on that an earlier policy has sampled already.
      look_ahead: sample the next prompts too, while the reward functions work.
      engine: samples these in the background, and may not be done when this returns; None waits for them.
      interrupt: called before each of these parts, every few tokens and at the end; what it raises ends the iteration.
    """
    config = run.config
    begin = functools.partial(_begin_batch, run, state)

    def watched(name: str) -> AbstractContextManager[None]:
        interrupt()
        return phase(name)

    rollouts = _Rollouts(
        run=run,
        request=request_of(run),
        params=state.params if state.old_params is None else state.old_params,
        key=jax.random.fold_in(state.key, 0),
        step=int(state.step),
        count=count,
        phase=watched,
        look_ahead=look_ahead,
        interrupt=interrupt,
        engine=engine,
    )
    if config.dynamic_sampling:
        last, counted = _with_signal(rollouts.rounds(cursor, ahead, None), config, count)
        with watched("reference"):
            last = last._replace(batch=begin(last.groups.prompts, last.groups.completions, counted))
    else:
        last, counted = next(rollouts.rounds(cursor, ahead, begin)), np.ones(count, bool)
    groups, metrics, batch, cursor, ahead = last
    assert batch is not None, "begun by the round, or after all of them"
    with watched("reference"):  # whose log-probs are waited for here
        batch = _with_advantages(run, state, batch, groups, counted)
    if run.teaching is not None:
        with watched("teacher"):
            batch = with_teacher(run.teaching, batch, groups.completions, config)
    interrupt()
    metrics |= mismatch(batch, config)
    lines = zip((row for group in groups.rows for row in group), _of_completions(batch).reshape(-1), strict=True)
    return Experience(batch, cursor, metrics, [{**row, "advantage": float(a)} for row, a in lines], ahead)


def _with_advantages(run: Run, state: TrainState, batch: Batch, groups: Groups, counted: np.ndarray) -> Batch:
    """The batch on the host, with its advantages; `counted` [B] is False for groups that only fill it."""
    config, own = run.config, run.own_advantages
    # Groups that only fill the batch count as not scored: NaN keeps them out of the statistics of the whole batch.
    rewards = np.where(counted[:, None, None], groups.rewards, np.float32(np.nan))
    if own is not None:
        assert groups.parts is not None, "placed where somebody asks"
        batch = fetch(batch)
        context = context_of(state, batch, groups.completions, groups.parts.of(batch, counted), config)
        return batch.replace(advantages=own(rewards, batch, counted, context))
    advantages = _jit_advantages(
        rewards,
        weights=config.reward_weights,
        multi_objective_aggregation=config.multi_objective_aggregation,
        estimator=config.advantage_estimator,
        scale_rewards=config.scale_rewards,
        lengths=np.sum(groups.completions.mask, axis=-1) if config.advantage_estimator == "opo" else None,
    )
    return fetch(batch.replace(advantages=advantages))


def _of_completions(batch: Batch) -> np.ndarray:
    """One advantage for each completion [B, G]: of those of tokens their mean."""
    advantages = np.asarray(batch.advantages)
    return advantages if advantages.ndim == 2 else advantages.sum(-1) / np.maximum(np.sum(batch.mask, axis=-1), 1)


def _begin_batch(run: Run, state: TrainState, prompts: Prompts, completions: Completions, counted: Any = None) -> Batch:
    """The `Batch` of some completions but for its advantages; the device may still be at its log-probs.

    `counted` [B] bool: False for groups that only fill the batch; None: all count.
    """
    t = run.updater.columns(int(lengths_of(np.asarray(completions.mask)).max()))
    tokens, mask = completions.tokens[:, :, :t], completions.mask[:, :, :t]
    if counted is not None:
        mask = mask & counted[:, None, None]
    if run.config.mask_truncated_completions:
        mask = mask & completions.ended[:, :, None]

    def log_probs_under(params: Params | None) -> jax.Array | None:
        return None if params is None else run.updater.score(params, prompts, tokens, mask)

    advantages: Any = np.zeros(mask.shape[:2], np.float32)
    return Batch(
        prompts=prompts,
        tokens=tokens,
        mask=mask,
        advantages=advantages,
        sampling_log_probs=completions.log_probs[:, :, :t],  # the ratio's old ones: see `types.Batch`
        ref_log_probs=log_probs_under(state.ref_params),
        initial_log_probs=log_probs_under(state.initial_params),
        counted=counted,
        old_log_probs=None if completions.old_log_probs is None else completions.old_log_probs[:, :, :t],
    )
