"""Advantages per turn and token: values by hand, special cases, and expected gradients over all groups."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.maths.advantages import compute_advantages
from grpo_jax.maths.credit import turn_advantages

NAN = np.nan
TURNS = jnp.array([[[0, 0, -1, 1], [0, -1, 1, 1], [0, -1, -1, -1]]])
to_go = lambda **settings: lambda rewards, turns: turn_advantages(rewards, turns, scale_rewards="none", **settings)


@pytest.mark.parametrize(("settings", "expected"), [
    # rewards-to-go (1 + 3, 3), (2 + 0, 0), (6): the means are 4 for the first turn and 1.5 for the second
    ({}, [[0, 0, 0, 1.5], [-2, 0, -1.5, -1.5], [2, 0, 0, 0]]),
    ({"estimator": "rloo", "scale_rewards": None}, [[0, 0, 0, 3], [-3, 0, -3, -3], [3, 0, 0, 0]]),
    ({"weights": [2.0]}, [[0, 0, 0, 3], [-4, 0, -3, -3], [4, 0, 0, 0]]),
])  # fmt: skip
def test_by_hand(settings, expected):
    rewards = jnp.array([[[0, 1, 0, 3], [2, 0, 0, 0], [6, 0, 0, 0.0]]])[..., None]
    found = turn_advantages(rewards, TURNS, **{"scale_rewards": "none"} | settings)
    np.testing.assert_allclose(found, [expected], atol=1e-6)


@pytest.mark.quick
def test_rewards_inside_turns_and_on_observations():
    """A token is not credited with earlier rewards in its turn; rewards on observations count for the turn before."""
    rewards = jnp.zeros((1, 3, 4, 1)).at[0, 0, :, 0].set(jnp.array([0.5, 1.0, 2.0, 4.0]))
    found = turn_advantages(rewards, TURNS, scale_rewards="none")
    first, second = 7.5 - 2.5, 4 - 2.0
    np.testing.assert_allclose(found[0, 0], [first, first - 0.5, 0, second], atol=1e-6)
    np.testing.assert_allclose(found[0, 1], [-2.5, 0, -2, -2], atol=1e-6)
    slope = jax.grad(lambda rewards: (turn_advantages(rewards, TURNS, scale_rewards="none") ** 2).sum())(rewards)
    assert not slope.any(), "rewards are constant in the gradient"
    two = jnp.concatenate([rewards, 3 * rewards], axis=-1)
    weighed = turn_advantages(two, TURNS, scale_rewards="none", weights=[2.0, 1.0])
    np.testing.assert_allclose(weighed[0, 0], 5 * np.array([first, first - 0.5, 0, second]), atol=1e-5)
    # With scaling by the std of whole turns, all tokens in a turn get the same advantage.
    for settings in ({}, {"scale_rewards": "none", "multi_objective_aggregation": "normalize_then_sum"}):
        divided = turn_advantages(rewards, TURNS, **settings)
        assert divided[0, 0, 0] == divided[0, 0, 1]


@pytest.mark.parametrize(
    ("scale_rewards", "aggregation"),
    [*((scale, "sum_then_normalize") for scale in ("group", "batch", "none")), ("group", "normalize_then_sum")],
)
def test_single_turn_has_the_advantage_of_its_completion(scale_rewards, aggregation):
    """With one turn, every token has exactly the advantage of the completion."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 6, (3, 4))
    turns = np.where(np.arange(6) < lengths[..., None], 0, -1)
    rewards = rng.normal(size=(3, 4, 2)).astype(np.float32)
    rewards[0, 1, 0] = rewards[2, 3] = NAN
    tokens = np.zeros((3, 4, 6, 2), np.float32)
    np.put_along_axis(tokens, lengths[..., None, None] - 1, rewards[:, :, None], axis=2)
    tokens[np.isnan(rewards)[:, :, None] & np.ones((1, 1, 6, 1), bool)] = NAN
    settings = {"scale_rewards": scale_rewards, "multi_objective_aggregation": aggregation, "weights": [1.0, 0.5]}
    found = turn_advantages(tokens, turns, **settings)
    expected = compute_advantages(rewards, **settings)
    np.testing.assert_array_equal(found, np.where(turns == 0, expected[..., None], 0))


