"""The hint that a policy hardly moves: measured by its KL to the start, or bounded by the learning rates so far."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from grpo_jax.config.config import GRPOConfig
from grpo_jax.watch.summary import numbers
from grpo_jax.watch.writer import Line

STEPS = 50
"""Optimizer steps after which a policy should have moved."""
STILL = 1e-4
"""KL to the start, in nats per token, and sum of learning rates, below which it has not.

Measured: `experiments.sort_digits`, which learns at 5e-4, is at a KL of 0.13 after 10 steps; models of that size and
less stay below 1e-5 at a learning rate of 1e-6.
"""
RATES = (
    "5e-4 to 1e-3 below a million parameters, 1e-5 about a hundred million, 1e-6 from half a billion up, and ten times"
    " as much for adapters"
)
"""Learning rates by the size of a policy, as README and docs/recipes.md have them."""


def hardly_moved(history: Sequence[Line], config: GRPOConfig) -> str | None:
    """The policy is where it began, and the reward where it was, though there is something to learn.

    Example:
      >>> lines = [{"step": n, "kl": 1e-7 * n, "reward": 0.1, "learning_rate": 1e-6} for n in range(10, 60, 10)]
      >>> hardly_moved(lines, GRPOConfig(beta=0.04)).split(";")[0]
      'the policy has hardly moved in 50 steps: KL to the start 5e-06 nats per token, reward 0.1 → 0.1'
    """
    step, rewards = history[-1].get("step") or 0, numbers(history, "reward")
    equal = numbers(history, "frac_reward_zero_std")
    if step < STEPS or len(rewards) < 4 or (equal and statistics.fmean(equal) > 0.9):  # of that, another hint tells
        return None
    measured = _still(history, config, step)
    half = len(rewards) // 2
    first, now = statistics.fmean(rewards[:half]), statistics.fmean(rewards[half:])
    noise = math.hypot(*(statistics.pstdev(part) / math.sqrt(len(part)) for part in (rewards[:half], rewards[half:])))
    if measured is None or abs(now - first) > 2 * noise + 1e-9:
        return None
    return (
        f"the policy has hardly moved in {step:.0f} steps: {measured}, reward {first:.3g} → {now:.3g}; raise"
        f" learning_rate (now {config.learning_rate:g}): {RATES}"
    )


def _still(history: Sequence[Line], config: GRPOConfig, step: float) -> str | None:
    """The measure by which a policy has not moved, in words; None if it has, or if nothing tells."""
    names = [name for name in ("kl_initial", "kl") if numbers(history[-1:], name)]
    if names:
        kl = numbers(history[-1:], names[0])[0]
        return f"KL to the start {kl:.2g} nats per token" if kl < STILL else None
    rates = numbers(history, "learning_rate")
    if not rates:  # an optimizer of the caller's
        return None
    most = step * statistics.fmean(rates)
    return (
        f"its learning rates add up to {most:.2g}, about the most that a parameter has moved" if most < STILL else None
    )
