"""Where a turn ends: the bytes of tokens for every kind of tokenizer, and ends that are refused."""

import numpy as np
import pytest
from chat_families import family
from test_completions import FAMILIES, fast
from tokenizers import Tokenizer, decoders, models

from grpo_jax.rollout.ends import TurnEnds, stops_of
from grpo_jax.text.completions import special_tokens, token_bytes
from grpo_jax.text.templates import ChatTemplate

pytestmark = pytest.mark.quick

TEXTS = ["Once upon a time.", "a café was there", "  a  ", "€ and 日本, ç", "\x00\n\t"]


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "ends of words"])
def test_the_bytes_of_tokens_make_the_text_that_is_decoded(name):
    """Behind another text, since some tokenizers take the first space away; characters of several tokens among them."""
    tokenizer = FAMILIES[name]()
    pieces, before = token_bytes(tokenizer), ids_of(tokenizer, "a")
    for text in TEXTS:
        ids = [i for i in ids_of(tokenizer, text) if i not in special_tokens(tokenizer)]
        joined = b"".join(pieces[i] for i in (*before, *ids)).decode()
        assert joined.removeprefix(" ") == tokenizer.decode([*before, *ids]).removeprefix(" ")
    for index in special_tokens(tokenizer):
        assert pieces[index] == b""


def test_tokens_that_change_their_neighbours_are_refused():
    with pytest.raises(ValueError, match=r"stop=\['a'\]: .*decodes tokens differently depending on.*stop_token_ids"):
        stops_of(FAMILIES["ends of words"](), ["a"])
    odd = Tokenizer(models.BPE({"<s>": 0, "a": 1, "€\ufffd": 2, "¿Ā€": 3}, []))
    odd.decoder = decoders.Replace("Ā", "\ufffd")
    with pytest.raises(ValueError, match=r"tokenizer's token 3 \('¿Ā€'\) is part of a character, but its name"):
        token_bytes(fast(odd))


def test_a_text_is_found_where_it_is_spelt_by_other_tokens_and_with_its_space():
    tokenizer = FAMILIES["sentencepiece"]()
    stops = stops_of(tokenizer, ["café", " time"])
    assert stops is stops_of(tokenizer, ("café", " time")), "seconds, for a large vocabulary"
    vocabulary = tokenizer.get_vocab()
    spelt = [vocabulary[name] for name in ("▁a", "<0x63>", "a", "<0x66>", "<s>", "<0xC3>", "<0xA9>", ".")]
    assert stops.end_of(np.array(spelt)) == 7
    assert stops.end_of(np.array([vocabulary["▁time"]])) == 1, "the first of a text, whose space decoding takes away"
    assert stops.end_of(np.array([vocabulary["time"], vocabulary["▁a"]])) is None


def test_a_turn_is_cut_short_that_is_long_and_has_not_ended():
    tokenizer = FAMILIES["bytes"]()
    turn, eos = np.array(ids_of(tokenizer, "abc")), [tokenizer.eos_token_id]
    for ends, expected in (
        (TurnEnds(max_turn_length=3), True),
        (TurnEnds(max_turn_length=4), False),
        (TurnEnds(), False),
        (TurnEnds(("bc",), (), 3), False),
        (TurnEnds(("ab",), (), 3), False),
        (TurnEnds(("x",), (5,), 3), True),
        (TurnEnds((), (int(turn[-1]),), 3), False),
    ):
        assert ends.cut_short(turn, tokenizer, eos) == expected
    assert not TurnEnds(max_turn_length=3).cut_short(np.append(turn[:2], eos), tokenizer, eos)


def test_behind_a_turn_without_an_eos_the_observation_has_it():
    tokenizer, ends = family("hermes")
    said = [{"role": "user", "content": "and then?"}]
    template = ChatTemplate(tokenizer, eos_token_ids=ends)
    usual = template.observation_ids(said, drawn=ends[0])
    assert usual == template.observation_ids(said)
    letter = ids_of(tokenizer, "x")[-1]
    closed = template.observation_ids(said, drawn=letter)
    assert closed[-len(usual) :] == usual
    assert len(closed) == len(usual) + 1
    assert closed[0] in ends
