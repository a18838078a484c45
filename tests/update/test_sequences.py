"""Zero-signal groups have no gradient, so they take only a forward pass, for their metrics."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_packed import OPTIMIZER, G, T, assert_same_step, batch, both, small_blocks  # noqa: F401
from tiny import tiny_model, tiny_policy

from grpo_jax import GRPOConfig, add_lora, make_prompts
from grpo_jax.maths.losses import grpo_loss_terms
from grpo_jax.maths.surrogates import LOSS_TYPES
from grpo_jax.models.packing import order_prompts
from grpo_jax.models.sharding import make_mesh
from grpo_jax.types import Prompts, as_jit_argument
from grpo_jax.update import packed
from grpo_jax.update.objective import loss_settings, zero_advantage_has_no_gradient
from grpo_jax.update.packed import choose_updater, zero_gradients
from grpo_jax.update.state import create_state

MODEL, PARAMS = tiny_model(layers=1)


def with_signal(*prompts, by_token=False):
    """Return a batch in which only the groups of the given prompts have nonzero advantages."""
    b = batch(prompts=make_prompts([[3 + i, 4, 5] * 3 for i in range(4)]))
    advantages = np.where(np.isin(np.arange(4), prompts)[:, None], b.advantages, np.float32(0))
    return b.replace(advantages=jnp.asarray(np.repeat(advantages[..., None], T, axis=-1) if by_token else advantages))


@pytest.fixture
def parts(monkeypatch):
    """Record (sequences with a gradient, sequences used) for each part of an update."""
    found, add, summed = [], packed.add_gradients, packed.sum_metrics  # a list, because several threads may append

    def call(updater, total, state, part, totals):
        found.append((int(part.num_with_grad), int(part.num_used)))
        return add(updater, total, state, part, totals)

    def call_without_gradient(updater, state, part, totals):
        if part.num_with_grad == 0:
            found.append((0, int(part.num_used)))
        return summed(updater, state, part, totals)

    monkeypatch.setattr(packed, "add_gradients", call)
    monkeypatch.setattr(packed, "sum_metrics", call_without_gradient)
    monkeypatch.setattr(packed, "PROMPT_TOKENS", 9)  # one prompt
    return found


VESPO = {"loss_type": "vespo", "temperature": 0.7, "top_k": 5}
BNPO = {"loss_type": "bnpo", "importance_sampling_level": "sequence", "top_entropy_quantile": 0.5}


@pytest.mark.parametrize(
    ("learnt", "settings", "threads"),
    [((), {}, 2), ((2,), {}, 2), ((0, 1, 2, 3), {}, 1), ((0, 3), VESPO, 2), ((1, 2), BNPO, 1)],
    ids=["none", "one", "all", "vespo", "bnpo"],
)
def test_step_with_zero_signal_groups_equals_train_step(monkeypatch, parts, learnt, settings, threads):
    """The step equals `train_step`, with backward passes only through prompts with a signal: none, some or all."""
    monkeypatch.setattr(packed, "count_threads", lambda _, parts: min(threads, parts))
    config = GRPOConfig(max_completion_length=T, max_grad_norm=0, num_iterations=2, **settings)
    b = with_signal(*learnt, by_token=bool(settings))
    plain, packed_step = both(MODEL, PARAMS, b, config)
    assert_same_step(plain, packed_step)
    moved = optax.tree.norm(optax.tree.sub(plain[0], PARAMS))
    assert (moved > 1e-3) == (len(learnt) > 0)
    assert len(parts) == 4
    assert sum(trained > 0 for trained, _ in parts) == len(learnt), "no backward pass through other prompts"


@pytest.mark.parametrize("learnt", [(0,), (0, 1)], ids=str)
def test_groups_without_a_trained_token_are_skipped(parts, learnt):
    """Groups without trained tokens (fillers, truncated completions) are skipped, prompts included."""
    b = with_signal(*learnt)
    b = b.replace(mask=b.mask.at[jnp.array([1, 3])].set(False))
    config = GRPOConfig(max_completion_length=T, max_grad_norm=0)
    assert_same_step(*both(MODEL, PARAMS, b, config))
    assert [trained > 0 for trained, _ in sorted(parts)] == [False, True]


def test_groups_with_and_without_a_gradient_share_a_part(parts, monkeypatch):
    """Groups with and without a gradient use separate sequences in a part, unless this takes more operations."""
    monkeypatch.setattr(packed, "PROMPT_TOKENS", 1024)
    monkeypatch.setattr(packed, "count_threads", lambda *_: 1)
    config = GRPOConfig(max_completion_length=T, max_grad_norm=0)
    assert_same_step(*both(MODEL, PARAMS, with_signal(2), config))
    ((trained, used),) = parts
    assert 0 < trained < used
    few = with_signal(2)
    few = few.replace(mask=few.mask.at[:, 1:].set(False).at[:, :, 1:].set(False))
    assert_same_step(*both(MODEL, PARAMS, few, config))
    assert parts[1] == (1, 1)


@pytest.mark.quick
@pytest.mark.parametrize("learnt", [(), (0,), (0, 1), (0, 4), range(4), range(8)], ids=str)
def test_all_parts_have_one_shape(learnt):
    """The number of sequences of a part does not depend on which groups have a gradient, also on two devices."""
    config = GRPOConfig(max_completion_length=T)
    updater = choose_updater(MODEL, config, micro_shape=(4, G), mesh=make_mesh({"data": 2}))
    part = jax.tree.map(lambda x: np.concatenate([x, x]), batch(mask=np.ones((4, G, T), bool)))
    shape = updater.shapes(PARAMS, part.mask.shape)[0]
    assert shape.size // T == 1
    sequences = updater.pack_part(part, None, np.isin(np.arange(8), learnt), shape, 0).sequences
    assert sequences.tokens.shape == (2, 4 * G + 1, shape.size)


def test_dropout_is_applied_to_groups_without_a_gradient(parts):
    """Dropout also applies to groups without a gradient; it depends on the update's key and the packed sequence."""
    policy = add_lora(tiny_policy(), rank=4, dropout=0.5, key=jax.random.key(1))
    params = jax.tree.map(lambda x: x + 0.1, policy.params)
    config = GRPOConfig(max_completion_length=T, max_grad_norm=0)
    entropies = []
    for seed in (0, 0, 1):
        state = create_state(params, OPTIMIZER, jax.random.key(seed))
        updater = choose_updater(policy.model, config, optimizer=OPTIMIZER, micro_shape=(4, G))
        entropies.append(float(updater.update(state, with_signal(0, 1))[1]["entropy"]))
    assert entropies[0] == entropies[1] != entropies[2]
    alike = with_signal(0).replace(prompts=make_prompts([[3, 4, 5]] * 4))
    alike = alike.replace(tokens=jnp.broadcast_to(alike.tokens[:1], alike.tokens.shape), mask=jnp.ones((4, G, T), bool))
    state, keys = create_state(params, OPTIMIZER, jax.random.key(0)), set()
    updater = dataclasses.replace(updater, skip_zero_signal=False)
    packs = updater.pack(params, alike)[0]
    for part in packs:
        grads, totals = zero_gradients(updater, params), packed._count_totals(alike)
        _, sums = packed.add_gradients(updater, grads, state, part, totals)
        keys.add(float(sums.sums["entropy_sum"]))
    assert len(keys) == len(packs) > 1


