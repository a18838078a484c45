"""from_row, the combinators and the shipped rewards, each against values worked out by hand."""

import asyncio
import functools
import pickle
import random
import time

import numpy as np
import pytest

from grpo_jax.rewards import calls as calls_module
from grpo_jax.rewards import combine as combine_module
from grpo_jax.rewards import contract as contract_module
from grpo_jax.rewards import shipped as lib


def length(completions):
    return [len(text) for text in completions]


def messages(texts):
    return [[{"role": "assistant", "content": text}] for text in texts]


def score(fns, completions, *, prompts=None, on_error="raise", **columns):
    """Scores [N] of one function, or [N, K], through compute_rewards, without a warning about missing ones."""
    rewards, _ = calls_module.compute_rewards(
        fns,
        prompts=prompts or [f"p{index}" for index in range(len(completions))],
        completions=completions,
        completion_ids=[[1]] * len(completions),
        num_generations=1,
        columns=columns,
        on_error=on_error,
        loud_share=1.0,
    )
    flat = rewards.reshape(len(completions), -1)
    return flat[:, 0].tolist() if callable(fns) else flat.tolist()


# --- from_row


@pytest.mark.quick
def test_from_row_sees_the_text_and_the_row_of_each_completion():
    seen = []

    @combine_module.from_row
    def reward(completion, row):
        seen.append((completion, row))
        return float(completion == row["answer"])

    for completions in (["1", "2", "3"], messages(["1", "2", "3"])):
        seen.clear()
        assert score(reward, completions, prompts=["a", "b", "c"], answer=["1", "2", "4"], level=[7, 8, 9]) == [1, 1, 0]
        assert seen == [
            ("1", {"prompt": "a", "answer": "1", "level": 7}),
            ("2", {"prompt": "b", "answer": "2", "level": 8}),
            ("3", {"prompt": "c", "answer": "4", "level": 9}),
        ]
    assert contract_module.reward_names(reward) == ["reward"]


def divide(completion, row):
    return None if row["by"] is None else 6 / row["by"]


@pytest.mark.quick
def test_from_row_keeps_the_scores_beside_a_fault():
    assert score(combine_module.from_row(divide), ["x"] * 4, by=[1, 0, None, 3], on_error="none") == pytest.approx(
        [6, np.nan, np.nan, 2], nan_ok=True
    )
    with pytest.raises(
        contract_module.RewardError,
        match=r"'divide' raised ZeroDivisionError: division by zero for prompt 1 of the batch, completion 0",
    ) as caught:
        score(combine_module.from_row(divide), ["x"] * 4, by=[1, 0, None, 3])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.quick
def test_from_row_called_by_hand_raises_and_keeps_what_it_has():
    with pytest.raises(
        contract_module.PartialRewards, match="because of a fault: 1 of 3; completion 1 raised Zero"
    ) as caught:
        combine_module.from_row(divide)(prompts=["p"] * 3, completions=["x"] * 3, by=[1, 0, 3])
    assert caught.value.values == [6, None, 2]
    assert list(caught.value.faults) == [1]


@pytest.mark.quick
def test_from_row_also_looks_at_what_each_call_returns():
    values = iter([1.0, "x", float("inf"), None])
    scores = score(combine_module.from_row(lambda completion, row: next(values)), ["x"] * 4, on_error="none")
    assert scores == pytest.approx([1, np.nan, np.nan, np.nan], nan_ok=True)


@pytest.mark.quick
def test_from_row_judges_all_completions_together_when_async():
    @combine_module.from_row
    async def judge(completion, row):
        await asyncio.sleep(0.05)
        return 6 / row["by"]

    started = time.perf_counter()
    by = [1, 2, 0, 3] * 8
    assert score(judge, ["x"] * 32, by=by, on_error="none") == pytest.approx([6, 3, np.nan, 2] * 8, nan_ok=True)
    assert time.perf_counter() - started < 1.5, "one after the other they take 1.6 s"


# --- combinators


def some(values):
    """A reward function with these scores."""
    return lambda completions: list(values)


@pytest.mark.quick
def test_weighted_multiplies_and_keeps_what_is_not_scored():
    assert score(combine_module.weighted(some([1.0, None, -2.0]), -0.5), ["x"] * 3) == pytest.approx(
        [-0.5, np.nan, 1], nan_ok=True
    )
    assert combine_module.weighted(some([1.0, None]), 3)(completions=["x"] * 2) == [3.0, None]


@pytest.mark.quick
def test_clipped_bounds_both_sides_or_one():
    values = [-3.0, 0.25, None, 9.0]
    assert combine_module.clipped(some(values), -1, 2)(completions=["x"] * 4) == [-1.0, 0.25, None, 2.0]
    assert combine_module.clipped(some(values), low=0)(completions=["x"] * 4) == [0.0, 0.25, None, 9.0]
    assert combine_module.clipped(some(values), high=0)(completions=["x"] * 4) == [-3.0, 0.0, None, 0.0]


