"""Numeric answers: correct ones are read in every spelling, wrong ones never score, and parsing takes linear time."""

import functools
import itertools
import json
import pickle
import re
import time
from fractions import Fraction
from pathlib import Path

import pytest

from grpo_jax.rewards.answers import final_number, number_reward, sole_number
from grpo_jax.rewards.contract import check_reward_fns
from grpo_jax.rewards.shipped import format_reward
from grpo_jax.rewards.workers import isolated

GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"

# Texts and the numbers they state, or None if they state no number.
WRITTEN = [
    ("18", "18"), (r"It costs \$18.", "18"), ("18kg in all", "18"), ("75%", "75"), ("Total: €1.234", "1.234"),
    ("1,234,567", "1234567"), ("1,234.50 dollars", "1234.5"), (r"1{,}234", "1234"), (r"1\,234", "1234"), ("42.", "42"),
    (".5", "0.5"), ("−7", "-7"), ("-$7", "-7"), ("$-7", "-7"), ("(3+7)-7", "7"), ("5–7", "7"), ("3/4", "3/4"),
    (r"\frac{3}{4}", "3/4"), ("1.5e3", "1500"), (r"-\dfrac{1,000}{3}", "-1000/3"), ("The field has 12 m^2.", "12"),
    ("She ate 5 on the 3rd day.", "5"), ("__18__ ", "18"), ("She has 3 and then 5, so 8 in all.", "8"),
    ("**Answer:** $18 for 2 days", "18"), ("Final answer:\n\n18\n\nIt took 3 steps.", "18"),
    ("The answer would be 18 (see step 3)", "18"), ("The answer is 6 * 3 = 18, for 2 days", "18"),
    ("The answer is 5. No wait, the answer is 6, not 5", "6"), ("Answer (in dollars): 18 for 3 days", "18"),
    ("The answer to both questions is 18, for 3 days", "18"), (r"\boxed{17} so I was wrong: \boxed{18}, not 17", "18"),
    (r"\boxed{S_{10} = 18}", "18"), (r"\boxed{18 \text{ apples}}", "18"), ("#### $1,018\nThat was 3 steps.", "1018"),
    ("####18.", "18"), ("#### - 18", "-18"), ("#### 2. Add the 5 apples\n12 + 6 = 18 apples", "18"),
    ("#### 2. Add\nThe answer is 18.\n#### 3. Check 5", "18"), ("<answer>17</answer> <answer>18 km/h</answer>", "18"),
    ("If you answer every question correctly, the total marks are 50*2 = 100. You get 10.", "10"),
    ("Convert the answer to weeks: 28 days / 7 days/week = 4 weeks. She has 2 more.", "2"),
    *((text, None) for text in ("", "eighteen", r"\boxed{none}, though 18 came to mind", "18/0", "9" * 61, "$5k",
        "2.5 million", r"\boxed{17 of 18}", "2^5", "x_1", "the 3rd", "100,00", "1,234,56", "1,00,000", "1.5.2", "3,4")),
    ("1e100", None), ("(5,-3)", "-3"),
]  # fmt: skip

# Ground truths that are a single number in mathematical notation; each is also tested in a box and in a sentence.
NUMBERS = [
    (r"90^\circ", "90"), (r"90^{\circ}", "90"), (r"-40^{\circ}\text{C}", "-40"), (r"90\degree", "90"),
    (r"\$32,\!348", "32348"), (r"12,\!345,\!678.5", "12345678.5"), (r"10{,}080", "10080"), (r"10\,080", "10080"),
    (r"\dfrac{ -3 }{ 4 }", "-3/4"), (r"\frac{1.5}{2}", "3/4"), (r"15\mbox{ cm}^2", "15"),
    (r"12\ \text{units}^{3}", "12"), (r"\text{8 inches}", "8"), (r"6\text{ (cm)}", "6"), ("x = - 5", "-5"),
    ("f(2) = 7", "7"), (r"50\%", "50"), ("$36$", "36"), ("18 km/h", "18"), ("June 20", "20"), ("+5", "5"),
    ("3.5 m²", "3.5"),
]  # fmt: skip

