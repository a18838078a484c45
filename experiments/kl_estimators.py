"""A four-armed bandit, by exact gradients: where does training end with each estimator of the KL?

    python -m experiments.kl_estimators [--beta 0.5] [--seed N] [--out FILE]

GRPO with a KL term is meant to end at π* ∝ π_ref·exp(R/β), the maximum of E[R] − β·KL(π‖π_ref). Here nothing is
sampled: the loss of each arm is from `grpo_loss`, weighted by the probability of the arm under the policy that would
have drawn it, π_old. So what is left between the end of a run and π* is the estimator's, and no noise. The advantage is
R − E[R] under π_old, not divided by a std, and the clip is out of reach: both would move the end by themselves.

π_old is the policy of the last μ updates' start (μ = 1 and 4), or the start policy for good ("one batch": one rollout,
passed over and over, the limit of a large μ). --seed other than 0 draws another bandit.

Time: 6 CPU seconds.
Expect: the corrected k1, k2 and k3 and the KL in the reward end at π* to 0.01 % of every probability, at any μ. Plain
k3 ends at the optimum of the other divergence, KL(π_ref‖π), which is off by up to 62 %; plain k1 at the best arm, as if
there were no KL. Plain k2 is right while π_old follows, and off by 66 % with one batch.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.maths.losses import grpo_loss
from grpo_jax.watch.plots import LIGHT, color

UPDATES = 8000
"""Gradient steps of a run; a multiple of 4."""
LEARNING_RATE = 0.5
"""Of plain gradient descent on the four logits."""
NO_CLIP = 1e6
REUSE = {"μ = 1": 1, "μ = 4": 4, "one batch": UPDATES}
"""Updates for which the same π_old is kept."""


class Arm(NamedTuple):
    """One way to enter the KL: the keywords of `grpo_loss`."""

    kl_estimator: str
    use_bias_correction_kl: bool
    kl_placement: str

    @property
    def name(self) -> str:
        """As in the table: "k3", "w·k3" (corrected) or "in reward"."""
        if self.kl_placement == "reward":
            return "in reward"
        return f"w·{self.kl_estimator}" if self.use_bias_correction_kl else self.kl_estimator


ARMS = [Arm(k, corrected, "loss") for corrected in (False, True) for k in ("k1", "k2", "k3")]
# With one token and the KL in the reward, estimator and correction are not read: one row stands for all.
ARMS.append(Arm("k3", True, "reward"))


class Bandit(NamedTuple):
    """Probabilities and rewards of the four arms, float64."""

    rewards: np.ndarray
    reference: np.ndarray
    start: np.ndarray
    beta: float

    @property
    def optimum(self) -> np.ndarray:
        """π* ∝ π_ref·exp(R/β)."""
        weights = self.reference * np.exp(self.rewards / self.beta)
        return weights / weights.sum()


def make_bandit(seed: int, beta: float) -> Bandit:
    """Seed 0: a reference that likes the best arm least. Others: drawn."""
    if seed == 0:
        rewards, reference = np.array([1.0, 0.0, 0.5, -0.5]), np.array([0.1, 0.2, 0.3, 0.4])
    else:
        draw = np.random.default_rng(seed)
        rewards, reference = draw.normal(size=4) * 0.6, draw.dirichlet(np.full(4, 4.0))
    return Bandit(rewards, reference, np.full(4, 0.25), beta)


# Training, by the library's own objective ---------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames="arm")
def run(arm: Arm, reuse: jax.Array, rewards: jax.Array, reference: jax.Array, start: jax.Array, beta: jax.Array) -> Any:
    """Gradient descent on the expected loss.

    Args:
      arm: how the KL enters.
      reuse: [] int32, updates between two snapshots of π_old.
      rewards: [4] float32, as the probabilities `reference` and `start`.
      beta: [] float32.

    Returns:
      [UPDATES, 4] float32, the policy after each update.
    """
    column = lambda x: x[:, None, None]  # four batches, each of one completion of one token: [4, 1, 1]

    def expected_loss(theta: jax.Array, old: jax.Array) -> jax.Array:
        def loss_of_one(l: jax.Array, l_old: jax.Array, l_ref: jax.Array, advantage: jax.Array) -> jax.Array:
            return grpo_loss(
                l,
                l_old,
                l_ref,
                advantage,
                jnp.ones((1, 1)),
                loss_type="grpo",
                importance_sampling_level="trajectory",  # one token: the same as "token"
                beta=beta,
                epsilon=NO_CLIP,
                **arm._asdict(),
            )[0]

        advantages = rewards - jnp.sum(old * rewards)
        l, l_old, l_ref = jax.nn.log_softmax(theta), jnp.log(old), jnp.log(reference)
        losses = jax.vmap(loss_of_one)(column(l), column(l_old), column(l_ref), advantages[:, None])
        return jnp.sum(old * losses)

    def update(carry: tuple[jax.Array, jax.Array], step: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        theta, old = carry
        old = jnp.where(step % reuse == 0, jax.nn.softmax(theta), old)
        theta = theta - LEARNING_RATE * jax.grad(expected_loss)(theta, old)
        return (theta, old), jax.nn.softmax(theta)

    return jax.lax.scan(update, (jnp.log(start), start), jnp.arange(UPDATES))[1]


def train_all(bandit: Bandit, arms: Sequence[Arm] = ARMS) -> dict[str, dict[str, np.ndarray]]:
    """Policies [UPDATES, 4] of each arm at each μ, by name."""
    arrays = [jnp.asarray(x, jnp.float32) for x in bandit]
    all_reuses = jax.vmap(run, in_axes=(None, 0, None, None, None, None))
    curves = {}
    for arm in arms:
        paths = all_reuses(arm, jnp.asarray(list(REUSE.values())), *arrays)
        curves[arm.name] = {name: np.asarray(path) for name, path in zip(REUSE, paths, strict=True)}
    return curves


# Where theory says it ends, without the library ---------------------------------------------------------------------


def descend(slopes: Callable[[np.ndarray], np.ndarray], start: np.ndarray) -> np.ndarray:
    """Minimise by gradient descent in float64; `slopes(π)` is the derivative of the objective by each log π(a)."""
    theta = np.log(start)
    for _ in range(UPDATES):
        pi = np.exp(theta - theta.max())
        pi /= pi.sum()
        gradient = slopes(pi)
        theta = theta - LEARNING_RATE * (gradient - pi * gradient.sum())
    return pi


def forward_optimum(bandit: Bandit) -> np.ndarray:
    """The maximum of E[R] − β·KL(π_ref‖π): π(a) = β·π_ref(a)/(λ − R(a)), λ > max R such that it sums to 1."""
    low = bandit.rewards.max() + bandit.beta * bandit.reference[bandit.rewards.argmax()]
    high = bandit.rewards.max() + bandit.beta
    for _ in range(200):
        middle = (low + high) / 2
        total = np.sum(bandit.beta * bandit.reference / (middle - bandit.rewards))
        low, high = (middle, high) if total > 1 else (low, middle)
    return bandit.beta * bandit.reference / (low - bandit.rewards)


def theory(bandit: Bandit) -> dict[str, dict[str, tuple[str, np.ndarray]]]:
    """By name of arm and μ: a word for the end that theory expects, and the distribution."""
    rewards, reference, start, beta = bandit
    d = lambda pi: np.log(pi / reference)
    best = np.eye(4)[rewards.argmax()]
    optimum, forward = ("π*", bandit.optimum), ("forward KL", forward_optimum(bandit))
    # −E[R] + β·Σ π_old·log π is unbounded below: it falls as the other arms vanish.
    stale_k1 = ("runs off", best)
    stale_k2 = ("stale k2", descend(lambda pi: beta * start * d(pi) - pi * rewards, start))
    stale_k3 = ("stale k3", descend(lambda pi: beta * start * (1 - reference / pi) - pi * rewards, start))
    # An on-policy fixed point is one at any μ: where the first update of an iteration is 0, so are the others.
    same = lambda end, stale: {name: end if name != "one batch" else stale for name in REUSE}
    return {
        "k1": same(("no KL", best), stale_k1),
        "k2": same(optimum, stale_k2),
        "k3": same(forward, stale_k3),
        "w·k1": same(optimum, optimum),
        "w·k2": same(optimum, optimum),
        "w·k3": same(optimum, optimum),
        "in reward": same(optimum, optimum),
    }


# Table and picture --------------------------------------------------------------------------------------------------


def total_variation(p: np.ndarray, q: np.ndarray) -> Any:
    """Half the sum of |p − q|, over the last axis.

    Example:
      >>> float(total_variation(np.array([0.5, 0.5]), np.array([1.0, 0.0])))
      0.5
    """
    return np.abs(p - q).sum(-1) / 2


def relative_error(p: np.ndarray, q: np.ndarray) -> float:
    """The largest |p/q − 1| of an arm: the strictest measure here, as it does not forgive a rare arm.

    Example:
      >>> relative_error(np.array([0.9, 0.1]), np.array([0.95, 0.05]))
      1.0
    """
    return float(np.abs(p / q - 1).max())


def make_results(bandit: Bandit, curves: dict[str, dict[str, np.ndarray]]) -> list[dict[str, Any]]:
    """One row for each arm and μ."""
    rows = []
    expected = theory(bandit)
    for arm, paths in curves.items():
        for reuse, path in paths.items():
            word, end = expected[arm][reuse]
            final = np.asarray(path[-1], float)
            rows.append(
                {
                    "kl": arm,
                    "reuse": reuse,
                    "final": final.tolist(),
                    "error": relative_error(final, bandit.optimum),
                    "variation": float(total_variation(final, bandit.optimum)),
                    "theory": word,
                    "theory_variation": float(total_variation(final, end)),
                }
            )
    return rows


def show_distribution(p: Sequence[float] | np.ndarray) -> str:
    """Four probabilities as a person reads them."""
    return " ".join(f"{x:.3f}" for x in p)


def print_table(bandit: Bandit, rows: Sequence[dict[str, Any]]) -> None:
    """The table, the distributions that it speaks of first."""
    print(f"rewards      {' '.join(f'{x:5.2f}' for x in bandit.rewards)}   β = {bandit.beta}")
    print(f"reference    {show_distribution(bandit.reference)}")
    print(f"π*           {show_distribution(bandit.optimum)}")
    print(f"forward KL   {show_distribution(forward_optimum(bandit))}\n")
    head = f"{'KL term':<12} {'old policy':<10} {'ends at':<24} {'largest error':>13} {'TV to π*':>9}"
    print(f"{head}   theory says  TV to that")
    for row in rows:
        print(
            f"{row['kl']:<12} {row['reuse']:<10} {show_distribution(row['final']):<24}"
            f" {row['error']:>12.2%} {row['variation']:>9.4f}   {row['theory']:<12} {row['theory_variation']:.4f}"
        )


def draw(bandit: Bandit, curves: dict[str, dict[str, np.ndarray]], out: Path) -> None:
    """Distance to π* on the way: with an old policy that follows, and with one batch for good."""
    from matplotlib.figure import Figure

    corrected = [name for name in curves if name not in ("k1", "k2", "k3")]
    shown = {
        "log ratio (k1): as if there were no KL": (["k1"], "start", "-"),
        "DeepSeekMath's estimator (k3): the KL in the other direction": (["k3"], "high", "-"),
        "half its square (k2): right while the old policy follows": (["k2"], "low", "-"),
        "any with the ratio in front (default), or in the reward: right": (corrected, "policy", (0, (4, 2))),
    }
    figure = Figure(figsize=(10, 4.6), dpi=100, layout="constrained", facecolor=LIGHT.page)
    heading = f"Where training ends with each form of the KL term (β = {bandit.beta:g}, exact gradients)"
    figure.suptitle(heading, x=0.01, ha="left", weight="bold", color=LIGHT.ink)
    titles = {"μ = 4": "The old policy is renewed every 4 updates", "one batch": "One batch is used for good"}
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (reuse, title) in zip(panels, titles.items(), strict=True):
        for label, (names, meaning, style) in shown.items():
            # Of several names the one that is farthest.
            distance = np.max([total_variation(curves[name][reuse], bandit.optimum) for name in names], axis=0)
            updates = np.arange(1, len(distance) + 1)
            axes.plot(updates, np.maximum(distance, 1e-9), color=color(meaning), linestyle=style, lw=2.2, label=label)
        axes.axhline(0.01, color=LIGHT.gray, lw=1, linestyle=":")
        axes.text(9000, 0.0115, "1 % of the probability misplaced", color=LIGHT.gray, fontsize=8.5, ha="right")
        axes.set(xscale="log", yscale="log", ylim=(1e-4, 1.2))
        axes.set_xlabel("updates", color=LIGHT.gray)
        axes.set_title(title, loc="left", fontsize=11, color=LIGHT.ink)
        axes.grid(color=LIGHT.grid)
        axes.tick_params(colors=LIGHT.gray, which="both", length=0)
        axes.spines[:].set_visible(False)
    panels[0].set_ylabel("distance to the optimum", color=LIGHT.gray)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower left", ncols=2, frameon=False, fontsize=9)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, format="png")
    print(f"\npicture: {out}")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.kl_estimators", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--seed", type=int, default=0, help="of the bandit; 0: the one of the docs (default)")
    parser.add_argument("--beta", type=float, default=0.5, help="weight of the KL, in units of reward (default 0.5)")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/kl_estimators.png"), help="the picture (default %(default)s)"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Run the experiment and return the rows of its table."""
    arguments = parse(argv)
    bandit = make_bandit(arguments.seed, arguments.beta)
    curves = train_all(bandit)
    rows = make_results(bandit, curves)
    print_table(bandit, rows)
    draw(bandit, curves, arguments.out)
    return rows


if __name__ == "__main__":
    main()