@pytest.mark.quick
def test_gated_asks_the_second_only_about_what_passed():
    asked = []

    def second(completions, answer):
        asked.append((completions, answer))
        return [10.0 + len(text) for text in completions]

    gate = some([1.0, 0.0, None, 0.6, 0.4])
    texts, answer = ["a", "bb", "ccc", "dddd", "eeeee"], list("vwxyz")
    reward = combine_module.gated(gate, second, threshold=0.5, otherwise=-1.0)
    assert score(reward, texts, answer=answer) == pytest.approx([11, -1, np.nan, 14, -1], nan_ok=True)
    assert asked == [(["a", "dddd"], ["v", "y"])]
    assert score(combine_module.gated(gate, second, otherwise=None), texts, answer=answer) == pytest.approx(
        [11, np.nan, np.nan, 14, 15], nan_ok=True
    )


@pytest.mark.quick
def test_gated_does_not_call_the_second_when_nothing_passed():
    def second(completions):
        raise AssertionError("not to be called")

    assert score(combine_module.gated(some([0.0, 0.0]), second), ["x", "y"]) == [0, 0]


@pytest.mark.quick
def test_combinators_ask_for_the_arguments_of_the_functions_inside():
    def first(completions, answer):
        return [0.0] * len(completions)

    def second(completions, trainer_state, level=None):
        return [0.0] * len(completions)

    reward = combine_module.weighted(combine_module.clipped(combine_module.gated(first, second), 0, 1), 2.0)
    with pytest.raises(ValueError, match="reward function 'second' needs the argument 'answer'"):
        contract_module.check_reward_fns(reward, ["prompt", "level"], extras=["trainer_state"])
    with pytest.raises(ValueError, match="'second' needs the argument 'trainer_state'"):
        contract_module.check_reward_fns(reward, ["prompt", "answer"])
    contract_module.check_reward_fns(reward, ["prompt", "answer"], extras=["trainer_state"])
    # Required by the gate, optional for the second: required.
    with pytest.raises(ValueError, match="needs the argument 'answer'"):
        contract_module.check_reward_fns(combine_module.gated(first, lambda completions, answer=None: 0), ["prompt"])


@pytest.mark.quick
def test_extras_reach_the_functions_inside_a_combinator_whole():
    state = object()
    seen = []

    def second(completions, trainer_state):
        seen.append((len(completions), trainer_state))
        return [1.0] * len(completions)

    calls_module.compute_rewards(
        combine_module.gated(some([1.0, 0.0, 1.0]), second),
        prompts=["p"] * 3,
        completions=["x"] * 3,
        completion_ids=[[1]] * 3,
        num_generations=3,
        extras={"trainer_state": state},
    )
    assert seen == [(2, state)]


def fives(completions):
    return [5.0] * len(completions)


def combined(fn):
    """The function inside each combinator, scoring everything as it does itself."""
    passes = some([1.0, 1.0, 1.0])
    return [
        combine_module.weighted(fn, 1.0),
        combine_module.clipped(fn, -100, 100),
        combine_module.gated(passes, fn),
        combine_module.gated(fn, fives),
    ]


@pytest.mark.quick
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), "1.0"])
def test_no_combinator_hides_a_bad_value(bad):
    for reward in combined(some([1.0, bad, 2.0])):
        with pytest.raises(contract_module.RewardError, match="for prompt 1 of the batch"):
            score(reward, ["x"] * 3)


@pytest.mark.quick
@pytest.mark.parametrize("outcome", [None, 1.0, [1.0], "abc"])
def test_no_combinator_hides_a_bad_list(outcome):
    for reward in combined(lambda completions: outcome):
        with pytest.raises(contract_module.RewardError, match="'lambda' returned "):
            score(reward, ["x"] * 3)


@pytest.mark.quick
def test_combinators_hand_partial_scores_on():
    by = [1, 0, 3]
    divided = combine_module.from_row(divide)
    for reward, expected in zip(combined(divided), [[6, 2], [6, 2], [6, 2], [5, 5]], strict=True):
        with pytest.raises(contract_module.RewardError, match=r"'.*' raised ZeroDivisionError: .* for prompt 1"):
            score(reward, ["x"] * 3, by=by)
        if reward.fn is divided:
            scores = score(reward, ["x"] * 3, by=by, on_error="none")
            assert scores == pytest.approx([expected[0], np.nan, expected[1]], nan_ok=True)


@pytest.mark.quick
def test_faults_of_a_gate_that_nothing_passed_are_told():
    with pytest.raises(contract_module.RewardError, match=r"returned nan; .* for prompt 0 of the batch"):
        score(combine_module.gated(some([float("nan"), 0.0]), fives), ["x", "y"])


