"""Calls to reward functions: their arguments, the validation of their results, and logged metrics and columns."""

import asyncio
import functools
import threading
from decimal import Decimal

import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.rewards.calls import compute_rewards, mean_of_scored, total_rewards
from grpo_jax.rewards.contract import RewardError, TrainerState, copy_containers, reward_names
from grpo_jax.rewards.workers import isolated

pytestmark = pytest.mark.quick

B, G = 2, 3
N = B * G
PROMPTS = ["p0"] * G + ["p1"] * G
COMPLETIONS = ["a", "bb", "ccc", "dddd", "eeeee", "ffffff"]
COLUMNS = {"answer": ["x"] * G + ["y"] * G, "level": [1] * G + [2] * G}


def compute(fns, *, columns=COLUMNS, **keywords):
    return compute_rewards(
        fns,
        prompts=PROMPTS,
        completions=COMPLETIONS,
        completion_ids=[[1] * len(text) for text in COMPLETIONS],
        columns=columns,
        **{"num_generations": G} | keywords,
    )


def score(fns, **keywords):
    return compute(fns, **keywords)[:2]


def returns(value):
    """Make a reward function that returns a fixed value, or raises it if it is an exception."""

    def reward(completions):
        if isinstance(value, BaseException):
            raise value
        return value

    return reward


def length(completions):
    return [len(text) for text in completions]


def test_functions_receive_the_arguments_they_name():
    seen = []
    see = lambda *arguments: seen.append(arguments) or [0.0] * N
    fns = [
        lambda answer, completions: see(answer, completions),
        lambda prompts, missing="default", *, level=None: see(prompts, missing, level),
        lambda **kwargs: see(set(kwargs)),
        lambda completions, answer, **kwargs: see(set(kwargs)),  # like TRL's functions
        lambda completions, trainer_state: see(trainer_state.global_step),
    ]
    # The column `prompt` is passed only as `prompts`.
    score(fns, columns={"prompt": PROMPTS, **COLUMNS}, trainer_state=TrainerState(global_step=3))
    assert seen == [
        (COLUMNS["answer"], COMPLETIONS),
        (PROMPTS, "default", COLUMNS["level"]),
        ({"prompts", "completions", "completion_ids", "answer", "level"},),
        ({"prompts", "completion_ids", "level"},),
        (3,),
    ]


def test_methods_partials_and_objects_are_accepted():
    class Judge:
        def __call__(self, completions, answer):
            return [float(truth == "y") for truth in answer]

        def method(self, completions):
            return length(completions)

    def scaled(completions, factor):
        return [factor * len(text) for text in completions]

    rewards, stats = score([Judge(), Judge().method, functools.partial(scaled, factor=2)])
    assert rewards.dtype == np.float32
    np.testing.assert_array_equal(rewards, [[[0, 1, 2], [0, 2, 4], [0, 3, 6]], [[1, 4, 8], [1, 5, 10], [1, 6, 12]]])
    assert {key.split("/")[1] for key in stats} == {"Judge", "method", "scaled", "unscored"}
    named = lambda completions, answer: [float(truth == "mine") for truth in answer]
    by_keywords = lambda completions, **columns: named(completions, columns["answer"])
    bound = [functools.partial(fn, answer=["mine"] * N) for fn in (named, by_keywords)]
    assert (score(bound)[0] == 1).all(), "a column must not replace an argument bound by a partial"
    reward, reward_2 = returns(None), returns(None)
    reward_2.__name__ = "reward_2"
    assert reward_names([reward, reward_2, reward]) == ["reward", "reward_2", "reward_3"], "names must be distinct"


def test_functions_and_completions_do_not_share_objects():
    """Reward functions receive copies of a row's objects, which all epochs and the row's group share."""
    prompt, info = [{"role": "user", "content": "Sort."}], {"limits": {"seconds": 1}}
    completions = [[{"role": "assistant", "content": text}] for text in ("a", "bb", "ccc", "dddd")]
    inputs = {"prompts": [prompt] * 4, "completion_ids": [[1]] * 4, "columns": {"info": [info] * 4}}

    def edits(prompts, completions, info):
        for prompt, completion, one in zip(prompts, completions, info, strict=True):
            prompt.append({"role": "user", "content": "more"})
            completion[0]["content"] = "nothing"
            one["limits"]["seconds"] += 1
        return [float(one["limits"]["seconds"]) for one in info]

    def said(prompts, completions):
        return [len(prompt) + len(one[0]["content"]) for prompt, one in zip(prompts, completions, strict=True)]

    for _ in range(2):
        rewards = compute_rewards([edits, said], completions=completions, num_generations=4, **inputs)
        np.testing.assert_array_equal(rewards.values[0].T, [[2, 2, 2, 2], [2, 3, 4, 5]])
    value = [{"deep": [1, (2, [3])]}, {1}, np.array([1.0])]
    copied, expected = copy_containers(value), repr(value)
    assert repr(copied) == expected
    nested, numbers, array = copied
    nested["deep"][1][1].append(1)
    numbers.add(2)
    array += 1
    assert repr(value) == expected
    others = [threading.Lock(), len, jnp.ones(1).dtype]
    assert all(one is other for one, other in zip(copy_containers(others), others, strict=True)), (
        "objects that are not containers must be shared"
    )


