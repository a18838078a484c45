"""Completions with several turns: log-probs equal those of the whole row, and timing does not change the samples."""

import functools
import itertools
import time
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_generate import Bare, assert_same
from tiny import random_params, scored, tiny_model

from grpo_jax.models.config import ConvShape, DeltaShape, TransformerConfig
from grpo_jax.models.context import num_slots
from grpo_jax.models.sharding import make_mesh, place
from grpo_jax.models.transformer import Transformer
from grpo_jax.rollout import turns
from grpo_jax.rollout.generate import generate
from grpo_jax.types import Prompts

# One layer of each kind, since each keeps a different state in the cache. `SMALL` has attention without a window.
SHAPE = TransformerConfig(
    *(32, 16, 32),
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    initializer_range=0.3,
    rms_norm_eps=1e-2,  # large, because the norm after a delta layer amplifies rounding errors in tiny outputs
    windows=(None, 9, None),
    attention_sinks=True,
    mixers=("delta", "attention", "conv"),
    delta=DeltaShape(key_heads=1, value_heads=2, key_dim=6, value_dim=5),
    conv=ConvShape(16),
)
MODEL = Transformer(SHAPE)
PARAMS = random_params(MODEL)
SMALL, SMALL_PARAMS = tiny_model(vocab=32, layers=1)
PROMPTS = Prompts(jnp.array([[3, 4, 5, 6], [7, 8, 0, 0], [9, 9, 9, 0], [5, 2, 0, 0]]), jnp.array([4, 2, 3, 2]))
EOS, PAD = (0, 1, 2), 31
T = 48


def answer(value):
    done = Future()
    done.set_result(value)
    return done


class Script:
    """Answers that depend only on the completion and its turn number; by default the third turn is the last."""

    def __init__(self, seconds=lambda completion: 0.0, most=3):
        self.heard, self.seconds, self.most = {}, seconds, most
        self.pool = ThreadPoolExecutor(16)

    def __call__(self, completion, turn, room):
        return self.pool.submit(self.answer, completion, turn, room)

    def answer(self, completion, turn, room):
        time.sleep(self.seconds(completion))
        heard = self.heard.setdefault(completion, [])
        heard.append((turn.tolist(), room))
        number = len(heard)
        return None if number == self.most else [10 + completion % 7] * ((3 * completion + 5 * number) % 11)


def play(script=None, *, model=MODEL, params=PARAMS, length=T, **settings):
    script = Script() if script is None else script
    how = {"num_generations": 4, "max_completion_length": length, "eos_token_ids": EOS, "pad_token_id": PAD}
    return generate(model, params, PROMPTS, jax.random.key(7), next_observation=script, **how | settings), script


@functools.cache
def played():
    return play()


def turns_of(completions, i):
    """Split the i-th completion into runs of (tokens, whether they were sampled)."""
    tokens, drawn = (np.asarray(x).reshape(-1, T)[i] for x in (completions.tokens, completions.mask))
    there = np.asarray(completions.present).reshape(-1, T)[i]
    runs = []
    for token, own in zip(tokens[there].tolist(), drawn[there].tolist(), strict=True):
        if not runs or runs[-1][1] != own or (own and runs[-1][0][-1] in EOS):
            runs.append(([], own))
        runs[-1][0].append(token)
    return runs


def test_each_sampled_turn_is_answered_and_followed_by_its_answer():
    completions, script = played()
    tokens, mask, present = (
        np.asarray(x).reshape(-1, T) for x in (completions.tokens, completions.mask, completions.present)
    )
    several, ended = 0, np.asarray(completions.ended).ravel()
    for i in range(16):
        runs, heard, length = turns_of(completions, i), script.heard.get(i, []), present[i].sum()
        drawn = [turn for turn, own in runs if own]
        assert [turn for turn, _ in heard] == [turn for turn in drawn if turn[-1] in EOS]
        number = 0
        for run, own in runs:
            number += own
            assert own or run == [10 + i % 7] * ((3 * i + 5 * number) % 11)
        several += len(drawn) > 1
        assert (present[i] == (np.arange(T) < length)).all(), "the tokens of a completion must be contiguous"
        assert (mask[i] <= present[i]).all()
        assert (tokens[i, length:] == PAD).all()
        assert ended[i] == (len(heard) == 3), "only a final answer ends a completion"
        # Otherwise the observation or the rest of the turn did not fit.
        assert ended[i] or length == T or (3 * i + 5 * len(heard)) % 11 >= T - length
    assert several > 8, "too few completions have several turns"


