"""The objective of a batch: its terms, their weights and gradients. test_step covers micro-batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_packed import OPTIMIZER, G, T, batch

from grpo_jax import GRPOConfig
from grpo_jax.maths.metrics import finalize_metrics, merge_metrics
from grpo_jax.models.config import TransformerConfig
from grpo_jax.models.scoring import Scores
from grpo_jax.models.transformer import Transformer
from grpo_jax.update.objective import compute_loss, count_totals, has_entropy_bonus, router_loss_coef_of
from grpo_jax.update.state import create_state
from grpo_jax.update.step import Updater, apply_gradients

state_of = lambda **settings: create_state({"w": jnp.ones(2)}, OPTIMIZER, jax.random.key(0), **settings)


def case(**changes):
    """Return a batch, and log-probs and entropies [B, G, T]."""
    l, h = np.random.default_rng(0).normal(-2, 0.3, (2, 4, G, T)).astype(np.float32)
    return batch(prompts=None, **changes), jnp.asarray(l), jnp.asarray(-h)


def test_load_balancing_loss_is_weighted_by_tokens():
    """Parts with 1/4 and 3/4 of the tokens and losses 2 and 4 add their weighted mean 3.5, times the factor 0.1."""
    mask = jnp.asarray(np.arange(T) < np.array([2, 5, 1, 0])[:, None, None])
    batch, log_probs, entropies = case()
    one = lambda x: x[:, :1]
    batch = jax.tree.map(one, batch).replace(mask=mask)
    config, state = GRPOConfig(max_completion_length=T), state_of()
    totals = count_totals(batch)

    @jax.jit
    def of(rows, router_loss=None):
        scores, part = (
            Scores(one(log_probs)[rows], one(entropies)[rows], router_loss),
            jax.tree.map(lambda x: x[rows], batch),
        )
        return compute_loss(scores, part, state, totals, config=config, on_policy=True, router_loss_coef=0.1)

    first, rest = jnp.array([0]), jnp.array([1, 2, 3])
    grad = jax.grad(lambda x, rows: of(rows, x)[0])
    np.testing.assert_allclose((grad(2.0, first), grad(4.0, rest)), (0.1 / 4, 0.3 / 4), rtol=1e-6)
    parts = [of(first, jnp.float32(2)), of(rest, jnp.float32(4))]
    metrics = finalize_metrics(merge_metrics(parts[0][1], parts[1][1]))
    np.testing.assert_allclose(metrics["aux_loss"], 3.5, rtol=1e-6)
    without = of(first)[0] + of(rest)[0]
    np.testing.assert_allclose(parts[0][0] + parts[1][0], without + 0.35, rtol=1e-6)
    np.testing.assert_allclose(metrics["loss"], without + 0.35, rtol=1e-6)


@pytest.mark.quick
def test_load_balancing_factor_defaults_to_that_of_the_checkpoint():
    experts = TransformerConfig(24, 16, 32, 2, 2, 1, 8, num_experts=4, num_experts_per_token=2, router_loss_coef=0.001)
    dense = TransformerConfig(24, 16, 32, 2, 2, 1, 8)
    of = lambda shape, given: router_loss_coef_of(Transformer(shape), GRPOConfig(router_aux_loss_coef=given))
    assert [of(experts, given) for given in (None, 0.0, 0.5)] == [0.001, 0.0, 0.5]
    assert of(dense, None) == of(dense, 0.0) == router_loss_coef_of(lambda tokens: tokens, GRPOConfig()) == 0


def test_entropy_has_a_gradient_only_with_a_bonus():
    batch, log_probs, entropies = case()
    for coef, moves in ((0.0, False), (0.3, True)):
        config = GRPOConfig(max_completion_length=T, entropy_coef=coef)
        assert has_entropy_bonus(config) == moves
        loss = lambda h, config=config, coef=coef: compute_loss(
            Scores(log_probs, h), batch, state_of(entropy_coef=coef), count_totals(batch), config=config, on_policy=True
        )[0]
        assert bool(jnp.any(jax.grad(loss)(entropies) != 0)) == moves
    assert has_entropy_bonus(GRPOConfig(use_adaptive_entropy=True))


@pytest.mark.quick
def test_filler_groups_are_not_counted():
    """Filler groups, which only complete the batch, do not count in the losses' denominators."""
    batch, *_ = case()
    counted = jnp.array([True, True, False, False])
    filled = batch.replace(mask=batch.mask & counted[:, None, None], counted=counted)
    two = jax.tree.map(lambda x: x[:2], batch)
    assert jax.tree.map(int, count_totals(filled)) == jax.tree.map(int, count_totals(two))


@pytest.mark.parametrize(
    ("gradient", "target", "after"), [(0.1, 10.0, (0.105, 0.105)), (0.1, 0.0, (0.095, 0.0)), (np.nan, 10.0, (0.1, 0.0))]
)
def test_adaptive_coefficient_follows_the_entropy_unless_the_update_is_skipped(gradient, target, after):
    config = GRPOConfig(use_adaptive_entropy=True, entropy_coef=0.1, entropy_coef_delta=0.005, entropy_target=target)
    batch, *scores = case()
    state = state_of(entropy_coef=0.1, entropy_bonus=0.0)
    totals = count_totals(batch)
    _, sums = compute_loss(Scores(*scores), batch, state, totals, config=config, on_policy=True)
    updater = Updater(None, config, (1, 1), OPTIMIZER)
    state, metrics = apply_gradients(updater, state, {"w": jnp.full(2, gradient)}, sums)
    assert float(metrics["entropy_bonus"]) == 0, "the first update has no bonus"
    np.testing.assert_allclose((state.entropy_coef, state.entropy_bonus), after, rtol=1e-6)
