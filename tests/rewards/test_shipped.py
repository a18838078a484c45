"""from_row and the built-in rewards, each compared with values computed by hand."""

import asyncio

import numpy as np
import pytest

from grpo_jax.rewards import accuracy_reward, format_reward, get_soft_overlong_punishment
from grpo_jax.rewards.calls import compute_rewards
from grpo_jax.rewards.contract import RewardError, reward_names
from grpo_jax.rewards.shipped import from_row

pytestmark = [pytest.mark.quick, pytest.mark.filterwarnings("ignore:no score for ")]
messages = lambda texts: [[{"role": "assistant", "content": text}] for text in texts]
divide = lambda completion, row: 6 / row["by"]


def length(completions):
    return [len(text) for text in completions]


def score(fn, completions, *, on_error="raise", **columns):
    """Compute scores [N] with compute_rewards."""
    rewards = compute_rewards(
        fn, prompts=[f"p{index}" for index in range(len(completions))], completions=completions,
        completion_ids=[[1]] * len(completions), num_generations=1, columns=columns, on_error=on_error,
    )  # fmt: skip
    return rewards.values.ravel().tolist()


def test_from_row_receives_each_completion_and_its_row():
    seen = []

    @from_row
    def reward(completion, row):
        seen.append((completion, row))
        return float(completion == row["answer"])

    for completions in (["1", "2"], messages(["1", "2"])):
        seen.clear()
        assert score(reward, completions, answer=["1", "4"], level=[7, 8]) == [1, 0]
        rows = [{"prompt": "p0", "answer": "1", "level": 7}, {"prompt": "p1", "answer": "4", "level": 8}]
        assert seen == [("1", rows[0]), ("2", rows[1])]
    assert reward_names(reward) == ["reward"]


def test_row_error_keeps_the_other_scores():
    async def later(completion, row):
        return divide(completion, row)

    for reward in map(from_row, (divide, later)):
        with pytest.raises(RewardError, match=r"'.*' raised ZeroDivisionError: .* for prompt 1") as caught:
            score(reward, ["x"] * 3, by=[1, 0, 3])
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        found = score(reward, ["x"] * 3, by=[1, 0, 3], on_error="none")
        assert found == pytest.approx([6, np.nan, 2], nan_ok=True)


def test_from_row_scores_asynchronous_functions_together():
    begun = []

    async def together(completion, row):
        begun.append(completion)
        await asyncio.sleep(0)
        return float(len(begun))

    assert asyncio.run(from_row(together)(completions=["a", "bb", "ccc"])) == [3, 3, 3]


def test_factories_refuse_invalid_arguments():
    for make, message in (
        (lambda: accuracy_reward(extract="("), r"extract must be a regular expression; got '\(' \(missing \)"),
        (
            lambda: get_soft_overlong_punishment(10, 11),
            "soft_punish_cache must be between 0 and max_completion_len=10; got 11",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            make()


def test_accuracy_compares_the_extracted_answer_with_the_column():
    texts = ["it is 12", "12", "", "13 "]
    last_word = lambda text: (text.split() or [None])[-1]
    for extract, answer, scores in (
        (last_word, 12, [1, 1, 0, 0]),
        (r"\d+", 12, [1, 1, 0, 0]),
        (None, "12", [0, 1, 0, 0]),
        (None, "13", [0, 0, 0, 1]),
    ):
        assert score(accuracy_reward(extract=extract), texts, answer=[answer] * 4) == scores
    tagged = accuracy_reward("truth", r"<answer>(.*?)</answer>")
    right = "<answer>4</answer>"
    texts = [right, "4", f"{right} no, <answer>5</answer>", "<answer>\n 4\n</answer>", "<answer></answer>", right]
    scores = score(tagged, messages(texts), truth=["4", "4", "4", " 4", "4", None])
    assert scores == pytest.approx([1, 0, 0, 1, 0, np.nan], nan_ok=True)


def test_format_matches_the_whole_completion_across_lines():
    reward = format_reward(r"<think>.*</think>\s*<answer>.*</answer>\s*")
    right = "<think>a\nb</think>\n<answer>4</answer>\n"
    assert score(reward, messages([right, f"so {right}", f"{right}done", "<think>a</think>"])) == [1, 0, 0, 0]


@pytest.mark.parametrize(
    ("longest", "cache", "expected"),
    [(10, 4, [0] * 7 + [-0.25, -0.5, -0.75, -1, -1, -1]), (3, 3, [0, -1 / 3, -2 / 3, -1, -1]), (2, 0, [0, 0, 0, -1])],
)
def test_soft_overlong_is_equation_13_of_dapo(longest, cache, expected):
    ids = [[1] * length for length in range(len(expected))]
    assert get_soft_overlong_punishment(longest, cache)(completion_ids=ids) == pytest.approx(expected)