def test_log_probs_equal_those_of_scoring_the_whole_row():
    completions, _ = played()
    np.testing.assert_allclose(scored(MODEL, PARAMS, PROMPTS, completions), completions.log_probs, atol=1e-5)
    assert (np.asarray(completions.log_probs)[~np.asarray(completions.mask)] == 0).all()


def test_long_turns_wrap_around_a_growing_ring(monkeypatch):
    """Waiting completions keep their keys while others draw more tokens than there are slots."""
    sizes, original = set(), turns.decode
    spy = lambda *args, **how: sizes.add(num_slots(args[2].cache)) or original(*args, **how)
    monkeypatch.setattr(turns, "decode", spy)
    completions, _ = play(Script(most=6), model=SMALL, params=SMALL_PARAMS, length=200, eos_token_ids=(0,))
    np.testing.assert_allclose(scored(SMALL, SMALL_PARAMS, PROMPTS, completions), completions.log_probs, atol=1e-5)
    assert sizes == {64, 128, 256}, "the ring must start small and grow when it is full"
    assert np.asarray(completions.present & ~completions.mask).any(axis=-1).sum() > 8, "too few observations"


def test_samples_do_not_depend_on_timing_other_completions_or_the_mesh(monkeypatch):
    monkeypatch.setattr(turns, "CHUNK", 4)
    params = place(PARAMS, make_mesh({"data": 2, "tensor": 2}))
    completions, _ = play(Script(seconds=lambda i: 0.003 * (i * 7 % 5)), params=params, batch_size=9)
    expected, _ = played()
    assert_same(completions, expected)
    np.testing.assert_array_equal(completions.present, expected.present)


def test_one_turn_equals_plain_generation():
    completions, _ = play(Script(most=1), model=SMALL, params=SMALL_PARAMS, length=20)
    how = {"num_generations": 4, "max_completion_length": 20, "eos_token_ids": EOS, "pad_token_id": PAD}
    expected = generate(SMALL, SMALL_PARAMS, PROMPTS, jax.random.key(7), **how)
    assert_same(completions, expected)
    np.testing.assert_array_equal(completions.present, expected.mask)


def test_failed_answer_or_interrupt_ends_the_rollout():
    asked, checks = [], itertools.count()

    def answers(completion, turn, room):
        asked.append(completion)
        failed = Future()
        failed.set_exception(ZeroDivisionError("no")) if completion == 5 else failed.set_result([4])
        return failed

    with pytest.raises(ZeroDivisionError, match="no"):
        play(answers, model=SMALL, params=SMALL_PARAMS)
    assert asked.count(5) == 1

    def interrupt():
        if next(checks) == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play(lambda *_: Future(), model=SMALL, params=SMALL_PARAMS, check_interrupt=interrupt)


def test_observation_of_maximum_length_leaves_room_for_a_token():
    completions, _ = play(lambda i, turn, room: answer([9] * min(11, room)), model=SMALL, params=SMALL_PARAMS)
    assert not np.asarray(completions.ended).any()
    assert (np.asarray(completions.present).sum(axis=-1) == T).all(), "each completion must draw one more token"
    assert np.asarray(completions.mask)[..., -1].all()


def test_a_last_completion_of_maximum_length_does_not_end_the_others():
    """Empty positions have row −1, which must not be read as the last row."""
    fill = lambda i, turn, room: answer([9] * (room if i == 15 else min(3, room)))
    completions, _ = play(fill, model=SMALL, params=SMALL_PARAMS, length=200, eos_token_ids=(0,))
    assert (np.asarray(completions.present).sum(axis=-1) == 200).all()


@pytest.mark.quick
def test_several_turns_need_a_built_in_model_outside_jit():
    several = {"next_observation": Script(), "num_generations": 2, "max_completion_length": 4}
    sample = lambda model, params: generate(model, params, PROMPTS, jax.random.key(0), **several)
    message = "next_observation requires a built-in model and does not support jit; got "
    with pytest.raises(ValueError, match=f"{message}Bare"):
        sample(Bare(MODEL), {})
    with pytest.raises(ValueError, match=f"{message}Transformer under jit"):
        jax.jit(functools.partial(sample, SMALL))(SMALL_PARAMS)
