"""Countdown: the checker counts right, lets nothing through and nothing hang; the problems can be solved."""

from fractions import Fraction

import pytest

from experiments import countdown
from experiments.countdown import expression_value, last_answer, make_problems

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3+5+9", "17"),
        ("9*(5-3)", "18"),
        ("3/5/9", "1/15"),
        ("9/(5/3)", "27/5"),
        ("3-5-9", "-11"),
        ("9 × 5 ÷ 3", "15"),
        (r"9 \times 5 \div 3", "15"),
        ("9 − 5 + 3 = 7", "7"),
        ("((((9))))-5-3", "1"),
    ],
)
def test_expressions_are_counted_exactly(text, value):
    assert expression_value(text, [3, 5, 9]) == Fraction(value)


WITHOUT_VALUE = (
    "3+5 | 3+5+9+9 | 3+5+5 | 3+5+8 | 35+9 | 3**5+9 | 3//5+9 | 3%5+9 | -3+5+9 | +3+5+9 | ~3+5+9 | 9/(5-5)*3 | "
    "5/(9-3*3) | 3+5+9=18 | 3+5+9==17 | =17 | 3+5+ | (3+5+9 | 3+5,9 | 3(5)(9) | 3 5 9 | 3+5+09 | 3.0+5+9 | "
    "3e0+5+9 | 3_+5+9 | ３+5+9 | [3+5+9] | (3+5+9).real | (3).__class__+5+9 | "
    "__import__('os').system('true') | 3 if 5 else 9 | 3+5+9 # easy | True+5+9 | (lambda: 3)()+5+9"
)


def test_what_breaks_the_rules_has_no_value():
    """Countdown executes nothing."""
    for text in (*WITHOUT_VALUE.split(" | "), "", " ", "3+5\n+9"):
        assert expression_value(text, [3, 5, 9]) is None, text
    assert expression_value("9-5", [3, 5, 9]) is None
    assert expression_value("9-5", [3, 5, 9], use_all=False) == 4
    assert expression_value("9-5-5", [3, 5, 9], use_all=False) is None
    assert expression_value("5+5", [5, 5], use_all=False) == 10


@pytest.mark.parametrize(
    "text",
    ["9**9**9**9", "9" * 10**6, "(" * 10**6, "((((" * 20 + "9", "9+" * 10**6 + "9", "-" * 99 + "9", "9*" * 49 + "9"],
    ids=lambda text: text[:8],
)
def test_a_hostile_text_is_read_at_once(text):
    assert expression_value(text, [3, 5, 9]) is None
    assert last_answer("<answer>" * 10**5 + text) is None


@pytest.mark.parametrize("numbers", [3, 4, 5, 6])
def test_problems_differ_and_their_solutions_solve_them(numbers):
    problems = make_problems(1, 60, numbers=numbers, largest=50, targets=range(10, 500))
    assert len({(problem["target"], *sorted(problem["numbers"])) for problem in problems}) == 60
    for problem in problems:
        assert len(set(problem["numbers"])) == numbers
        assert problem["target"] in range(10, 500)
        # Python's own arithmetic is another road: every step of a solution is a whole number.
        assert (
            eval(problem["solution"]) == problem["target"] == expression_value(problem["solution"], problem["numbers"])
        )
    assert problems == make_problems(1, 60, numbers=numbers, largest=50, targets=range(10, 500))
    assert problems != make_problems(2, 60, numbers=numbers, largest=50, targets=range(10, 500))


def test_rewards_look_at_the_last_answer():
    row = {"numbers": [[3, 5, 9]], "target": [17], "prompts": ["make 17 from 3 5 9:"]}
    for completion, right, legal in [
        ("<answer>3+5+9</answer>", 1.0, 1.0),
        ("hm <answer>3*5+9</answer> no <answer> (3 + 5) + 9 = 17 </answer> so", 1.0, 1.0),
        ("<answer>3*5+9</answer>", 0.0, 1.0),
        ("<answer>9+9-1</answer>", 0.0, 0.0),
        ("<answer>17</answer>", 0.0, 0.0),
        ("3+5+9", 0.0, 0.0),
        ("<answer>3+5+9", 0.0, 0.0),
        ("<answer>3+5+9</answer> <answer></answer>", 0.0, 0.0),
    ]:
        assert countdown.accuracy(completions=[completion], **row) == [right]
        assert countdown.follows_rules(completions=[completion], **row) == [legal]
