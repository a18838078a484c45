"""Rewards for turns and tokens: they sum to the reward, are placed at their tokens, and must match in length."""

import numpy as np
import pytest

from grpo_jax.rewards.calls import compute_rewards
from grpo_jax.rewards.contract import RewardError
from grpo_jax.rewards.outcomes import RewardParts, place_rewards, read_number, read_reward

pytestmark = pytest.mark.quick

INPUTS = {
    "prompts": ["p"] * 4,
    "completions": ["ab", "cd", "ef", "gh"],
    "completion_ids": [[1, 2, 3], [4, 5], [6], [7, 8, 9, 9]],
    "num_generations": 2,
}
NUMBERS = "instead of a number or None"


def returned(*values):
    def fn(completions):
        return list(values)

    return fn


def test_lists_are_turn_rewards_and_arrays_are_token_rewards():
    mixed = returned([0.5, -1], np.array([0.25, 0.5]), None, 2)
    rewards, stats, parts, *_ = compute_rewards([mixed, returned(1, (2,), 3.0, 4)], turn_counts=[2, 1, 1, 3], **INPUTS)
    np.testing.assert_array_equal(rewards[..., 0], np.float32([[-0.5, 0.75], [np.nan, 2]]))
    assert parts == [
        RewardParts(0, 0, False, [0.5, -1.0]),
        RewardParts(1, 0, True, [0.25, 0.5]),
        RewardParts(1, 1, False, [2.0]),
    ]
    assert stats["rewards/fn/mean"] == pytest.approx(0.75)
    assert stats["rewards/fn/missing"] == 0.25


@pytest.mark.parametrize(("value", "message"), [
    ([1, 2, 3], f"returned [1, 2, 3] of type list {NUMBERS}, or a list with one reward per turn (2)"),
    (np.zeros(2), f"returned array([0., 0.]) of type ndarray {NUMBERS}, or an array with one reward per token (3)"),
    ([1, None], "returned [1, None]; the reward for turn 1 must be a finite number"),
    (np.array([0, np.inf, 1]), "returned array([ 0., inf,  1.]); the reward for token 1 must be a finite number"),
    ([3e38, 3e38], "returned 6e+38, which is not finite in float32"),
    ("12", f"returned '12' of type str {NUMBERS}"),
])  # fmt: skip
def test_other_values_and_lengths_are_refused(value, message):
    """Turn or token rewards of the wrong length and non-numeric values are refused, and the completion is named."""
    assert read_reward(0, value, function=0, turn_counts=[2], token_counts=[3], parts=[]) == message
    with pytest.raises(RewardError, match="for prompt 0 of the batch, completion 0 of its group"):
        compute_rewards(returned(value, 0, 0, 0), turn_counts=[2, 1, 1, 3], **INPUTS)


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"requires_grad": True}])
def test_pytorch_scalars_that_numpy_cannot_read_are_rewards(options):
    torch = pytest.importorskip("torch")
    options = {name: getattr(torch, value) if isinstance(value, str) else value for name, value in options.items()}
    assert read_number(torch.tensor(0.5, **options)) == 0.5


def test_rewards_are_placed_at_their_tokens():
    turns = np.array([[[0, 0, -1, 1, -1], [0, -1, -1, -1, -1]], [[0, 1, 1, -1, -1], [0, 0, 0, 0, 0]]])
    present = np.array([[[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]], [[1, 1, 1, 0, 0], [1] * 5]], bool)
    rewards = np.array([[[7.0, 1.0], [3.0, np.nan]], [[5.0, 2.0], [np.nan, 4.0]]], np.float32)
    parts = [
        RewardParts(0, 0, False, [3.0, 4.0]),
        RewardParts(0, 1, True, [0.1, 0.2, 0.3, 0.4]),
        RewardParts(2, 1, False, [0.5, 1.5]),
    ]
    placed = place_rewards(rewards, parts, turns, present)
    nan = [np.nan] * 5
    np.testing.assert_array_equal(
        placed[..., 0], np.float32([[[0, 3, 0, 4, 0], [3, 0, 0, 0, 0]], [[0, 0, 5, 0, 0], nan]])
    )
    np.testing.assert_array_equal(
        placed[..., 1], np.float32([[[0.1, 0.2, 0.3, 0.4, 0], nan], [[0.5, 0, 1.5, 0, 0], [0, 0, 0, 0, 4]]])
    )
