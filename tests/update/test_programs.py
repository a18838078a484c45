"""The programs described by shapes alone are the programs that an update runs."""

import jax
import numpy as np
import pytest
from test_generate import Bare
from test_packed import OPTIMIZER, G, T, batch
from tiny import tiny_model, tiny_policy

from grpo_jax import GRPOConfig, add_lora
from grpo_jax.models.sharding import lower_call
from grpo_jax.rollout.draw import DecodeSettings
from grpo_jax.rollout.programs import decode_call
from grpo_jax.update import packed, step
from grpo_jax.update.packed import choose_updater
from grpo_jax.update.programs import update_calls
from grpo_jax.update.state import create_state

PACKED = ("add_gradients", "score_part")


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

    module, names = (step, ("update_padded", "score_padded")) if kind == "padded" else (packed, PACKED)
    for name in names:
        monkeypatch.setattr(module, name, watched(name, vars(module)[name]))
    updater.log_probs(state.ref_params, whole.prompts, whole.tokens, whole.mask)
    updater.update(state, whole)
    assert [ran[name] for name in names] == [lower_call(call).as_text() for call in described]
    sizes = {"num_generations": G, "max_completion_length": T, "settings": DecodeSettings()}
    assert kind != "padded" or decode_call(updater.model, state.params, 2, 3, **sizes) is None
