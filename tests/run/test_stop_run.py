"""Runs with stop strings: the text that environments receive, and the tokens that are learned and counted."""

import pytest
from test_turns_run import ROWS, Game
from tiny import logged, tiny_policy

from grpo_jax import GRPOConfig, train

POLICY = tiny_policy().replace(generation_config={"eos_token_id": [1], "pad_token_id": 0})
# Each letter is one of 258 tokens, so most turns end at a stop string, few at an EOS, and some at neither.
STOP = [*"abcdefghijklmnop", "é", "Q", "R"]
SMALL = {
    "num_generations": 4, "per_device_train_batch_size": 8, "max_completion_length": 40,
    "gradient_checkpointing": False, "logging_steps": 1, "max_steps": 2, "learning_rate": 1e-2, "stop": STOP,
    "max_turn_length": 9,
}  # fmt: skip


HEARD = []


class Says(Game):
    """A `Game` whose responses begin with a stop string."""

    def respond(self, text):
        HEARD.append(text)
        response = super().respond(text)
        return response and f"a{response}"


def run(**settings):
    return logged(train, POLICY, ROWS, [], GRPOConfig(**SMALL | settings), environment_factory=Says)[1]


def test_turns_end_after_a_stop_string_or_are_cut_short_and_counted():
    HEARD.clear()
    lines = run()
    assert all(line["sampler_gap"] <= 2e-5 and line["turns/cut_short"] > 0 for line in lines)
    by_text = [text for text in HEARD if text.endswith(tuple(STOP))]
    assert len(by_text) > 20
    assert not any(part in text[:-1] for text in HEARD for part in STOP), "a turn continued after a stop string"


@pytest.mark.quick
@pytest.mark.parametrize(("change", "message"), [
    ({"stop": ["a", "<eos>"]}, r"stop must not contain special tokens; got '<eos>'.*stop_token_ids=\[1\]"),
    ({"stop_token_ids": [3, 258]}, "stop_token_ids must be less than the model's vocabulary size, 258; got 258"),
    ({"sampler": lambda params: None}, "sampler must take stop and max_turn_length, which"),
    ({"sampler": lambda params, stop: None}, "sampler must take max_turn_length, which"),
])  # fmt: skip
def test_invalid_stop_settings_are_rejected_before_sampling(change, message):
    sampler = change.pop("sampler", None)
    with pytest.raises(ValueError, match=message):
        train(POLICY, ROWS, lambda completions: [0.0], GRPOConfig(**SMALL | change), sampler=sampler)
