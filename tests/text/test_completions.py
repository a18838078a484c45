"""Completions as text: prompt + completion equals the text of all tokens, for every kind of tokenizer."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from grpo_jax.text.completions import reward_inputs

pytestmark = pytest.mark.quick

WORDS = ["Once", "upon", "a", "time", "there", "was", "café", "."]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPECIAL = ["<unk>", "<s>", "</s>", "<user>", "<bot>"]
TEMPLATE = "{% for m in messages %}<{{ 'bot' if m.role == 'assistant' else 'user' }}>{{ m.content | trim }}{% endfor %}"


def fast(tokenizer, **how):
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>",
        additional_special_tokens=["<user>", "<bot>"],
        chat_template=TEMPLATE + "{% if add_generation_prompt %}<bot>{% endif %}", **how,
    )  # fmt: skip


def words(*extra, space="▁"):
    names = [*SPECIAL, *BYTES, *(space + word for word in WORDS), *WORDS, space, *extra]
    return {name: i for i, name in enumerate(dict.fromkeys(names))}


def sentencepiece():
    """Like Llama 2's tokenizer: a space before every text, which decoding strips, and unknown characters as bytes."""
    tokenizer = Tokenizer(models.Unigram([(name, -1.0 - (len(name) == 1)) for name in words()], 0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return fast(tokenizer)


def metaspace(scheme):
    tokenizer = Tokenizer(models.Unigram([(name, -1.0 - (len(name) == 1)) for name in words()], 0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme)])
    return fast(tokenizer)


def byte_level(*, add_prefix_space=False):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate([*SPECIAL, *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return fast(tokenizer)


FAMILIES = {
    "sentencepiece": sentencepiece, "metaspace always": lambda: metaspace("always"),
    "metaspace first": lambda: metaspace("first"), "metaspace never": lambda: metaspace("never"), "bytes": byte_level,
    "bytes with a space in front": lambda: byte_level(add_prefix_space=True),
}  # fmt: skip


def completed(tokenizer, prompt, prompt_ids, ids):
    """Return a completion as a reward function receives it."""
    tokens = np.array([[[*ids, tokenizer.eos_token_id]]])
    row = {"prompt": prompt}
    return reward_inputs(tokenizer, [row], tokens, np.ones(tokens.shape, bool), prompt_ids=[prompt_ids]).completions[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_and_completion_join_to_the_text_of_all_tokens(family):
    """Wherever the tokens are cut, prompt and completion join to their text; a split character is in the completion."""
    tokenizer = FAMILIES[family]()
    text = "Once upon a time there was a café."
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    assert whole.strip() == text
    for cut in range(1, len(ids)):
        before = tokenizer.decode(ids[:cut]).rstrip("\ufffd")
        assert before + completed(tokenizer, before, ids[:cut], ids[cut:]) == whole
        assert before + completed(tokenizer, before, [1, *ids[:cut]], ids[cut:]) == whole, "after a BOS"
    unfinished = tokenizer("é", add_special_tokens=False)["input_ids"][-2:-1]
    if len(unfinished) and "\ufffd" in tokenizer.decode(unfinished):
        assert completed(tokenizer, text, ids, unfinished) == "\ufffd", "the end of a completion may split a character"


def test_reward_inputs_of_a_group_join_to_the_conversation():
    """Reward inputs are in prompt-major order without padding; a prefill moves from the prompt to the completion."""
    tokenizer = byte_level()
    user, parts = {"role": "user", "content": "a"}, [{"type": "text", "text": "So"}]
    rows = [{"prompt": [user]}, {"prompt": [user, {"role": "assistant", "content": parts}]}]
    tokens, mask = np.full((2, 2, 6), 7), np.zeros((2, 2, 6), bool)
    for (b, g), text in zip(np.ndindex(2, 2), ["one", "two!", "", "four"], strict=True):
        ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        tokens[b, g, : len(ids)], mask[b, g, : len(ids)] = ids, True
    found = reward_inputs(tokenizer, rows, tokens, mask)
    assert [said["content"] for (said,) in found.completions] == ["one", "two!", "So", "Sofour"]
    assert found.prompts == [[user]] * 4
    assert rows[1]["prompt"][1]["content"] is parts, "the dataset is unchanged"


@pytest.mark.parametrize("prefill", ["Once upon a", "Once upon a "], ids=["", "with a space that is trimmed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_completion_continues_the_prefill(family, prefill):
    tokenizer = FAMILIES[family]()
    prompt = [{"role": "user", "content": "there was"}, {"role": "assistant", "content": prefill}]
    prompt_ids = tokenizer.apply_chat_template(prompt, continue_final_message=True, tokenize=True, return_dict=False)
    whole = tokenizer("Once upon a time.", add_special_tokens=False)["input_ids"]
    ids = whole[len(tokenizer("Once upon a", add_special_tokens=False)["input_ids"]) :]
    assert completed(tokenizer, prompt, prompt_ids, ids) == [{"role": "assistant", "content": "Once upon a time."}]
    opened = tokenizer.apply_chat_template(prompt[:1], add_generation_prompt=True, tokenize=True, return_dict=False)
    ids = tokenizer("Once upon", add_special_tokens=False)["input_ids"]
    alone = tokenizer.decode(ids)
    said = completed(tokenizer, prompt[:1], opened, ids)
    assert said == [{"role": "assistant", "content": alone}], "without a prefill, a message begins as in TRL"
