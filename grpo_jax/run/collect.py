"""One iteration's experience: prompts → completions → rewards → advantages → `Batch`.

The host's part of the loop. What is random or ordered is found by counting prompts since the start of the run: the n-th
prompt is the n-th entry of the shuffled epochs, and its samples come from the keys of n. So the cursor is one integer.

While the host is at the reward functions, the device has work that needs no rewards: the reference's log-probs are
asked for first, and with `rollout_ahead` the next completions are sampled in a thread beside (`streams.beside`).

```
rollout_ahead    device: sample 1 from θ0 │ sample 2 from θ0 │ update 1 │ sample 3 from θ1 │ update 2 │ sample 4 …
                 host:                    │ rewards of 1     │          │ rewards of 2     │          │ rewards of 3 …
```
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.config.config import GRPOConfig
from grpo_jax.devices.streams import beside
from grpo_jax.maths.advantages import compute_advantages, zero_signal_groups
from grpo_jax.models.packing import lengths_of
from grpo_jax.rewards.calls import mean_of_scored, means_of, total_rewards
from grpo_jax.rewards.contract import TrainerState, reward_names
from grpo_jax.rewards.extras import Extras, check_metrics
from grpo_jax.run.sample import Ahead, Sampled, sample
from grpo_jax.run.sampler import Sampler, mismatch, sample_by
from grpo_jax.run.scores import completion_rows, of_all_processes, score_own
from grpo_jax.text.prompts import EncodedPrompts, make_prompts, prompt_indices
from grpo_jax.turns.interaction import Interaction
from grpo_jax.types import Batch, Completions, Model, Params, Prompts
from grpo_jax.update.objective import sampling_of
from grpo_jax.update.state import TrainState
from grpo_jax.update.updater import Updater

Phase = Callable[[str], AbstractContextManager[Any]]

_advantages = jax.jit(compute_advantages, static_argnames=("weights", "scale_rewards", "multi_objective_aggregation"))
_zero_signal = jax.jit(zero_signal_groups, static_argnames=("weights", "multi_objective_aggregation"))


@dataclasses.dataclass(frozen=True)
class Task:
    """What a run trains on; nothing in it changes.

    Attributes:
      model: the model.
      tokenizer: decodes completions for the reward functions.
      eos_token_ids: token ids that end a completion.
      pad_token_id: what stands after the end.
      data: the encoded dataset.
      prompt_length: P, one for all batches, so that nothing is compiled twice.
      reward_fns: K reward functions.
      config: the run's settings.
      interaction: what completions of several turns are answered by; None: they have one.
      sampler: another engine in the place of `generate`, as `run.sampler` wants it; None for that.
    """

    model: Model
    tokenizer: Any
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    data: EncodedPrompts
    prompt_length: int
    reward_fns: Sequence[Callable[..., Any]]
    config: GRPOConfig
    interaction: Interaction | None = None
    sampler: Sampler | None = None

    def trainer_state(self, step: int, cursor: int) -> TrainerState:
        """What reward functions may know of the run after so many optimizer steps and sampled prompts."""
        rows = len(self.data.rows)
        return TrainerState(step, self.config.total_steps(rows), cursor / rows)


@dataclasses.dataclass(frozen=True)
class Experience:
    """A batch and what a person wants to know of it.

    Attributes:
      batch: the whole iteration's `Batch`, [B, G, T].
      cursor: prompts used since the start of the run, after this iteration.
      metrics: of the rollout: rewards, lengths, counts. With `dynamic_sampling` they tell of the groups sampled first,
        and `num_tokens`, faults and seconds of all rounds.
      rows: one dict per completion: prompt, completion, rewards, advantage, ended.
      ahead: completions of the prompts from `cursor` on, for the next iteration; None without `look_ahead`.
    """

    batch: Batch
    cursor: int
    metrics: dict[str, float]
    rows: list[dict[str, Any]]
    ahead: Ahead | None = None


class _Groups(NamedTuple):
    """Some groups as they came from the sampler, on the host: lists and arrays with B in front."""

    rows: list[list[dict[str, Any]]]  # of each group those of its completions, for `completions.jsonl`
    prompts: Prompts
    completions: Completions
    rewards: np.ndarray  # [B, G, K]

    def take(self, groups: np.ndarray) -> _Groups:
        """Only these groups, in this order."""
        pick = lambda x: np.asarray(x)[groups]
        return _Groups([self.rows[b] for b in groups], *jax.tree.map(pick, self[1:]))

    def join(self, other: _Groups) -> _Groups:
        """These groups and then the others."""
        both = lambda x, y: np.concatenate([np.asarray(x), np.asarray(y)])
        mine, theirs = _equally_long(self.prompts, other.prompts)
        arrays = jax.tree.map(both, (mine, *self[2:]), (theirs, *other[2:]))
        return _Groups(self.rows + other.rows, *arrays)


class _Round(NamedTuple):
    """One rollout with its rewards."""

    groups: _Groups
    metrics: dict[str, float]
    batch: Batch | None  # as far as it is known without rewards; None where they choose among the groups
    cursor: int  # prompts used since the start of the run, after this round
    ahead: Ahead | None  # of the next round; None without `look_ahead`


@dataclasses.dataclass(frozen=True)
class _Rollouts:
    """Rollouts of `count` prompts each, as `collect` was asked for them."""

    task: Task
    params: Params
    key: jax.Array
    step: int
    count: int
    phase: Phase
    look_ahead: bool
    interrupt: Callable[[], None]
    updater: Updater

    def rounds(
        self, cursor: int, ahead: Ahead | None, begin: Callable[[Prompts, Completions], Batch] | None
    ) -> Iterator[_Round]:
        """Round after round: the device's work is begun first, and then the rewards are computed."""
        task = self.task
        names = reward_names(task.reward_fns)
        while True:
            start, cursor = cursor, cursor + self.count
            if ahead is None:
                with self.phase("rollout"):
                    sampled = self.sample(start)
            else:
                rows, _, token_ids = self.prompts(start)
                sampled = ahead.sampled(rows, token_ids, **self._room)
            if task.config.rollout_ahead:  # so that no iteration knows more than one whose completions have waited
                sampled = sampled._replace(environments=None)
            batch = None
            if begin is not None:
                with self.phase("reference"):
                    batch = begin(sampled.prompts, sampled.completions)

            def sample_next(batch: Batch | None = batch, cursor: int = cursor) -> Ahead:
                jax.block_until_ready(batch)  # two threads' programs at once could reach a mesh's devices out of order
                return Ahead.of(self.sample(cursor), self.prompts(cursor)[0])

            with beside(sample_next) if self.look_ahead else contextlib.nullcontext() as coming:
                with self.phase("rewards"):
                    how: dict[str, Any] = {"on_error": task.config.on_reward_error}
                    how["extras"] = Extras(task.trainer_state(self.step, start))
                    own = score_own(task.tokenizer, task.reward_fns, sampled, **how)
                with self.phase("rollout"):
                    ahead = None if coming is None else coming.result()
            with self.phase("rewards"):
                scores = of_all_processes(own, task.reward_fns)
            lines, g = completion_rows(scores, names, sampled, advantage=None), scores.rewards.shape[1]
            of_groups = [lines[i : i + g] for i in range(0, len(lines), g)]
            groups = _Groups(of_groups, sampled.prompts, sampled.completions, scores.rewards)
            metrics = scores.stats | _rollout_metrics(task.config, groups, sampled.present) | sampled.metrics
            check_metrics(scores.logged, metrics)
            yield _Round(groups, means_of(scores.logged) | metrics, batch, cursor, ahead)

    def prompts(self, cursor: int) -> tuple[list[dict[str, Any]], list[int], list[list[int]]]:
        """The next rows of the dataset, their numbers in it, and the tokens of their prompts."""
        data, config = self.task.data, self.task.config
        how: dict[str, Any] = {"seed": config.seed, "shuffle": config.shuffle_dataset}
        at = [row for _, row in prompt_indices(cursor, self.count, num_rows=len(data.rows), **how)]
        return [data.rows[row] for row in at], at, [data.token_ids[row] for row in at]

    def sample(self, cursor: int) -> Sampled:
        """Completions of the next prompts."""
        task, config = self.task, self.task.config
        rows, numbers, token_ids = self.prompts(cursor)
        how: dict[str, Any] = {
            "num_generations": config.num_generations,
            "max_completion_length": config.max_completion_length,
            "eos_token_ids": task.eos_token_ids,
            "pad_token_id": task.pad_token_id,
            "prompt_indices": cursor + np.arange(self.count),
            "batch_size": config.rollout_batch_size,
            "interrupt": self.interrupt,
            **sampling_of(config)._asdict(),
        }
        if task.sampler is not None:
            prompts = make_prompts(token_ids, length=task.prompt_length)
            given = (task.model, self.params, prompts, self.key)
            return Sampled(rows, prompts, sample_by(task.sampler, self.updater, *given, **how))
        how |= {"numbers": numbers, **self._room}
        return sample(task.model, self.params, rows, token_ids, self.key, **how)

    @property
    def _room(self) -> dict[str, Any]:
        """Who answers, and how long prompts are."""
        task = self.task
        return {"interaction": task.interaction, "prompt_length": task.prompt_length, "padding": task.config.padding}


