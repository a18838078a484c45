"""Ends of turns: token bytes for every kind of tokenizer, stop strings, and tokenizers that are refused."""

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
ids_of = lambda tokenizer, text: tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("name", FAMILIES)
def test_token_bytes_join_to_the_decoded_text(name):
    """Token bytes join to the decoded text, including characters that span several tokens."""
    tokenizer = FAMILIES[name]()
    pieces, before = token_bytes(tokenizer), ids_of(tokenizer, "a")  # some tokenizers strip a leading space
    for text in TEXTS:
        ids = [i for i in ids_of(tokenizer, text) if i not in special_tokens(tokenizer)]
        joined = b"".join(pieces[i] for i in (*before, *ids)).decode()
        assert joined.removeprefix(" ") == tokenizer.decode([*before, *ids]).removeprefix(" ")
    for index in special_tokens(tokenizer):
        assert pieces[index] == b""


def test_token_without_bytes_is_refused():
    odd = Tokenizer(models.BPE({"<s>": 0, "a": 1, "€\ufffd": 2, "¿Ā€": 3}, []))
    odd.decoder = decoders.Replace("Ā", "\ufffd")
    with pytest.raises(ValueError, match=r"stop=\['a'\]: .*token 3 \('¿Ā€'\) decodes to an incomplete character"):
        stops_of(fast(odd), ["a"])


def test_stop_string_is_found_across_token_boundaries():
    tokenizer = FAMILIES["sentencepiece"]()
    stops = stops_of(tokenizer, ["café", " time"])
    assert stops is stops_of(tokenizer, ("café", " time")), "stops must be cached: a large vocabulary takes seconds"
    vocabulary = tokenizer.get_vocab()
    spelt = [vocabulary[name] for name in ("▁a", "<0x63>", "a", "<0x66>", "<s>", "<0xC3>", "<0xA9>", ".")]
    assert stops.end_of(np.array(spelt)) == 7
    assert stops.end_of(np.array([vocabulary["▁time"]])) == 1, "decoding strips the space of the first token"
    assert stops.end_of(np.array([vocabulary["time"], vocabulary["▁a"]])) is None


def test_long_turn_without_an_end_is_cut_short():
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


def test_observation_adds_the_eos_that_the_turn_lacks():
    tokenizer, ends = family("hermes")
    said = [{"role": "user", "content": "and then?"}]
    template = ChatTemplate(tokenizer, eos_token_ids=ends)
    usual = template.observation_ids(said, last_token=ends[0])
    assert usual == template.observation_ids(said)
    letter = ids_of(tokenizer, "x")[-1]
    closed = template.observation_ids(said, last_token=letter)
    assert closed[-len(usual) :] == usual
    assert len(closed) == len(usual) + 1
    assert closed[0] in ends
