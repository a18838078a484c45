"""Stop strings in rollouts: in every array shape, completions end where a search of their text finds a stop string."""

import functools

import jax
import numpy as np
import pytest
from test_generate import Bare, assert_same
from test_stops import searched
from test_turns import answer
from tiny import scored, tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from grpo_jax import generate, make_prompts
from grpo_jax.models.sharding import make_mesh, place
from grpo_jax.rollout import decode_plan
from grpo_jax.text.completions import token_bytes

NAMES = ["<pad>", "<eos>", "a", "b", "c", ".", "ab", "ba", "cab", " a", " b", "b.", ". ", "aa", "bb", "c ", "é", "éa"]
EOS, PAD, T = 1, 0, 24
LONG = 40  # the length of completions with several turns
PROMPTS = [[3, 4, 5], [6], [7, 8, 9, 10, 11], [4, 4]]
STOP = ["b a", "ac", "éé"]
"""Each can be spelled in several ways, across token and character boundaries."""


@functools.cache
def tokenizer():
    """Return a byte-level tokenizer with multi-character tokens; é can be one token or the two tokens of its bytes."""
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    table, texts = bytes_to_unicode(), [*(text.encode() for text in NAMES[2:]), b"\xc3", b"\xa9", b"\xa9c\xc3"]
    names = [*NAMES[:2], *("".join(table[byte] for byte in text) for text in texts)]
    fast = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=fast, pad_token="<pad>", eos_token="<eos>")


@functools.cache
def model_and_params():
    return tiny_model(vocab=24, layers=1, seed=3)


def arguments(**settings):
    how = {"num_generations": 8, "max_completion_length": T, "eos_token_ids": (EOS,), "pad_token_id": PAD}
    return how | {"tokenizer": tokenizer()} | settings


def sample(params=None, **settings):
    model, own = model_and_params()
    return generate(
        model, own if params is None else params, make_prompts(PROMPTS), jax.random.key(7), **arguments(**settings)
    )


@functools.cache
def unstopped():
    return sample()


def cut(completions, ends):
    lengths = np.array([T if end is None else end for end in ends]).reshape(completions.ended.shape)
    kept = np.asarray(completions.mask) & (np.arange(T) < lengths[..., None])
    return completions.replace(
        tokens=np.where(kept, completions.tokens, PAD),
        mask=kept,
        log_probs=np.where(kept, completions.log_probs, 0),
        ended=np.asarray(completions.ended) | np.array([end is not None for end in ends]).reshape(lengths.shape),
    )


@functools.cache
def expected():
    """Cut the completions after the token that completes a stop string, found by a search of their text."""
    pieces = [*token_bytes(tokenizer()), b"", b"", b""]
    tokens, mask = (np.asarray(x).reshape(-1, T) for x in (unstopped().tokens, unstopped().mask))
    rows = [row[own].tolist() for row, own in zip(tokens, mask, strict=True)]
    ends = [searched(STOP, pieces, row) for row in rows]
    assert sum(end is not None for end in ends) > 8, "too few rows contain a stop string"
    assert any(end is None for end in ends)
    last = [[pieces[i] for i in row[:end][-2:]] for row, end in zip(rows, ends, strict=True)]
    assert sum(not any(text.encode() in pair[-1] for text in STOP) for pair in last) > 8, "too few span several tokens"
    assert any(b"\xa9" in (piece[:1] for piece in pair) for pair in last), "no character spans two tokens"
    return cut(unstopped(), ends)


def test_completions_end_at_a_stop_string_in_every_shape(monkeypatch):
    """A completion ends with the token that completes a stop string, also in a jit, without a cache and on a mesh."""
    assert_same(sample(stop=STOP), expected())
    model, params = model_and_params()
    prompts, key = make_prompts(PROMPTS), jax.random.key(7)
    inside = jax.jit(lambda params: generate(model, params, prompts, key, **arguments(stop=STOP)))
    assert_same(inside(params), expected())
    assert_same(generate(Bare(model), params, prompts, key, **arguments(stop=STOP)), expected())
    assert_same(sample(place(params, make_mesh({"data": 2})), stop=STOP), expected())
    monkeypatch.setattr(decode_plan, "BURST", 3)
    assert_same(sample(stop=STOP, batch_size=8), expected())


