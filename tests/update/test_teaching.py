"""The teacher in an update: the gradient of divergences of whole logits, whatever the layout and the models."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import tiny_model

from grpo_jax import Batch, GRPOConfig, make_prompts
from grpo_jax.devices.sharding import make_mesh, place
from grpo_jax.models import packing
from grpo_jax.types import as_argument
from grpo_jax.update import packed
from grpo_jax.update.packed import PackedUpdater, choose_updater
from grpo_jax.update.state import create_state
from grpo_jax.update.step import PaddedUpdater
from grpo_jax.update.teaching import Teacher, compare_padded

LISTS = [[3, 4, 5], [6], [7, 8], [9, 3]]
B, G, T, V = 4, 2, 12, 24
SGD = optax.sgd(1.0)  # params move by minus the gradient, which makes it visible
CONFIG = GRPOConfig(max_completion_length=T, max_grad_norm=0, distillation_coef=0.7, temperature=0.8)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 4 tokens and sequences of 16: completions of 12 reach over several blocks, batches over sequences."""
    monkeypatch.setattr(packing, "BLOCK", 4)
    monkeypatch.setattr(packed, "CPU_TOKENS", 16)


@dataclasses.dataclass(frozen=True)
class Bare:
    """A model without a cache."""

    model: object

    def apply(self, variables, tokens):
        return self.model.apply(variables, tokens)


def batch(**changes) -> Batch:
    keys = jax.random.split(jax.random.key(0))
    given = {
        "prompts": make_prompts(LISTS),
        "tokens": jax.random.randint(keys[1], (B, G, T), 0, V),
        "mask": jnp.arange(T).reshape(1, 1, T) < jax.random.randint(keys[0], (B, G, 1), 0, T + 1),
        "advantages": jnp.zeros((B, G)),
        "sampling_log_probs": jnp.full((B, G, T), -3.0),
    }
    return Batch(**{**given, **changes})


def distributions(model, params, prompts, tokens):
    """[B, G, T, V] probabilities by whole logits, each completion written out behind its prompt."""
    rows = np.zeros((B * G, 4 + T), np.int32)
    for i, prompt in enumerate(prompts):
        rows[i, : len(prompt) + T] = [*prompt, *tokens[i]]
    logits = model.apply({"params": params}, rows)[..., :V] / CONFIG.temperature
    starts = jnp.array([len(prompt) - 1 for prompt in prompts])
    own = jax.vmap(lambda x, start: jax.lax.dynamic_slice_in_dim(x, start, T))(logits, starts)
    return jax.nn.softmax(own).reshape(B, G, T, V)


FORMULAS = {
    "reverse_kl": lambda p, q: jnp.sum(p * jnp.log(p / q), -1),
    "forward_kl": lambda p, q: jnp.sum(q * jnp.log(q / p), -1),
    "jsd": lambda p, q: (
        0.3 * jnp.sum(q * jnp.log(q / (0.7 * p + 0.3 * q)), -1)
        + 0.7 * jnp.sum(p * jnp.log(p / (0.7 * p + 0.3 * q)), -1)
    ),
}


BASE = batch()


def by_whole_logits(model, params):
    """Distributions [B, G, T, V], row by row."""
    asked = [prompt for prompt in LISTS for _ in range(G)]
    return distributions(model, params, asked, np.asarray(BASE.tokens).reshape(-1, T))


def reduced(far):
    return 0.7 * jnp.sum(jnp.where(BASE.mask, far, 0)) / BASE.mask.sum()


def expected(kind, teacher):
    """Loss and gradient by whole logits."""
    model, params = tiny_model()
    loss = lambda params: reduced(FORMULAS[kind](by_whole_logits(model, params), by_whole_logits(*teacher)))
    return jax.jit(jax.value_and_grad(loss))(params)


@functools.cache
def larger():
    """A teacher of another shape, whose vocabulary is padded by more."""
    return tiny_model(vocab=V + 8, layers=3, seed=3)


# The divergences differ in the loss alone, and the layouts in the forward pass alone.
CASES = [("packed", kind) for kind in FORMULAS]
CASES += [(layout, "jsd") for layout in ("padded", "padded student", "padded teacher")]


