"""Round trips: a rendered call is parsed back from its tokens, or the run is refused with the difference."""

from typing import Literal

import numpy as np
import pytest
from chat_families import CALL, FAMILIES, HERMES, LLAMA, add, family, tokenizer_of
from tokenizers import normalizers

from grpo_jax import GRPOConfig
from grpo_jax.rollout.episode_setup import make_episode_setup
from grpo_jax.rollout.episodes import Episode
from grpo_jax.rollout.tools import read_tools
from grpo_jax.text import calls as lib
from grpo_jax.text.formats import FORMATS
from grpo_jax.text.templates import ChatTemplate

pytestmark = pytest.mark.quick

CHAT = {"prompt": [{"role": "user", "content": "What is 1 + 2?"}]}
schemas = lambda *tools: [tool.schema for tool in read_tools(tools).values()]


def everything(text: str, n: int, x: float, sure: bool, many: list[int], more: dict, kind: Literal["p", "q"]) -> str:
    """Take a value of every kind.

    Args:
        text: text
        n: a number
        x: another
        sure: or not
        many: several
        more: by name
        kind: one of two
    """
    return text


def nothing() -> str:
    """Take nothing."""
    return ""


# Functionary's format for Llama 3.1, whose template uses <|python_tag|> only for code.
FUNCTIONARY = LLAMA.replace(
    """{{- '{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}}<|eot_id|>""",
    """{{- '<function=' + call.name + '>' }}{{ call.arguments | tojson }}</function><|eot_id|>""",
)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tool", [add, everything, nothing])
@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}])
def test_call_of_each_family_is_parsed_back(name, tool, kwargs):
    """A call rendered by the chat template is parsed back from its tokens, or the run is refused; the policy is told
    about malformed calls.
    """
    tokenizer, ends = family(name)
    assert lib.call_fault(ChatTemplate(tokenizer, kwargs, schemas(tool), ends), FORMATS[name]) == ""
    for other in FORMATS.keys() - {name}:
        assert "no call" in lib.call_fault(ChatTemplate(tokenizer, kwargs, schemas(add), ends), FORMATS[other]), other


def test_unsupported_call_format_is_refused_with_the_difference():
    tokenizer = tokenizer_of(FUNCTIONARY, "<|eot_id|>")
    with pytest.raises(ValueError, match="the chat template renders a call") as caught:
        make_episode_setup(tokenizer, (tokenizer.eos_token_id,), [CHAT], GRPOConfig(), tools=[add])
    message = str(caught.value)
    assert "to add with {'a': 3, 'b': 3} as '<function=add>{\"a\": 3, \"b\": 3}</function>" in message
    assert "'llama3' parser finds no call (A tool call could not be read: it is enclosed in <function=" in message


def test_arguments_must_be_parsed_back_unchanged():
    written = "{{ call.function.arguments | tojson }}"
    assert written in HERMES
    ends = tokenizer_of(HERMES).convert_tokens_to_ids(["<|im_end|>"])
    template_of = lambda tokenizer, tool: ChatTemplate(tokenizer, None, schemas(tool), ends)
    fault_of = lambda *args: lib.call_fault(template_of(*args), FORMATS["hermes"])
    as_text = tokenizer_of(HERMES.replace(written, "{{ call.function.arguments }}"))  # for a dict, this is not JSON
    assert fault_of(as_text, add) == ""
    escaped = tokenizer_of(HERMES.replace(written, "{{ call.function.arguments | tojson | replace('3', '4') }}"))
    fault = fault_of(escaped, add)
    assert "finds add with {'a': 4, 'b': 4}." in fault
    lossy = tokenizer_of(HERMES)
    lossy.backend_tokenizer.normalizer = normalizers.Lowercase()
    fault = fault_of(lossy, everything)
    assert "'text': 'Xw5'" in fault
    assert "'text': 'xw5'" in fault


@pytest.mark.parametrize("name", ["hermes", "qwen_xml"])
def test_only_markers_among_special_tokens_reach_the_parser(name):
    """Markers such as <tool_call> that are added as special tokens reach the parser; other special tokens do not."""
    template, eos, _ = FAMILIES[name]
    tokenizer = tokenizer_of(template, eos)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>", "<think>", "</think>"]})
    (end,) = tokenizer.convert_tokens_to_ids([eos])
    episode_setup = make_episode_setup(tokenizer, (end,), [CHAT], GRPOConfig(), tools=[add])
    text, _ = ChatTemplate(tokenizer, tools=schemas(add)).turn_of(CALL)
    turn = np.array(tokenizer(text.removesuffix("\n"), add_special_tokens=False)["input_ids"], np.int32)
    assert turn[-1] == end
    assert "<tool_call>" not in tokenizer.decode(turn, skip_special_tokens=True)  # each call would be silently lost
    read = lib.turn_text(turn, tokenizer.decode, episode_setup.removed_token_ids)
    assert read + eos == text.removesuffix("\n")
    episode = Episode(episode_setup, CHAT, "row 0 of the dataset, completion 0")
    episode.reset(CHAT)
    assert "\n3\n</tool_response>" in tokenizer.decode(episode.answer(turn, 200))
    assert (episode.record.calls, episode.record.failures) == (1, 0)


def test_call_is_parsed_back_if_only_the_prompt_opens_a_thought():
    """A call is parsed back if the generation prompt opens a thought that rendered turns lack."""
    tokenizer = tokenizer_of(
        HERMES.replace("'<think>\n\n</think>\n\n' if '</think>' not in m.content else ''", "''").replace(
            "if enable_thinking is false else ''", "if enable_thinking is false else '<think>\n'"
        )
    )
    template = ChatTemplate(tokenizer, None, schemas(add), [tokenizer.eos_token_id])
    assert lib.call_fault(template, FORMATS["hermes"]) == ""
