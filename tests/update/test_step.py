"""The padded update: it follows the gradient of `grpo_loss` for any split into micro-batches."""

import dataclasses
import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_packed import JITTED, LISTS, OPTIMIZER, T, batch
from test_scoring import whole_logits
from tiny import tiny_model

from grpo_jax import GRPOConfig, grpo_loss
from grpo_jax.maths.surrogates import sampler_weights
from grpo_jax.types import as_jit_argument
from grpo_jax.update.objective import loss_settings
from grpo_jax.update.state import create_state
from grpo_jax.update.step import Updater

config = lambda **changes: GRPOConfig(**{"beta": 0.1, "max_completion_length": T, "max_grad_norm": 0, **changes})


@functools.cache
def model_and_params():
    return tiny_model(layers=1)


def step(batch, config, micro_shape=None, on_policy=False, **keep):
    model, params = model_and_params()
    state = create_state(params, OPTIMIZER, jax.random.key(0), keep_reference=True, **keep)
    settings = {"optimizer": OPTIMIZER, "config": config, "on_policy": on_policy, "micro_shape": micro_shape}
    return JITTED(state, batch, model=as_jit_argument(model), **settings)


@jax.jit
def plain_log_probs(params, tokens):
    return whole_logits(model_and_params()[0], params, tokens, lists=LISTS)


@pytest.mark.parametrize(("loss_type", "corrects"), [("grpo", False), ("dapo", True)])
def test_params_change_by_the_gradient_of_grpo_loss(loss_type, corrects):
    """An SGD step changes params by minus the gradient of `grpo_loss`, with and without sampler correction."""
    _, params = model_and_params()
    b, bounds = batch(), {"clip_max": 1.2, "clip_min": 0.8}
    c = config(
        loss_type=loss_type, sampler_correction="token_mask", sampler_correction_max=1.2, sampler_correction_min=0.8
    )
    old, settings = b.sampling_log_probs, vars(loss_settings(c))
    if corrects:
        old = jnp.asarray(-3 + 0.3 * np.random.default_rng(1).normal(size=old.shape), jnp.float32)
        b = b.replace(old_log_probs=old)
        settings["importance_weights"] = sampler_weights(old, b.sampling_log_probs, b.mask, mode="token_mask", **bounds)

    def objective(params):
        l = plain_log_probs(params, b.tokens)
        return grpo_loss(l, old, b.ref_log_probs, b.advantages, b.mask, **settings)[0]

    loss, grads = jax.jit(jax.value_and_grad(objective))(params)
    state, metrics = step(b, c)
    assert float(metrics["loss"]) == pytest.approx(float(loss), abs=1e-6)
    assert float(metrics["grad_norm"]) == pytest.approx(float(optax.tree.norm(grads)), rel=1e-4)
    chex.assert_trees_all_close(state.params, jax.tree.map(jnp.subtract, params, grads), atol=2e-5)
    gap = jnp.where(b.mask, jnp.abs(plain_log_probs(params, b.tokens) - b.sampling_log_probs), 0).max()
    assert float(metrics["sampler_gap"]) == pytest.approx(float(gap), rel=1e-4)


@pytest.mark.parametrize("settings", [
    {"loss_type": "dapo", "entropy_coef": 0.1, "top_entropy_quantile": 0.5},
    {"loss_type": "bnpo", "importance_sampling_level": "sequence"},
], ids=lambda settings: settings["loss_type"])  # fmt: skip
def test_update_does_not_depend_on_micro_batches(settings):
    b, c = batch(), config(**settings)
    (whole, metrics), (state, others) = (step(b, c, micro_shape=micro_shape) for micro_shape in ((4, 4), (2, 1)))
    chex.assert_trees_all_close(state.params, whole.params, atol=1e-5)
    assert others.keys() == metrics.keys()
    for name, value in metrics.items():
        np.testing.assert_allclose(others[name], value, atol=1e-5, rtol=1e-4, err_msg=name)


def test_bfloat16_gradients_of_micro_batches_are_summed_in_float32():
    model, params = model_and_params()
    state = create_state(jax.tree.map(lambda x: x.astype(jnp.bfloat16), params), OPTIMIZER, jax.random.key(0))
    b = batch(ref_log_probs=None)
    # The loss divides by totals of the whole batch, so a part is the batch with all other advantages set to 0.
    updater = Updater(as_jit_argument(model), config(beta=0.0), micro_shape=(4, 4))
    total, _ = updater.replace(micro_shape=(1, 4)).gradients(state, b)
    own = lambda i: b.replace(advantages=jnp.where(jnp.arange(4)[:, None] == i, b.advantages, 0.0))
    parts = [updater.gradients(state, own(i))[0] for i in range(4)]
    assert {x.dtype for x in jax.tree.leaves(parts)} == {jnp.dtype("bfloat16")}
    expected = jax.tree.map(lambda *x: sum(np.asarray(y, np.float32) for y in x), *parts)
    chex.assert_trees_all_equal_dtypes(total, jax.tree.map(jnp.asarray, expected))
    for x, y in zip(jax.tree.leaves(total), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(x - y) < 0.01 * np.linalg.norm(y)


def test_score_returns_log_probs_for_any_params():
    model, params = model_and_params()
    b = batch()
    expected = jnp.where(b.mask, plain_log_probs(params, b.tokens), 0)
    for micro_shape in ((4, 4), (1, 4)):
        got = Updater(as_jit_argument(model), config(), micro_shape).log_probs(params, b.prompts, b.tokens, b.mask)
        np.testing.assert_allclose(got, expected, atol=1e-5)


def test_on_policy_means_a_ratio_of_one():
    """If the sampler's log-probs equal the trainer's, on_policy=True and on_policy=False take the same step."""
    _, params = model_and_params()
    b = batch()
    own = jnp.where(b.mask, plain_log_probs(params, b.tokens), 0)
    b = b.replace(sampling_log_probs=own, initial_log_probs=own, ref_log_probs=own - 0.5)
    one, metrics = step(b, config(), on_policy=True)
    other, others = step(b, config(), on_policy=False)
    chex.assert_trees_all_close(one.params, other.params, atol=1e-5)
    assert float(metrics["ratio_max"]) == 1.0
    assert float(others["sampler_gap"]) < 1e-5
    assert float(others["ratio_max"]) == pytest.approx(1.0, abs=1e-5)
    assert float(metrics["kl_initial"]) == pytest.approx(0, abs=1e-6)
    assert float(metrics["kl"]) == pytest.approx(np.exp(-0.5) - 1 + 0.5, rel=1e-3)
    _, metrics = step(b.replace(ref_log_probs=None), config(beta=0.0), on_policy=True)
    assert [name for name in metrics if name.startswith("kl")] == ["kl_initial"]


@pytest.mark.quick
def test_every_loss_field_of_the_config_reaches_the_loss():
    """Every config field that is an argument of `grpo_loss` is passed to it."""
    changed = config(epsilon=0.11, epsilon_high=0.33, delta=4.0, kl_estimator="k2", off_policy_mask_threshold=0.5)
    given = dict(vars(loss_settings(changed)))
    assert given["epsilon"] == 0.11
    assert given.pop("surrogate") is None, "surrogate is not a field of the config"
    assert all(value == getattr(changed, name) for name, value in given.items())
    assert given.keys() == {f.name for f in dataclasses.fields(GRPOConfig)} & set(LOSS_ARGUMENTS) - {"entropy_coef"}


LOSS_ARGUMENTS = inspect.signature(grpo_loss).parameters
