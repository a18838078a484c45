"""The experiments' tasks: Countdown and its checker, the guessing game and its bounds, and the calculator tool."""

import functools
import re
import statistics
from fractions import Fraction

import pytest

from experiments import calculator, countdown, guess
from experiments.calculator import calculate, last_number, used_tool
from experiments.countdown import expression_value, last_answer
from experiments.guess import Game, bisection, random_play

pytestmark = pytest.mark.quick


def test_expressions_are_evaluated_exactly():
    values = {"3+5+9": "17", "9*(5-3)": "18", "3/5/9": "1/15", "9/(5/3)": "27/5", "3-5-9": "-11", "9 × 5 ÷ 3": "15"}
    values |= {r"9 \times 5 \div 3": "15", "9 − 5 + 3 = 7": "7", "((((9))))-5-3": "1"}
    for text, value in values.items():
        assert expression_value(text, [3, 5, 9]) == Fraction(value), text


WITHOUT_VALUE = (
    "3+5 | 3+5+9+9 | 3+5+5 | 3+5+8 | 35+9 | 3**5+9 | 3//5+9 | 3%5+9 | -3+5+9 | +3+5+9 | ~3+5+9 | 9/(5-5)*3 | "
    "5/(9-3*3) | 3+5+9=18 | 3+5+9==17 | =17 | 3+5+ | (3+5+9 | 3+5,9 | 3(5)(9) | 3 5 9 | 3+5+09 | 3.0+5+9 | "
    "3e0+5+9 | 3_+5+9 | ３+5+9 | [3+5+9] | (3+5+9).real | (3).__class__+5+9 | "
    "__import__('os').system('true') | 3 if 5 else 9 | 3+5+9 # easy | True+5+9 | (lambda: 3)()+5+9"
)


def test_expressions_that_break_the_rules_are_refused():
    """Expressions that break the rules have no value, and Countdown never executes code."""
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
def test_hostile_text_is_rejected_quickly(text):
    assert expression_value(text, [3, 5, 9]) is None
    assert last_answer("<answer>" * 10**5 + text) is None


@pytest.mark.parametrize("numbers", [3, 4, 5, 6])
def test_countdown_problems_are_distinct_and_solved_by_their_solutions(numbers):
    problems = countdown.make_problems(1, 60, numbers=numbers, largest=50, targets=range(10, 500))
    assert len({(problem["target"], *sorted(problem["numbers"])) for problem in problems}) == 60
    for problem in problems:
        assert len(set(problem["numbers"])) == numbers
        assert problem["target"] in range(10, 500)
        # Python's eval agrees, because every intermediate result is an integer.
        assert (
            eval(problem["solution"]) == problem["target"] == expression_value(problem["solution"], problem["numbers"])
        )
    assert problems == countdown.make_problems(1, 60, numbers=numbers, largest=50, targets=range(10, 500))
    assert problems != countdown.make_problems(2, 60, numbers=numbers, largest=50, targets=range(10, 500))


def test_countdown_rewards_use_the_last_answer():
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


def test_game_answers_higher_or_lower_and_a_lost_one_earns_nothing():
    game = Game()
    game.reset(target=5, prompt="guess: ")
    assert [game.respond(text) for text in ("4", "6", "5")] == [guess.HIGHER, guess.LOWER, None]
    assert guess.found([game]) == guess.found_soon([game]) == [1.0]
    assert guess.guesses([game]) == [3.0]
    assert guess.few_guesses([game]) == [pytest.approx(1 - 2 / guess.LIMIT)]
    (by_turn,) = guess.few_guesses_by_turn([game])
    assert by_turn == pytest.approx([0, -1 / guess.LIMIT, 1 - 1 / guess.LIMIT])
    slow = Game()
    slow.reset(target=5)
    assert [slow.respond("4") for _ in range(guess.LIMIT)] == [guess.HIGHER] * (guess.LIMIT - 1) + [None]
    for text in ("", "five", " 5", "5 ", "-5", "5.0", "٥", "²", "5" * 5000):
        game.reset(target=5)
        assert game.respond(text) is None
        assert guess.few_guesses([slow, game]) == guess.found_soon([slow, game]) == [0, 0]
        assert guess.guesses([slow, game]) == [guess.LIMIT] * 2


def mean_of_all_games(numbers, choose):
    """Return the mean number of guesses by enumeration; `choose` is `min` (best play) or the mean (random play)."""

    @functools.cache
    def total(n):
        """Return the total number of guesses for the n numbers in an interval."""
        return n + choose([total(g) + total(n - 1 - g) for g in range(n)]) if n else 0

    return total(numbers) / numbers


def test_bounds_equal_the_enumeration_of_all_games():
    for numbers in (1, 2, 3, 7, 50, 64):
        assert random_play(numbers) == pytest.approx(mean_of_all_games(numbers, statistics.mean))
        assert bisection(numbers) == pytest.approx(mean_of_all_games(numbers, min))


CALLED = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "calculate", "arguments": {}}}]}


def conversation(result, answer):
    return [CALLED, {"role": "tool", "content": result}, {"role": "assistant", "content": answer}]


def test_calculator_problems_and_expressions():
    problems = calculator.make_problems(3, 300)
    assert len({problem["text"] for problem in problems}) == 300
    for problem in problems:
        a, sign, b = problem["expression"].split()
        assert problem["answer"] == {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign] >= 0
        assert re.findall(r"\d+", problem["text"]) == [a, b]
    assert {problem["expression"].split()[1] for problem in problems} == set("+-*")
    for text, value in (("37 * 48", "1776"), ("7 - 9", "-2"), ("(1+2)*3", "9"), ("9 / 2", "9/2"), ("2*2", "4")):
        assert calculate(text) == value
    for text in ("", "2 ** 9", "__import__('os')", "1.5 + 1", "9 / 0", "9" * 200, "2 +", "pens"):
        with pytest.raises(ValueError, match="is not an expression of whole numbers"):
            calculate(text)


def test_only_the_last_message_of_the_policy_is_an_answer():
    said = lambda text: [{"role": "assistant", "content": text}]
    completions = [
        *(said("The answer is 80."), said("80 or 81"), said("The answer is 8,0"), said("nothing"), said("-80")),
        *(conversation("80", "It is 80"), conversation("80", ""), conversation("80", "81"), conversation("7", "80")),
        [CALLED, {"role": "tool", "content": "80"}],
    ]
    assert calculator.accuracy(completions, [80] * 10) == [1, 0, 1, 0, 0, 1, 0, 0, 1, 0]
    assert used_tool(completions) == [0, 0, 0, 0, 0, 1, 1, 1, 1, 1]
    assert used_tool([conversation("ValueError: '2 +' is no expression", "80")]) == [0]
    assert last_number("9" * 5000) is None
