"""Device memory decides whether activations are kept or recomputed, also when a run is resumed. The programs described
by shapes alone are the programs that an update runs.
"""

import dataclasses
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from test_generate import Bare
from test_packed import OPTIMIZER, G, T, batch
from tiny import lengths, tiny_model, tiny_policy

from grpo_jax import GRPOConfig, add_lora
from grpo_jax.models.context import num_slots
from grpo_jax.models.sharding import lower_call
from grpo_jax.rollout.decode_plan import decode_call
from grpo_jax.rollout.draw import DecodeSettings
from grpo_jax.run.memory import COMPILED, compiled_peak_bytes, decide_checkpointing, rollout_call, update_calls
from grpo_jax.run.prepare import prepare
from grpo_jax.run.resume import with_saved_gradient_checkpointing
from grpo_jax.run.run import new_state
from grpo_jax.update import packed, step
from grpo_jax.update.packed import choose_updater
from grpo_jax.update.state import create_state

ROWS = [{"prompt": text} for text in ("ab", "c", "defgh", "gh ijk lmn")]


def run_of(memory=None, platform="gpu", **settings):
    """Return the run that `prepare` builds for a device with `memory` bytes (None: unknown)."""
    config = GRPOConfig(**{"num_generations": 4, "max_completion_length": 16, "compute_dtype": "float32"} | settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("grpo_jax.run.prepare.memory_of", lambda device: memory)
        patch.setattr("grpo_jax.run.memory.devices_of", lambda params: [SimpleNamespace(platform=platform)])
        return prepare(tiny_policy(), ROWS, lengths, config)


def products(run):
    """Return the number of matrix products in the update program."""
    state = new_state(run)
    lowered = lower_call(update_calls(run.updater, state, jax.eval_shape(lambda: run.zero_batch(state))).update)
    return lowered.as_text().count("stablehlo.dot_general")


def recomputes(run):
    """Return whether layers are recomputed; all parts of the run must agree."""
    values = {run.config.gradient_checkpointing, run.updater.config.gradient_checkpointing}
    values |= {run.policy.model.config.remat, run.updater.model.config.remat}
    assert len(values) == 1
    return values.pop()


def test_activations_are_kept_if_they_fit():
    """Activations are kept if the compiled update fits in the accelerator's memory, and always on CPUs. If the memory
    is unknown, they are recomputed.
    """
    run = run_of(gradient_checkpointing=False)
    compiled = compiled_peak_bytes(run)
    state = new_state(run)
    batch = jax.eval_shape(lambda: run.zero_batch(state))
    stats = lower_call(update_calls(run.updater, state, batch).update).compile().memory_analysis()
    held = sum(x.nbytes for x in jax.tree.leaves((state, run.policy.params)))
    assert compiled > held + stats.temp_size_in_bytes
    kept, recomputed = run_of(memory=compiled / COMPILED + 1), run_of(memory=compiled / COMPILED - 1)
    assert (recomputes(kept), recomputes(recomputed)) == (False, True)
    assert products(kept) < products(recomputed)
    assert recomputes(run_of())
    assert not recomputes(run_of(memory=1, platform="cpu"))
    assert not recomputes(run_of(memory=1, gradient_checkpointing=False))
    assert recomputes(run_of(memory=1e15, gradient_checkpointing=True))


@pytest.mark.quick
def test_all_processes_recompute_if_one_lacks_memory(monkeypatch):
    run = run_of(gradient_checkpointing=True)
    run = dataclasses.replace(run, config=dataclasses.replace(run.config, gradient_checkpointing=None))
    monkeypatch.setattr("grpo_jax.run.memory.devices_of", lambda params: [SimpleNamespace(platform="gpu")])
    monkeypatch.setattr("grpo_jax.run.memory.gather_objects", lambda own: [own, None])
    assert decide_checkpointing(run, 1e15).config.gradient_checkpointing


def test_cache_of_the_decode_program_holds_all_turns_of_a_completion():
    """`max_turn_length` does not make it smaller, since the cache is kept from the first turn to the last."""
    run = run_of(gradient_checkpointing=False, max_turn_length=2)
    assert num_slots(rollout_call(run, run.policy.params).args[2].cache) == 15


def test_resumed_run_recomputes_activations_as_before(tmp_path):
    """A resumed run keeps recomputing activations, however much memory it has."""
    (tmp_path / "run.json").write_text(json.dumps({"config": {"gradient_checkpointing": True}}))
    config = GRPOConfig(max_steps=1, num_generations=2, per_device_train_batch_size=4, max_completion_length=8)
    for setting, found in ((None, True), (False, False)):
        given = with_saved_gradient_checkpointing(dataclasses.replace(config, gradient_checkpointing=setting), tmp_path)
        assert recomputes(prepare(tiny_policy(), ROWS, lengths, given)) is found


def case(kind):
    """Return an updater and its state."""
    model, params = tiny_model(layers=1)
    if kind == "padded":
        model = Bare(model)
    if kind == "dropout":
        policy = add_lora(tiny_policy(), rank=2, dropout=0.5, key=jax.random.key(1))
        model, params = policy.model, policy.params
    settings = {"top_entropy_quantile": 0.5} if kind == "entropy" else {}
    updater = choose_updater(
        model, GRPOConfig(beta=0.1, max_completion_length=T, **settings), micro_shape=(4, G), optimizer=OPTIMIZER
    )
    return updater, create_state(jax.tree.map(np.array, params), OPTIMIZER, jax.random.key(0), keep_reference=True)


@pytest.mark.parametrize("kind", ["packed", "entropy", "dropout", pytest.param("padded", marks=pytest.mark.quick)])
def test_described_programs_are_the_ones_that_run(monkeypatch, kind):
    """Programs lowered from shapes have the same text as the programs lowered from the arrays of an update."""
    updater, state = case(kind)
    whole = batch(mask=np.ones(batch().mask.shape, bool))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (state, whole))
    described, ran = update_calls(updater, *shapes), {}

    def watched(name, program):
        def call(*args, **keywords):
            ran.setdefault(name, program.lower(*args, **keywords).as_text())
            return program(*args, **keywords)

        return call

    module = step if kind == "padded" else packed
    names = ("update_padded", "score_padded") if kind == "padded" else ("add_gradients", "score_part")
    for name in names:
        monkeypatch.setattr(module, name, watched(name, vars(module)[name]))
    updater.log_probs(state.ref_params, whole.prompts, whole.tokens, whole.mask)
    updater.update(state, whole)
    assert [ran[name] for name in names] == [lower_call(call).as_text() for call in described]
    sizes = {"num_generations": G, "max_completion_length": T, "settings": DecodeSettings()}
    assert kind != "padded" or decode_call(updater.model, state.params, 2, 3, **sizes) is None
