"""The choice between the packed and the padded update, and minibatches without trained tokens."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_generate import Bare
from test_packed import G, T, batch
from tiny import tiny_model

from grpo_jax import GRPOConfig
from grpo_jax.update.packed import PackedUpdater, choose_updater
from grpo_jax.update.state import create_state
from grpo_jax.update.step import Updater

CONFIG = GRPOConfig(beta=0.1, max_completion_length=T, max_grad_norm=0)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("bare", "devices", "kind"),
    [(False, 0, PackedUpdater), (False, 1, PackedUpdater), (False, 2, PackedUpdater), (True, 0, Updater)],
)
def test_choice_of_packed_or_padded_updates(bare, devices, kind):
    model = tiny_model(layers=1)[0]
    mesh = jax.make_mesh((devices,), ("data",)) if devices else None
    updater = choose_updater(Bare(model) if bare else model, CONFIG, micro_shape=(4, G), mesh=mesh)
    assert type(updater) is kind
    assert updater.on_policy is CONFIG.on_policy is True
    assert updater.mesh is (mesh if devices > 1 else None)
    assert choose_updater(model, GRPOConfig(num_iterations=2), micro_shape=(4, G)).on_policy is False


@pytest.mark.parametrize("bare", [False, True], ids=["packed", "padded"])
def test_minibatch_without_a_trained_token_changes_nothing(bare):
    """A fully masked minibatch counts as a step but changes neither params, optimizer state nor entropy coefficient."""
    model, params = tiny_model(layers=1)
    adamw = optax.adamw(0.01, weight_decay=0.1)
    config = GRPOConfig(
        beta=0.1, max_completion_length=T, use_adaptive_entropy=True, entropy_coef=0.1, entropy_target=9
    )
    how = {"micro_shape": (4, G), "optimizer": adamw}
    updater = choose_updater(Bare(model) if bare else model, config, **how).replace(on_policy=False)
    masked = jnp.zeros((4, G, T), bool)
    truncated = batch(seed=1, mask=masked)
    fillers = batch(seed=2, mask=masked, counted=jnp.zeros(4, bool))

    def after(*batches):
        given = jax.tree.map(np.array, params)
        state, found = create_state(given, adamw, jax.random.key(0), keep_reference=True, entropy_coef=0.1), []
        for one in batches:
            state, metrics = updater.update(state, one)
            found.append({name: float(value) for name, value in metrics.items()})
        return state, found

    (alone, _), (between, found) = after(batch(), batch()), after(batch(), truncated, fillers, batch())
    chex.assert_trees_all_equal(alone.replace(step=0, key=0), between.replace(step=0, key=0))
    assert (int(alone.step), int(between.step), int(between.skipped)) == (2, 4, 0)
    assert float(alone.entropy_coef) == pytest.approx(0.11)
    for metrics in found[1:3]:
        assert metrics["tokens"] == metrics["update_skipped"] == metrics["selected_tokens"] == 0
        measured = {name for name, value in metrics.items() if not np.isnan(value)} - {"padding_share"}
        counts = {"tokens", "rows", "selected_tokens", "kl_bounded_tokens", "update_skipped"}
        assert measured == counts | {"entropy_coef"}
    assert not any(np.isnan(list(found[3].values())))