# Two turns of one token each and two actions: logits [2] for the first action, [2, 2] for the second given the first.
# If `ends_early`, completions that begin with action 1 end there.
G, PARAMS = 2, jnp.array([0.3, -0.2, 0.5, -0.4, -0.1, 0.2])
EARNED = np.array([[0.7, -0.4], [0.2, 1.1]]), np.array([[1.3, 0.1], [-0.8, 0.6]])  # r_0, r_1 by pair of actions


def log_pi(params, actions):
    first = jax.nn.log_softmax(params[:2])[actions[0]]
    return jnp.stack([first, jax.nn.log_softmax(params[2:].reshape(2, 2)[actions[0]])[actions[1]]])


@functools.partial(jax.jit, static_argnums=(0, 1))
def expected_gradient(ends_early, credit):
    """Return E[(1/G) Σ_i Σ_t A_it ∇log π(t)] over all groups, ∇E[R], and the total probability of the groups."""
    all_actions = list(itertools.product(range(2), repeat=2))
    if ends_early:  # action 1 ends the completion, so that it has no second turn
        all_actions = [(0, 0), (0, 1), (1, None)]
    known = lambda actions: tuple(action or 0 for action in actions)
    turns = np.array([[0, -1 if a[1] is None else 1] for a in all_actions])
    earned = np.float32([[EARNED[0][a[0], 0], 0 if a[1] is None else EARNED[1][a]] for a in all_actions])
    there = np.float32(turns >= 0)
    scores = jnp.stack([jax.jacobian(log_pi)(PARAMS, known(a)) for a in all_actions]) * there[..., None]
    l = jnp.stack([(log_pi(PARAMS, known(a)) * t).sum() for a, t in zip(all_actions, there, strict=True)])
    groups = np.array(list(itertools.product(range(len(all_actions)), repeat=G)))
    chance = jnp.exp(l[groups].sum(1))
    advantages = credit(earned[groups][..., None], turns[groups])
    found = jnp.einsum("n,ngt,ngtp->p", chance, advantages, scores[groups]) / G
    truth = jnp.einsum("n,n,np->p", jnp.exp(l), earned.sum(1), scores.sum(1))
    return found, truth, chance.sum()


def of_episodes(rewards, turns):
    advantages = compute_advantages(rewards.sum(2), scale_rewards="none")[..., None]
    return jnp.where(turns >= 0, advantages, 0)


@pytest.mark.parametrize(("ends_early", "credit", "factor"), [
    (False, of_episodes, 1 / 2),
    (True, of_episodes, 1 / 2),
    (False, to_go(), 1 / 2),
    (False, to_go(estimator="rloo"), 1.0),
    (True, to_go(), None),
    (True, to_go(estimator="rloo"), None),
])  # fmt: skip
def test_expected_gradients_of_turn_advantages(ends_early, credit, factor):
    """The expected gradient is the documented multiple of ∇E[R], or has another direction if completions end early."""
    found, truth, total = expected_gradient(ends_early, credit)
    assert total == pytest.approx(1.0, abs=1e-6)
    if factor is not None:
        np.testing.assert_allclose(found, factor * truth, atol=1e-6)
    else:
        cosine = found @ truth / np.linalg.norm(found) / np.linalg.norm(truth)
        assert cosine < 0.999


def test_expected_gradient_with_rewards_inside_a_turn():
    """With rewards inside a turn, the expected gradient of rloo is ∇E[R]."""

    def inside(rewards, turns):
        return turn_advantages(rewards, jnp.zeros_like(turns), scale_rewards="none", estimator="rloo")

    found, truth, _ = expected_gradient(False, inside)
    np.testing.assert_allclose(found, truth, atol=1e-6)
