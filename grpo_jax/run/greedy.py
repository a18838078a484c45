"""The greedy completion of each prompt, whose reward is the baseline of `advantage_estimator="remax"`.

It is sampled by the params that the other completions would come from now, in a rollout of its own: one completion more
for each prompt, and as many decoding steps again. It takes part in nothing but the baseline. It hangs on no sampled
completion, so the gradient stays unbiased; with `rollout_ahead` too, where it comes from the policy of one iteration
later than the completions that it is compared with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from grpo_jax.maths.sampling import Sampling
from grpo_jax.rewards.calls import mean_of_scored, total_rewards
from grpo_jax.rewards.extras import Extras
from grpo_jax.run.run import Run
from grpo_jax.run.sample import Sampled, sample
from grpo_jax.run.sampler import Request
from grpo_jax.run.scores import of_all_processes, score_own
from grpo_jax.types import Params


class Baseline(NamedTuple):
    """The rewards of greedy completions.

    Attributes:
      rewards: [B, K] float32; NaN = not scored.
      metrics: `reward_greedy`, the mean of their weighted sums, and what a rollout and reward functions cost.
    """

    rewards: np.ndarray
    metrics: dict[str, float]


def sample_greedy(
    run: Run,
    params: Params,
    numbers: Sequence[int],
    request: Request,
    key: jax.Array,
    *,
    prompt_indices: np.ndarray,
    interrupt: Callable[[], None],
) -> Sampled:
    """One greedy completion [B, 1, T] for each of these rows; arguments as of `sample`."""
    greedy = dataclasses.replace(request, num_generations=1, sampling=Sampling(temperature=0.0))
    return sample(
        run.policy.model, params, run.data, numbers, key, greedy, prompt_indices=prompt_indices, interrupt=interrupt
    )


def score_greedy(run: Run, sampled: Sampled, *, step: int, cursor: int) -> Baseline:
    """The rewards of greedy completions, by a call of the reward functions of their own; all processes ask together."""
    config = run.config
    extras = Extras(run.trainer_state(step, cursor))
    own = score_own(run.policy.tokenizer, run.reward_fns, sampled, on_error=config.on_reward_error, extras=extras)
    scores = of_all_processes(own, run.reward_fns)
    costs = {name: value for name, value in scores.stats.items() if name.endswith(("/errors", "/seconds"))}
    totals = total_rewards(scores.rewards, config.reward_weights)
    own_metrics = {"reward_greedy": mean_of_scored(totals), "num_tokens": float(sampled.present.sum())}
    return Baseline(scores.rewards[:, 0], costs | own_metrics)
