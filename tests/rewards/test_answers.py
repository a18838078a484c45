"""Answers: every way to write a right one is read, a wrong one never scores, and no text takes long."""

import json
import pickle
from fractions import Fraction
from pathlib import Path

import pytest

from grpo_jax.rewards.answers import final_number, number_reward

GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"

# What is written, and the number that is meant by it.
WRITTEN = [
    ("18", "18"),
    ("It costs $18.", "18"),
    ("It costs $ 18", "18"),
    (r"It costs \$18.", "18"),
    ("18 apples", "18"),
    ("18kg in all", "18"),
    ("75%", "75"),
    (r"75\%", "75"),
    ("Total: €1.234", "1.234"),
    ("1,234,567", "1234567"),
    ("1,234.50 dollars", "1234.5"),
    ("1 234 567", "1234567"),
    ("1\u202f234", "1234"),
    (r"1{,}234", "1234"),
    (r"1\,234", "1234"),
    ("42.0", "42"),
    ("42.", "42"),
    (".5", "0.5"),
    ("-7", "-7"),
    ("−7", "-7"),
    ("x = -7", "-7"),
    ("-$7", "-7"),
    ("$-7", "-7"),
    ("(-7)", "-7"),
    ("10-7", "7"),
    ("(3+7)-7", "7"),
    ("5–7", "7"),
    ("3/4", "3/4"),
    ("2 3/4 cups", "11/4"),
    ("2¾ cups", "11/4"),
    ("½", "1/2"),
    (r"\frac{3}{4}", "3/4"),
    (r"-\dfrac{1,000}{3}", "-1000/3"),
    (r"2\frac{3}{4}", "11/4"),
    (r"\frac12", "1/2"),
    ("2.5 million people", "2500000"),
    ("$5k", "5000"),
    ("1.5e3", "1500"),
    (r"1.5 \times 10^{3}", "1500"),
    ("1.5 × 10^-3", "0.0015"),
    ("The field has 12 m^2.", "12"),
    ("The field has 12 m².", "12"),
    ("She ate 5 on the 3rd day.", "5"),
    ("Model B2 has 5 of them.", "5"),
    ("**18**", "18"),
    ("__18__ ", "18"),
    ("`18`", "18"),
    ("She has 3 and then 5, so 8 in all.", "8"),
    ("3*6=18", "18"),
    ("5*3*2 = **30**", "30"),
    ("2**3 = 8", "8"),
    # The answer is named, and other numbers follow it.
    ("The answer is 18, which is 3 more than 15.", "18"),
    ("**Answer:** $18 for 2 days", "18"),
    ("Final answer:\n\n18\n\nIt took 3 steps.", "18"),
    ("The answer would be 18 (see step 3)", "18"),
    ("The answer is 6 * 3 = 18, for 2 days", "18"),
    ("The answer is 5. No wait, the answer is 6, not 5", "6"),
    ("The final answer is $\\boxed{18}$. Check: 18 - 3 = 15", "18"),
    (r"\boxed{x = 18}", "18"),
    (r"\boxed{18 \text{ apples}}", "18"),
    (r"\boxed{\frac{6}{2} = 3} in 5 steps", "3"),
    (r"\boxed{18 when x_1 = 5}", "18"),
    (r"\boxed{17} ... so I was wrong: \boxed{18}, not 17", "18"),
    ("#### 18", "18"),
    ("#### $1,018\nThat was 3 steps.", "1018"),
    ("#### **18** apples, 3 for each", "18"),
    ("#### 5 + 13 = 18", "18"),
    ("####18.", "18"),
    ("#### 2. Add the 5 apples\n12 + 6 = 18 apples", "18"),
    ("#### 2. Add\nThe answer is 18.\n#### 3. Check 5", "18"),
    ("<answer> 18 </answer> after 3 steps", "18"),
    ("<answer>17</answer> no: <answer>18</answer>", "18"),
    ("<think> 5 </think><answer>The answer is 18 for 3</answer>", "18"),
]


@pytest.mark.quick
@pytest.mark.parametrize(("text", "number"), WRITTEN)
def test_numbers_are_read_as_they_are_written(text, number):
    assert final_number(text) == Fraction(number)


@pytest.mark.quick
@pytest.mark.parametrize(
    "text",
    [
        "",
        "I do not know.",
        "eighteen",
        r"\boxed{}",
        r"\boxed{none}, though 18 came to mind",
        "<answer>no idea</answer> 18",
        "18/0",
        "9" * 61,
        "2^5",
        "x_1",
        "A1 and B2",
        "the 3rd",
    ],
)
def test_no_number_is_none(text):
    assert final_number(text) is None