def test_max_turn_length_cuts_a_single_turn_completion():
    assert_same(sample(max_turn_length=6), sample(max_completion_length=6))
    assert_same(sample(max_turn_length=T + 5), unstopped())


@pytest.mark.quick
@pytest.mark.parametrize(("change", "message"), [
    ({"stop": [""]}, r"stop = \[''\]: must be a non-empty string, a list of such strings"),
    ({"stop": "a<eos>"}, r"stop must not contain special tokens; got '<eos>' in 'a<eos>'.*stop_token_ids=\[1\]"),
    ({"stop": ["a", "x"]}, "stop=.*the vocabulary's tokens cannot form 'x'. Pass token ids"),
    ({"stop": ["a"], "tokenizer": None}, "stop=.*needs a tokenizer; pass tokenizer"),
    ({"stop_token_ids": [True]}, r"stop_token_ids = \[True\]: the id at index 0 must be an integer"),
    ({"stop_token_ids": "7"}, "stop_token_ids = '7': must be a list of token ids"),
    ({"max_turn_length": 0}, "max_turn_length must be an integer ≥ 1; got 0"),
])  # fmt: skip
def test_invalid_stop_settings_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        sample(**change)


SAID = [9, 2, 10, 2, 10, 9, 4, 16, 16]
"""An observation that contains all stop strings and completes one that the turn's end began."""


class Answers:
    def __init__(self):
        self.heard = {}

    def __call__(self, completion, turn, room):
        heard = self.heard.setdefault(completion, [])
        heard.append(turn.tolist())
        return answer(None if len(heard) == 3 else SAID)


def play(**settings):
    model, params = model_and_params()
    answers, prompts = Answers(), make_prompts(PROMPTS)
    how = arguments(max_completion_length=LONG, **settings)
    completions = generate(model, params, prompts, jax.random.key(7), next_observation=answers, **how)
    return completions, answers.heard


def test_observations_do_not_contribute_to_stop_strings():
    completions, heard = play(stop=STOP)
    pieces, by_text, by_eos = [*token_bytes(tokenizer()), b"", b"", b""], 0, 0
    for turn in (turn for multi_turn in heard.values() for turn in multi_turn):
        text = searched(STOP, pieces, turn)
        assert EOS not in turn[:-1]
        assert text in (None, len(turn))
        assert text or turn[-1] == EOS
        by_text, by_eos = by_text + (text is not None), by_eos + (text is None)
    assert by_text > 20
    assert by_eos > 0
    assert max(map(len, heard.values())) == 3
    np.testing.assert_array_equal(
        np.asarray(completions.ended).ravel(), [len(heard.get(i, [])) == 3 for i in range(32)]
    )


@pytest.mark.parametrize("longest", [1, 5])
def test_a_turn_of_the_maximum_length_is_answered(longest):
    completions, heard = play(stop=STOP, max_turn_length=longest)
    lengths = [len(turn) for multi_turn in heard.values() for turn in multi_turn]
    assert max(lengths) == longest
    assert (longest == 1) == (min(lengths) == longest)
    assert all(len(multi_turn) == 3 for multi_turn in heard.values())  # all of them fit
    assert np.asarray(completions.ended).all()
    for i, multi_turn in heard.items():
        row, own = (np.asarray(x).reshape(-1, LONG)[i] for x in (completions.tokens, completions.mask))
        assert row[own].tolist() == [token for turn in multi_turn for token in turn]
    again = scored(*model_and_params(), make_prompts(PROMPTS), completions)
    np.testing.assert_allclose(again, completions.log_probs, atol=2e-5)
