"""Token advantages from turn and token rewards. Each token is credited with the rewards at and after it."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from grpo_jax.maths.advantages import compute_advantages, scale_of


def turn_advantages(
    token_rewards: jax.Array,
    turns: jax.Array,
    *,
    weights: Sequence[float] | jax.Array | None = None,
    scale_rewards: str | None = None,
    multi_objective_aggregation: str = "sum_then_normalize",
    epsilon: float = 1e-4,
    estimator: str = "grpo",
) -> jax.Array:
    """Compute token advantages from the rewards at and after each token (rewards-to-go).

        r_n = sum of rewards in turn n, from its first token to the last token before the next turn
        S_n = Σ_{m≥n} r_m
        A_n = `compute_advantages` of S_n over the completions in the group
        A_t = A_n − Σ_k w_k (rewards in turn n before token t)

    Statistics over the batch use all turns of all completions. The second term of A_t is 0 if a turn's only reward is
    at its last token. This term is in units of the reward, so it is subtracted only if the advantages are too: with
    scale_rewards="none", "sum_then_normalize" and the estimator "grpo" or "rloo".

    Args:
      token_rewards: [B, G, T, K] float, rewards placed at tokens: a turn's reward at the last token of the turn, a
        completion's reward at its last token. NaN at any token means that function k did not score the completion.
      turns: [B, G, T] int, turn index of each sampled token, starting at 0; −1 for all other tokens, whose rewards
        belong to the preceding turn.
      weights: as in `compute_advantages`.
      scale_rewards: as in `compute_advantages`.
      multi_objective_aggregation: as in `compute_advantages`.
      epsilon: as in `compute_advantages`.
      estimator: as in `compute_advantages`, except "opo".

    Returns:
      [B, G, T] float32 (float64 for float64 rewards); 0 where `turns` is −1. With a single turn that is
      rewarded at its last token, every token has the advantage that `compute_advantages` returns for the completion.

    Raises:
      ValueError: if a shape is wrong, the estimator is "opo", or `compute_advantages` rejects an argument.

    Gradient:
      None; rewards are constants. With scale_rewards="none", the expected value of (1/G) Σ_i Σ_t A_it ∇log π(t) over
      groups of G samples from π is as follows, where R is the sum of a completion's rewards:

      | number of turns, estimator | expected gradient |
      |---|---|
      | the same in every completion, "rloo" | ∇E[R] |
      | the same in every completion, "grpo" | (G − 1)/G · ∇E[R] |
      | depends on the sample | biased: a turn is compared across only the completions that reach it |

      A turn that no other completion in its group reaches has A_n = 0. With "grpo", crediting every token with the
      total reward gives (G − 1)/G · ∇E[R] for any number of turns, but the rewards before a turn add variance.
      These results are verified by enumeration in tests/maths/test_credit.py.

    References:
      Rewards-to-go and state-dependent baselines: Williams, "Simple statistical gradient-following algorithms" (1992),
      and Greensmith, Bartlett, Baxter, "Variance reduction techniques for gradient estimates" (2004). DeepSeekMath
      (arXiv:2402.03300), section 4.1.3, normalizes each step's reward over all steps in the group, then sums over the
      following steps. No discount is applied; see Nota, Thomas, "Is the policy gradient a gradient?"
      (arXiv:1906.07073).

    Example:
      Two completions with two turns each. Only the first turn of the first completion has a reward.

      >>> import jax.numpy as jnp
      >>> turns = jnp.array([[[0, 0, -1, 1], [0, -1, 1, 1]]])
      >>> rewards = jnp.array([[[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]])[..., None]
      >>> turn_advantages(rewards, turns, scale_rewards="none").tolist()
      [[[0.5, 0.5, 0.0, 0.0], [-0.5, 0.0, 0.0, 0.0]]]
    """
    token_rewards, turns = jax.lax.stop_gradient(jnp.asarray(token_rewards)), jnp.asarray(turns)
    if token_rewards.ndim != 4 or token_rewards.shape[:3] != turns.shape:
        raise ValueError(
            f"token_rewards must be [B, G, T, K] and turns [B, G, T]; got {token_rewards.shape} and {turns.shape}."
        )
    if estimator == "opo":
        raise ValueError('estimator="opo" does not support turns, since its baseline is defined for whole completions.')
    scale_rewards = scale_of(scale_rewards, estimator)
    b, g, t, k = token_rewards.shape
    rewards = token_rewards.astype(jnp.promote_types(token_rewards.dtype, jnp.float32))
    scored = ~jnp.isnan(rewards).any(axis=2, keepdims=True)  # [B, G, 1, K]
    rewards = jnp.where(scored, rewards, 0)
    # Turn index of each token; observation tokens belong to the preceding turn. There are at most T turns.
    turn_of = jnp.maximum(jax.lax.cummax(turns, axis=2), 0)
    rows = jnp.arange(b)[:, None, None], jnp.arange(g)[None, :, None], turn_of
    turn_rewards = jnp.zeros_like(rewards).at[rows].add(rewards)  # [B, G, turn, K]
    to_go = _to_go(turn_rewards)
    exists = jnp.arange(t)[None, None] <= turns.max(axis=2, keepdims=True)
    to_go = jnp.where(exists[..., None] & scored, to_go, jnp.nan)
    advantages = compute_advantages(
        jnp.moveaxis(to_go, 2, 1).reshape(b * t, g, k),
        weights=weights,
        scale_rewards=scale_rewards,
        multi_objective_aggregation=multi_objective_aggregation,
        epsilon=epsilon,
        estimator=estimator,
    )
    advantages = jnp.moveaxis(advantages.reshape(b, t, g), 1, 2)
    per_token = jnp.take_along_axis(advantages, turn_of, axis=2)
    if in_units_of_rewards(scale_rewards, multi_objective_aggregation, estimator):
        per_function = jnp.ones(k, rewards.dtype) if weights is None else jnp.asarray(weights, rewards.dtype)
        weighted = (rewards * per_function[None, None, None]).sum(axis=-1)
        per_token = per_token - _earlier_in_turn(weighted, turn_of)
    return jnp.where(turns >= 0, per_token, 0)


def in_units_of_rewards(scale_rewards: str, aggregation: str, estimator: str) -> bool:
    """Return whether advantages are differences between rewards, in which case rewards can be added to them."""
    return scale_rewards == "none" and aggregation == "sum_then_normalize" and estimator in ("grpo", "rloo")


def _to_go(turn_rewards: jax.Array) -> jax.Array:
    """Return Σ_{m≥n} r_m along axis 2."""

    def step(later: jax.Array, now: jax.Array) -> tuple[jax.Array, jax.Array]:
        to_go = now + later
        return to_go, to_go

    by_turn = jnp.moveaxis(turn_rewards, 2, 0)
    _, to_go = jax.lax.scan(step, jnp.zeros_like(by_turn[0]), by_turn, reverse=True)
    return jnp.moveaxis(to_go, 0, 2)


def _earlier_in_turn(rewards: jax.Array, turn_of: jax.Array) -> jax.Array:
    """Return the sum of the rewards that precede each token in its turn, [B, G, T]."""
    starts = jnp.diff(turn_of, axis=2, prepend=-1) != 0

    def step(sum_so_far: jax.Array, token: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        reward, start = token
        sum_so_far = jnp.where(start, 0, sum_so_far)
        return sum_so_far + reward, sum_so_far

    tokens = jnp.moveaxis(rewards, 2, 0), jnp.moveaxis(starts, 2, 0)
    _, sums = jax.lax.scan(step, jnp.zeros_like(rewards[..., 0]), tokens)
    return jnp.moveaxis(sums, 0, 2)
