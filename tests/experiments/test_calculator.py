"""Asking a calculator: the problems, what counts as right, and the lessons."""

import re

import pytest

from experiments.calculator import accuracy, calculate, last_number, make_problems, used_tool

pytestmark = pytest.mark.quick

CALLED = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "calculate", "arguments": {}}}]}


def conversation(result, answer):
    return [CALLED, {"role": "tool", "content": result}, {"role": "assistant", "content": answer}]


def test_answers_are_those_of_their_expressions_and_differ():
    problems = make_problems(3, 300)
    assert len({problem["text"] for problem in problems}) == 300
    for problem in problems:
        a, sign, b = problem["expression"].split()
        assert problem["answer"] == {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign] >= 0
        assert re.findall(r"\d+", problem["text"]) == [a, b]
    assert {problem["expression"].split()[1] for problem in problems} == set("+-*")


def test_the_tool_works_out_expressions_and_refuses_all_else():
    for text, value in (("37 * 48", "1776"), ("7 - 9", "-2"), ("(1+2)*3", "9"), ("9 / 2", "9/2"), ("2*2", "4")):
        assert calculate(text) == value
    for text in ("", "2 ** 9", "__import__('os')", "1.5 + 1", "9 / 0", "9" * 200, "2 +", "pens"):
        with pytest.raises(ValueError, match="is no expression of whole numbers"):
            calculate(text)


def test_only_what_the_policy_says_last_is_an_answer():
    said = lambda text: [{"role": "assistant", "content": text}]
    completions = [
        *(said("The answer is 80."), said("80 or 81"), said("The answer is 8,0"), said("nothing"), said("-80")),
        *(conversation("80", "It is 80"), conversation("80", ""), conversation("80", "81"), conversation("7", "80")),
        [CALLED, {"role": "tool", "content": "80"}],
    ]
    assert accuracy(completions, [80] * 10) == [1, 0, 1, 0, 0, 1, 0, 0, 1, 0]
    assert used_tool(completions) == [0, 0, 0, 0, 0, 1, 1, 1, 1, 1]
    assert used_tool([conversation("ValueError: '2 +' is no expression", "80")]) == [0]
    assert last_number("9" * 5000) is None
