"""Rows in epochs, groups refilled, or rows by a Beta posterior: rollouts to the same accuracy on mixed problems.

    python -m experiments.prompt_selection [--seeds 0 1 2] [--steps 200] [--rows N] [--run-dir DIR]
    python -m experiments.prompt_selection --table --run-dir DIR    # nothing is run: the table of what DIR holds

Countdown as in `experiments.countdown`, with problems of two, three and four numbers mixed, so that many are always
solved by the small model of the start, and many never. The three arms make the same number of updates, each of 16
prompts of 8 completions: `uniform` takes rows in shuffled epochs; `dynamic` replaces groups of equal rewards
(`dynamic_sampling`), so that its updates cost more completions; `beta` chooses rows (`prompt_selection="beta"`). Every
20 steps 240 held-out problems of the same mixture are sampled 4 times.

`rollouts`: completions sampled, refills among them, until the mean of 3 evaluations reaches the bar, which is 95 % of
what uniform has gained in the mean of its last 3. A line is added to `results.jsonl` for each run; what is there is not
run again. Expect: with --steps 120 (five CPU minutes) the table in docs/estimators.md.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import countdown
from experiments.common import Stopwatch, supervise, use_compile_cache
from experiments.estimators import GROUP, add_result, kept, read_results
from grpo_jax import GRPOConfig, Policy, train

ARMS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "dynamic": {"dynamic_sampling": True},
    "beta": {"prompt_selection": "beta"},
}
MIXTURE = {2: 330, 3: 800, 4: 800}
"""Problems with so many numbers."""
HELD_OUT = 8
"""One problem in so many is held out."""
WINDOW = 3
"""Evaluations that a point of a curve is the mean of."""


def make_problems(seed: int) -> list[dict[str, Any]]:
    """The mixture, in any order, as rows."""
    kinds = [{**countdown.SMALL, "numbers": numbers} for numbers in MIXTURE]
    problems = [
        problem
        for kind, count in zip(kinds, MIXTURE.values(), strict=True)
        for problem in countdown.make_problems(seed, count, **kind)
    ]
    random.Random(seed).shuffle(problems)
    return problems


def run_arm(base: Policy, rows: Sequence[Any], held_out: Sequence[Any], seed: int, steps: int, arm: str) -> Any:
    """Train one arm; `curve` has (completions sampled, held-out accuracy) of each evaluation."""
    curve: list[tuple[int, float]] = []
    last: dict[str, float] = {}

    def keep(step: int, metrics: Mapping[str, float]) -> None:
        last.update({name: value for name, value in metrics.items() if not name.startswith(("eval/", "seconds/"))})
        if "eval/accuracy" in metrics:
            curve.append((int(last.get("num_prompts", 0)) * GROUP, round(metrics["eval/accuracy"], 4)))

    config = GRPOConfig(
        num_generations=GROUP,
        per_device_train_batch_size=16 * GROUP,
        max_completion_length=20,
        max_steps=steps,
        learning_rate=5e-4,
        lr_scheduler_type="constant",
        seed=seed,
        eval_steps=20,
        logging_steps=20,
        num_generations_eval=4,
        per_device_eval_batch_size=4 * len(held_out),
        save_steps=None,
        **ARMS[arm],
    )
    train(base, list(rows), [countdown.accuracy], config, eval_dataset=list(held_out), callbacks=[keep])
    return {"curve": curve, "last": {name: value for name, value in last.items() if "/" in name or name == "reward"}}


def smooth(curve: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """Means of `WINDOW` evaluations, at the last of each.

    Example:
      >>> smooth([(0, 0.0), (10, 0.3), (20, 0.6), (30, 0.6)])
      [(20, 0.3), (30, 0.5)]
    """
    ends = range(WINDOW, len(curve) + 1)
    return [(curve[end - 1][0], round(sum(y for _, y in curve[end - WINDOW : end]) / WINDOW, 6)) for end in ends]


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """One line for each arm and seed, in Markdown."""
    lines = ["| seed | arm | accuracy at the end | completions in all | rollouts to the bar |", "|---|---|---|---|---|"]
    for seed in sorted({line["seed"] for line in results}):
        arms = {line["arm"]: line for line in results if line["seed"] == seed}
        if not smooth(arms.get("uniform", {}).get("curve", ())):
            continue
        start, end = arms["uniform"]["curve"][0][1], smooth(arms["uniform"]["curve"])[-1][1]
        bar = start + 0.95 * (end - start)
        for arm in [arm for arm in ARMS if arm in arms]:
            points = smooth(arms[arm]["curve"])
            reached = next((f"{rollouts:,}" for rollouts, accuracy in points if accuracy >= bar), "–")
            lines.append(f"| {seed} | {arm} | {points[-1][1]:.3f} | {points[-1][0]:,} | {reached} (bar {bar:.3f}) |")
    return "\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    about = "Rows in epochs, groups refilled, or rows by a Beta posterior."
    parser = argparse.ArgumentParser(prog="python -m experiments.prompt_selection", description=about)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="default 0 1 2")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps of a run (default 200)")
    parser.add_argument("--rows", type=int, help="problems that GRPO learns from (default: all but the held-out ones)")
    parser.add_argument("--warm-up-steps", type=int, default=300, help="supervised steps of the base (default 300)")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/prompt_selection"))
    parser.add_argument("--table", action="store_true", help="only show the results that are there")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Run what is missing, print the table and return all results."""
    arguments = parse(argv)
    directory: Path = arguments.run_dir
    directory.mkdir(parents=True, exist_ok=True)
    use_compile_cache()
    results = read_results(directory)
    done = {(line["seed"], line["arm"]) for line in results}
    for seed in [] if arguments.table else arguments.seeds:
        missing = [arm for arm in arguments.arms if (seed, arm) not in done]
        if not missing:
            continue
        problems = make_problems(seed)
        held_out = [countdown.short_prompt(problem) for problem in problems[::HELD_OUT]]
        to_train = [problem for i, problem in enumerate(problems) if i % HELD_OUT]

        def taught(seed: int = seed, to_train: Sequence[Any] = to_train) -> Policy:
            new = countdown.make_policy(seed)
            lessons = countdown.lessons(new, to_train, arguments.warm_up_steps * countdown.BATCH, seed)
            return supervise(new, lessons, batch=countdown.BATCH)

        base = kept(directory / f"base-{seed}", taught)
        rows = [countdown.short_prompt(problem) for problem in to_train[: arguments.rows]]
        for arm in missing:
            watch = Stopwatch()
            line = {"seed": seed, "arm": arm, **run_arm(base, rows, held_out, seed, arguments.steps, arm)}
            results.append({**line, "seconds": watch.seconds["total"]})
            add_result(directory, results[-1])
    print(table(results))
    return results


if __name__ == "__main__":
    main()
