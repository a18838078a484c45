"""Settings: tools, environments and chat templates that fit together are found so, and others are refused in words."""

import numpy as np
import pytest
from chat_families import GLM, HERMES, PLAIN, tokenizer_of

from grpo_jax.rollout.episodes import Episode, Texts
from grpo_jax.rollout.interaction import encode_rows, make_interaction
from grpo_jax.text.formats import FORMATS

pytestmark = pytest.mark.quick

CHAT = {"prompt": [{"role": "user", "content": "What is 1 + 2?"}]}
ALONE = HERMES.replace("{%- if tools %}<", "<").replace("{% endif %}\n{%- set last", "\n{%- set last")


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


class Sums:
    """An environment with a tool of its own."""

    def plus(self, n: int) -> int:
        """Add one.

        Args:
            n: to what
        """
        return n + 1


class Guess:
    """An environment that speaks."""

    def respond(self, text):
        return "higher"


def ids(tokenizer, text):
    return np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)


def begun(interaction, row=CHAT):
    episode = Episode(interaction, row, "row 0 of the dataset, completion 0", Texts(interaction.tokenizer))
    episode.reset(row)
    return episode


@pytest.mark.parametrize("template", [ALONE, {"default": PLAIN, "tool_use": ALONE}])
@pytest.mark.parametrize("given", [{"tools": [add]}, {"environment_factory": Sums}])
def test_a_template_for_tools_alone_is_taken_for_tools_and_for_an_environments_own(template, given):
    tokenizer = tokenizer_of(template)
    interaction = make_interaction(tokenizer, (tokenizer.eos_token_id,), [CHAT], **given)
    assert interaction.format is FORMATS["hermes"]
    assert not interaction.thinking
    (prompt,) = encode_rows(interaction, [CHAT], tokenizer).token_ids
    assert tokenizer.decode(prompt).count("ToolCall one as <tool_call>") == 1
    name, argument = ("add", '{"a": 1, "b": 2}') if "tools" in given else ("plus", '{"n": 2}')
    turn = f'<tool_call>\n{{"name": "{name}", "arguments": {argument}}}\n</tool_call><|im_end|>'
    assert "3\n</tool_response>" in tokenizer.decode(begun(interaction).answer(ids(tokenizer, turn), 100))


def test_an_environment_speaks_where_the_eos_opens_its_turn():
    tokenizer = tokenizer_of(GLM, "<|user|>")
    ends = tokenizer.convert_tokens_to_ids(["<|user|>", "<|eot_id|>"])
    interaction = make_interaction(tokenizer, ends, [CHAT], environment_factory=Guess)
    (prompt,) = encode_rows(interaction, [CHAT], tokenizer).token_ids
    whole = [CHAT["prompt"][0], {"role": "assistant", "content": "32"}, {"role": "user", "content": "higher"}]
    text = tokenizer.apply_chat_template(whole, tokenize=False, add_generation_prompt=True)
    for drawn, between in (("<|user|>", ""), ("<|eot_id|>", "<|user|>")):
        turn = ids(tokenizer, "\n32" + drawn)
        said = begun(interaction).answer(turn, 100)
        spoken = tokenizer.decode([*prompt, *turn, *said])
        assert spoken == text.replace("32<|user|>", "32" + drawn + between)