# Wrong answers to a question whose answer is 18.
@pytest.mark.quick
@pytest.mark.parametrize(
    "text",
    [
        "-18",
        "180",
        "118",
        "1.8",
        "18.01",
        "1,800",
        "0.18",
        "18 000",
        "18/5",
        "1 8/9",
        "18 million",
        "18e2",
        "x18",
        "18th",
        "It is 18 or 19",
        "17, not 18. The answer is 17",
        "18\n#### 17",
        "#### 17\n18",
        r"18 \boxed{17} 18",
        r"\boxed{18} \boxed{17}",
        r"\boxed{17 or 18}",
        "<answer>17</answer> 18",
        "<answer>17 18</answer>",
        "The answer is 17, since 9 + 9 = 18",
        "The answer is not 18 but 17",
        "18 · 2",
        "20 - 2",
        "18, 17",
    ],
)
def test_a_wrong_answer_never_scores(text):
    assert number_reward()(completions=[text], answer=["18"]) == [0.0]


@pytest.mark.quick
def test_reward_reads_messages_numbers_and_whole_solutions_and_can_be_sent_to_a_worker():
    right = pickle.loads(pickle.dumps(number_reward("truth")))
    message = [{"role": "assistant", "content": "The answer is 1,018.0 dollars."}]
    scores = right(completions=[message] * 5, truth=["3 + 15 = 18\n#### 1018", 1018, 1018.0, None, "1019"])
    assert scores == [1.0, 1.0, 1.0, None, 0.0]
    assert right.__name__ == "accuracy"
    assert right.reward_arguments == {"truth": True}
    with pytest.raises(ValueError, match="column 'truth' holds 'none', in which there is no number"):
        right(completions=["1"], truth=["none"])


# Of GSM8K (MIT licence), with what its files have of signs, separators and several numbers.
SOLUTIONS = [
    ("It takes 2/2=<<2/2=1>>1 bolt of white fiber\nSo the total is 2+1=<<2+1=3>>3 bolts of fabric\n#### 3", 3),
    ("So he made a profit of 200,000-130,000=$<<200000-130000=70000>>70,000\n#### 70000", 70000),
    ("Add the values to get $5,600 - $3,200 = $<<5600-3200=2400>>2,400\n#### 2,400", 2400),
    ("The temperature is 3-10=<<3-10=-7>>-7 degrees\n#### -7", -7),
]


@pytest.mark.quick
@pytest.mark.parametrize(("solution", "number"), SOLUTIONS)
def test_solutions_in_the_form_of_gsm8k_are_read(solution, number):
    assert final_number(solution) == number


@pytest.mark.skipif(not GSM8K.is_dir(), reason="../shared/data/gsm8k is not there")
@pytest.mark.parametrize(("split", "count"), [("train", 7473), ("test", 1319)])
def test_every_solution_of_gsm8k_scores_and_a_changed_one_does_not(split, count):
    lines = (GSM8K / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    solutions = [json.loads(line)["answer"] for line in lines]
    truths = [solution.rpartition("#### ")[2] for solution in solutions]
    score = number_reward()
    assert len(solutions) == count
    for completions in (
        solutions,
        [f"So it is ${truth}." for truth in truths],
        [rf"Thus $\boxed{{{truth}.00 \text{{ units}}}}$, of 3." for truth in truths],
    ):
        assert sum(score(completions=completions, answer=truths)) == count
    wrong = [f"{int(truth.replace(',', '')) + 1:,}" for truth in truths]
    changed = [f"{s.rpartition('####')[0]}#### {number}" for s, number in zip(solutions, wrong, strict=True)]
    assert sum(score(completions=changed, answer=truths)) == 0


# A text that is long, and of which some reader might look at every part from every place.
LONG = [
    "\\boxed{",
    "<answer>",
    "1,234",
    "1,234,",
    "= ",
    "#### 1",
    "the answer is ",
    "9",
    "1 ",
    "1/",
    "\\frac{1",
    "{",
    "-$",
    "x_",
]


@pytest.mark.parametrize("part", LONG)
def test_no_text_takes_time_that_grows_with_its_square(part):
    """Each takes some tenths of a second at most, and minutes if it did."""
    final_number(part * (150_000 // len(part)))
    final_number(part * (150_000 // len(part)) + "=")
