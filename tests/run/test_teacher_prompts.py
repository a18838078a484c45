"""What a teacher reads before a completion: encoded as the run's prompts are, and of the same kind."""

import numpy as np
import pytest
from tiny import tiny_tokenizer

from grpo_jax import GRPOConfig, Prompts
from grpo_jax.run.sample import Sampled
from grpo_jax.run.teacher_prompts import Heard, PeerSolution, ask, own_prompts

TOKENIZER, CONFIG = tiny_tokenizer(), GRPOConfig(max_completion_length=8, pad_to_multiple_of=4)
ROWS = [{"prompt": "ab", "hint": "abc"}, {"prompt": "x", "hint": None}]
SAMPLED = Sampled(ROWS, None, None, environments=["e0", "e1", "e2", "e3"])
HEARD = Heard(SAMPLED, ["yes", "no", "so", "go"], np.array([[1.0, 0.0], [np.nan, 0.5]]))


def texts(asked):
    return [[None if one is None else TOKENIZER.decode(one) for one in row] for row in asked]


@pytest.mark.quick
def test_a_column_is_the_prompt_of_every_completion_of_its_row():
    assert texts(ask("hint", HEARD, TOKENIZER, None, CONFIG)) == [["abc", "abc"], [None, None]]


@pytest.mark.quick
def test_a_function_is_given_the_completion_its_group_its_environment_and_its_row():
    def prompt(prompt, completion, reward, peers, environment, hint):
        return f"{prompt} {completion} {reward} {peers} {environment} {hint}"

    assert texts(ask(prompt, HEARD, TOKENIZER, None, CONFIG)) == [
        ["ab yes 1.0 [('no', 0.0)] e0 abc", "ab no 0.0 [('yes', 1.0)] e1 abc"],
        ["x so None [('go', 0.5)] e2 None", "x go 0.5 [('so', None)] e3 None"],
    ]


@pytest.mark.quick
def test_the_solution_of_a_peer_is_for_those_who_have_one():
    asked = ask(PeerSolution(template="{prompt}:{solution}"), HEARD, TOKENIZER, None, CONFIG)
    assert texts(asked) == [[None, "ab:yes"], [None, None]]
    messages = [{"role": "user", "content": "1+1"}]
    found = PeerSolution(0.5, "{prompt} ({solution})")(messages, [([{"role": "assistant", "content": "2"}], 0.5)])
    assert found == [{"role": "user", "content": "1+1 (2)"}]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [
        (lambda: [{"role": "user", "content": "a"}], "give text, as the dataset's prompts, or None"),
        (lambda: "", "give text"),
        (lambda: "a" * 20, "gave a prompt of 20 tokens: with max_completion_length = 8 it passes the 24 positions"),
    ],
    ids=["kind", "empty", "long"],
)
def test_a_prompt_that_cannot_be_one_is_refused(prompt, complaint):
    with pytest.raises(ValueError, match=complaint):
        ask(prompt, HEARD, TOKENIZER, None, CONFIG, 24)


@pytest.mark.quick
def test_prompts_of_many_lengths_have_few_shapes_and_who_has_none_keeps_his():
    asked = np.empty((1, 3), object)
    asked[0] = [[5] * 9, None, [6]]
    own = own_prompts(asked, Prompts(np.array([[7, 8, 0]]), np.array([2])), CONFIG)
    assert own.tokens.shape == (1, 3, 16)  # 4 · 2²
    assert own.lengths.tolist() == [[9, 2, 1]]
    assert own.tokens[0, 1, :3].tolist() == [7, 8, 0]
