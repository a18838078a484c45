"""The packed update equals the plain `train_step` for all lengths, settings and models, and is used where possible."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_generate import Bare
from tiny import tiny_model, tiny_policy

from grpo_jax import Batch, GRPOConfig, add_lora, make_prompts
from grpo_jax.models import packing
from grpo_jax.models.config import ConvShape, DeltaShape
from grpo_jax.models.experts import router_loss
from grpo_jax.models.sharding import commit_to_devices
from grpo_jax.types import as_jit_argument, join_rows
from grpo_jax.update import packed
from grpo_jax.update.packed import PackedUpdater, choose_updater
from grpo_jax.update.state import create_state
from grpo_jax.update.step import Updater, train_step

LISTS = [[3, 4, 5], [6], [7, 8], [9, 3]]
G, T = 4, 12
JITTED = jax.jit(train_step, static_argnames=("optimizer", "config", "on_policy", "micro_shape"))
DELTA = DeltaShape(key_heads=2, value_heads=4, key_dim=6, value_dim=5, kernel=3)
OPTIMIZER = optax.sgd(1.0)  # params change by exactly minus the gradient
both = lambda *given, **how: [step(*given, **how, packs=packs) for packs in (False, True)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Use blocks of 4 and sequences of 16 tokens, so that completions of 12 span blocks and batches span sequences."""
    monkeypatch.setattr(packing, "BLOCK", 4)
    monkeypatch.setattr(packed, "CPU_TOKENS", 16)
    monkeypatch.setattr(packed, "CPU_CAST_TOKENS", 16)  # the size for bfloat16 on CPUs with matrix units


def batch(seed=0, **changes) -> Batch:
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    given = {
        "prompts": make_prompts(LISTS), "tokens": rng.integers(0, 24, (4, G, T)).astype(np.int32),
        "mask": np.arange(T) < rng.integers(0, T + 1, (4, G, 1)), "advantages": normal(4, G),
        "sampling_log_probs": -3 + 0.3 * normal(4, G, T), "ref_log_probs": -3 + 0.3 * normal(4, G, T),
    }  # fmt: skip
    return jax.tree.map(jnp.asarray, Batch(**{**given, **changes}))


def step(model, params, b, config, *, packs, on_policy=False):
    """Return (params, metrics) after an optimizer step with packed sequences or padded rows."""
    state = create_state(params, OPTIMIZER, jax.random.key(0), keep_reference=True, entropy_coef=0.1)
    how = {"optimizer": OPTIMIZER, "micro_shape": (4, G)}
    if packs:
        state, metrics = choose_updater(model, config, **how).replace(on_policy=on_policy).update(state, b)
    else:
        state, metrics = JITTED(state, b, model=as_jit_argument(model), config=config, on_policy=on_policy, **how)
    return state.params, dict(metrics)