@pytest.mark.quick
@pytest.mark.parametrize("seed", range(5))
def test_every_prompt_is_in_one_part_and_prompts_with_a_gradient_come_first(seed):
    rng = np.random.default_rng(seed)
    b, bins, bin_size = rng.integers(1, 20), rng.integers(1, 4), rng.integers(1, 4)
    work, learns = rng.integers(0, 9, b), rng.random(b) < 0.5
    order = order_prompts(work, learns, parallel_bins=bins, bin_size=bin_size)
    assert sorted(order[order >= 0]) == [*range(b)]
    assert len(order) - b < bins * bin_size
    rounds = [learns[own[own >= 0]] for own in order.reshape(-1, bins * bin_size)]
    assert all(first.all() or not second.any() for first, second in itertools.pairwise(rounds))


@pytest.mark.quick
@pytest.mark.parametrize(("prompts", "threads", "parts", "each"), [
    (8, 1, 4, 2),  # 3 parts of 3 prompts would have an empty position
    (9, 1, 3, 3),
    (7, 1, 4, 2),
    (8, 2, 4, 2),
    (3, 1, 1, 3),
])  # fmt: skip
def test_parts_have_few_empty_positions(monkeypatch, prompts, threads, parts, each):
    monkeypatch.setattr(packed, "count_threads", lambda _, most: min(threads, most))
    tokens, lengths = np.zeros((prompts, 160), np.int32), np.ones(prompts, np.int32)
    b = with_signal(0).replace(prompts=Prompts(tokens, lengths), mask=np.ones((prompts, G, T)))
    updater = choose_updater(MODEL, GRPOConfig(max_completion_length=T), micro_shape=(prompts, G))
    assert updater.plan_parts(PARAMS, b) == (threads, parts, each)


