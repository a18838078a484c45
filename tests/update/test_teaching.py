"""Updates with a teacher: the gradient of the divergence over full logits, for all layouts and models."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_generate import Bare
from test_packed import LISTS, G, T, small_blocks  # noqa: F401
from test_packed import batch as random_batch
from tiny import tiny_model

from grpo_jax import GRPOConfig
from grpo_jax.maths.surrogates import sampler_weights
from grpo_jax.models.scoring import Scores
from grpo_jax.models.sharding import make_mesh, place
from grpo_jax.models.transformer import Transformer
from grpo_jax.run.teacher import TeacherScoring
from grpo_jax.types import as_jit_argument
from grpo_jax.update.objective import Teacher, compute_loss, count_totals, make_fn_of_logits
from grpo_jax.update.packed import PackedUpdater, choose_updater
from grpo_jax.update.state import create_state
from grpo_jax.update.step import Updater

B, V = 4, 24
SGD = optax.sgd(1.0)  # params change by exactly minus the gradient
CONFIG = GRPOConfig(max_completion_length=T, max_grad_norm=0, distillation_coef=0.7, temperature=0.8)


FORMULAS = {
    "reverse_kl": lambda p, q: jnp.sum(p * jnp.log(p / q), -1),
    "forward_kl": lambda p, q: jnp.sum(q * jnp.log(q / p), -1),
    "jsd": lambda p, q: (
        0.3 * jnp.sum(q * jnp.log(q / (0.7 * p + 0.3 * q)), -1)
        + 0.7 * jnp.sum(p * jnp.log(p / (0.7 * p + 0.3 * q)), -1)
    ),
}
reduced = lambda far: 0.7 * jnp.sum(jnp.where(BASE.mask, far, 0)) / BASE.mask.sum()
drawn = lambda p: jnp.log(jnp.take_along_axis(p, BASE.tokens[..., None], -1)[..., 0])


def batch(**told):
    """Return a batch with zero advantages."""
    return random_batch(advantages=np.zeros((B, G), np.float32), ref_log_probs=None, **told)


BASE = batch()
STUDENT, PARAMS = tiny_model(layers=1)


def by_whole_logits(model, params):
    """Return probabilities [B, G, T, V] from full logits, with each completion appended to its prompt."""
    prompts = [prompt for prompt in LISTS for _ in range(G)]
    rows = np.zeros((B * G, 4 + T), np.int32)
    for row, prompt, tokens in zip(rows, prompts, np.asarray(BASE.tokens).reshape(-1, T), strict=True):
        row[: len(prompt) + T] = [*prompt, *tokens]
    logits = model.apply({"params": params}, rows)[..., :V] / CONFIG.temperature
    starts = jnp.array([len(prompt) - 1 for prompt in prompts])
    own = jax.vmap(lambda x, start: jax.lax.dynamic_slice_in_dim(x, start, T))(logits, starts)
    return jax.nn.softmax(own).reshape(B, G, T, V)


@functools.cache
def expected(kind):
    """Return the loss and its gradient from full logits."""
    loss = lambda params: reduced(FORMULAS[kind](by_whole_logits(STUDENT, params), by_whole_logits(*larger())))
    return jax.jit(jax.value_and_grad(loss))(PARAMS)


@functools.cache
def larger():
    """Return a teacher with more layers and a vocabulary with more padding."""
    return tiny_model(vocab=V + 8, layers=2, seed=3)


# Divergences differ only in the loss, and layouts only in the forward pass, so not every pair is tested.
CASES = [("packed", kind) for kind in FORMULAS]
CASES += [(layout, "jsd") for layout in ("padded student", "padded teacher")]


@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_update_follows_the_gradient_of_the_full_divergence(layout, kind):
    """An update follows the gradient of the divergence over full logits, for packed and padded students and teachers,
    with a teacher that has another shape.
    """
    alpha = {"distillation_alpha": 0.3} if kind == "jsd" else {}
    config = dataclasses.replace(CONFIG, distillation_divergence=kind, **alpha)
    theirs, held = larger()
    teacher = Teacher(as_jit_argument(Bare(theirs) if layout == "padded teacher" else theirs), held)
    micro_shape = (2, G)
    if layout == "packed" or "teacher" in layout:
        updater = choose_updater(STUDENT, config, micro_shape=micro_shape, optimizer=SGD, teacher=teacher)
    else:
        updater = Updater(as_jit_argument(Bare(STUDENT)), config, micro_shape, SGD, teacher=teacher)
    assert isinstance(updater, PackedUpdater if layout == "packed" else Updater)
    grads, sums = updater.gradients(create_state(PARAMS, SGD, jax.random.key(0)), batch())
    loss, gradient = expected(kind)
    np.testing.assert_allclose(sums.sums["distillation_loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(sums.sums["loss"], loss, rtol=1e-5)
    chex.assert_trees_all_close(grads, gradient, atol=1e-5)


RNG = np.random.default_rng(7)
TOLD = jnp.asarray(-2 - np.abs(RNG.normal(size=(B, G, T))), jnp.float32)
TOP_IDS = jnp.asarray(RNG.permuted(np.tile(np.arange(V), (B, G, T, 1)), axis=-1)[..., :3], jnp.int32)
TOP_LOG_PROBS = jnp.asarray(np.log(np.tile([0.5, 0.2, 0.1], (B, G, T, 1))), jnp.float32)


def by_drawn_token(params):
    p = by_whole_logits(STUDENT, params)
    return reduced(jax.lax.stop_gradient(drawn(p) - TOLD) * drawn(p))


def by_top_tokens(params):
    p = jnp.take_along_axis(by_whole_logits(STUDENT, params), TOP_IDS, -1)
    p, q = (jnp.concatenate([x, 1 - x.sum(-1, keepdims=True)], -1) for x in (p, jnp.exp(TOP_LOG_PROBS)))
    return reduced(jnp.sum(q * jnp.log(q / p), -1))


TELLERS = {
    "sampled_token": (by_drawn_token, {}, {"teacher_log_probs": TOLD}),
    "topk_logits": (
        by_top_tokens,
        {"distillation_topk": 3, "distillation_divergence": "forward_kl"},
        {"teacher_top_ids": TOP_IDS, "teacher_top_log_probs": TOP_LOG_PROBS},
    ),
}


@pytest.mark.parametrize(
    ("mode", "packs"),
    [pytest.param("sampled_token", True, marks=pytest.mark.quick), ("topk_logits", True), ("topk_logits", False)],
)
def test_update_follows_log_probs_from_an_external_teacher(mode, packs):
    loss, settings, told = TELLERS[mode]
    config = dataclasses.replace(CONFIG, distillation_mode=mode, **settings)
    updater = (PackedUpdater if packs else Updater)(as_jit_argument(STUDENT), config, (2, G), SGD)
    grads, _ = updater.gradients(create_state(PARAMS, SGD, jax.random.key(0)), batch(**told))
    chex.assert_trees_all_close(grads, jax.jit(jax.grad(loss))(PARAMS), atol=1e-5)


@pytest.mark.quick
@pytest.mark.parametrize("mode", ["token_truncate", "sequence_truncate"])
def test_sampled_divergence_is_weighted_if_an_engine_drew_the_tokens(mode):
    """Without the weights π_old / π_sampler, it does not estimate the reverse KL."""
    config = dataclasses.replace(CONFIG, distillation_mode="sampled_token", sampler_correction=mode)
    l = jnp.asarray(np.random.default_rng(3).normal(-2, 0.2, BASE.mask.shape), jnp.float32)
    part = batch(teacher_log_probs=TOLD).replace(old_log_probs=l)
    w = sampler_weights(l, part.sampling_log_probs, part.mask, mode=mode).reshape(B, G, -1)
    scores, state = Scores(l, l), create_state({"w": jnp.ones(2)}, SGD, jax.random.key(0))
    _, metrics = compute_loss(scores, part, state, count_totals(part), config=config, on_policy=True)
    np.testing.assert_allclose(metrics.sums["distillation_loss"], reduced(w * (l - TOLD)), rtol=1e-5)


@pytest.mark.quick
def test_top_ids_beyond_the_vocabulary_count_as_other_tokens():
    """A teacher's vocabulary may have more padding; gathering a logit beyond the policy's would give NaN."""
    logits, q = jnp.linspace(0, 1, 4), jnp.log(jnp.array([0.3, 0.2, 0.4]))
    of = lambda at: make_fn_of_logits(CONFIG, logits, top_ids=jnp.array([2, 0, 4])[:at], top_log_probs=q[:at])
    (alone, known), (alone, more) = of(2), of(3)
    np.testing.assert_allclose(alone(logits, *more), alone(logits, *known), rtol=1e-6)


def test_teacher_gradient_on_a_mesh_equals_that_of_one_device():
    mesh = make_mesh({"data": 2, "fsdp": 2})
    grads = []
    for here in (None, mesh):
        student, teacher = (Transformer(dataclasses.replace(x.config, mesh=here)) for x in (STUDENT, larger()[0]))
        teacher = Teacher(as_jit_argument(teacher), place(larger()[1], here))
        updater = PackedUpdater(as_jit_argument(student), CONFIG, (4, G), SGD, mesh=here, teacher=teacher)
        state = place(create_state(PARAMS, SGD, jax.random.key(0)), here)
        grads.append(updater.gradients(state, batch())[0])
    chex.assert_trees_all_close(jax.tree.map(np.asarray, grads[1]), grads[0], atol=1e-5)


@pytest.mark.parametrize("packs", [True, False])
def test_tokens_beyond_the_teachers_vocabulary_are_not_compared(packs):
    """The policy's vocabulary may have more padding. Such an id has no embedding in the teacher: its state is NaN."""
    model, params = tiny_model(vocab=V - 4, layers=1, seed=3)
    part, teacher = batch(), Teacher(as_jit_argument(model), params)
    assert (np.asarray(part.tokens)[np.asarray(part.mask)] >= V - 4).any()
    updater = (PackedUpdater if packs else Updater)(as_jit_argument(STUDENT), CONFIG, (2, G), SGD, teacher=teacher)
    grads, sums = updater.gradients(create_state(PARAMS, SGD, jax.random.key(0)), part)
    chex.assert_tree_all_finite((grads, sums.sums["distillation_loss"]))
    config = dataclasses.replace(CONFIG, distillation_mode="sampled_token")
    distillation = TeacherScoring(teacher, (PackedUpdater if packs else Updater)(teacher.model, config, (2, G)))
    told = distillation.add_log_probs(jax.tree.map(np.asarray, part), part, config).teacher_log_probs
    beyond = np.asarray(part.tokens) >= V - 4
    np.testing.assert_array_equal(told[beyond], np.asarray(part.sampling_log_probs)[beyond])
    assert np.isfinite(told).all()
