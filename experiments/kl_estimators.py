"""Find where training ends with each KL estimator, on a four-armed bandit with exact gradients.

    python -m experiments.kl_estimators [--beta 0.5] [--seed N] [--out FILE]

GRPO with a KL term should end at π* ∝ π_ref·exp(R/β), the maximum of E[R] − β·KL(π‖π_ref). Here nothing is sampled: the
loss of each arm comes from `grpo_loss`, weighted by the arm's probability under the policy that would have drawn it,
π_old. Any distance between the end of a run and π* is therefore due to the estimator, not to noise. The advantage is
R − E[R] under π_old, not divided by a std, and the clip is never reached; both would shift the end point.

π_old is updated every μ updates (μ = 1 and 4), or stays the start policy ("one batch": repeated passes over one
rollout, the limit of a large μ). A --seed other than 0 draws another bandit.

Time: 6 CPU seconds.
Expect: the corrected k1, k2 and k3 and the KL in the reward end within 0.01 % of every probability of π*, at any μ.
Plain k3 ends at the optimum of the other divergence, KL(π_ref‖π), which is off by up to 62 %; plain k1 ends at the best
arm, as if there were no KL. Plain k2 is correct while π_old is updated, and off by 66 % with one batch.
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
"""Gradient steps per run; a multiple of 4."""
LEARNING_RATE = 0.5
"""Learning rate for plain gradient descent on the four logits."""
NO_CLIP = 1e6
REUSE = {"μ = 1": 1, "μ = 4": 4, "one batch": UPDATES}
"""Number of updates for which π_old stays the same."""


class Arm(NamedTuple):
    """One way to include the KL, as keyword arguments for `grpo_loss`."""

    kl_estimator: str
    use_bias_correction_kl: bool
    kl_placement: str

    @property
    def name(self) -> str:
        """The name in the table: "k3", "w·k3" (corrected) or "in reward"."""
        if self.kl_placement == "reward":
            return "in reward"
        return f"w·{self.kl_estimator}" if self.use_bias_correction_kl else self.kl_estimator


ARMS = [Arm(k, corrected, "loss") for corrected in (False, True) for k in ("k1", "k2", "k3")]
# With one token and the KL in the reward, estimator and correction have no effect, so one arm is enough.
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
    """Create a bandit. With seed 0, the reference gives the best arm the lowest probability; others are random."""
    if seed == 0:
        rewards, reference = np.array([1.0, 0.0, 0.5, -0.5]), np.array([0.1, 0.2, 0.3, 0.4])
    else:
        draw = np.random.default_rng(seed)
        rewards, reference = draw.normal(size=4) * 0.6, draw.dirichlet(np.full(4, 4.0))
    return Bandit(rewards, reference, np.full(4, 0.25), beta)


# Training with the library's objective ------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames="arm")
def run(arm: Arm, reuse: jax.Array, rewards: jax.Array, reference: jax.Array, start: jax.Array, beta: jax.Array) -> Any:
    """Run gradient descent on the expected loss.

    Args:
      arm: how the KL is included.
      reuse: [] int32, updates between snapshots of π_old.
      rewards: [4] float32, like the probabilities `reference` and `start`.
      beta: [] float32, coefficient of the KL.

    Returns:
      [UPDATES, 4] float32, the policy after each update.
    """
    column = lambda x: x[:, None, None]  # four batches with one completion of one token each: [4, 1, 1]

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
    """Return the policies [UPDATES, 4] for each arm and μ, by name."""
    arrays = [jnp.asarray(x, jnp.float32) for x in bandit]
    all_reuses = jax.vmap(run, in_axes=(None, 0, None, None, None, None))
    curves = {}
    for arm in arms:
        paths = all_reuses(arm, jnp.asarray(list(REUSE.values())), *arrays)
        curves[arm.name] = {name: np.asarray(path) for name, path in zip(REUSE, paths, strict=True)}
    return curves


# The end points that theory predicts, without the library -----------------------------------------------------------


def descend(slopes: Callable[[np.ndarray], np.ndarray], start: np.ndarray) -> np.ndarray:
    """Minimize with gradient descent in float64. `slopes(π)` is the objective's gradient with respect to log π."""
    theta = np.log(start)
    for _ in range(UPDATES):
        pi = np.exp(theta - theta.max())
        pi /= pi.sum()
        gradient = slopes(pi)
        theta = theta - LEARNING_RATE * (gradient - pi * gradient.sum())
    return pi


def forward_optimum(bandit: Bandit) -> np.ndarray:
    """Return the maximizer of E[R] − β·KL(π_ref‖π): β·π_ref/(λ − R), with λ > max R such that it sums to 1."""
    low = bandit.rewards.max() + bandit.beta * bandit.reference[bandit.rewards.argmax()]
    high = bandit.rewards.max() + bandit.beta
    for _ in range(200):
        middle = (low + high) / 2
        total = np.sum(bandit.beta * bandit.reference / (middle - bandit.rewards))
        low, high = (middle, high) if total > 1 else (low, middle)
    return bandit.beta * bandit.reference / (low - bandit.rewards)


def theory(bandit: Bandit) -> dict[str, dict[str, tuple[str, np.ndarray]]]:
    """Return, by arm and μ, the end point that theory predicts: a short name and the distribution."""
    rewards, reference, start, beta = bandit
    d = lambda pi: np.log(pi / reference)
    best = np.eye(4)[rewards.argmax()]
    optimum, forward = ("π*", bandit.optimum), ("forward KL", forward_optimum(bandit))
    # −E[R] + β·Σ π_old·log π is unbounded below: it falls as the other arms vanish.
    stale_k1 = ("runs off", best)
    stale_k2 = ("stale k2", descend(lambda pi: beta * start * d(pi) - pi * rewards, start))
    stale_k3 = ("stale k3", descend(lambda pi: beta * start * (1 - reference / pi) - pi * rewards, start))
    # A fixed point of on-policy training holds for any μ: if the first update of an iteration is 0, so are the others.
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
    """Compute half the sum of |p − q| over the last axis.

    Example:
      >>> float(total_variation(np.array([0.5, 0.5]), np.array([1.0, 0.0])))
      0.5
    """
    return np.abs(p - q).sum(-1) / 2


def relative_error(p: np.ndarray, q: np.ndarray) -> float:
    """Return the largest |p/q − 1| over the arms. Unlike total variation, it also counts errors on rare arms.

    Example:
      >>> relative_error(np.array([0.9, 0.1]), np.array([0.95, 0.05]))
      1.0
    """
    return float(np.abs(p / q - 1).max())


def make_results(bandit: Bandit, curves: dict[str, dict[str, np.ndarray]]) -> list[dict[str, Any]]:
    """Build the table's rows, one for each arm and μ."""
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
    """Format four probabilities for printing."""
    return " ".join(f"{x:.3f}" for x in p)


def print_table(bandit: Bandit, rows: Sequence[dict[str, Any]]) -> None:
    """Print the rewards and the reference distributions, then the table."""
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
    """Draw the distance to π* during training, with an updated old policy and with one fixed batch."""
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
            # If a curve stands for several arms, draw the farthest.
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
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.kl_estimators", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--seed", type=int, default=0, help="seed for the bandit; 0 is the docs' (default)")
    parser.add_argument("--beta", type=float, default=0.5, help="KL coefficient, in units of reward (default 0.5)")
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