def _with_signal(rounds: Iterator[_Round], config: GRPOConfig, count: int) -> tuple[_Round, np.ndarray]:
    """`count` groups whose rewards differ, by sampling further prompts for those whose rewards do not (DAPO).

    Sampling goes on for `max_refills` rounds at most. What is missing then is filled with zero-signal groups, which
    count nowhere: not in the loss, not in its denominators, not in the batch's statistics.

    Returns:
      All rounds as one, with `count` groups; and which of the groups count [count] bool. The metrics are those of the
      first round, whose prompts nobody has chosen, so that they tell of the policy; what a round costs is added up.
    """
    taken = [next(rounds)]
    groups = taken[0].groups
    while True:
        kept = ~np.asarray(_zero_signal(groups.rewards, **_aggregation(config)))
        if kept.sum() >= count or len(taken) > config.max_refills:
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


def _aggregation(config: GRPOConfig) -> dict[str, Any]:
    return {"weights": config.reward_weights, "multi_objective_aggregation": config.multi_objective_aggregation}


def collect(
    task: Task,
    state: TrainState,
    cursor: int,
    *,
    count: int,
    updater: Updater,
    phase: Phase = contextlib.nullcontext,
    ahead: Ahead | None = None,
    look_ahead: bool = False,
    interrupt: Callable[[], None] = lambda: None,
) -> Experience:
    """Sample, score and weigh one iteration's completions.

    Args:
      task: what the run trains on.
      state: the present state; completions come from `old_params`, or from `params` where no old policy is kept.
      cursor: prompts used since the start of the run.
      count: B, prompts of the iteration.
      updater: computes the reference's log-probs, and the old ones of another engine's completions.
      phase: `phase(name)` is a context in which that part of the work is timed.
      ahead: completions of the prompts from `cursor` on, on the host, if an earlier policy has sampled them already.
      look_ahead: sample the prompts that come next too, while the reward functions work.
      interrupt: called before each of these parts, every few tokens and at the end; what it raises ends the iteration.

    Returns:
      `Experience`. Its arrays are cut as the updater asks for it.
    """
    config = task.config
    begin = functools.partial(_begin, task, state, updater)

    def watched(name: str) -> AbstractContextManager[Any]:
        interrupt()
        return phase(name)

    params = state.params if state.old_params is None else state.old_params
    key = jax.random.fold_in(state.key, 0)
    rollouts = _Rollouts(task, params, key, int(state.step), count, watched, look_ahead, interrupt, updater)
    if config.dynamic_sampling:
        last, counts_in = _with_signal(rollouts.rounds(cursor, ahead, None), config, count)
        with watched("reference"):
            last = last._replace(batch=begin(last.groups.prompts, last.groups.completions, counts_in))
    else:
        last, counts_in = next(rollouts.rounds(cursor, ahead, begin)), np.ones(count, bool)
    groups, metrics, batch, cursor, ahead = last
    # Groups that only fill the batch are not scored: NaN keeps them out of the statistics of the whole batch.
    rewards = np.where(counts_in[:, None, None], groups.rewards, np.nan)
    advantages = _advantages(rewards, scale_rewards=config.scale_rewards, **_aggregation(config))
    assert batch is not None, "begun by the round, or after all of them"
    with watched("reference"):
        batch = jax.block_until_ready(batch.replace(advantages=advantages))
    interrupt()
    metrics |= mismatch(batch, config)
    lines = zip((row for group in groups.rows for row in group), np.asarray(advantages).reshape(-1), strict=True)
    return Experience(batch, cursor, metrics, [row | {"advantage": float(a)} for row, a in lines], ahead)