@pytest.mark.quick
def test_partial_scores_of_async_functions_are_handed_on():
    async def later(completion, row):
        return divide(completion, row)

    scores = score(
        combine_module.weighted(combine_module.from_row(later), 2.0), ["x"] * 3, by=[1, 0, 3], on_error="none"
    )
    assert scores == pytest.approx([12, np.nan, 4], nan_ok=True)


@pytest.mark.quick
def test_faults_of_the_second_function_stand_where_their_completions_do():
    scores = score(
        combine_module.gated(some([0.0, 1.0, 1.0]), combine_module.from_row(divide)),
        ["x"] * 3,
        by=[1, 2, 0],
        on_error="none",
    )
    assert scores == pytest.approx([0, 3, np.nan], nan_ok=True)


@pytest.mark.quick
def test_combinators_of_async_functions_are_async():
    async def judge(completions):
        await asyncio.sleep(0.4)
        return [float(len(text)) for text in completions]

    async def strict(completions):
        raise KeyError("gold")

    fns = [
        combine_module.weighted(judge, 2.0),
        combine_module.clipped(judge, high=2),
        combine_module.gated(judge, combine_module.weighted(judge, -1.0), threshold=1),
        combine_module.gated(some([0.0, 1.0, 1.0]), judge),
        combine_module.gated(judge, length, threshold=2),
    ]
    started = time.perf_counter()
    scores = score(fns, ["a", "bb", "ccc"])
    assert np.transpose(scores).tolist() == [[2, 4, 6], [1, 2, 2], [0, -2, -3], [0, 2, 3], [0, 0, 3]]
    assert time.perf_counter() - started < 2.2, "in a row they take 2.4 s"
    with pytest.raises(contract_module.RewardError, match="'strict' raised KeyError"):
        score(combine_module.weighted(strict, 1.0), ["a"])