OTHER_TERMS = {
    "none": {}, "beta": {"beta": 0.1}, "bonus": {"entropy_coef": 0.1},
    "adaptive bonus": {"use_adaptive_entropy": True}, "experts": {"router_aux_loss_coef": 0.1}, "surrogate": {},
}  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("kind", OTHER_TERMS)
def test_every_group_has_a_gradient_if_the_loss_has_other_terms(kind):
    experts = {"num_experts": 4, "num_experts_per_token": 2, "expert_size": 8, "expert_layers": (True,)}
    model = tiny_model(layers=1, **experts)[0] if kind == "experts" else MODEL
    config = GRPOConfig(max_completion_length=T, **OTHER_TERMS[kind])
    surrogate = (lambda tokens, settings: tokens.ratio) if kind == "surrogate" else None
    updater = choose_updater(model, config, micro_shape=(4, G), surrogate=surrogate)
    assert updater.has_gradient(with_signal(0)).tolist() == [True] + 3 * [kind != "none"]


MORE = {"cispo": {"epsilon_high": 5.0}, "luspo": {"importance_sampling_level": "sequence"}}
"""Settings that two of the losses require."""


@pytest.mark.parametrize(("loss_type", "settings"), [
    *((name, {}) for name in LOSS_TYPES),
    ("grpo", {"importance_sampling_level": "sequence"}),
    ("grpo", {"importance_sampling_level": "trajectory", "delta": 1.5}),
    ("dapo", {"off_policy_mask_threshold": 0.5}),
])  # fmt: skip
def test_losses_proportional_to_advantages_have_no_gradient_at_zero(loss_type, settings):
    """If `zero_advantage_has_no_gradient` is true, the loss has no gradient at zero advantages, even off-policy."""
    config = GRPOConfig(loss_type=loss_type, num_iterations=2, **MORE.get(loss_type, {}), **settings)
    rng = np.random.default_rng(0)
    log_probs, old = (jnp.asarray(-3 + rng.normal(size=(3, 6)), jnp.float32) for _ in range(2))

    def loss(log_probs, advantages):
        mask = jnp.ones((3, 6), bool)
        return grpo_loss_terms(
            log_probs, old, None, advantages, mask, loss_settings(config), num_rows=3, num_tokens=18
        )[0]

    without, with_them = (np.abs(jax.grad(loss)(log_probs, a)).max() for a in (jnp.zeros(3), jnp.ones(3)))
    assert with_them > 0
    assert without == 0 or not zero_advantage_has_no_gradient(as_jit_argument(MODEL), config)
