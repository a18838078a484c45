"""Asking a calculator: the problems, what counts as right, and the lessons."""

import random
import re

import numpy as np
import pytest

from experiments import calculator
from experiments.calculator import accuracy, asked, calculate, last_number, make_problems, taught, used_tool
from grpo_jax.rollout.tools import read_tools
from grpo_jax.text.formats import FORMATS, format_of

CALLED = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "calculate", "arguments": {}}}]}


def conversation(result, answer):
    return [CALLED, {"role": "tool", "content": result}, {"role": "assistant", "content": answer}]


@pytest.mark.quick
def test_answers_are_those_of_their_expressions_and_differ():
    problems = make_problems(3, 300)
    assert len({problem["text"] for problem in problems}) == 300
    for problem in problems:
        a, sign, b = problem["expression"].split()
        assert problem["answer"] == {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign] >= 0
        assert re.findall(r"\d+", problem["text"]) == [a, b]
    assert {problem["expression"].split()[1] for problem in problems} == set("+-*")


@pytest.mark.quick
def test_the_tool_works_out_expressions_and_refuses_all_else():
    for text, value in (("37 * 48", "1776"), ("7 - 9", "-2"), ("(1+2)*3", "9"), ("9 / 2", "9/2"), ("2*2", "4")):
        assert calculate(text) == value
    for text in ("", "2 ** 9", "__import__('os')", "1.5 + 1", "9 / 0", "9" * 200, "2 +", "pens"):
        with pytest.raises(ValueError, match="is no expression of whole numbers"):
            calculate(text)


@pytest.mark.quick
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


def test_lessons_are_what_a_run_would_show_and_the_calls_can_be_read():
    policy = calculator.make_policy(0, width=16, layers=1)
    tokenizer, problems = policy.tokenizer, make_problems(1, 20)
    assert format_of(tokenizer.chat_template) is FORMATS["hermes"]
    schemas = [tool.schema for tool in read_tools(calculator.TOOLS).values()]
    lessons = calculator.lessons(policy, problems, 40, seed=5)
    draw = random.Random(5)
    rows = draw.choices(problems, k=40)
    for lesson, problem in zip(lessons, rows, strict=True):
        row, own = np.array(lesson["input_ids"]), np.array(lesson["labels"]) != -100
        turns = taught(problem, draw)
        messages = asked(problem, scratch=True)["prompt"]
        for turn, result in turns:
            parsed = FORMATS["hermes"].parse(turn)
            calls = [{"function": {"name": call.name, "arguments": call.arguments}} for call in parsed.calls]
            assert bool(calls) == bool(result)
            assert not parsed.problems
            messages.append({"role": "assistant", "content": parsed.content, "tool_calls": calls})
            if result:
                messages.append({"role": "tool", "content": result})
        whole = tokenizer.apply_chat_template(messages, tools=schemas, tokenize=False)
        text = tokenizer.decode(row)
        assert text + "\n" == whole, "the turns are the template's own"
        assert tokenizer.decode(row[own]) == "".join(turn + "<|im_end|>" for turn, _ in turns)
