"""What a run warns of before it begins: a doubled BOS, null arguments, a thought that the prompt has opened."""

import copy
import re
import warnings

import pytest
from tiny import tiny_policy, tiny_tokenizer

from grpo_jax import GRPOConfig
from grpo_jax.rewards import format_reward, weighted
from grpo_jax.run.cautions import warn_of_prompts
from grpo_jax.run.prepare import prepare
from grpo_jax.run.run import Arguments
from grpo_jax.text.prompts import encode_prompts

pytestmark = pytest.mark.quick

OPENING = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<think>\n{% endif %}"


def tokenizer_with(template=None, bos=None):
    from tokenizers.processors import TemplateProcessing

    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = template
    if bos is not None:
        tokenizer.bos_token = bos
        ids = [(bos, tokenizer.bos_token_id)]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=ids)
    return tokenizer


def talk(text="hi"):
    return [{"role": "user", "content": text}]


def said(rows, tokenizer, reward_fns=(), **how):
    """The warnings of some rows."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_prompts(encode_prompts(rows, tokenizer, **how), tokenizer, list(reward_fns), "dataset")
    return [str(one.message) for one in caught]


def test_a_bos_that_is_added_again():
    tokenizer = tokenizer_with(bos="!")
    assert said([{"prompt": "ab"}, {"prompt": "c!"}], tokenizer) == []
    (line,) = said([{"prompt": "ab"}, {"prompt": "!ab"}, {"prompt": "!c"}], tokenizer)
    assert line.startswith("dataset: 2 of 3 prompts, the first of them '!ab', begin with the BOS '!', and the token")
    assert said([{"prompt": "!!ab"}], tokenizer_with()) == []  # no BOS at all
    template = "!" + OPENING.replace("<think>", "")
    assert said([{"prompt": talk("!ab")}], tokenizer_with(template, bos="!")) == []  # a message, whose text it is


def called(**arguments):
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return [*talk(), {"role": "assistant", "content": "", "tool_calls": [call]}, *talk()]


def test_arguments_that_datasets_has_filled_in():
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    tokenizer = tokenizer_with(OPENING)
    rows = [{"prompt": called(x=1)}, {"prompt": called(y="a")}]
    assert said(rows, tokenizer) == []
    (line,) = said(list(datasets.Dataset.from_list(rows)), tokenizer)
    assert line.startswith("dataset row 0 has a call of a tool with the argument 'y' = None in its prompt (2 such")
    as_text = {"role": "assistant", "content": "", "tool_calls": [{"arguments": "{}"}]}
    assert said([{"prompt": [*talk(), as_text, *talk()]}], tokenizer) == []


MARK = re.compile(r"<think>.*?</think>", re.DOTALL)


def by_constant(completions):
    return [float(bool(re.match(r"^\<think\>", text))) for text in completions]


def by_closure(tag):
    return lambda completions: [float(tag in text) for text in completions]


class ByMethod:
    __name__ = "by_method"

    def __call__(self, completions):
        return [float("<think>" in text) for text in completions]


def without(completions):
    """Score </think>, not <think>."""
    return [float("</think>" in text) for text in completions]


ASKING = [lambda completions: [float(MARK.match(text) is not None) for text in completions], by_closure("<think>")]
ASKING += [by_constant, ByMethod(), ByMethod().__call__]
ASKING += [format_reward(r"<think>.*</think>.*"), weighted(by_constant, 2.0)]


@pytest.mark.parametrize("fn", ASKING, ids=lambda fn: getattr(fn, "__name__", "method"))
def test_a_thought_that_the_template_opens_and_a_reward_that_asks_for_it(fn):
    rows = [{"prompt": talk()}]
    (line,) = said(rows, tokenizer_with(OPENING), [without, fn])
    assert "so completions begin inside the thought, and reward function '" in line
    assert "'without'" not in line
    assert said(rows, tokenizer_with(OPENING.replace("<think>", "")), [fn]) == []
    assert len(said([{"prompt": "Think. <think>\n"}], tokenizer_with(), [fn])) == 1
    assert said([{"prompt": "<think> is a tag"}], tokenizer_with(), [fn]) == []


def test_a_run_says_so_before_it_begins():
    policy = tiny_policy().replace(tokenizer=tokenizer_with(OPENING))
    with pytest.warns(UserWarning, match="reward function 'by_constant' names <think>: where it has to be there"):
        prepare(Arguments(policy, [{"prompt": talk()}], [by_constant], GRPOConfig(max_completion_length=4)))
