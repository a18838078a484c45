"""The programs of an update are described by shapes alone, and are those that run."""

import jax
import numpy as np
import pytest
from test_packed import OPTIMIZER, G, T, batch
from test_updater import Bare
from tiny import tiny_model, tiny_policy

from grpo_jax import GRPOConfig, add_lora
from grpo_jax.models import packing
from grpo_jax.update import packed, step
from grpo_jax.update.packed import choose_updater
from grpo_jax.update.programs import kept_bytes, update_programs
from grpo_jax.update.state import create_state


def case(kind):
    """An updater and its state."""
    model, params = tiny_model()
    if kind == "padded":
        model = Bare(model)
    if kind == "dropout":
        policy = add_lora(tiny_policy(), rank=2, dropout=0.5, key=jax.random.key(1))
        model, params = policy.model, policy.params
    settings = {"top_entropy_quantile": 0.5} if kind == "entropy" else {}
    config = GRPOConfig(beta=0.0 if kind == "zero signal" else 0.1, max_completion_length=T, **settings)
    updater = choose_updater(model, config, micro=(4, G), optimizer=OPTIMIZER)
    return updater, create_state(jax.tree.map(np.array, params), OPTIMIZER, jax.random.key(0), keep_reference=True)


@pytest.mark.parametrize("kind", ["packed", "zero signal", "entropy", "dropout", "padded"])
def test_what_an_update_runs_is_in_the_list(monkeypatch, kind):
    """The text of the program, lowered from shapes before there is an update and from the arrays of one."""
    updater, state = case(kind)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (state, batch()))
    listed = update_programs(updater, *shapes)
    texts, ran = {program.lower().as_text() for program in listed.by_length or listed[:2]}, []

    def watched(program):
        def call(*args, **keywords):
            ran.append(program.lower(*args, **keywords).as_text())
            return program(*args, **keywords)

        return call

    for module in (packed, step):
        for name in {"add_gradients", "measure", "add_scores", "_train_step", "_score_batch"} & set(vars(module)):
            monkeypatch.setattr(module, name, watched(vars(module)[name]))
    updater.score(state.ref_params, batch().prompts, batch().tokens, batch().mask)
    b = batch()
    if kind == "zero signal":  # half of the groups have no advantages
        b = b.replace(advantages=b.advantages.at[:2].set(0))
    updater.update(state, b)
    assert len(ran) >= (3 if kind == "zero signal" else 2)
    assert set(ran) <= texts
    assert (kept_bytes(updater, *shapes) > 0) == (kind != "padded")


@pytest.mark.quick
def test_the_names_say_what_a_program_is_for():
    updater, state = case("entropy")
    listed = update_programs(updater, state, batch())
    names = [program.name for program in listed.by_length]
    assert len(set(names)) == len(names)
    assert {name.split()[0] for name in names} == {"update", "score"}
    assert any(name.endswith("with entropy") for name in names)
    assert listed.update.name in names, "the largest is one of them"
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(listed.update.arguments[1]))


@pytest.mark.quick
def test_halves_are_the_first_that_is_compiled(monkeypatch):
    """They are chosen most often where a batch may be packed in them; what is read at a time stays the larger size."""
    updater, state = case("packed")
    monkeypatch.setattr(packed, "CPU_TOKENS", 24)
    monkeypatch.setattr(packing, "BLOCK", 4)
    for least, sizes in ((12, ["12", "24", "24"]), (13, ["24", "24"])):
        monkeypatch.setattr(packing, "HALF", least)
        listed = update_programs(updater, state, batch())
        found = [program.name.split()[1] for program in listed.by_length if program.name.startswith("update")]
        assert found == sizes
        assert listed.update.name.split()[1] == "24"
