"""The one choice of a run: packed where the model allows it on one device, padded elsewhere; the same numbers."""

import jax
import numpy as np
import pytest
from test_packed import OPTIMIZER, G, T, batch
from tiny import tiny_model

from grpo_jax import GRPOConfig
from grpo_jax.update.packed import PackedUpdater
from grpo_jax.update.state import create_state
from grpo_jax.update.updater import PaddedUpdater, choose_updater

CONFIG = GRPOConfig(beta=0.1, max_completion_length=T, max_grad_norm=0)


class Bare:
    """A model that has `apply` and nothing else."""

    def __init__(self, model):
        self.model = model

    def apply(self, variables, tokens):
        return self.model.apply(variables, tokens)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("bare", "devices", "kind"),
    [(False, 0, PackedUpdater), (False, 1, PackedUpdater), (False, 2, PackedUpdater), (True, 0, PaddedUpdater)],
)
def test_what_is_packed(bare, devices, kind):
    model = tiny_model()[0]
    mesh = jax.make_mesh((devices,), ("data",)) if devices else None
    updater = choose_updater(Bare(model) if bare else model, CONFIG, micro=(4, G), mesh=mesh)
    assert type(updater) is kind
    assert updater.on_policy is CONFIG.on_policy is True
    assert updater.mesh is (mesh if devices > 1 else None)
    assert choose_updater(model, GRPOConfig(num_iterations=2), micro=(4, G)).on_policy is False


def test_both_kinds_have_the_same_numbers():
    model, params = tiny_model()
    b, results = batch(), []
    for one in (model, Bare(model)):
        updater = choose_updater(one, CONFIG, micro=(4, G), optimizer=OPTIMIZER, on_policy=False)
        scores = updater.score(params, b.prompts, b.tokens, b.mask)
        state = create_state(jax.tree.map(np.array, params), OPTIMIZER, jax.random.key(0), keep_reference=True)
        state, metrics = updater.update(state, b)
        results.append((scores, state.params, {k: v for k, v in metrics.items() if k != "padding_share"}))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), *results)
    assert "padding_share" not in metrics, "nothing is packed there"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("longest", "largest", "expected"),
    [(64, 64, 64), (33, 64, 64), (32, 64, 32), (9, 64, 16), (3, 64, 8), (5, 96, 12), (70, 100, 100), (50, 100, 50)],
)
def test_buckets_hold_the_longest_and_are_few(longest, largest, expected):
    updater = PaddedUpdater(None, GRPOConfig(max_completion_length=largest), (4, G))
    assert updater.columns(longest) == expected