def assert_same_step(plain, packed_step, padding=None):
    chex.assert_trees_all_close(plain[0], packed_step[0], atol=1e-5)
    share = float(packed_step[1].pop("padding_share"))
    assert 0 < share < 1 if padding is None else share == pytest.approx(padding)
    assert set(plain[1]) == set(packed_step[1])
    chex.assert_trees_all_close(plain[1], packed_step[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("settings", [
    {"loss_type": "dapo", "sampler_correction": "sequence_mask"},
    {"loss_type": "grpo", "entropy_coef": 0.1},
    {"loss_type": "bnpo", "top_entropy_quantile": 0.5, "importance_sampling_level": "sequence"},
    {"loss_type": "sapo", "importance_sampling_level": "trajectory", "kl_placement": "reward", "top_k": 5},
    {"loss_type": "vespo", "use_adaptive_entropy": True, "entropy_target": 5.0, "top_p": 0.9},
], ids=lambda settings: settings["loss_type"])  # fmt: skip
def test_packed_update_equals_train_step(monkeypatch, settings):
    """The packed update equals the padded one for every kind of objective."""
    monkeypatch.setattr(packed, "count_threads", lambda *_: 1 + ("top_p" in settings))
    config, b = GRPOConfig(beta=0.1, max_completion_length=T, max_grad_norm=0, **settings), batch()
    if settings["loss_type"] == "grpo":  # a filler group, and the metric kl_initial
        mask, counted = b.mask.at[1].set(False), jnp.array([True, False, True, True])
        b = b.replace(mask=mask, counted=counted, initial_log_probs=-3 * jnp.ones(mask.shape))
    if "sampler_correction" in settings:
        b = b.replace(old_log_probs=b.ref_log_probs + 0.1)
    plain, packed_step = both(*tiny_model(layers=1), b, config)
    assert ("kl_initial" in plain[1]) == (settings["loss_type"] == "grpo")
    assert_same_step(plain, packed_step)


EXPERTS = {"num_experts": 4, "num_experts_per_token": 2, "expert_size": 8}
BIASES = {"qkv_bias": True, "qk_norm": "head", "norms": "sandwich", "tie_word_embeddings": False}
# The norm after a recurrent memory amplifies the rounding of tiny values; a large eps reduces this.
RECURRENT = {"delta": DELTA, "conv": ConvShape(16, bias=True), "attention_gate": True, "rms_norm_eps": 1e-2}


@pytest.mark.parametrize("shape", [
    {"windows": (5, None), "attention_sinks": True, "attention_soft_cap": 5.0, "logit_soft_cap": 4.0},
    {"rotary_layers": (True, False), "expert_layers": (True, False), "remat": True, **BIASES, **EXPERTS},
    {"mixers": ("delta", "conv", "attention"), "layers": 3, **RECURRENT},
], ids=lambda shape: next(iter(shape)))  # fmt: skip
def test_every_kind_of_layer_is_packed(shape):
    """The packed update equals the padded one for every kind of layer."""
    config = GRPOConfig(beta=0.1, max_completion_length=T, max_grad_norm=0)
    assert_same_step(*both(*tiny_model(**shape), batch(), config, on_policy=True))


def test_experts_are_balanced_over_completion_tokens(monkeypatch):
    """The load-balancing loss adds the gradient of `router_loss` for unshared rows, counted over completion tokens."""
    monkeypatch.setattr(packed, "CPU_TOKENS", 256)  # all completions in one sequence, like one micro-batch
    monkeypatch.setattr(packed, "count_threads", lambda *_: 1)
    model, params = tiny_model(**EXPERTS, expert_layers=(True, True), layers=2, remat=True, loop_layers=True)
    b, coef = batch(), 0.7
    config = GRPOConfig(max_completion_length=T, max_grad_norm=0)
    params_without, _ = step(model, params, b, config, packs=False)
    plain, packed_step = both(model, params, b, dataclasses.replace(config, router_aux_loss_coef=coef))
    assert_same_step(plain, packed_step)

    rows, start = join_rows(b.prompts, b.tokens)
    at = start[:, None] + jnp.arange(T)[None]
    counted = jnp.zeros(rows.shape, bool).at[jnp.arange(len(rows))[:, None], at].set(b.mask.reshape(-1, T))

    def alone(params):
        _, written = model.apply({"params": params}, rows, mutable=["router"])
        return router_loss(written, counted, num_experts_per_token=2)

    value, gradient = jax.jit(jax.value_and_grad(alone))(params)
    assert float(plain[1]["aux_loss"]) == pytest.approx(float(value), rel=1e-5)
    moved = jax.tree.map(jnp.subtract, params_without, plain[0])
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(moved)) > 1e-3
    chex.assert_trees_all_close(moved, jax.tree.map(lambda x: coef * x, gradient), atol=1e-5)


def test_adapters_are_packed():
    policy = add_lora(tiny_policy(), rank=4, key=jax.random.key(1))
    params = jax.tree.map(lambda x: x + 0.1, policy.params)
    config = GRPOConfig(beta=0.1, max_completion_length=T, max_grad_norm=0)
    assert_same_step(*both(policy.model, params, batch(), config))


# "full": two rows of 12 tokens fill a sequence of 24. "a row each": a row of 12 leaves one block of a 16-token sequence
# empty. "halves": the short rows need two sequences of 24 with blocks of 4, but only two of 12 with blocks of 2.
FULL, SHORT = np.full((4, G), T), np.array([[12, 0, 0, 0], [1, 1, 1, 0], [2, 0, 0, 0], [0, 3, 1, 1]])


@pytest.mark.parametrize(
    ("tokens", "half", "lengths", "padding"),
    [(24, None, FULL, 0), (16, None, FULL, 1 - T / 16), (24, 12, SHORT, 1 - 22 / 24)],
    ids=["full", "a row each", "halves"],
)
def test_packed_update_equals_train_step_in_every_layout(monkeypatch, tokens, half, lengths, padding):
    monkeypatch.setattr(packed, "CPU_TOKENS", tokens)
    monkeypatch.setattr(packed, "count_threads", lambda *_: 1)  # one part
    if half is not None:
        monkeypatch.setattr(packing, "MIN_HALF_SIZE", half)
    b = batch(mask=jnp.asarray(np.arange(T) < lengths[..., None]))
    config = GRPOConfig(beta=0.1, max_completion_length=T, max_grad_norm=0)
    assert_same_step(*both(*tiny_model(layers=1), b, config), padding)


def test_all_parts_of_an_update_use_one_program(monkeypatch):
    """JAX compiles a program separately for committed arrays, such as a run's params, and uncommitted ones."""
    monkeypatch.setattr(packed, "PROMPT_TOKENS", 8)
    monkeypatch.setattr(packed, "count_threads", lambda *_: 1)
    kinds, program = [], packed.add_gradients

    def call(updater, total, state, part, totals):
        kinds.append({(x.committed, x.sharding, x.dtype, x.weak_type) for x in jax.tree.leaves(total)})
        return program(updater, total, state, part, totals)

    monkeypatch.setattr(packed, "add_gradients", call)
    model, params = tiny_model(layers=1)
    config = GRPOConfig(beta=0.1, max_completion_length=T)
    updater = choose_updater(model, config, optimizer=OPTIMIZER, micro_shape=(1, G))
    updater.update(commit_to_devices(create_state(params, OPTIMIZER, jax.random.key(0))), batch())
    assert len(kinds) > 1
    assert all(kind == kinds[0] for kind in kinds)


@pytest.mark.quick
def test_sequence_has_the_size_of_a_micro_batch_up_to_a_limit():
    model, params = tiny_model(layers=1)
    sizes = {
        (micro_shape, t): choose_updater(model, GRPOConfig(), micro_shape=(1, micro_shape))
        .shapes(params, (4, G, t))[0]
        .size
        for micro_shape, t in ((1, 8), (2, 8), (4, 8), (1, 40))
    }
    assert sizes == {(1, 8): 8, (2, 8): 16, (4, 8): 16, (1, 40): 40}  # at most 16 tokens, unless a completion is longer


@pytest.mark.quick
@pytest.mark.parametrize(
    ("bare", "devices", "kind"),
    [(False, 0, PackedUpdater), (False, 1, PackedUpdater), (False, 2, PackedUpdater), (True, 0, Updater)],
)
def test_choice_of_packed_or_padded_updates(bare, devices, kind):
    model = tiny_model(layers=1)[0]
    mesh = jax.make_mesh((devices,), ("data",)) if devices else None
    updater = choose_updater(Bare(model) if bare else model, GRPOConfig(beta=0.1), micro_shape=(4, G), mesh=mesh)
    assert type(updater) is kind
    assert updater.on_policy is True
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
