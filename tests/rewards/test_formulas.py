"""Formulas as answers: math-verify compares them within a time limit, and ground truths it cannot read are refused."""

import pickle

import pytest

from grpo_jax.rewards import PartialRewards, formula_reward, number_reward
from grpo_jax.rewards.contract import check_rows

pytest.importorskip("math_verify", reason="math-verify is not installed")

# Ground truth, completion, whether it is correct, scores from formula_reward and number_reward (None: row refused).
# docs/suites.md has the table.
TABLE = [
    ("18", "She makes $18 in all.", 1, 1, 1),
    ("So 9 * 2 = 18.\n#### 18", "#### 18.00", 1, 1, 1),
    ("18", "<answer>18</answer>", 1, 0, 1),
    ("18", "The answer is 18. Check: 1 + 1 = 2.", 1, 0, 1),
    ("11/4", "2 3/4", 1, 0, 0),
    (r"\frac{3}{4}", r"\boxed{\frac{6}{8}}", 1, 1, 1),
    (r"\frac{3}{4}", "75%", 0, 1, 0),
    (r"\frac{10}{3}", "3.333333", 0, 1, 0),
    (r"50\%", r"\boxed{0.5}", 1, 1, 0),
    ("8", r"\boxed{2^3}", 1, 1, 0),
    ("6", r"\boxed{3!}", 1, 1, 0),
    (r"3\sqrt{13}", r"\boxed{\sqrt{117}}", 1, 1, None),
    (r"3\sqrt{13}", r"\boxed{3}", 0, 0, None),
    (r"2\pi", r"It is $2\pi$.", 1, 1, None),
    (r"[0, 1)", r"\boxed{[0,1)}", 1, 1, None),
    (r"[0, 1)", r"\boxed{[0,1]}", 0, 0, None),
    (r"(3, 4)", r"\boxed{(4,3)}", 0, 0, None),
    (r"\{1, 2\}", r"\boxed{\{2,1\}}", 1, 1, None),
    (r"x^2 - 1", r"\boxed{(x-1)(x+1)}", 1, 1, None),
]


@pytest.mark.quick
@pytest.mark.parametrize(("truth", "completion", "right", "formula", "number"), TABLE)
def test_number_and_formula_rewards_score_as_documented(truth, completion, right, formula, number):
    judge = formula_reward(timeout=None)
    assert judge(completions=[completion], answer=[truth]) == [formula]
    assert judge.check_rows([{"answer": truth}]) is None
    if number is None:
        with pytest.raises(ValueError, match="must be single numbers"):
            number_reward()(completions=[completion], answer=[truth])
    else:
        assert number_reward()(completions=[completion], answer=[truth]) == [number]


@pytest.mark.quick
def test_messages_are_scored_after_pickling():
    judge = pickle.loads(pickle.dumps(formula_reward("truth", timeout=None)))
    messages = [[{"role": "assistant", "content": text}] for text in (r"$\frac{2}{4}$", r"\boxed{7}", "1")]
    assert judge(completions=messages, truth=[r"\frac{1}{2}", "-7", None]) == [1.0, 0.0, None]


@pytest.mark.quick
def test_unreadable_ground_truths_are_refused_before_a_run():
    judge = formula_reward(timeout=None)
    with pytest.raises(
        ValueError, match=r"in 1 of 2 rows of data, the column 'answer' has no formula .*: row 1 has ''"
    ):
        check_rows([judge], [{"answer": "18"}, {"answer": ""}], argument="data")
    with pytest.raises(PartialRewards, match="completion 0, the function cannot parse '' with math-verify") as caught:
        judge(completions=["1", "2"], answer=["", "2"])
    assert caught.value.values == [None, 1.0]


def test_a_formula_that_does_not_terminate_costs_one_score():
    judge = formula_reward(timeout=2.0)
    with pytest.raises(PartialRewards, match="for completion 0, the function took longer") as caught:
        judge(completions=[r"$9^{9^{9^{9}}} + x$", "$18$"], answer=["$x$", "18"])
    assert caught.value.values == [None, 1.0]