# Ground truths that are not a single number: the numbers in them are wrong answers.
NO_NUMBER = r"""
3\sqrt{13} ; 2√3 ; 7\pi ; 7 \pi ; 9π ; \frac{10\pi}{3} ; 2^{10} ; 2.5^3 ; 3/4^2 ; 10^{-3} ; e^2 ; \sin 30^\circ ; 5i
3x ; x + 3 ; n/2 ; 3/x ; (3,4) ; [3,\infty) ; x > 3 ; \pm 3 ; 3, 4 ; 3 \text{ or } 4 ; \{1,2\} ; 4:3 ; 1011_2
0.\overline{3} ; |x|=5 ; 8! ; 5² ; {100 \over 9} ; \infty ; \text{(B)} ; B ; nan ; \frac{5}{0}
"""


@pytest.mark.quick
@pytest.mark.parametrize(("text", "number"), NUMBERS)
def test_a_single_number_is_read_in_every_spelling(text, number):
    """Answers in mathematical notation are read, a ground truth that is not a single number is refused, and GSM8K's
    8,792 solutions score, each with one of four styles of ending.
    """
    assert sole_number(text) == Fraction(number)
    score = number_reward()
    written = [rf"So \boxed{{{text}}}, of 3.", f"<answer>{text}</answer> of 3"]
    if text[0] in "-0123456789":  # after ####, any other text is a heading
        written.append(f"#### {text}\nof 3")
    if "- " not in text:  # in a sentence, a sign separated from its number is an operator
        written.append(f"It is {text}.")
    assert score(completions=written, answer=[text] * len(written)) == [1.0] * len(written)
    wrong = [rf"\boxed{{{Fraction(number) + 1}}}", rf"\boxed{{{-Fraction(number)}}}"]
    assert score(completions=wrong, answer=[text] * 2) == [0.0] * 2


@pytest.mark.quick
@pytest.mark.parametrize("text", [*re.split(" ; |\n", NO_NUMBER.strip()), ""])
def test_ground_truths_without_a_single_number_are_refused(text):
    assert sole_number(text) is None
    assert sole_number(rf"So 3 + 15 = 18 is not it: \boxed{{{text}}}") is None
    with pytest.raises(ValueError, match=r"must be single numbers; got .*\. Remove such rows"):
        number_reward()(completions=["18"], answer=[text])
    score, written = number_reward(), rf"\boxed{{{text}}}"
    assert not any(score(completions=[written], answer=[n])[0] for n in re.findall(r"\d+", text))


@pytest.mark.quick
def test_rows_without_a_number_are_refused_before_a_run():
    rows = [{"prompt": "p", "answer": truth} for truth in ("18", r"3\sqrt{13}", None, "B", 18.5, *["(1, 2)"] * 40)]
    message = (
        r"in 42 of 45 rows of the dataset, the column 'answer' has no single number: "
        r"row 1 has '3.*', row 3 has 'B', row 5 has '\(1, 2\)', row 6 .* row 7 has '\(1, 2\)', …\. Remove such .*"
        r"accuracy_reward \(compares strings\) .* math-verify"
    )
    right = number_reward()
    for fns in (right, [format_reward("a"), right], isolated(right, timeout=5.0), functools.partial(right)):
        check_reward_fns(fns, ["prompt", "answer"], rows=[rows[0], rows[2], rows[4]])
        with pytest.raises(ValueError, match=message):
            check_reward_fns(fns, ["prompt", "answer"], rows=rows)
    with pytest.raises(ValueError, match="reward_fns has 2 errors"):
        check_reward_fns([right, right], ["answer"], rows=rows)
    with pytest.raises(ValueError, match="1 of 1 rows of eval_dataset"):
        right.check_rows(rows[1:2], argument="eval_dataset")


