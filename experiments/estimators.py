"""Compare every advantage estimator and every loss, with one setting each, on two small tasks.

    python -m experiments.estimators [--tasks sort_digits countdown] [--seeds 0 1 2] [--only NAME ...] [--run-dir DIR]
    python -m experiments.estimators --table --run-dir DIR      # run nothing; print the table of the results in DIR

The base for each seed comes from `experiments.sort_digits` or `experiments.countdown`: a small model trained on a
flawed teacher, right one time in six to eight. Every setting makes the same number of optimizer steps with the same
seed, rows and learning rate. The reward is 1 for a correct answer, and there is no KL term. An iteration makes two
passes over 16 prompts × 8 completions in 2 minibatches, so that three of its four updates are off-policy, where losses
differ. Hyperparameters for single losses come from the papers, or else are ours: see `SETTINGS`.

Each result is measured on 200 held-out prompts with 8 completions each at temperature 1: `sampled`, the share of
correct completions; `pass@8`, the share of prompts with a correct completion; `entropy` and `kl` (to the base), in nats
per token. `half` is the number of optimizer steps until the training reward, averaged over 5 iterations, is halfway
from the base's accuracy to the final accuracy of the setting "dapo" with the same seed.

Each run appends a line to `results.jsonl`, and runs that have a line are skipped, so the script can be interrupted.
Time: about 12 CPU seconds per run. Expect: the tables in docs/estimators.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments import countdown, sort_digits
from experiments.common import Stopwatch, supervise, use_compile_cache
from grpo_jax import (
    GRPOConfig,
    Policy,
    completion_log_probs,
    from_pretrained,
    generate,
    make_prompts,
    save_pretrained,
    train,
)
from grpo_jax.rewards.calls import compute_rewards
from grpo_jax.text.completions import reward_inputs

LESSONS = 400
"""Supervised steps for the sort_digits base; the Countdown base takes three quarters as many."""
GROUP = 8
"""Completions per prompt, in training and in the test."""
HELD_OUT = 200
"""Number of held-out prompts."""
WINDOW = 5
"""Iterations averaged for each point of the training curve."""

SETTINGS: dict[str, dict[str, Any]] = {
    "dapo": {},
    "grpo without std": {"scale_rewards": "none"},
    "rloo": {"advantage_estimator": "rloo", "scale_rewards": "none"},
    "maxrl": {"advantage_estimator": "maxrl", "scale_rewards": "none"},
    "opo": {"advantage_estimator": "opo", "scale_rewards": "none"},
    "reinforce_pp": {"advantage_estimator": "reinforce_pp", "scale_rewards": "none"},
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "sapo": {"loss_type": "sapo"},
    "vespo": {"loss_type": "vespo"},
}
"""Name → its changes to the common setting, which is "dapo": estimator "grpo", loss "dapo", ε = 0.2."""


class Task(NamedTuple):
    """A task with the base model for one seed."""

    base: Policy
    rows: list[dict[str, Any]]
    held_out: list[dict[str, Any]]
    reward: Callable[..., Any]
    longest: int  # maximum tokens per completion


def sort_digits_task(seed: int, directory: Path) -> Task:
    """Build the task from `experiments.sort_digits`."""
    rows, held_out = sort_digits.make_rows(seed, held_out=HELD_OUT)

    def taught() -> Policy:
        new = sort_digits.make_policy(seed)
        return supervise(new, sort_digits.lessons(new, rows, LESSONS * 128, seed), batch=128)

    return Task(kept(directory, taught), list(rows), list(held_out), sort_digits.accuracy, sort_digits.LONGEST)


def countdown_task(seed: int, directory: Path) -> Task:
    """Build the task from `experiments.countdown`, from scratch."""
    problems = countdown.make_problems(seed, HELD_OUT + 2000, **countdown.SMALL)

    def taught() -> Policy:
        new = countdown.make_policy(seed)
        return supervise(new, countdown.lessons(new, problems[HELD_OUT:], LESSONS * 96, seed), batch=128)

    rows = [countdown.short_prompt(problem) for problem in problems]
    return Task(kept(directory, taught), rows[HELD_OUT:], rows[:HELD_OUT], countdown.accuracy, 16)


TASKS: dict[str, Callable[[int, Path], Task]] = {"sort_digits": sort_digits_task, "countdown": countdown_task}


def kept(directory: Path, make: Callable[[], Policy]) -> Policy:
    """Load the policy from a directory, creating it first if it does not exist."""
    if not directory.exists():
        save_pretrained(directory, make())
    return from_pretrained(directory)


def make_config(seed: int, steps: int, longest: int, settings: Mapping[str, Any]) -> GRPOConfig:
    """Build the common settings with the changes from an entry of `SETTINGS`."""
    common: dict[str, Any] = {
        "num_generations": GROUP,
        "per_device_train_batch_size": 8 * GROUP,
        "steps_per_generation": 2,
        "num_iterations": 2,
        "max_completion_length": longest,
        "max_steps": steps,
        "learning_rate": 2e-4,
        "lr_scheduler_type": "constant",
        "seed": seed,
        "logging_steps": 4,
        "logging_first_step": False,
        "save_steps": None,
    }
    return GRPOConfig(**{**common, **settings})


def measure(task: Task, params: Any, seed: int) -> dict[str, float]:
    """Measure params on the held-out prompts: sampled, pass@8, entropy and kl."""
    policy, rows = task.base, task.held_out
    prompts = make_prompts(policy.tokenizer([row["prompt"] for row in rows])["input_ids"])
    completions = generate(
        policy.model,
        params,
        prompts,
        jax.random.key(seed + 1000),
        num_generations=GROUP,
        max_completion_length=task.longest,
        eos_token_ids=policy.eos_token_ids,
        pad_token_id=policy.pad_token_id,
    )
    mask, log_probs = np.asarray(completions.mask), np.asarray(completions.log_probs)
    inputs = reward_inputs(policy.tokenizer, rows, np.asarray(completions.tokens), mask)
    rewards = compute_rewards(
        task.reward,
        prompts=inputs.prompts,
        completions=inputs.completions,
        completion_ids=inputs.completion_ids,
        columns=inputs.columns,
        num_generations=GROUP,
    )
    right = rewards.values[:, :, 0] == 1
    of_base = np.asarray(completion_log_probs(policy.model, policy.params, prompts, completions))
    return {
        "sampled": float(right.mean()),
        "pass@8": float(right.any(axis=1).mean()),
        "entropy": float(-log_probs[mask].mean()),
        "kl": float((log_probs - of_base)[mask].mean()),
    }


def run_setting(task: Task, seed: int, steps: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Train with one setting and measure the result. `curve` has (step, mean reward) for each iteration."""
    curve: list[tuple[int, float]] = []
    state = train(
        task.base,
        task.rows,
        [task.reward],
        make_config(seed, steps, task.longest, settings),
        callbacks=[lambda step, metrics: curve.append((step, round(metrics["reward"], 4)))],
    )
    return {**measure(task, state.params, seed), "curve": curve}


