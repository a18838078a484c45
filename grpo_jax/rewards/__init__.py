"""Reward functions: `contract` (what they get and may return), `calls` (calling them), `extras` (what they log),
`shipped` and `combine` (those that come with the package), `answers` (reading answers out of text), `workers`
(functions in processes of their own).
"""

from grpo_jax.rewards.answers import final_number, number_reward, sole_number
from grpo_jax.rewards.calls import compute_rewards
from grpo_jax.rewards.combine import clipped, from_row, gated, weighted
from grpo_jax.rewards.contract import PartialRewards, RewardError, TrainerState, check_reward_fns, reward_names
from grpo_jax.rewards.shipped import (
    accuracy_reward,
    completion_text,
    format_reward,
    formula_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
)
from grpo_jax.rewards.workers import isolated

__all__ = [
    "PartialRewards",
    "RewardError",
    "TrainerState",
    "accuracy_reward",
    "check_reward_fns",
    "clipped",
    "completion_text",
    "compute_rewards",
    "final_number",
    "format_reward",
    "formula_reward",
    "from_row",
    "gated",
    "get_repetition_penalty_reward",
    "get_soft_overlong_punishment",
    "isolated",
    "number_reward",
    "reward_names",
    "sole_number",
    "weighted",
]
