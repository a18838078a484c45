"""SFT examples: the tokens learned from each kind of row, including assistant tokens with and without template tags."""

import copy

import pytest
from chat_families import tokenizer_of
from tiny import tiny_tokenizer

from grpo_jax.config.sft import SFTConfig
from grpo_jax.text.examples import encode_examples, fill_blocks, load_examples

pytestmark = pytest.mark.quick

EOS = tiny_tokenizer().eos_token_id
CHAT = (
    "{% for m in messages %}<{{ m['role'][0] }}>{{ m['content'] }}<eos>{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
TAGGED = CHAT.replace(
    "{{ m['content'] }}<eos>",
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<eos>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<eos>{% endif %}",
)
FORGETS = "{{ m['content'] if loop.last else m['content'] | replace('s', '') }}"  # changes earlier turns
TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "so"},
    {"role": "assistant", "content": "ok"},
]


def chatting(template):
    tokenizer = copy.copy(tiny_tokenizer())
    tokenizer.chat_template = template
    return tokenizer


def learned(rows, tokenizer=None, **config):
    """Return the text of each example and the part of it that is learned."""
    tokenizer = tokenizer or tiny_tokenizer()
    found = encode_examples(load_examples(rows), tokenizer, SFTConfig(**config), eos_token_ids=(EOS,))
    return [
        (tokenizer.decode(ids), tokenizer.decode([x for x, m in zip(ids, mask, strict=True) if m]))
        for ids, mask in zip(found.token_ids, found.masks, strict=True)
    ]


def test_learned_part_of_text_and_token_rows():
    rows = [{"prompt": "ab", "completion": "cd"}]
    assert learned(rows) == [("abcd<eos>", "cd<eos>")]
    assert learned(rows, completion_only_loss=False) == [("abcd<eos>", "abcd<eos>")]
    assert learned([{"text": "abc"}]) == [("abc<eos>", "abc<eos>")]
    assert learned([{"text": "abc<eos>"}]) == [("abc<eos>", "abc<eos>")]
    tokens = {"input_ids": [70, 71, EOS], "labels": [-100, 71, EOS]}
    assert learned([tokens])[0][1] == tiny_tokenizer().decode([71, EOS])
    with pytest.raises(ValueError, match="row 0 has 'labels' that differ from 'input_ids' at index 1"):
        load_examples([{"input_ids": [1, 2], "labels": [1, 3]}])
    with pytest.raises(ValueError, match="row 0 has the negative token id -100 in 'input_ids'"):
        load_examples([{"input_ids": [-100, 2], "labels": [-100, 2]}])


MASKED = {"input_ids": [70, 71, EOS], "assistant_masks": [0, 1, 1], "completion_mask": [1, 0, 1]}


def test_masks_select_the_learned_tokens():
    """`labels` override both masks; `completion_only_loss=False` disables only `completion_mask`."""
    both, first = ([EOS], [71, EOS])
    for row, settings, wanted in (
        (MASKED, {}, both),
        (MASKED, {"assistant_only_loss": True, "completion_only_loss": True}, both),
        (MASKED, {"completion_only_loss": False}, first),
        (MASKED | {"labels": [-100, 71, EOS]}, {"completion_only_loss": True}, first),
    ):
        (found,) = encode_examples(load_examples([row]), tiny_tokenizer(), SFTConfig(**settings)).masks
        assert [x for x, learned in zip(row["input_ids"], found, strict=True) if learned] == wanted, settings
    for setting, name in (("assistant_only_loss", "assistant_masks"), ("completion_only_loss", "completion_mask")):
        with pytest.raises(ValueError, match=f"{setting}=True requires '{name}' or 'labels' .* in dataset row 0"):
            learned([{name: x for name, x in MASKED.items() if name == "input_ids"}], **{setting: True})
    for name in ("labels", "completion_mask"):
        with pytest.raises(ValueError, match=f"row 0 has 2 'input_ids' but 1 '{name}'"):
            load_examples([{"input_ids": [1, 2], name: [1]}])


def test_learned_part_of_messages():
    whole = "<u>hi<eos>\n<a>yes<eos>\n<u>so<eos>\n<a>ok<eos>\n"
    plain, tagged = chatting(CHAT), chatting(TAGGED)
    assert learned([{"messages": TALK}], plain) == [(whole, whole)]
    for tokenizer in (plain, tagged):  # from growing conversations, and from the template's tags
        assert learned([{"messages": TALK}], tokenizer, assistant_only_loss=True) == [(whole, "yes<eos>ok<eos>")]
    row = {"prompt": TALK[:3], "completion": TALK[3:]}
    assert learned([row], plain) == [(whole, "ok<eos>\n")]
    assert learned([row], plain, completion_only_loss=False, assistant_only_loss=True) == [(whole, "yes<eos>ok<eos>")]
    assert learned([row], tagged, assistant_only_loss=True) == [(whole, "ok<eos>")]
    # One of several templates is selected by its name; its tags are used although it changes earlier turns.
    several = chatting({"default": CHAT, "tags": TAGGED.replace("{{ m['content'] }}", FORGETS)})
    by_name = {"assistant_only_loss": True, "chat_template_kwargs": {"chat_template": "tags"}}
    assert learned([{"messages": TALK}], several, **by_name)[0][1] == "ye<eos>ok<eos>"


