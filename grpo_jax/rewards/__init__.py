"""Reward functions.

`contract`: names, arguments and checks. `outcomes`: validation of returned rewards. `calls`: function calls. `shipped`
and `answers`: built-in functions. `workers`: execution in worker processes.
"""

from grpo_jax.rewards.answers import final_number, number_reward, sole_number
from grpo_jax.rewards.calls import Rewards, compute_rewards
from grpo_jax.rewards.contract import RewardError, TrainerState, check_reward_fns, reward_names
from grpo_jax.rewards.outcomes import PartialRewards
from grpo_jax.rewards.shipped import (
    accuracy_reward,
    completion_text,
    format_reward,
    formula_reward,
    from_row,
    get_soft_overlong_punishment,
)
from grpo_jax.rewards.workers import isolated

__all__ = [
    "PartialRewards", "RewardError", "Rewards", "TrainerState", "accuracy_reward", "check_reward_fns",
    "completion_text", "compute_rewards", "final_number", "format_reward", "formula_reward", "from_row",
    "get_soft_overlong_punishment", "isolated", "number_reward", "reward_names", "sole_number",
]  # fmt: skip