@pytest.mark.quick
@pytest.mark.parametrize(("text", "number"), WRITTEN)
def test_final_number_is_read_from_text(text, number):
    assert final_number(text) == (None if number is None else Fraction(number))


# Wrong answers to a question with the answer 18.
@pytest.mark.quick
@pytest.mark.parametrize("text", [
    "-18", "180", "1.8", "18.01", "1,800", "18/5", "18 million", "18e2", "18th", "It is 18 or 19", "18\n#### 17",
    r"18 \boxed{17} 18", r"\boxed{18} \boxed{17}", r"\boxed{17 or 18}", "<answer>17</answer> 18", "18 · 2", "18, 17",
    "The answer is 17, since 9 + 9 = 18", "The answer is not 18 but 17",
])  # fmt: skip
def test_a_wrong_answer_never_scores(text):
    assert number_reward()(completions=[text], answer=["18"]) == [0.0]


@pytest.mark.quick
def test_messages_numbers_and_whole_solutions_are_read():
    right = pickle.loads(pickle.dumps(number_reward("truth")))
    message = [{"role": "assistant", "content": "The answer is 1,018.0 dollars."}]
    scores = right(completions=[message] * 5, truth=["3 + 15 = 18\n#### 1018", 1018, 1018.0, None, "1019"])
    assert scores == [1.0, 1.0, 1.0, None, 0.0]


@pytest.mark.skipif(not GSM8K.is_dir(), reason="../shared/data/gsm8k does not exist")
def test_gsm8k_solutions_score_and_changed_ones_do_not():
    """All 8,792 gold solutions in GSM8K score, and solutions with a changed number do not."""
    lines = [line for path in GSM8K.glob("t*.jsonl") for line in path.read_text(encoding="utf-8").splitlines()]
    solutions = [json.loads(line)["answer"] for line in lines]
    truths = [solution.rpartition("#### ")[2] for solution in solutions]
    score, count = number_reward(), 8792
    assert len(solutions) == count
    boxed = [rf"Thus $\boxed{{{truth}.00 \text{{ units}}}}$, of 3." for truth in truths]
    assert sum(score(completions=solutions + boxed, answer=truths * 2)) == 2 * count
    wrong = [f"{int(truth.replace(',', '')) + 1:,}" for truth in truths]
    # Endings without ####; a whole solution is also accepted as a ground truth.
    reasons = [re.sub("<<.*?>>", "", solution.rpartition("\n####")[0]) for solution in solutions]
    ends = itertools.cycle(("Total = {}", "So it is ${}.", "**{}**", "The answer is {}."))
    unmarked = [f"{reason}\n{next(ends).format(truth)}" for reason, truth in zip(reasons, truths, strict=True)]
    assert sum(score(completions=unmarked, answer=truths)) == count
    score.check_rows([{"answer": solution} for solution in solutions])
    assert [sole_number(solution) for solution in solutions] == [Fraction(t.replace(",", "")) for t in truths]
    changed = [f"{s.rpartition('####')[0]}#### {number}" for s, number in zip(solutions, wrong, strict=True)]
    assert sum(score(completions=changed, answer=truths)) == 0


# Repeated many times, each of these could make a parser scan the rest of the text from every position.
LONG = [
    "\\boxed{", "<answer>", "1,234", "1,234,", "= ", "#### 1", "the answer is ", "9", "1 ", "1/", "\\frac{1", "{", "-$",
    "x_", "\\sqrt{", "\\sqrt[", "^{1", "x_{1", "-\\frac{1.5}{", "\\circ^", "answer (", "answer * ", "1 a + ", "= - ",
    "1,\\!",
]  # fmt: skip


def test_reading_takes_linear_time():
    """Parsing a long text takes linear time: hundredths of a second, where quadratic time would be tens of seconds."""
    for part in LONG:
        started = time.process_time()
        final_number(part * (30_000 // len(part)))
        final_number(part * (30_000 // len(part)) + "=")
        assert time.process_time() - started < 1, part