def test_unsupported_templates_and_rows_are_refused():
    with pytest.raises(ValueError, match=r"up to message 1 differently without the .*generation %\} … "):
        learned([{"messages": TALK}], chatting(CHAT.replace("{{ m['content'] }}", FORGETS)), assistant_only_loss=True)
    assert learned([{"messages": TALK, "tools": ""}], chatting(CHAT))
    with pytest.raises(ValueError, match="row 0 has 'add' as 'tools'; use a list of schemas, or such a list as JSON"):
        learned([{"messages": TALK, "tools": "add"}], chatting(CHAT))
    with pytest.raises(ValueError, match="assistant_only_loss=True requires messages in dataset row 0"):
        learned([{"text": "a"}], assistant_only_loss=True)
    with pytest.raises(ValueError, match="completion_only_loss=True requires 'prompt' and 'completion' in dataset"):
        learned([{"text": "a"}], completion_only_loss=True)
    with pytest.raises(ValueError, match="dataset row 0 consists of messages, but the tokenizer has no chat template"):
        learned([{"messages": TALK}])


CALL = {"function": {"name": "add", "arguments": {"a": 1}}}


@pytest.mark.parametrize(("row", "said"), [
    ({"messages": [{"role": "human", "content": "hi"}]}, "message 0 with role 'human'"),
    ({"prompt": TALK[:1], "completion": [{"role": "function", "content": "3"}]}, "message 1 with role 'function'"),
    ({"messages": [TALK[0], {**TALK[1], "tool_calls": [CALL]}]}, "the call to the tool 'add' in message 1"),
])  # fmt: skip
def test_messages_and_calls_that_the_template_omits_are_refused(row, said):
    """SFT refuses messages of any role and tool calls that the chat template omits."""
    known = chatting(CHAT.replace("in messages %}", "in messages if m['role'] in ('user', 'assistant') %}"))
    with pytest.raises(ValueError, match=f"dataset row 0: the chat template omits .*{said}"):
        learned([row], known)


PHI = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)


def test_assistant_tokens_are_found_if_only_the_last_turn_has_an_eos():
    tokenizer = tokenizer_of(PHI, "<|return|>")
    ends = tokenizer.convert_tokens_to_ids(["<|return|>", "<|end|>"])
    config = SFTConfig(assistant_only_loss=True)
    found = encode_examples([{"messages": TALK}], tokenizer, config, eos_token_ids=ends)
    learned = [x for x, m in zip(found.token_ids[0], found.masks[0], strict=True) if m]
    assert tokenizer.decode(learned) == "yes<|end|>ok<|end|>\n<|return|>"


@pytest.mark.parametrize(("row", "said"), [
    ({"prompt": "a"}, r"has none of 'prompt' and 'completion', 'messages', 'text' or 'input_ids'; rename one of"),
    ({"prompt": "a", "completion": TALK[1:2]}, "has 'prompt' and 'completion' of different types"),
    ({"messages": [{"role": "user"}]}, r"has \{'role': 'user'\} as message 0 of 'messages'"),
    ("abc", "must be a dict with .*; got 'abc'"),
])  # fmt: skip
def test_invalid_rows_are_refused(row, said):
    with pytest.raises(ValueError, match=f"dataset row 0 {said}"):
        load_examples([row, {"text": "a"}])
    with pytest.raises(ValueError, match="has none of 'prompt' and 'completion', 'messages', 'body' or 'input_ids'"):
        load_examples([{"text": "a"}], text_field="body")


def test_long_examples_are_truncated_and_empty_ones_dropped():
    rows = [{"prompt": "abcdef", "completion": "g"}, {"prompt": "a", "completion": "bcdef"}]
    with pytest.warns(UserWarning, match=r"truncated 2 of 2 .*max_length=4\); dropped 1 of 2 examples \(no tokens"):
        assert learned(rows, max_length=4) == [("abcd", "bcd")]
    with pytest.raises(ValueError, match=r"no row has tokens .* the loss \(rows: 1\); increase max_length=4"):
        learned(rows[:1], max_length=4)


def test_blocks_are_well_filled_and_batches_have_the_first_tokens_as_prompts():
    lengths = [3, 9, 1, 7, 5, 5, 2, 8]
    blocks = fill_blocks(lengths, 10)
    assert sorted(i for block in blocks for i in block) == list(range(8))
    assert all(sum(lengths[i] for i in block) <= 10 for block in blocks)
    assert len(blocks) == 4  # 40 tokens
    found = encode_examples([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}], tiny_tokenizer(), SFTConfig())
    batch = found.batch([1, 0], rows=3, length=4)
    assert batch.prompts.tokens.tolist() == [[8], [5], [0]]
    assert batch.tokens.tolist() == [[[9, 0, 0, 0]], [[6, 7, 0, 0]], [[0] * 4]]
    assert batch.mask.astype(int).tolist() == [[[1, 0, 0, 0]], [[1, 1, 0, 0]], [[0] * 4]]


@pytest.mark.parametrize(("rows", "shared"), [
    ([[5, 6, 7], [5, 6, 8, 9]], 1),  # the second token is learned
    ([[-5, -6, 7, 1], [-5, -6, -7, 9]], 2),
    ([[-5, -6, -7, 1], [-5, -6, -7, 2]], 3),
    ([[-5, -6, -7, 1], [-4, -6, -7, 2]], 0),
])  # fmt: skip
def test_prefix_is_shared_up_to_the_first_learned_token(rows, shared):
    """Examples share their prefix up to the first learned token; negative ids mark tokens that are not learned."""
    rows = [{"input_ids": [abs(x) for x in ids], "labels": [x if x > 0 else -100 for x in ids]} for ids in rows]
    assert encode_examples(rows, tiny_tokenizer(), SFTConfig()).shared == shared
