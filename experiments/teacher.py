"""Compare distillation from a GRPO-trained teacher with GRPO, and with SFT on the teacher's completions.

    python -m experiments.teacher [--model DIRECTORY_OR_NAME] [--seeds 0 1 2] [--run-dir DIR]
    python -m experiments.teacher --table --run-dir DIR    # run nothing; print the table of the results in DIR

Model and task are the same as in `experiments.stories`: stories260K must use a given word. There are three arms:

- `grpo`: trained with the reward; its final model is the teacher for the others
- `distilled`: the original model learns from the teacher with the reverse KL on its own stories, without a reward
- `sft`: the original model learns the teacher's stories and sees each once

In all arms, a step is one update with 128 stories. They are evaluated during training on 4 sampled stories for each of
64 unseen prompts. `tokens` counts the tokens of the training stories, which the student samples, or for `sft` the
teacher; evaluations and the teacher's training do not count.

Each seed appends a line to `results.jsonl`, and seeds that have a line are skipped. Time: a few minutes per seed
("seconds" in that file). Expect: the table in docs/teachers.md.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments.common import Stopwatch, use_compile_cache
from experiments.estimators import add_result, read_results
from experiments.stories import GROUP, LONGEST, fetch_stories260K, make_config, make_rows, uses_word
from grpo_jax import GRPOConfig, Policy, SFTConfig, TrainState, evaluate, from_pretrained, sft, train
from grpo_jax.run.checkpoint_reader import load_params

SAMPLES = 4
"""Stories per held-out prompt."""
GOOD = (0.9, 0.98)
"""Target shares of held-out stories with their word, for the columns "tokens to …"."""

Curve = list[tuple[int, float]]
"""(training tokens so far, share of the held-out stories with their word) for each evaluation."""


def no_reward(completions: Sequence[str]) -> list[float]:
    """Return 0 for every completion.

    Example:
      >>> no_reward(["a", "b"])
      [0.0, 0.0]
    """
    return [0.0] * len(completions)


def run_arm(
    base: Policy, config: GRPOConfig, reward_fns: Sequence[Callable[..., Any]], teacher: Policy | None = None
) -> tuple[TrainState, Curve]:
    """Train with rewards or from a teacher. Return the final state and the curve of evaluations."""
    rows, held_out = make_rows()
    curve: Curve = []
    tokens = [0.0]

    def keep(step: int, metrics: Mapping[str, float]) -> None:
        tokens.append(metrics.get("num_tokens", tokens[-1]))
        if "eval/uses_word" in metrics:
            curve.append((round(tokens[-1]), round(metrics["eval/uses_word"], 3)))

    state = train(base, rows, list(reward_fns), config, eval_dataset=held_out, teacher=teacher, callbacks=[keep])
    return state, curve


def imitate(base: Policy, teacher: Policy, config: GRPOConfig, run_dir: Path) -> Curve:
    """Run SFT on the teacher's stories, with the same batches, optimizer and evaluations as `config`."""
    rows, held_out = make_rows()
    steps, batch = config.max_steps, GROUP * config.gradient_accumulation_steps
    how: dict[str, Any] = {"temperature": 1.0, "max_completion_length": LONGEST, "seed": config.seed}
    each = -(-steps * batch // len(rows))  # the same number of stories for every prompt
    _, stories = evaluate(teacher, rows, uses_word, num_generations=each, batch_size=16, **how)
    lessons = [{"prompt": one["prompt"], "completion": one["completion"]} for one in stories]
    texts = [[one["prompt"] for one in lessons], [one["prompt"] + one["completion"] for one in lessons]]
    prompts, whole = (sum(map(len, base.tokenizer(column)["input_ids"])) for column in texts)
    length = (whole - prompts) / len(lessons)

    def rate(params: Any) -> float:
        metrics, _ = evaluate(
            base, held_out, uses_word, params=params, num_generations=SAMPLES, batch_size=len(held_out), **how
        )
        return round(metrics["uses_word"], 3)

    every = config.eval_steps or steps
    settings = SFTConfig(
        max_steps=steps,
        per_device_train_batch_size=GROUP,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        learning_rate=config.learning_rate,
        lr_scheduler_type=config.lr_scheduler_type,
        max_grad_norm=config.max_grad_norm,
        weight_decay=config.weight_decay,
        gradient_checkpointing=False,
        seed=config.seed,
        save_steps=every,
    )
    sft(base, lessons, settings, run_dir=run_dir)
    curve = [(0, rate(base.params))]
    for step in range(every, steps + 1, every):
        _, params = load_params(run_dir, base.params, step)
        curve.append((round(step * batch * length), rate(params)))
    return curve


def run_seed(base: Policy, arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Run all arms for one seed."""
    watch = Stopwatch()
    common = dataclasses.replace(
        make_config(seed, arguments.teacher_steps, arguments.prompts),
        logging_steps=1,
        eval_steps=arguments.every,
        num_generations_eval=SAMPLES,
        per_device_eval_batch_size=64 * SAMPLES,
    )
    with watch("grpo"):
        state, grpo = run_arm(base, common, [uses_word])
    teacher = base.replace(params=jax.tree.map(jnp.copy, state.params))
    shorter = dataclasses.replace(common, max_steps=arguments.steps)
    with watch("distilled"):
        alone = dataclasses.replace(shorter, beta=0.0, distillation_coef=1.0, reward_weights=[1.0, 0.0])
        _, distilled = run_arm(base, alone, [no_reward, uses_word], teacher)
    with watch("sft"):
        imitated = imitate(base, teacher, shorter, arguments.run_dir / f"sft-{seed}")
    return {"seed": seed, "grpo": grpo, "distilled": distilled, "sft": imitated, "seconds": watch.seconds}


def tokens_to(curve: Sequence[Sequence[float]], share: float) -> float | None:
    """Return the tokens at the first evaluation that reaches a share, or None if none does.

    Example:
      >>> tokens_to([(0, 0.1), (500, 0.7), (900, 0.95)], 0.9)
      900
    """
    return next((tokens for tokens, reached in curve if reached >= share), None)


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Format a Markdown table with one line per seed and arm."""
    heads = ["seed", "arm", "at the start", "at the end", "its tokens", *(f"tokens to {share}" for share in GOOD)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for line in sorted(results, key=lambda line: line["seed"]):
        for arm in ("grpo", "distilled", "sft"):
            (_, start), (tokens, end) = line[arm][0], line[arm][-1]
            needed = [tokens_to(line[arm], share) for share in GOOD]
            cells = [start, end, tokens, *needed]
            shown = ["–" if x is None else f"{x:.2f}" if isinstance(x, float) else f"{x:,}" for x in cells]
            lines.append(f"| {' | '.join([str(line['seed']), arm, *shown])} |")
    return "\n".join(lines)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m experiments.teacher", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", help="directory or hub name in Hugging Face's layout (default: fetch stories260K)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="default 0 1 2")
    parser.add_argument("--teacher-steps", type=int, default=100, help="GRPO steps (default 100)")
    parser.add_argument("--steps", type=int, default=24, help="distillation and SFT steps (default 24)")
    parser.add_argument("--every", type=int, default=2, help="steps between evaluations (default 2)")
    parser.add_argument("--prompts", type=int, default=16, help=f"prompts per step, × {GROUP} stories (default 16)")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/teacher"), help="default runs/teacher")
    parser.add_argument("--table", action="store_true", help="only print the existing results")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Run the missing seeds, print the table and return all results."""
    arguments = parse(argv)
    directory: Path = arguments.run_dir
    directory.mkdir(parents=True, exist_ok=True)
    use_compile_cache()
    results = read_results(directory)
    missing = [seed for seed in arguments.seeds if seed not in {line["seed"] for line in results}]
    if missing and not arguments.table:
        base = from_pretrained(arguments.model or fetch_stories260K(directory / "base"))
        for seed in missing:
            results.append(run_seed(base, arguments, seed))
            add_result(directory, results[-1])
    print(table(results))
    return results


if __name__ == "__main__":
    main()
