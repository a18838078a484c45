"""Prompts: the encoding of rows, rows that are refused, and an order that can be resumed."""

import json

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from chat_families import FAMILIES, family
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from grpo_jax.text import prompts as lib

pytestmark = pytest.mark.quick

TEMPLATE = (
    "{% if messages[0]['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{% for m in messages %}<s>{{ m['role'] }}:{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}{% if shout is defined %}!{{ shout }}{% endif %}"
)
user = lambda text: {"role": "user", "content": text}
assistant = lambda text: {"role": "assistant", "content": text}


def make_tokenizer(*, bos=False, chat_template=TEMPLATE):
    """Make a byte-level BPE without merges: one id per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: index for index, piece in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    wrapped.chat_template = chat_template
    return wrapped


def test_make_prompts_pads_on_the_right():
    prompts = lib.make_prompts([[5, 6, 7], (8,), np.array([9, 10])])
    chex.assert_trees_all_equal(prompts.tokens, jnp.array([[5, 6, 7], [8, 0, 0], [9, 10, 0]], jnp.int32))
    chex.assert_trees_all_equal(prompts.lengths, jnp.array([3, 1, 2], jnp.int32))
    assert prompts.tokens.dtype == prompts.lengths.dtype == jnp.int32
    tokens = lib.make_prompts([[1, 2, 3], [4]], length=5, as_numpy=True).tokens
    assert tokens.tolist() == [[1, 2, 3, 0, 0], [4, 0, 0, 0, 0]]


@pytest.mark.parametrize(("token_ids", "keywords", "message"), [
    ([], {}, "token_ids is empty; pass at least one prompt"),
    ([[1], []], {}, r"token_ids\[1\] must be a non-empty list of token ids; got \[\]"),
    ([[1.0]], {}, r"token_ids\[0\] must contain integers in \[0, 2³¹\); got \[1.0\]"),
    (["hello"], {}, r"token_ids\[0\] must be a non-empty list of token ids; got 'hello'"),
    ([[3, -1]], {}, r"token_ids\[0\] must contain integers in \[0, 2³¹\); got \[3, -1\]"),
    ([[1], [1, 2, 3]], {"length": 2}, r"length=2 is too small for token_ids\[1\] with 3 tokens"),
])  # fmt: skip
def test_make_prompts_refuses_invalid_token_ids(token_ids, keywords, message):
    with pytest.raises(ValueError, match=message):
        lib.make_prompts(token_ids, **keywords)


@pytest.mark.parametrize("bos", [False, True])
def test_text_is_encoded_with_the_tokenizers_special_tokens(bos):
    tokenizer = make_tokenizer(bos=bos)
    encoded = lib.encode_prompts([{"prompt": "ab"}, {"prompt": "c"}], tokenizer)
    assert [tokenizer.decode(ids) for ids in encoded.token_ids] == (["<s>ab", "<s>c"] if bos else ["ab", "c"])
    assert encoded.dropped == []


KNOWN_ROLES = (
    "{% for m in messages %}{% if m.role == 'system' or m.role == 'user' %}<s>{{ m.role }}:{{ m.content | trim }}</s>"
    "{% elif m.role == 'assistant' %}<s>assistant:{{ m.content.split('</think>')[-1] }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


@pytest.mark.parametrize("role", ["human", "User", "tool"])
def test_omitted_message_is_refused_with_its_row_and_role(role):
    """A message that the chat template omits is refused with its row and role."""
    tokenizer = make_tokenizer(chat_template=KNOWN_ROLES)
    fine = {"prompt": [{"role": "system", "content": " be kind "}, user("hi")]}
    asked = {"prompt": [{"role": "system", "content": "be kind"}, {"role": role, "content": "1 + 1?"}]}
    for rows in ([fine, fine, asked], [fine, asked, asked]):
        message = rf"eval_dataset row {rows.index(asked)}: .* '1 \+ 1\?' of message 1 with role '{role}'"
        with pytest.raises(ValueError, match=message):
            lib.encode_prompts(rows, tokenizer, argument="eval_dataset")
    shown = make_tokenizer()  # this template renders any role
    if role != "tool":
        assert len(lib.encode_prompts([fine, asked], shown).rows) == 2


def called(arguments):
    """Return a conversation with a tool call."""
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": arguments}}]}
    return [user("hi"), call, {"role": "tool", "content": "3"}]


def test_omitted_call_is_refused_with_its_row_and_tool():
    tokenizer = make_tokenizer()
    with pytest.raises(ValueError, match=r"dataset row 1: .* omits the call to the tool 'add' in message 1"):
        lib.encode_prompts([{"prompt": [user("hi")]}, {"prompt": called({})}], tokenizer)


PLAIN = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ WRITTEN }}{% endfor %}{% endfor %}"


def test_json_text_arguments_are_rendered_as_objects():
    """Tool call arguments given as JSON text are decoded unless the template expects text."""
    text = '{"city": "Oslo", "n": [1]}'
    prompts = [called(json.loads(text)), called(text)]
    for name in FAMILIES:
        as_object, as_text = lib.encode_prompts([{"prompt": p} for p in prompts], family(name)[0]).token_ids
        assert as_object == as_text, name
    assert prompts[1] == called(text), "the row is unchanged"
    for written in ("c.function.name + c.function.arguments", "c.function.name ~ c.function.arguments"):
        tokenizer = make_tokenizer(chat_template=PLAIN.replace("WRITTEN", written))  # a dict raises or becomes a repr
        (ids,) = lib.encode_prompts([{"prompt": prompts[1]}], tokenizer).token_ids
        assert tokenizer.decode(ids) == f"hiadd{text}3"


def test_template_may_drop_whitespace_thoughts_and_empty_messages():
    """A template may strip whitespace and earlier thoughts, omit messages without content, and inspect contents."""
    tokenizer = make_tokenizer(chat_template=KNOWN_ROLES)
    rows = [
        {"prompt": [user(" hi\n"), assistant("<think>hm</think>yes?"), user("bye")]},
        {"prompt": [user("hi"), assistant("<think>hm</think>"), {"role": "human", "content": " "}, user("bye")]},
        {"prompt": [user("hi"), {"role": "tool", "content": None, "tool_calls": [{}]}]},
    ]
    texts = [tokenizer.decode(ids) for ids in lib.encode_prompts(rows, tokenizer).token_ids]
    assert texts[0] == "<s>user:hi</s><s>assistant:yes?</s><s>user:bye</s><s>assistant:"
    strict = make_tokenizer(chat_template="{{ 'x' if 'hi' in messages[0].content else raise_exception('?') }}")
    assert len(lib.encode_prompts([{"prompt": [user("hi")]}], strict).rows) == 1


def test_messages_open_an_assistant_turn_or_continue_a_prefill():
    tokenizer = make_tokenizer()
    rows = [
        {"prompt": [{"role": "system", "content": "be kind"}, user("hi")]},
        {"prompt": [user("hi"), assistant("<think>\n")]},
        {"prompt": [user("hi"), assistant("yes?"), user("bye")]},
    ]
    encoded = lib.encode_prompts(rows, tokenizer)
    assert [tokenizer.decode(ids) for ids in encoded.token_ids] == [
        "<s>system:be kind</s><s>user:hi</s><s>assistant:",
        "<s>user:hi</s><s>assistant:<think>\n",
        "<s>user:hi</s><s>assistant:yes?</s><s>user:bye</s><s>assistant:",
    ]
    assert all(type(token) is int for ids in encoded.token_ids for token in ids)
    # Each marker in the template is encoded as one special token.
    assert encoded.token_ids[0][0] == tokenizer.bos_token_id


def test_long_prompts_are_dropped_and_reported_but_not_truncated():
    rows = [{"prompt": "a" * length, "n": length} for length in (3, 9, 4, 12)]
    encoded = lib.encode_prompts(rows, make_tokenizer(), max_prompt_length=4, on_long_prompt="drop")
    assert encoded.rows == [rows[0], rows[2]]
    assert list(map(len, encoded.token_ids)) == [3, 4]
    assert encoded.dropped == [1, 3]


def test_each_epoch_has_its_own_permutation_fixed_across_releases():
    entries = lib.prompt_indices(0, 300, num_rows=100, seed=3)
    orders = [entries[start : start + 100] for start in (0, 100, 200)]
    for order in orders:
        assert sorted(order) == list(range(100))
    assert orders[0] != orders[1] != orders[2]
    assert orders[0] != list(range(100))
    assert entries != lib.prompt_indices(0, 300, num_rows=100, seed=4)
    # A run that resumes after an upgrade needs this order; changing it would break every checkpoint.
    second_epoch = [7, 6, 1, 5, 4, 2, 0, 3]
    assert lib.prompt_indices(8, 8, num_rows=8, seed=5) == second_epoch


@pytest.mark.parametrize("shuffle", [True, False])
def test_batch_size_does_not_change_the_order(shuffle):
    """The order of the prompts is the same for every batch size."""
    whole = lib.prompt_indices(0, 60, num_rows=7, seed=0, shuffle=shuffle)
    for size in (1, 4, 7, 15, 20):
        parts = [lib.prompt_indices(start, size, num_rows=7, seed=0, shuffle=shuffle) for start in range(0, 60, size)]
        assert [entry for part in parts for entry in part][:60] == whole
    assert lib.prompt_indices(5, 0, num_rows=7, seed=0) == []