def _begin(
    task: Task,
    state: TrainState,
    updater: Updater,
    prompts: Prompts,
    completions: Completions,
    counts_in: np.ndarray | None = None,
) -> Batch:
    """The `Batch` of some completions but for its advantages; the device may still be at its log-probs."""
    config = task.config
    t = updater.columns(int(lengths_of(np.asarray(completions.mask)).max()))
    mask = completions.mask[:, :, :t]
    if counts_in is not None:
        mask = mask & counts_in[:, None, None]
    if config.mask_truncated_completions:
        mask = mask & completions.ended[:, :, None]
    inputs: Any = (jax.tree.map(jnp.asarray, prompts), jnp.asarray(completions.tokens[:, :, :t]), jnp.asarray(mask))
    score_by = lambda params: None if params is None else updater.score(params, *inputs)
    prompts, tokens, mask = inputs
    return Batch(
        prompts=prompts,
        tokens=tokens,
        mask=mask,
        advantages=jnp.zeros(mask.shape[:2]),
        sampling_log_probs=jnp.asarray(completions.log_probs[:, :, :t]),
        ref_log_probs=score_by(state.ref_params),
        initial_log_probs=score_by(state.initial_params),
        counted=None if counts_in is None else jnp.asarray(counts_in),
        old_log_probs=None if completions.old_log_probs is None else jnp.asarray(completions.old_log_probs[:, :, :t]),
    )


def _equally_long(*prompts: Prompts) -> list[Prompts]:
    """Prompts of several rollouts, padded to the longest: environments may have added to some."""
    longest = max(some.tokens.shape[1] for some in prompts)
    pad = lambda tokens: np.pad(np.asarray(tokens), ((0, 0), (0, longest - tokens.shape[1])))
    return [some.replace(tokens=pad(some.tokens)) for some in prompts]


def _rollout_metrics(config: GRPOConfig, groups: _Groups, present: np.ndarray) -> dict[str, float]:
    """What TRL logs of a rollout, under TRL's names."""
    lengths = present.sum(axis=-1)
    rewards = total_rewards(groups.rewards, config.reward_weights)
    spread = [np.std(group[~np.isnan(group)], ddof=1) for group in rewards if (~np.isnan(group)).sum() > 1]
    return {
        "reward": mean_of_scored(rewards),
        "reward_std": float(np.mean(spread)) if spread else float("nan"),
        "frac_reward_zero_std": float(np.asarray(_zero_signal(groups.rewards, **_aggregation(config))).mean()),
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(1 - groups.completions.ended.mean()),
        "num_tokens": float(lengths.sum()),
    }