def test_metrics_and_columns_are_logged():
    objects = [[i] for i in range(N)]

    def logs(completions, trainer_state, log_metric, log_extra):
        log_metric("at", trainer_state.global_step)
        log_metric("at", trainer_state.max_steps)
        log_extra("length", length(completions))
        log_extra("object", objects)
        objects[0].append(2)
        return [0.0] * N

    rewards = compute(logs, trainer_state=TrainerState(global_step=3, max_steps=10))
    assert rewards.logged_metrics == {"at": [3.0, 10.0]}
    expected = [{"length": len(text), "object": [i]} for i, text in enumerate(COMPLETIONS)]
    assert rewards.logged_columns == expected, "logged values must be copied"
    with pytest.raises(RewardError, match=r"log_extra\('length', ...\) needs one value per completion, 6 .*; got 1"):
        compute(lambda completions, log_extra: log_extra("length", [1]))
    with pytest.raises(ValueError, match="fn='logs' takes log_metric, but workers cannot log"):
        isolated(logs, timeout=1.0)


def test_lists_of_other_lengths_are_refused():
    with pytest.raises(ValueError, match="answer must have B·G=6 entries, one per completion; got 1"):
        score(length, columns={"answer": ["x"]})
    with pytest.raises(ValueError, match=r"num_generations=4 must divide the number of completions \(> 0\); got 6"):
        score(length, num_generations=4)


@pytest.mark.parametrize("value", [
    (True, False) * 3,
    [np.float64(1), np.int8(0), np.bool_(True), jnp.float32(0), np.array(1.0), Decimal("0")],
    np.array([1, 0, 1, 0, 1, 0], np.float16), jnp.array([1, 0, 1, 0, 1, 0], jnp.bfloat16),
    (float(index % 2 == 0) for index in range(N)), {index: float(index % 2 == 0) for index in range(N)}.values(),
])  # fmt: skip
def test_all_kinds_of_numbers_are_accepted(value):
    rewards, _ = score(returns(value))
    np.testing.assert_array_equal(rewards.ravel(), [1, 0, 1, 0, 1, 0])


def test_none_is_unscored_and_not_zero():
    rewards, stats = score([returns([1.0, None, 0.0, None, None, 0.5]), returns([None, None, 1.0, 1.0, None, None])])
    np.testing.assert_array_equal(rewards[..., 0].ravel(), [1, np.nan, 0, np.nan, np.nan, 0.5])
    assert stats["rewards/reward/mean"] == pytest.approx(0.5)
    assert stats["rewards/reward/std"] == pytest.approx(np.std([1.0, 0.0, 0.5], ddof=1))
    assert stats["rewards/reward/missing"] == pytest.approx(0.5)
    assert stats["rewards/reward/errors"] == 0
    assert stats["rewards/unscored"] == pytest.approx(2 / 6)
    _, stats = score([returns([None] * N), returns([None] * (N - 1) + [1.0])])
    assert "rewards/reward/mean" not in stats
    assert stats["rewards/reward_2/mean"] == 1.0
    assert "rewards/reward_2/std" not in stats


@pytest.mark.parametrize("weights", [None, [2.0, -0.5, 1.0], [2.0, 0.0, 1.0]])
def test_total_is_the_weighted_sum_of_the_functions_that_scored(weights):
    rewards = np.array([[0.25, np.nan, 1], [np.nan, 2, np.nan], [np.nan] * 3, [0, 0, np.nan]], np.float32)
    expected = []
    for row in rewards.tolist():
        scored = [w * r for w, r in zip(weights or [1.0] * 3, row, strict=True) if w and r == r]
        expected.append(sum(scored) if scored else float("nan"))
    found = total_rewards(rewards.reshape(2, 2, 3), weights)
    np.testing.assert_array_equal(found, np.reshape(expected, (2, 2)))
    assert mean_of_scored(found) == np.nanmean(expected)
    assert np.isnan(mean_of_scored(found[1, :1]))


class Promise:
    tolist = lambda self: 1 // 0


WHOLE = {
    "raise": (returns(KeyError("gold")), "raised KeyError: 'gold'"),
    "none": (returns(None), r"returned None instead of a list; check that it has a return"),
    "too few": (returns([1.0] * 5), "must return one value per completion, 6 in total; got 5"),
    "endless": (returns(iter(int, 1)), "must return one value per completion, 6 in total; got more than 6"),
    "scalar": (returns(np.float32(0.5)), "must return a list with a float or None per completion, 6 in total; got 0.5"),
    "broken array": (returns(Promise()), "raised ZeroDivisionError: "),
}

