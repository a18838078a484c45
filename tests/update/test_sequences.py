"""Zero-signal groups have no gradient: their metrics take a forward pass, and nothing goes back through them."""

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
from grpo_jax.types import as_argument
from grpo_jax.update import packed
from grpo_jax.update import prompts as prompts_module
from grpo_jax.update.objective import learns_by_advantages, loss_settings
from grpo_jax.update.packed import choose_updater
from grpo_jax.update.state import create_state

MODEL, PARAMS = tiny_model(layers=1)


def with_signal(*prompts, by_token=False):
    """A batch whose other groups have no advantages."""
    b = batch(prompts=make_prompts([[3 + i, 4, 5] * 3 for i in range(4)]))
    advantages = np.where(np.isin(np.arange(4), prompts)[:, None], b.advantages, np.float32(0))
    return b.replace(advantages=jnp.asarray(np.repeat(advantages[..., None], T, axis=-1) if by_token else advantages))


@pytest.fixture
def calls(monkeypatch):
    """How often each program of an update is called, by its name; and the numbers of the packed sequences."""
    counts = {"numbers": []}  # lists, to which several threads may append

    def watch(module, name):
        program = getattr(module, name)

        def call(*args, **keywords):
            counts.setdefault(name + " forward" * (keywords.get("backward") is False), []).append(1)
            if module is packed:
                counts["numbers"].append(args[-1])
            return program(*args, **keywords)

        monkeypatch.setattr(module, name, call)

    watch(packed, "add_gradients")
    watch(packed, "measure")
    watch(prompts_module, "add_prompts")
    watch(prompts_module, "read_some")
    return counts


def count(calls, name):
    return len(calls.get(name, ()))


VESPO = {"loss_type": "vespo", "temperature": 0.7, "top_k": 5}
BNPO = {"loss_type": "bnpo", "importance_sampling_level": "sequence", "top_entropy_quantile": 0.5}


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize(
    ("learnt", "settings"),
    [((), {}), ((2,), {}), ((0, 1, 2, 3), {}), ((0, 3), VESPO), ((1, 2), BNPO)],
    ids=["none", "one", "all", "vespo", "bnpo"],
)
def test_the_step_is_that_of_train_step(monkeypatch, calls, learnt, settings, streams):
    """Params and metrics, where none, some and all of the groups learn; back only through the prompts that do."""
    monkeypatch.setattr(prompts_module, "count_streams", lambda _, parts: min(streams, parts))
    config = GRPOConfig(max_completion_length=T, max_grad_norm=0, num_iterations=2, **settings)
    b = with_signal(*learnt, by_token=bool(settings))
    plain, packed_step = both(MODEL, PARAMS, b, config)
    assert_same_step(plain, packed_step)
    moved = optax.tree.norm(optax.tree.sub(plain[0], PARAMS))
    assert (moved > 1e-3) == (len(learnt) > 0)
    assert count(calls, "add_prompts") == count(calls, "read_some") == len(learnt)
    scored = 4 * ("top_entropy_quantile" in settings)  # by a pass before, for the quantile
    assert count(calls, "read_some forward") - scored == 4 - len(learnt), "activations are kept for the way back only"
    assert (count(calls, "measure") > 0) == (len(learnt) < 4)
    assert (count(calls, "add_gradients") > 0) == (len(learnt) > 0)


@pytest.mark.parametrize("learnt", [(0,), (0, 1)], ids=str)
def test_groups_without_a_trained_token_cost_nothing(calls, learnt):
    """Fillers and completions that were cut off, with advantages and without: their prompts are not even read."""
    b = with_signal(*learnt)
    b = b.replace(mask=b.mask.at[jnp.array([1, 3])].set(False))
    config = GRPOConfig(max_completion_length=T, max_grad_norm=0)
    assert_same_step(*both(MODEL, PARAMS, b, config))
    assert (count(calls, "read_some"), count(calls, "read_some forward")) == (1, 1)


def test_dropout_falls_on_what_is_measured_too(calls):
    """By the key of the update, and differently on every packed sequence: each has a number of its own."""
    policy = add_lora(tiny_policy(), rank=4, dropout=0.5, key=jax.random.key(1))
    params = jax.tree.map(lambda x: x + 0.1, policy.params)
    config = GRPOConfig(max_completion_length=T, max_grad_norm=0)
    entropies = []
    for seed in (0, 0, 1):
        state = create_state(params, OPTIMIZER, jax.random.key(seed))
        updater = choose_updater(policy.model, config, optimizer=OPTIMIZER, micro=(4, G))
        entropies.append(float(updater.update(state, with_signal(0, 1))[1]["entropy"]))
        assert sorted(calls["numbers"]) == [*range(len(calls["numbers"]))]
        calls["numbers"].clear()
    assert entropies[0] == entropies[1] != entropies[2]


OTHER_TERMS = {
    "none": {},
    "beta": {"beta": 0.1},
    "bonus": {"entropy_coef": 0.1},
    "adaptive bonus": {"use_adaptive_entropy": True},
    "experts": {"router_aux_loss_coef": 0.1},
    "surrogate": {},
}


@pytest.mark.quick
@pytest.mark.parametrize("kind", OTHER_TERMS)
def test_where_the_loss_has_other_terms_every_group_has_a_gradient(kind):
    experts = {"num_experts": 4, "num_experts_per_token": 2, "expert_size": 8, "expert_layers": (True,)}
    model = tiny_model(layers=1, **experts)[0] if kind == "experts" else MODEL
    config = GRPOConfig(max_completion_length=T, **OTHER_TERMS[kind])
    surrogate = (lambda tokens, settings: tokens.ratio) if kind == "surrogate" else None
    updater = choose_updater(model, config, micro=(4, G), surrogate=surrogate)
    assert updater.learns(with_signal(0)).tolist() == [True] + 3 * [kind != "none"]


MORE = {"cispo": {"epsilon_high": 5.0}, "luspo": {"importance_sampling_level": "sequence"}}
"""What two of the losses ask for."""


@pytest.mark.parametrize(
    ("loss_type", "settings"),
    [
        *((name, {}) for name in LOSS_TYPES),
        ("grpo", {"importance_sampling_level": "sequence"}),
        ("grpo", {"importance_sampling_level": "trajectory", "delta": 1.5}),
        ("dapo", {"off_policy_mask_threshold": 0.5}),
    ],
)
def test_a_loss_that_is_a_product_with_advantages_has_no_gradient_without_them(loss_type, settings):
    """By the objective itself, far from the policy that sampled; one that is not, has."""
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
    assert without == 0 or not learns_by_advantages(as_argument(MODEL), config)