@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_an_update_follows_the_gradient_of_the_divergence_of_whole_distributions(layout, kind):
    """An update follows the divergence of whole logits: packed and padded, larger teachers, prompts of their own,
    quantized, log-probs that were told, on a mesh.
    """
    model, params = tiny_model()
    alpha = {"distillation_alpha": 0.3} if kind == "jsd" else {}
    config = dataclasses.replace(CONFIG, distillation_divergence=kind, **alpha)
    theirs, held = larger()
    teacher = Teacher(as_argument(Bare(theirs) if layout == "padded teacher" else theirs), held)
    micro = (2, G)
    if layout == "packed" or "teacher" in layout:
        updater = choose_updater(model, config, micro=micro, optimizer=SGD, teacher=teacher)
    else:
        student = as_argument(Bare(model) if "student" in layout else model)
        updater = PaddedUpdater(student, config, micro, SGD, teacher=teacher)
    assert isinstance(updater, PackedUpdater if layout == "packed" else PaddedUpdater)
    grads, sums = updater.gradients(create_state(params, SGD, jax.random.key(0)), batch())
    loss, gradient = expected(kind, (theirs, held))
    np.testing.assert_allclose(sums.sums["distillation_loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(sums.sums["loss"], loss, rtol=1e-5)
    chex.assert_trees_all_close(grads, gradient, atol=1e-5)


def drawn(p):
    return jnp.log(jnp.take_along_axis(p, BASE.tokens[..., None], -1)[..., 0])


TOLD = -2 - jnp.abs(jax.random.normal(jax.random.key(7), (B, G, T)))
TOP = jax.random.split(jax.random.key(8), B * G * T)
TOP_IDS = jax.vmap(lambda key: jax.random.permutation(key, V)[:3])(TOP).reshape(B, G, T, 3)
TOP_LOG_PROBS = jnp.log(jnp.broadcast_to(jnp.array([0.5, 0.2, 0.1]), (B, G, T, 3)))


def by_drawn_token(params):
    p = by_whole_logits(tiny_model()[0], params)
    return reduced(jax.lax.stop_gradient(drawn(p) - TOLD) * drawn(p))


def by_top_tokens(params):
    p = jnp.take_along_axis(by_whole_logits(tiny_model()[0], params), TOP_IDS, -1)
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


@pytest.mark.parametrize(("mode", "packs"), [("sampled_token", True), ("topk_logits", True), ("topk_logits", False)])
def test_an_update_follows_log_probs_that_a_teacher_has_told(mode, packs):
    loss, settings, told = TELLERS[mode]
    model, params = tiny_model()
    config = dataclasses.replace(CONFIG, distillation_mode=mode, **settings)
    updater = (PackedUpdater if packs else PaddedUpdater)(as_argument(model), config, (2, G), SGD)
    grads, _ = updater.gradients(create_state(params, SGD, jax.random.key(0)), batch(**told))
    chex.assert_trees_all_close(grads, jax.jit(jax.grad(loss))(params), atol=1e-5)


@pytest.mark.quick
def test_without_a_teacher_nothing_is_compared():
    assert compare_padded(None, BASE, CONFIG) is None


def test_on_a_mesh_the_gradient_is_that_of_one_device():
    model, params = tiny_model()
    theirs, held = larger()
    mesh = make_mesh({"data": 2, "fsdp": 2})
    grads = []
    for here in (None, mesh):
        model_there = as_argument(model if here is None else tiny_model(mesh=mesh)[0])
        teacher_there = theirs if here is None else tiny_model(vocab=V + 8, layers=3, seed=3, mesh=mesh)[0]
        teacher = Teacher(as_argument(teacher_there), place(held, here))
        updater = PackedUpdater(model_there, CONFIG, (4, G), SGD, mesh=here, teacher=teacher)
        state = place(create_state(params, SGD, jax.random.key(0)), here)
        grads.append(updater.gradients(state, batch())[0])
    chex.assert_trees_all_close(jax.tree.map(np.asarray, grads[1]), grads[0], atol=1e-5)
