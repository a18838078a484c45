"""Whether activations are kept or recomputed: decided by the memory, and the same when a run is resumed."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny_policy

from grpo_jax import GRPOConfig
from grpo_jax.models.scoring import read_prompts, score_packed
from grpo_jax.models.sharding import lower_call
from grpo_jax.run import memory
from grpo_jax.run.memory import COMPILED, FILLED, compiled_peak_bytes, decide_checkpointing, peak_bytes
from grpo_jax.run.prepare import prepare
from grpo_jax.run.resume import as_begun
from grpo_jax.run.run import new_state
from grpo_jax.update.objective import sampling_of
from grpo_jax.update.programs import update_bytes, update_calls

ROWS = [{"prompt": text} for text in ("ab", "c", "defgh", "gh ijk lmn")]


def lengths(completions):
    return [float(len(text)) for text in completions]


def run_of(memory=None, **settings):
    """A run as `prepare` derives it; `memory` as if the device had so much."""
    config = GRPOConfig(**{"num_generations": 4, "max_completion_length": 16, "compute_dtype": "float32"} | settings)
    with pytest.MonkeyPatch.context() as patch:
        if memory is not None:
            patch.setattr("grpo_jax.run.prepare.memory_of", lambda device: memory)
        return prepare(tiny_policy(), ROWS, lengths, config)


def products(run):
    """Matrix products of the program of an update."""
    state = new_state(run)
    lowered = lower_call(update_calls(run.updater, state, jax.eval_shape(lambda: run.zero_batch(state))).update)
    return lowered.as_text().count("stablehlo.dot_general")


def recomputes(run):
    """Whether layers are recomputed, as all of the run says."""
    said = {run.config.gradient_checkpointing, run.updater.config.gradient_checkpointing}
    said |= {run.policy.model.config.remat, run.updater.model.config.remat}
    assert len(said) == 1
    return said.pop()


def test_activations_are_kept_if_they_fit(monkeypatch):
    """By an estimate, and where that does not fit by the compiler's count of the update."""
    run = run_of(gradient_checkpointing=False)
    enough, compiled = peak_bytes(run) / FILLED, compiled_peak_bytes(run)
    with monkeypatch.context() as patch:
        patch.setattr("grpo_jax.run.memory.compile_program", lambda *_: pytest.fail("compiled"))
        kept = run_of(memory=enough)
    asked = []
    for bytes_ in (COMPILED * (enough - 1), COMPILED * (enough - 1) + 1):
        monkeypatch.setattr(memory, "compiled_peak_bytes", lambda run, bytes_=bytes_: asked.append(run) or bytes_)
        recomputed = run_of(memory=enough - 1)
        assert recomputes(recomputed) == (len(asked) == 2)
    assert not any(run.policy.model.config.remat for run in asked)
    assert not recomputes(kept)
    state = new_state(run)
    batch = jax.eval_shape(lambda: run.zero_batch(state))
    stats = lower_call(update_calls(run.updater, state, batch).update).compile().memory_analysis()
    held = sum(x.nbytes for x in jax.tree.leaves((state, run.policy.params)))
    assert compiled > held + stats.temp_size_in_bytes
    assert products(kept) < products(recomputed)
    assert not recomputes(run_of(memory=1, gradient_checkpointing=False))
    assert recomputes(run_of(memory=1e15, gradient_checkpointing=True))


@pytest.mark.quick
def test_where_nothing_is_known_of_the_memory_activations_are_recomputed(monkeypatch):
    monkeypatch.setattr("grpo_jax.run.prepare.memory_of", lambda device: None)
    assert recomputes(run_of())


@pytest.mark.quick
def test_one_process_without_room_decides_for_all(monkeypatch):
    run = run_of(gradient_checkpointing=True)
    run = dataclasses.replace(run, config=dataclasses.replace(run.config, gradient_checkpointing=None))
    monkeypatch.setattr("grpo_jax.run.memory.gather_objects", lambda own: [own, None])
    assert decide_checkpointing(run, 1e15).config.gradient_checkpointing


def test_what_is_counted_is_what_a_forward_pass_keeps():
    """The arrays that the backward pass of a packed sequence holds, without the weights."""
    run = run_of(gradient_checkpointing=False)
    state, updater = new_state(run), run.updater
    batch = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), jax.eval_shape(lambda: run.zero_batch(state)))
    part = updater.pack(state.params, batch)[0][0]

    def scores(params):
        prompts = part.batch.prompts
        read = read_prompts(updater.model, params, prompts)
        sampling = sampling_of(run.config)
        return score_packed(updater.model, params, read, prompts.lengths, part.sequence(0), sampling)[:2]

    pullback = jax.tree.map(jnp.asarray, jax.vjp(scores, state.params)[1])
    held = {x.unsafe_buffer_pointer(): x.nbytes for x in jax.tree.leaves(pullback)}
    given = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(state.params)}
    activations = sum(size for at, size in held.items() if at not in given)
    params = sum(x.nbytes for x in jax.tree.leaves(state.params))
    streams, _, _ = updater.count_parts(state.params, batch)
    assert update_bytes(updater, state, batch) == pytest.approx(streams * (params + activations), rel=0.02)
    held = peak_bytes(run) - update_bytes(updater, state, batch)
    assert held == sum(x.nbytes for x in jax.tree.leaves(state)) + params, "the state, and the caller's params"


def test_a_resumed_run_recomputes_activations_as_before(tmp_path, monkeypatch):
    """A run that recomputes activations does so to its end, whatever memory the resumed run has."""
    (tmp_path / "run.json").write_text(json.dumps({"config": {"gradient_checkpointing": True}}))
    config = GRPOConfig(max_steps=1, num_generations=2, per_device_train_batch_size=4, max_completion_length=8)
    monkeypatch.setattr("grpo_jax.run.prepare.memory_of", lambda device: 1e15)
    for asked, found in ((None, True), (False, False)):
        given = as_begun(dataclasses.replace(config, gradient_checkpointing=asked), tmp_path)
        assert recomputes(prepare(tiny_policy(), ROWS, lengths, given)) is found