def steps_to(curve: Sequence[tuple[int, float]], bar: float) -> int | None:
    """Return the first step at which the mean of `WINDOW` points reaches the bar.

    Example:
      >>> steps_to([(4, 0.0), (8, 0.1), (12, 0.5), (16, 0.6), (20, 0.6), (24, 0.7)], 0.4)
      24
    """
    rewards = [reward for _, reward in curve]
    for end in range(WINDOW, len(curve) + 1):
        if sum(rewards[end - WINDOW : end]) / WINDOW >= bar:
            return curve[end - 1][0]
    return None


def read_results(directory: Path) -> list[dict[str, Any]]:
    """Read the results that earlier runs have written."""
    path = directory / "results.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def add_result(directory: Path, line: Mapping[str, Any]) -> None:
    """Append the result of a completed run."""
    with (directory / "results.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def table(results: Sequence[Mapping[str, Any]], task: str) -> str:
    """Format a task's results as a Markdown table: means over the seeds, with (lowest … highest)."""
    of_task = {(line["setting"], line["seed"]): line for line in results if line["task"] == task}
    seeds = sorted({seed for _, seed in of_task})
    lines = ["| | seeds | sampled | pass@8 | entropy | KL to the base | half |", "|---|---|---|---|---|---|---|"]
    for name in ["base", *SETTINGS]:
        runs = [of_task[name, seed] for seed in seeds if (name, seed) in of_task]
        if not runs:
            continue
        cells = [_spread([run[column] for run in runs]) for column in ("sampled", "pass@8", "entropy", "kl")]
        halves = [] if name == "base" else [_half(of_task, run) for run in runs]
        lines.append(f"| {name} | {len(runs)} | {' | '.join(cells)} | {', '.join(halves)} |")
    return "\n".join(lines)


def _half(of_task: Mapping[tuple[str, int], Mapping[str, Any]], run: Mapping[str, Any]) -> str:
    """Return the steps to half the gain of "dapo" with the same seed: "–" if not reached, "?" without a "dapo" run."""
    base, best = of_task.get(("base", run["seed"])), of_task.get(("dapo", run["seed"]))
    if base is None or best is None:
        return "?"
    return str(steps_to(run["curve"], (base["sampled"] + best["sampled"]) / 2) or "–")


def _spread(values: Sequence[float]) -> str:
    """Format the mean, lowest and highest value.

    Example:
      >>> _spread([0.5, 0.7])
      '0.600 (0.500 … 0.700)'
    """
    mean, low, high = (round(x, 3) + 0.0 for x in (sum(values) / len(values), min(values), max(values)))  # no −0.000
    return f"{mean:.3f} ({low:.3f} … {high:.3f})"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m experiments.estimators", description=__doc__.split("\n")[0])
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="default 0 1 2")
    parser.add_argument("--only", nargs="+", choices=list(SETTINGS), default=list(SETTINGS), metavar="NAME")
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps per run (default 120)")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/estimators"), help="default runs/estimators")
    parser.add_argument("--table", action="store_true", help="only print the existing results")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Run the missing settings, print the tables and return all results."""
    arguments = parse(argv)
    directory: Path = arguments.run_dir
    directory.mkdir(parents=True, exist_ok=True)
    use_compile_cache()
    results = read_results(directory)
    done = {(line["task"], line["setting"], line["seed"]) for line in results}

    def keep(line: dict[str, Any]) -> None:
        results.append(line)
        add_result(directory, line)

    for name in [] if arguments.table else arguments.tasks:
        for seed in arguments.seeds:
            missing = [setting for setting in arguments.only if (name, setting, seed) not in done]
            if not missing:
                continue
            task = TASKS[name](seed, directory / f"{name}-{seed}")
            if (name, "base", seed) not in done:
                keep({"task": name, "setting": "base", "seed": seed, **measure(task, task.base.params, seed)})
            for setting in missing:
                watch = Stopwatch()
                line = run_setting(task, seed, arguments.steps, SETTINGS[setting])
                keep({"task": name, "setting": setting, "seed": seed, **line, "seconds": watch.seconds["total"]})
    for name in arguments.tasks:
        print(f"\n{name}\n{table(results, name)}")
    return results


if __name__ == "__main__":
    main()
