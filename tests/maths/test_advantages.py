"""Advantages: compared with loops and with values computed by hand, under symmetries, and for extreme rewards."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from precision import x64

from grpo_jax.maths.advantages import compute_advantages, zero_signal_groups

AGGREGATIONS = ["sum_then_normalize", "normalize_then_sum"]
PAIRS = [*((scale, "sum_then_normalize") for scale in ("group", "batch", "none")), ("group", "normalize_then_sum")]


def by_loops(rewards, weights, scale, aggregation, epsilon):
    """Compute advantages by their definition, one completion at a time, from plain lists of the scored values."""
    B, G, K = rewards.shape
    std = lambda values: float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    per_function = rewards.copy()
    if aggregation == "normalize_then_sum":
        for b in range(B):
            for k in range(K):
                scored = [x for x in rewards[b, :, k] if x == x]
                for g in range(G):
                    if rewards[b, g, k] == rewards[b, g, k]:
                        per_function[b, g, k] = (rewards[b, g, k] - np.mean(scored)) / (std(scored) + epsilon)
    total = np.full((B, G), np.nan)
    for b in range(B):
        for g in range(G):
            scored = [k for k in range(K) if rewards[b, g, k] == rewards[b, g, k]]
            if scored:
                total[b, g] = sum(weights[k] * per_function[b, g, k] for k in scored)
    everything = [x for x in total.ravel() if x == x]
    result = np.zeros((B, G))
    for b in range(B):
        group = [x for x in total[b] if x == x]
        for g in range(G):
            if total[b, g] != total[b, g]:
                continue
            if aggregation == "normalize_then_sum":
                result[b, g] = (total[b, g] - np.mean(everything)) / (std(everything) + epsilon)
            else:
                divisor = {"group": std(group) + epsilon, "batch": std(everything) + epsilon, "none": 1.0}[scale]
                result[b, g] = (total[b, g] - np.mean(group)) / divisor
    return result


def example(seed=0, B=3, G=4, K=2, missing=0.0):
    rng = np.random.default_rng(seed)
    rewards = rng.normal(size=(B, G, K)) * np.array([1.0, 5.0, 0.3])[:K]
    rewards[rng.random(rewards.shape) < missing] = np.nan
    return rewards


@pytest.mark.parametrize(("scale", "aggregation"), PAIRS)
@pytest.mark.parametrize("missing", [0.0, 0.5])
def test_definition(scale, aggregation, missing):
    """Advantages equal a direct implementation of their definition with loops."""
    rewards, weights = example(missing=missing, K=3), [0.5, -2.0, 3.0]
    for epsilon in (1e-4, 0.5):
        expected = by_loops(rewards, weights, scale, aggregation, epsilon)
        assert np.abs(expected).max() > 0.1, "the expected advantages must not all be near 0"
        settings = {
            "weights": weights,
            "scale_rewards": scale,
            "multi_objective_aggregation": aggregation,
            "epsilon": epsilon,
        }
        np.testing.assert_allclose(compute_advantages(rewards, **settings), expected, atol=3e-6)
        with x64():
            np.testing.assert_allclose(compute_advantages(rewards, **settings), expected, atol=1e-13)
    logged = np.concatenate([rewards, example(seed=1, K=1)], axis=2)  # the fourth function scores every completion
    logged = compute_advantages(logged, **settings | {"weights": [*weights, 0.0]})
    np.testing.assert_allclose(logged, expected, atol=3e-6)


@pytest.mark.quick
def test_only_batch_scaling_depends_on_other_prompts():
    """Group-scaled advantages do not depend on other prompts; batch-scaled advantages do."""
    rewards = example(B=3, K=1)
    other = rewards.copy()
    other[1:] *= 7.0
    first = lambda r, scale: np.asarray(compute_advantages(r, scale_rewards=scale))[0]
    for scale in ("group", "none"):
        np.testing.assert_array_equal(first(rewards, scale), first(other, scale))
    assert np.abs(first(rewards, "batch") - first(other, "batch")).max() > 0.1


@pytest.mark.parametrize(("scale", "aggregation"), PAIRS)
def test_equal_rewards_have_advantages_of_exactly_zero(scale, aggregation):
    """A group with equal rewards gets zeros, not rounding errors, also if others in the batch have a signal."""
    rewards = np.random.default_rng(1).normal(size=(5, 3, 2))
    rewards[0] = rewards[0, :1]
    advantages = compute_advantages(rewards, scale_rewards=scale, multi_objective_aggregation=aggregation)
    assert not np.any(advantages[0])
    assert np.all(advantages[1:])


@pytest.mark.parametrize(("scale", "aggregation"), PAIRS)
def test_shift_scale_and_permutations(scale, aggregation):
    settings = {"scale_rewards": scale, "multi_objective_aggregation": aggregation, "epsilon": 0.0}
    rewards, shift = example(missing=0.2), np.array([10.0, -3.0])
    advantages = np.asarray(compute_advantages(rewards, **settings))
    scaled_by = 3.0 if (scale, aggregation) == ("none", "sum_then_normalize") else 1.0
    np.testing.assert_allclose(compute_advantages(3.0 * rewards, **settings), scaled_by * advantages, atol=1e-5)
    if aggregation == "normalize_then_sum":
        # A shift of one function has no effect here. In a sum it would also shift completions that it did not score.
        np.testing.assert_allclose(compute_advantages(rewards + shift, **settings), advantages, atol=1e-5)
    full = example()
    np.testing.assert_allclose(
        compute_advantages(full + shift, **settings), compute_advantages(full, **settings), atol=1e-5
    )
    rows, groups = [2, 0, 3, 1], [1, 2, 0]
    np.testing.assert_allclose(compute_advantages(rewards[:, rows], **settings), advantages[:, rows], atol=1e-5)
    np.testing.assert_allclose(compute_advantages(rewards[groups], **settings), advantages[groups], atol=1e-5)
    np.testing.assert_allclose(
        compute_advantages(rewards[..., ::-1], weights=[2.0, 1.0], **settings),
        compute_advantages(rewards, weights=[1.0, 2.0], **settings),
        atol=1e-5,
    )


@pytest.mark.parametrize(("scale", "aggregation"), PAIRS)
@pytest.mark.parametrize("reward", [0.0, 0.1, 1000.1, -3e7, 1e30])
def test_equal_rewards_give_exactly_zero(reward, scale, aggregation):
    """Equal rewards give advantages of exactly 0, even when the rewards are large."""
    rewards = np.full((2, 3, 2), reward)
    rewards[1, 2, 0] = np.nan if reward == 0.0 else reward
    advantages = compute_advantages(rewards, scale_rewards=scale, multi_objective_aggregation=aggregation)
    np.testing.assert_array_equal(advantages, 0.0)


@pytest.mark.parametrize(("scale", "aggregation"), PAIRS)
def test_groups_with_fewer_than_two_scores_get_zero(scale, aggregation):
    settings = {"scale_rewards": scale, "multi_objective_aggregation": aggregation}
    nan = np.nan
    np.testing.assert_array_equal(compute_advantages(np.full((2, 3), nan), **settings), 0.0)
    np.testing.assert_array_equal(compute_advantages(np.array([[nan, 5.0, nan]]), **settings), 0.0)
    np.testing.assert_array_equal(compute_advantages(np.array([[7.0]]), **settings), 0.0)
    # The same groups in a batch that also has a group with a signal.
    both = np.asarray(compute_advantages(np.array([[nan, 5.0, nan], [1.0, 2.0, 3.0]]), **settings))
    if aggregation == "sum_then_normalize":
        np.testing.assert_array_equal(both[0], 0.0)
    np.testing.assert_array_equal(both[0, [0, 2]], 0.0)
    assert both[1, 2] > 0.5


@pytest.mark.quick
def test_large_offset_does_not_lose_the_signal():
    small = np.array([[0.0, 1.0, 0.0, 1.0]])
    np.testing.assert_array_equal(compute_advantages(small + 2.0**20), compute_advantages(small))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.int32, jnp.bool_])
def test_other_dtypes_are_computed_in_float32(dtype):
    rewards = jnp.array([[1, 0, 0, 1], [1, 1, 1, 0]])
    advantages = compute_advantages(rewards.astype(dtype))
    assert advantages.dtype == jnp.float32
    np.testing.assert_array_equal(advantages, compute_advantages(rewards.astype(jnp.float32)))


@pytest.mark.quick
def test_rewards_have_no_gradient():
    gradient = jax.grad(lambda r: jnp.sum(compute_advantages(r, scale_rewards="none") ** 2))(jnp.array([[1.0, 0.0]]))
    np.testing.assert_array_equal(gradient, 0.0)


def test_zero_signal_groups():
    nan = np.nan
    rewards = np.array(
        [
            [[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]],  # both constant
            [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]],  # the sum is constant, each function is not
            [[1.0, 0.0], [nan, 0.0], [1.0, 0.0]],  # the first function skips one completion, so its sum differs
            [[nan, nan], [nan, nan], [nan, nan]],
            [[0.0, 0.0], [0.0, 0.0], [0.0, 1e-3]],
        ]
    )
    assert zero_signal_groups(rewards).tolist() == [True, True, False, True, False]
    assert zero_signal_groups(rewards, multi_objective_aggregation="normalize_then_sum").tolist() == [
        True,
        False,
        True,
        True,
        False,
    ]
    # The second function has weight 0.
    first_only = [1.0, 0.0]
    for aggregation in AGGREGATIONS:
        signal = zero_signal_groups(rewards[[0, 1, 2, 4]], weights=first_only, multi_objective_aggregation=aggregation)
        assert signal.tolist() == [True, False, True, True]
    assert zero_signal_groups(np.full((1, 3), 0.1)).tolist() == [True]


# Other estimators ---------------------------------------------------------------------------------------------------

OTHERS = ["rloo", "maxrl", "opo", "reinforce_pp"]


def estimated(rewards, estimator, **settings):
    return compute_advantages(rewards, estimator=estimator, scale_rewards="none", **settings)


def test_estimators_by_hand():
    nan = np.nan
    rewards = np.array([[3.0, 0.0, 0.0, 1.0], [2.0, nan, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    lengths = np.array([[2, 2, 1, 3], [1, 9, 2, 1], [1, 1, 1, 1]])
    expected = {
        # The baseline is the mean of the three other rewards, or of the two other scored rewards.
        "rloo": [[3 - 1 / 3, -4 / 3, -4 / 3, 0], [1.5, 0, -1.5, 0], [0, 0, 0, 0]],
        "maxrl": [[2, -1, -1, 0], [1, 0, -1, 0], [0, 0, 0, 0]],
        # Baselines (2·3 + 3·1) / 8 and (1·2 + 1·1) / 4.
        "opo": [[3 - 9 / 8, -9 / 8, -9 / 8, 1 - 9 / 8], [1.25, 0, -0.75, 0.25], [0, 0, 0, 0]],
    }
    centred = np.array([[2.0, -1, -1, 0], [1, 0, -1, 0], [0, 0, 0, 0]])
    # Eleven completions are scored, and their squared deviations sum to 8.
    expected["reinforce_pp"] = centred / (np.sqrt(8 / 10) + 1e-4)
    for name, table in expected.items():
        found = compute_advantages(rewards, estimator=name, lengths=lengths)  # with its default scaling
        np.testing.assert_allclose(found, table, atol=1e-6, err_msg=name)
    # One group with a single token, and one group without tokens.
    rewards, lengths = np.array([[2.0, 0.0], [2.0, 0.0]]), np.array([[1, 0], [0, 0]])
    np.testing.assert_allclose(estimated(rewards, "opo", lengths=lengths), [[0, -2], [1, -1]], atol=1e-6)
    np.testing.assert_allclose(estimated(rewards, "rloo"), [[2, -2], [2, -2]], atol=1e-6)  # baseline: the other


def test_maxrl_skips_groups_without_a_positive_mean():
    rewards = np.array([[1.0, -1.0, 0.0], [-3.0, 0.0, 0.0], [4.0, -1.0, 0.0]])
    expected = [[0, 0, 0], [0, 0, 0], [3, -2, -1]]
    np.testing.assert_allclose(estimated(rewards, "maxrl"), expected, atol=1e-6)


@pytest.mark.parametrize("estimator", OTHERS)
def test_equal_or_unscored_rewards_give_zero_for_every_estimator(estimator):
    for rewards in ([[1000.1] * 3, [1000.1] * 3], [[np.nan] * 3, [7.0, np.nan, np.nan]]):
        np.testing.assert_array_equal(estimated(np.array(rewards), estimator, lengths=np.full((2, 3), 4)), 0.0)


GROUP = 4


def expected_gradient(theta, rewards, estimator):
    """Return E[(1/G) Σ A_i ∇log π(i)] for groups of four draws from softmax(theta), summed over all 3⁴ groups."""
    pi = np.exp(theta) / np.exp(theta).sum()
    groups = np.array(list(itertools.product(range(len(theta)), repeat=GROUP)))
    advantages = np.asarray(estimated(rewards[groups], estimator))
    scores = np.eye(len(theta))[groups] - pi
    return np.einsum("n,ng,nga->a", np.prod(pi[groups], axis=1), advantages, scores) / GROUP


def test_expected_gradients_of_estimators():
    """The expected gradient is ∇E[r] for rloo, (G − 1)/G · ∇E[r] for grpo, and ∇ of a truncated log p for maxrl.

    −Σ_{k<G} (1 − p)^k / k has the gradient Σ_{k<G−1} (1 − p)^k ∇p, and log p is its limit.
    """
    theta = np.array([0.3, -0.8, 0.1])
    pi = np.exp(theta) / np.exp(theta).sum()

    def of_mean(rewards):
        return pi * (rewards - pi @ rewards)

    with x64():
        rewards = np.array([2.0, -1.0, 0.5])
        np.testing.assert_allclose(expected_gradient(theta, rewards, "rloo"), of_mean(rewards), atol=1e-12)
        grpo = expected_gradient(theta, rewards, "grpo")
        np.testing.assert_allclose(grpo, of_mean(rewards) * (GROUP - 1) / GROUP, atol=1e-12)
        right = np.array([0.0, 1.0, 0.0])
        p = pi @ right
        weight = sum((1 - p) ** k for k in range(GROUP - 1))
        assert weight == pytest.approx((1 - (1 - p) ** (GROUP - 1)) / p)
        np.testing.assert_allclose(expected_gradient(theta, right, "maxrl"), weight * of_mean(right), atol=1e-12)


class VariantsTest(chex.TestCase, parameterized.TestCase):
    @chex.variants(with_jit=True, without_jit=True, with_pmap=True)
    @parameterized.parameters(("group", "sum_then_normalize"), ("batch", "normalize_then_sum"))
    def test_compute_advantages(self, scale, aggregation):
        rewards, weights = example(missing=0.2), jnp.array([1.0, 2.0])
        function = self.variant(
            lambda r, w: compute_advantages(r, weights=w, scale_rewards=scale, multi_objective_aggregation=aggregation)
        )
        advantages = function(jnp.asarray(rewards), weights)
        chex.assert_shape(advantages, (3, 4))
        chex.assert_type(advantages, jnp.float32)
        np.testing.assert_allclose(advantages, by_loops(rewards, [1, 2], scale, aggregation, 1e-4), atol=3e-6)

    @chex.variants(with_jit=True, without_jit=True, with_pmap=True)
    def test_zero_signal_groups(self):
        zero = self.variant(zero_signal_groups)(jnp.array([[1.0, 1.0], [0.0, 1.0]]))
        chex.assert_shape(zero, (2,))
        chex.assert_type(zero, bool)
        assert zero.tolist() == [True, False]