ELEMENTS = {
    "nan": (float("nan"), "returned nan instead of a number or None"),
    "inf in float32": (1e39, r"returned 1e\+39, which is not finite in float32"),
    "huge int": (10**400, "returned inf, which is not finite"),
    "text": ("1.0", "returned '1.0' of type str instead of a number or None"),
    "array": (np.ones(1), r"returned array\(\[1.\]\) of type ndarray instead of a number or None"),
}


@pytest.mark.parametrize("case", WHOLE)
def test_a_failing_function_can_be_scored_as_missing(case):
    """A failing function ends the run or, with `on_error="none"`, counts as missing; other functions still score."""
    fn, message = WHOLE[case]
    with pytest.raises(
        RewardError, match=rf"^reward function 'reward' {message}.*on_reward_error='none' .*on_error in compute_rewards"
    ):
        score([length, fn])
    with pytest.warns(RuntimeWarning, match=f"no score for 6 of 6 completions: reward function 'reward' {message}"):
        rewards, stats = score([length, fn], on_error="none")
    assert np.isnan(rewards[..., 1]).all()
    assert rewards[..., 0].sum() == 21
    assert (stats["rewards/reward/errors"], stats["rewards/reward/missing"]) == (6, 1)


@pytest.mark.parametrize("case", ELEMENTS)
def test_a_bad_value_names_function_prompt_and_completion(case):
    """A bad value raises an error that names function, prompt and completion, or only that value counts as missing."""
    value, message = ELEMENTS[case]
    where = r"for prompt 1 of the batch, completion 1 of its group \(prompt 'p1', completion 'eeeee'\)"
    with pytest.raises(RewardError, match=rf"^reward function 'reward_2' {message}.*{where}. Fix the error"):
        score([returns([0.0] * N), returns([1.0, 1, 1, 1, value, 1])])
    fns = [returns([1.0, None, value, 1, 1, 1])]
    with pytest.warns(RuntimeWarning, match=f"no score for 1 of 6 completions: .*'reward' {message}"):
        rewards, stats = score(fns, on_error="none")
    np.testing.assert_array_equal(rewards.ravel(), [1, np.nan, np.nan, 1, 1, 1])
    assert (stats["rewards/reward/errors"], stats["rewards/reward/missing"]) == (1, pytest.approx(2 / 6))


def test_exceptions_are_chained_and_counted_and_ctrl_c_is_not_caught():
    error = KeyError("gold")
    with pytest.raises(RewardError) as caught:
        score(returns(error))
    assert caught.value.__cause__ is error
    with pytest.raises(RewardError, match=r"completion 1 of its group.*, the first of 3 errors\. Fix"):
        score(returns([0.0, np.nan, 0.0, "x", np.inf, 0.0]))
    with pytest.raises(KeyboardInterrupt):
        score(returns(KeyboardInterrupt()), on_error="none")


def test_async_functions_run_concurrently_and_in_order():
    begun = []

    async def judge(completions):
        begun.append(judge)
        await asyncio.sleep(0)
        return [float(len(begun))] * N

    def thread(completions):  # for example math-verify: signal.alarm works only in the main thread
        assert threading.current_thread() is threading.main_thread()
        return length(completions)

    rewards, stats = score([judge, thread, judge, lambda completions: judge(completions)])
    np.testing.assert_array_equal(rewards[0, 0], [3, 1, 3, 3])
    assert stats["rewards/judge/seconds"] > 0


def test_async_objects_keep_clients_bound_to_their_loop():
    loops = set()

    class Judge:
        async def __call__(self, completions):
            loops.add(asyncio.get_running_loop())
            return [1.0] * len(completions)

    async def cell():  # as in a notebook, whose thread has a running loop
        return score(Judge())[0]

    assert score(Judge())[0].sum() == asyncio.run(cell()).sum() == N
    assert len(loops) == 1


@pytest.mark.parametrize("error", [KeyError("gold"), SystemExit(1), asyncio.CancelledError()])
def test_async_errors_are_reported_and_the_loop_keeps_running(error, recwarn):
    async def judge(completions):
        return [1.0] * N

    async def fails(completions):
        raise error

    with pytest.raises(RewardError, match="'reward' raised ValueError: no"):
        score([judge, returns(ValueError("no"))])
    assert not recwarn.list, "every coroutine must be awaited"
    with pytest.raises(RewardError, match=f"reward function 'fails' raised {type(error).__name__}"):
        score([fails, judge])
    with pytest.warns(RuntimeWarning, match="6 of 6 completions"):
        rewards, _ = score([fails, judge], on_error="none")
    np.testing.assert_array_equal(rewards[0, 0], [np.nan, 1])
