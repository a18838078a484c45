"""Prompts: rows in, tokens out, an order that can be resumed, and completions back to text."""

import itertools
import json

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from grpo_jax.text import completions as completions_module
from grpo_jax.text import prompts as lib
from grpo_jax.text import rows as rows_module
from grpo_jax.text import sources

pytestmark = pytest.mark.quick

TEMPLATE = (
    "{% if messages[0]['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{% for m in messages %}<s>{{ m['role'] }}:{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}{% if shout is defined %}!{{ shout }}{% endif %}"
)


def make_tokenizer(*, bos=False, chat_template=TEMPLATE, characters=None):
    """Byte-level BPE without merges: one id for each byte; `characters` keeps only those bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet()) if characters is None else list(characters)
    vocabulary = {piece: index for index, piece in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    wrapped.chat_template = chat_template
    return wrapped


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


# --- make_prompts


def test_make_prompts_pads_on_the_right():
    prompts = lib.make_prompts([[5, 6, 7], (8,), np.array([9, 10])])
    chex.assert_trees_all_equal(prompts.tokens, jnp.array([[5, 6, 7], [8, 0, 0], [9, 10, 0]], jnp.int32))
    chex.assert_trees_all_equal(prompts.lengths, jnp.array([3, 1, 2], jnp.int32))
    assert prompts.tokens.dtype == prompts.lengths.dtype == jnp.int32


@pytest.mark.parametrize(
    ("keywords", "length"),
    [({}, 3), ({"pad_to_multiple_of": 8}, 8), ({"length": 5}, 5), ({"length": 5, "pad_to_multiple_of": 4}, 8)],
)
def test_make_prompts_lengths_for_few_compiled_shapes(keywords, length):
    prompts = lib.make_prompts([[1, 2, 3], [4]], **keywords)
    assert prompts.tokens.shape == (2, length)
    assert prompts.tokens[:, 3:].sum() == 0
    assert prompts.lengths.tolist() == [3, 1]


@pytest.mark.parametrize(
    ("token_ids", "keywords", "message"),
    [
        ([], {}, "token_ids is empty: give at least one prompt"),
        ([[1], []], {}, r"token_ids\[1\] is empty: a prompt needs at least one token"),
        ([[1.0]], {}, r"token_ids\[0\] holds float64 values, \[1.0\]: token ids are integers"),
        ([[True]], {}, r"token_ids\[0\] holds bool values"),
        ([["a"]], {}, r"token_ids\[0\] holds <U1 values, \['a'\]: token ids are integers"),
        ([1, 2], {}, r"token_ids\[0\] is 1: give a list of lists"),
        ([[[1]]], {}, r"token_ids\[0\] is \[\[1\]\]: give a list of lists"),
        (["hello"], {}, r"token_ids\[0\] is text, 'hello': make_prompts takes token ids; encode_prompts takes text"),
        ([[3, -1]], {}, r"token_ids\[0\] holds ids from -1 to 3: token ids are in 0"),
        ([[2**31]], {}, r"token_ids\[0\] holds ids from 2147483648"),
        ([[1], [1, 2, 3]], {"length": 2}, r"length is 2, but token_ids\[1\] has 3 tokens: raise length"),
        ([[1]], {"pad_to_multiple_of": 0}, "pad_to_multiple_of is 0: give 1 or more"),
    ],
)
def test_make_prompts_refuses(token_ids, keywords, message):
    with pytest.raises(ValueError, match=message):
        lib.make_prompts(token_ids, **keywords)


# --- load_rows


class RandomAccess:
    """As a datasets.Dataset or a grain source: a length and rows by index, and no promise to be iterable."""

    column_names = ("prompt", "answer")

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        assert isinstance(index, int)
        return self.rows[index]

    __iter__ = None


ROWS = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(5)]


def test_load_rows_reads_every_kind_of_dataset_the_same(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n", encoding="utf-8")
    kinds = [ROWS, tuple(ROWS), RandomAccess(ROWS), iter(ROWS), (row for row in ROWS), path, str(path)]
    for kind in kinds:
        assert rows_module.load_rows(kind) == ROWS


def test_load_rows_reads_datasets_of_hugging_face_the_same():
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    stored = datasets.Dataset.from_list(ROWS)
    assert rows_module.load_rows(stored) == rows_module.load_rows(stored.to_iterable_dataset()) == ROWS
    with pytest.raises(ValueError, match=r"choose one: dataset\['train'\]"):
        rows_module.load_rows(datasets.DatasetDict({"train": stored}))


def test_load_rows_reads_sources_of_grain_the_same():
    grain = pytest.importorskip("grain", reason="grain is not installed")
    source = grain.MapDataset.source(ROWS)
    assert rows_module.load_rows(source) == rows_module.load_rows(source.to_iter_dataset()) == ROWS
    assert rows_module.load_rows(source.filter(lambda row: row["answer"] != "4")) == [*ROWS[:2], *ROWS[3:]]
    with pytest.raises(ValueError, match="repeats for ever: give it without its repetition"):
        rows_module.load_rows(source.repeat())


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ([{"prompt": "a", "image": "b.png"}], "row 0 has a column 'image': models read text alone"),
        ([{"prompt": "a", "images": ["b.png"]}], "row 0 has a column 'images': models read text alone"),
        (
            [{"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}]}]}],
            "as message 0 of its 'prompt': it has a part of type 'image'; models read text alone",
        ),
    ],
)
def test_rows_with_pictures_are_refused(dataset, message):
    with pytest.raises(ValueError, match=message):
        rows_module.load_rows(dataset)


def test_a_stream_without_an_end_is_refused(monkeypatch):
    monkeypatch.setattr(sources, "_MOST_READ", 100)
    with pytest.raises(ValueError, match="dataset goes on after 100 rows, as a stream does that has no end"):
        rows_module.load_rows({"prompt": str(n)} for n in itertools.count())
    assert len(rows_module.load_rows({"prompt": "p"} for _ in range(100))) == 100


# --- encode_prompts


@pytest.mark.parametrize("bos", [False, True])
def test_text_is_encoded_with_the_tokenizers_own_special_tokens(bos):
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
def test_a_message_that_the_template_leaves_out_is_refused_with_its_row_and_role(role):
    """A message that the chat template leaves out is refused with its row and role."""
    tokenizer = make_tokenizer(chat_template=KNOWN_ROLES)
    fine = {"prompt": [{"role": "system", "content": " be kind "}, user("hi")]}
    asked = {"prompt": [{"role": "system", "content": "be kind"}, {"role": role, "content": "1 + 1?"}]}
    for rows in ([fine, fine, asked], [fine, asked, asked]):
        with pytest.raises(
            ValueError, match=rf"eval_dataset row {rows.index(asked)}: .* leaves out message 1 .*'{role}'.* '1 \+ 1\?'"
        ):
            lib.encode_prompts(rows, tokenizer, argument="eval_dataset")
    shown = make_tokenizer()  # this one writes any role
    if role != "tool":
        assert len(lib.encode_prompts([fine, asked], shown).rows) == 2


def test_what_a_template_takes_out_of_a_message_or_does_not_say_is_no_fault():
    """White space and earlier thoughts; messages without content; a template that looks into the contents."""
    tokenizer = make_tokenizer(chat_template=KNOWN_ROLES)
    rows = [
        {"prompt": [user(" hi\n"), assistant("<think>hm</think>yes?"), user("bye")]},
        {"prompt": [user("hi"), assistant("<think>hm</think>"), {"role": "human", "content": " "}, user("bye")]},
        {"prompt": [user("hi"), {"role": "tool", "content": None, "tool_calls": [{}]}]},
        {"prompt": [user("hi"), assistant("So")]},
    ]
    texts = [tokenizer.decode(ids) for ids in lib.encode_prompts(rows, tokenizer).token_ids]
    assert texts[0] == "<s>user:hi</s><s>assistant:yes?</s><s>user:bye</s><s>assistant:"
    assert texts[3] == "<s>user:hi</s><s>assistant:So"
    strict = make_tokenizer(
        chat_template="{% if 'hi' not in messages[0].content %}{{ raise_exception('?') }}{% endif %}x"
    )
    assert len(lib.encode_prompts([{"prompt": [user("hi")]}], strict).rows) == 1


def test_messages_open_the_turn_of_the_assistant_and_a_prefill_is_continued():
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
    # The marks of the template are one special token each, not spelled out.
    assert encoded.token_ids[0][0] == tokenizer.bos_token_id


@pytest.mark.parametrize("bos", [False, True])
def test_conversations_are_tokenized_together_to_the_same_ids_in_their_order(monkeypatch, bos):
    """Of each kind (open, prefilled, with tools) in one call, where one by one each is a call of its own."""
    template = TEMPLATE + "{% if tools %}{{ tools | tojson }}{% endif %}"
    tokenizer, calls = make_tokenizer(bos=bos, chat_template=template), []
    prompts = [[user(f"question {i}"), *([assistant("it is")] if i % 3 == 1 else [])] for i in range(7)]
    tools = [[{"type": "function", "function": {"name": "add"}}] if i == 2 else None for i in range(7)]
    rows, apply = [{"prompt": prompt} for prompt in prompts], tokenizer.apply_chat_template

    def watched(messages, **keywords):
        calls.append(keywords["tokenize"])
        return apply(messages, **keywords)

    monkeypatch.setattr(tokenizer, "apply_chat_template", watched)
    together = lib.encode_prompts(rows, tokenizer, tools=tools).token_ids
    assert calls.count(True) == 3
    monkeypatch.setattr(lib, "_encode_together", lambda *_: None)
    assert together == lib.encode_prompts(rows, tokenizer, tools=tools).token_ids
    assert calls.count(True) == 3 + 7


def test_chat_template_kwargs_reach_the_template():
    tokenizer = make_tokenizer()
    rows = [{"prompt": [user("hi")]}]
    encoded = lib.encode_prompts(rows, tokenizer, chat_template_kwargs={"shout": "now"})
    assert tokenizer.decode(encoded.token_ids[0]).endswith("<s>assistant:!now")
    other = {"chat_template": "{{ messages[0]['content'] }}?"}
    bare = make_tokenizer(chat_template=None)
    assert bare.decode(lib.encode_prompts(rows, bare, chat_template_kwargs=other).token_ids[0]) == "hi?"


def test_long_prompts_are_dropped_and_named_never_cut():
    rows = [{"prompt": "a" * length, "n": length} for length in (3, 9, 4, 12)]
    encoded = lib.encode_prompts(rows, make_tokenizer(), max_prompt_length=4, on_long_prompt="drop")
    assert encoded.rows == [rows[0], rows[2]]
    assert list(map(len, encoded.token_ids)) == [3, 4]
    assert encoded.dropped == [1, 3]


@pytest.mark.parametrize(
    ("prompt", "settings", "keywords", "message"),
    [
        ("a", {}, {"on_long_prompt": "cut"}, "on_long_prompt is 'cut': choose one of 'error', 'drop'"),
        ("abc", {"characters": "xyz"}, {}, r"row 0: .* the prompt 'abc' to no token at all: check that the tokenizer"),
    ],
)
def test_what_cannot_be_encoded_is_named(prompt, settings, keywords, message):
    with pytest.raises(ValueError, match=message):
        lib.encode_prompts([{"prompt": prompt}], make_tokenizer(**settings), **keywords)


# --- prompt_indices


def test_every_epoch_is_a_permutation_of_its_own_that_no_release_changes():
    entries = lib.prompt_indices(0, 300, num_rows=100, seed=3)
    orders = [[row for epoch, row in entries if epoch == wanted] for wanted in range(3)]
    assert [epoch for epoch, _ in entries] == [0] * 100 + [1] * 100 + [2] * 100
    for order in orders:
        assert sorted(order) == list(range(100))
    assert orders[0] != orders[1] != orders[2]
    assert orders[0] != list(range(100))
    assert entries != lib.prompt_indices(0, 300, num_rows=100, seed=4)
    # A run that is resumed after an upgrade must find this order: changing it breaks every checkpoint.
    second_epoch = [(1, 7), (1, 6), (1, 1), (1, 5), (1, 4), (1, 2), (1, 0), (1, 3)]
    assert lib.prompt_indices(8, 8, num_rows=8, seed=5) == second_epoch


@pytest.mark.parametrize("shuffle", [True, False])
def test_any_cut_into_batches_gives_the_same_sequence(shuffle):
    """Every epoch is a permutation, however it is cut into batches."""
    whole = lib.prompt_indices(0, 60, num_rows=7, seed=0, shuffle=shuffle)
    for size in (1, 4, 7, 15, 20):
        parts = [lib.prompt_indices(start, size, num_rows=7, seed=0, shuffle=shuffle) for start in range(0, 60, size)]
        assert [entry for part in parts for entry in part][:60] == whole
    assert lib.prompt_indices(5, 0, num_rows=7, seed=0) == []


def test_orders_are_uniform():
    # 6000 permutations of 3: each of the 6 orders is expected 1000 times, standard deviation 29; 150 is five of them.
    counts = {}
    for seed in range(6000):
        order = tuple(row for _, row in lib.prompt_indices(0, 3, num_rows=3, seed=seed))
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 6
    assert all(abs(count - 1000) < 150 for count in counts.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_rows": 0}, "num_rows is 0: there has to be at least one row"),
        ({"start": -1}, "start is -1: give 0 or more"),
        ({"count": -1}, "count is -1: give 0 or more"),
        ({"seed": -1}, "seed is -1: give 0 or more"),
    ],
)
def test_prompt_indices_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        lib.prompt_indices(**({"start": 0, "count": 1, "num_rows": 2, "seed": 0} | arguments))


# --- completions back to text


def padded_batch(tokenizer, texts):
    """[B, G] texts, each followed by an EOS, to tokens and mask [B, G, T]; the padding is garbage, not zeros."""
    ids = [[[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in group] for group in texts]
    width = max(len(row) for group in ids for row in group)
    tokens = np.full((len(ids), len(ids[0]), width), 7, np.int32)
    mask = np.zeros(tokens.shape, bool)
    for b, group in enumerate(ids):
        for g, row in enumerate(group):
            tokens[b, g, : len(row)] = row
            mask[b, g, : len(row)] = True
    return tokens, mask


TEXTS = [["one", "two!"], ["three", "4"], ["", "sechs"]]


def test_reward_inputs_of_conversations_join_to_the_conversation():
    tokenizer = make_tokenizer()
    parts = [{"type": "text", "text": "So"}]
    rows = [{"prompt": p} for p in ([user("a")], [user("b"), assistant("<t>")], [user("c"), assistant(parts)])]
    inputs = completions_module.reward_inputs(tokenizer, rows, *padded_batch(tokenizer, TEXTS))
    assert inputs.completions == [[assistant(text)] for text in ("one", "two!", "<t>three", "<t>4", "So", "Sosechs")]
    assert inputs.prompts == [[user("a")]] * 2 + [[user("b")]] * 2 + [[user("c")]] * 2
    assert rows[1]["prompt"] == [user("b"), assistant("<t>")]  # the dataset is as it was