@pytest.mark.quick
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: combine_module.weighted(length, float("nan")), "weight is nan: give a finite number"),
        (lambda: combine_module.clipped(length, 2, 1), "low is 2 and high is 1: give low ≤ high"),
        (lambda: combine_module.clipped(length, 0, float("nan")), "low is 0 and high is nan"),
        (lambda: lib.accuracy_reward(extract="("), r"extract is '\(', which is no regular expression: missing \)"),
        (lambda: lib.format_reward("[a"), r"pattern is '\[a', which is no regular expression"),
        (lambda: lib.tag_reward(), r"tags is empty: give at least one name, tag_reward\('answer'\)"),
        (lambda: lib.get_soft_overlong_punishment(10, 11), "soft_punish_cache is 11 and max_completion_len is 10"),
        (lambda: lib.get_soft_overlong_punishment(10, -1), "give 0 ≤ soft_punish_cache"),
        (lambda: lib.get_repetition_penalty_reward(0), "ngram_size is 0: give 1 or more"),
        (lambda: lib.get_repetition_penalty_reward(2, 0.5), "max_penalty is 0.5: give a finite number ≤ 0"),
        (lambda: lib.get_repetition_penalty_reward(2, -np.inf), "max_penalty is -inf"),
    ],
)
def test_factories_refuse(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# --- shipped


@pytest.mark.quick
@pytest.mark.parametrize("form", [list, messages])
def test_accuracy_compares_the_extracted_answer_with_the_column(form):
    tagged = lib.accuracy_reward("truth", r"<answer>(.*?)</answer>")
    texts = [
        "<answer>4</answer>",
        "4",
        "<answer>4</answer> no, <answer>5</answer>",
        "<answer>\n 4\n</answer>",
        "<answer></answer>",
        "<answer>4</answer>",
    ]
    scores = score(tagged, form(texts), truth=["4", "4", "4", " 4", "4", None])
    assert scores == pytest.approx([1, 0, 0, 1, 0, np.nan], nan_ok=True)


def last_word(text):
    return text.split()[-1] if text.split() else None


@pytest.mark.quick
def test_accuracy_extracts_by_function_by_whole_match_or_not_at_all():
    texts = ["it is 12", "12", "", "13 "]
    assert score(lib.accuracy_reward(extract=last_word), texts, answer=[12] * 4) == [1, 1, 0, 0]
    assert score(lib.accuracy_reward(extract=r"\d+"), texts, answer=[12] * 4) == [1, 1, 0, 0]
    assert score(lib.accuracy_reward(), texts, answer=["12"] * 4) == [0, 1, 0, 0]
    assert score(lib.accuracy_reward(), texts, answer=["13"] * 4) == [0, 0, 0, 1]


@pytest.mark.quick
def test_accuracy_asks_for_its_column_and_a_forgotten_call_is_noticed():
    with pytest.raises(ValueError, match="'accuracy' needs the argument 'solution', which is no column"):
        contract_module.check_reward_fns(lib.accuracy_reward("solution"), ["prompt", "answer"])
    for factory in (lib.accuracy_reward, lib.get_soft_overlong_punishment, lib.format_reward):
        with pytest.raises(ValueError, match=r"needs the argument|call it first"):
            contract_module.check_reward_fns(factory, ["prompt", "answer"])


@pytest.mark.quick
@pytest.mark.parametrize("form", [list, messages])
def test_format_matches_the_whole_completion_across_lines(form):
    reward = lib.format_reward(r"<think>.*</think>\s*<answer>.*</answer>\s*")
    texts = [
        "<think>a\nb</think>\n<answer>4</answer>\n",
        "so <think>a</think><answer>4</answer>",
        "<think>a</think><answer>4</answer> done",
        "<think>a</think>",
    ]
    assert score(reward, form(texts)) == [1, 0, 0, 0]


@pytest.mark.quick
def test_tags_count_marks_that_stand_exactly_once():
    reward = lib.tag_reward("a", "b")
    texts = ["<a></a><b></b>", "<a></a><b>", "<a><a></a><b></b>", "", "</b></a><b><a>"]
    assert score(reward, texts) == [1, 0.75, 0.75, 0, 1]


def overlong_by_the_paper(length, longest, cache):
    """Equation 13 of DAPO, case by case."""
    if length <= longest - cache:
        return 0.0
    if length <= longest:
        return (longest - cache - length) / cache
    return -1.0


@pytest.mark.quick
@pytest.mark.parametrize(("longest", "cache"), [(10, 4), (10, 10), (10, 0), (1, 1)])
def test_soft_overlong_is_the_papers_equation(longest, cache):
    ids = [[1] * length for length in range(longest + 4)]
    expected = [overlong_by_the_paper(len(row), longest, cache) for row in ids]
    assert lib.get_soft_overlong_punishment(longest, cache)(completion_ids=ids) == pytest.approx(expected)
    assert min(expected) == -1


@pytest.mark.quick
def test_repetition_counts_n_grams():
    random.seed(0)
    for size in (1, 2, 3):
        reward = lib.get_repetition_penalty_reward(size, max_penalty=-2.0)
        for _ in range(50):
            ids = [random.randrange(3) for _ in range(random.randrange(9))]
            seen, repeated, total = [], 0, 0
            for start in range(len(ids)):
                ngram = ids[start : start + size]
                if len(ngram) == size:
                    total += 1
                    repeated += ngram in seen
                    seen.append(ngram)
            assert reward(completion_ids=[ids]) == pytest.approx([-2.0 * repeated / total if total else 0.0])
    assert lib.get_repetition_penalty_reward(3)(completion_ids=[[1, 2], [], [7] * 5]) == pytest.approx([0, 0, -2 / 3])


@pytest.mark.quick
def test_no_reward_is_minus_zero():
    rewards = [
        combine_module.weighted(some([0.0]), -1.0)(completions=["x"]),
        lib.get_soft_overlong_punishment(4, 2)(completion_ids=[[1, 2]]),
        lib.get_repetition_penalty_reward(1)(completion_ids=[[1, 2]]),
    ]
    assert [str(reward) for reward in rewards] == ["[0.0]"] * 3


SHIPPED = [
    lib.accuracy_reward("answer", r"<answer>(.*?)</answer>"),
    lib.format_reward(".*"),
    lib.tag_reward("answer"),
    lib.get_soft_overlong_punishment(4, 2),
    lib.get_repetition_penalty_reward(2),
    combine_module.from_row(divide),
    combine_module.weighted(length, 2.0),
    combine_module.clipped(length, 0, 2),
    combine_module.gated(length, combine_module.from_row(divide), threshold=3),
    functools.partial(length),
]


@pytest.mark.quick
@pytest.mark.parametrize("reward", SHIPPED, ids=contract_module.reward_names(SHIPPED))
def test_all_of_them_pickle_and_score_the_same_after(reward):
    texts, columns = ["<answer>4</answer>", "4 4 4"], {"answer": ["4", "4"], "by": [1, 2]}
    assert score(pickle.loads(pickle.dumps(reward)), texts, **columns) == score(reward, texts, **columns)


@pytest.mark.quick
def test_names_are_fit_for_metrics():
    assert contract_module.reward_names(SHIPPED) == [
        "accuracy", "format", "tags", "soft_overlong", "repetition", "divide", "length", "length_2", "divide_2",
        "length_3",
    ]  # fmt: skip


@pytest.mark.quick
def test_completion_text_of_text_and_messages():
    assert lib.completion_text("a") == "a"
    assert lib.completion_text([{"role": "assistant", "content": "a"}, {"role": "tool", "content": None}]) == "a"
