"""The experiment on GSM8K: its rows and rewards."""

import pytest

from experiments import gsm8k

pytestmark = pytest.mark.quick

PROBLEMS = [
    {
        "question": f"Tom has {n} apples and buys {n + 1}. How many has he?",
        "answer": f"{n} + {n + 1} = {2 * n + 1}\n#### {2 * n + 1}",
    }
    for n in range(1, 25)
]


def test_a_problem_is_a_conversation_or_text():
    chat, text = (gsm8k.make_row(PROBLEMS[0], chat=chat) for chat in (True, False))
    assert [message["role"] for message in chat["prompt"]] == ["system", "user"]
    assert chat["prompt"][1]["content"] == PROBLEMS[0]["question"] in text["prompt"]
    assert gsm8k.INSTRUCTION in text["prompt"] == text["prompt"].strip()
    for row in (chat, text):
        found = gsm8k.accuracy(completions=["He has 3.", "#### 3", "#### 4"], answer=[row["answer"]] * 3)
        assert found == [1.0, 1.0, 0.0]


def test_the_format_is_a_last_line_with_the_answer():
    right = ["1 + 2 = 3\n#### 3", "a\nb\n#### -$1,234.50\n"]
    wrong = ["#### 3", "1 + 2\n#### 3\nDone", "1 + 2\n### 3", "1 + 2\n#### three", "1 + 2 #### 3", "1\n#### 3 apples"]
    assert gsm8k.well_formed(completions=right + wrong) == [1.0] * 2 + [0.0] * 6
    assert gsm8k.well_formed(completions=[problem["answer"] for problem in PROBLEMS]) == [1.0] * len(PROBLEMS)
