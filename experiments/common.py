"""Helpers shared by the experiments: SFT, held-out evaluation, timing, run directories, pictures and the final JSON."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import random
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from grpo_jax import GRPOConfig, Policy, SFTConfig, evaluate, sft
from grpo_jax.models.sharding import gather_objects, parse_mesh
from grpo_jax.rewards.contract import reward_names
from grpo_jax.rewards.shipped import completion_text
from grpo_jax.run import distributed
from grpo_jax.run.compilation_cache import enable_compilation_cache
from grpo_jax.watch.monitor import Callback, StopRun
from grpo_jax.watch.plots import DARK, LIGHT, color, save_figure
from grpo_jax.watch.summary import held_out
from grpo_jax.watch.writer import read_lines

__all__ = [
    "Lesson",
    "Rates",
    "Stopwatch",
    "add_device_flags",
    "coin_flips",
    "copy_hero",
    "draw_hero",
    "encode_lessons",
    "fresh_directory",
    "held_out_rates",
    "lesson",
    "on_mesh",
    "report_results",
    "show_completions",
    "show_rates",
    "start_processes",
    "stop_after",
    "supervise",
    "use_compile_cache",
]

Rates = dict[str, float]
Lesson = dict[str, list[int]]


class Stopwatch:
    """Timer for named phases. `seconds` maps each phase, and "total", to its wall time."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._phases: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time a phase. Entering it again adds to its time."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._phases[phase] = self._phases.get(phase, 0.0) + time.perf_counter() - start

    def put(self, phase: str, seconds: float) -> None:
        """Set the seconds of a phase that an earlier process timed. They are not added to "total"."""
        self._phases[phase] = seconds

    @property
    def seconds(self) -> dict[str, float]:
        """Wall time of each phase and "total", rounded to 0.1 s."""
        phases = {**self._phases, "total": time.perf_counter() - self._start}
        return {phase: round(seconds, 1) for phase, seconds in phases.items()}


def on_mesh(config: GRPOConfig, mesh: str) -> GRPOConfig:
    """Spread a config's batches over a mesh given as "data=2,fsdp=4", keeping their total size; "" changes nothing.

    Example:
      >>> config = GRPOConfig(num_generations=8, per_device_train_batch_size=8, gradient_accumulation_steps=16)
      >>> spread = on_mesh(config, "fsdp=4")
      >>> spread.gradient_accumulation_steps, spread.sizes().completions == config.sizes().completions
      (4, True)
      >>> on_mesh(config, "data=3")
      Traceback (most recent call last):
      SystemExit: --mesh data=3: 16 prompts per step cannot be split over 3 devices along data and fsdp; use 1, 2, 4
    """
    axes = parse_mesh(mesh)
    spread = dataclasses.replace(config, mesh=axes)
    shards, group = spread.data_shards(), config.num_generations
    steps, size = config.gradient_accumulation_steps, config.per_device_train_batch_size
    if steps % shards == 0:
        return dataclasses.replace(spread, gradient_accumulation_steps=steps // shards)
    if size % (shards * group) == 0:
        return dataclasses.replace(spread, per_device_train_batch_size=size // shards)
    fitting = [n for n in range(1, 2 * shards) if steps % n == 0 or size % (n * group) == 0]
    raise SystemExit(
        f"--mesh {mesh}: {size * steps // group} prompts per step cannot be split over {shards} devices along data and"
        f" fsdp; use {', '.join(map(str, fitting))}"
    )


def add_device_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for a run on several devices, in one or several processes.

    Example:
      >>> parser = argparse.ArgumentParser()
      >>> add_device_flags(parser)
      >>> parser.parse_args(["--mesh", "fsdp=8"]).mesh
      'fsdp=8'
    """
    parser.add_argument("--mesh", default="", help="devices as data=2,fsdp=4 (default: one)")
    distributed.add_flags(parser)


def start_processes(arguments: argparse.Namespace) -> None:
    """Join the other processes, if the flags name any. Only process 0 prints."""
    distributed.start(arguments)
    if jax.distributed.is_initialized() and jax.process_index() > 0:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (open until the process ends)


def use_compile_cache() -> None:
    """Enable the compilation cache that `train` uses, for programs that a script compiles before calling `train`."""
    enable_compilation_cache()


def fresh_directory(run_dir: str | Path | None, name: str) -> Path:
    """Create a run directory, or exit if it is not empty, since `train` would resume the run in it.

    Args:
      run_dir: the directory. If None, `runs/<name>-<time>` is used.
      name: the run's name.
    """
    directory = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}" if run_dir is None else Path(run_dir)
    # Processes share a file system: process 0 checks and creates the directory before the others continue.
    taken = False
    if jax.process_index() == 0:
        directory.mkdir(parents=True, exist_ok=True)
        taken = any(directory.iterdir())
    name, taken = gather_objects([str(directory), taken])[0]
    directory = Path(name)
    if taken:
        raise SystemExit(f"--run-dir {directory} is not empty. Use a new directory for each run.")
    return directory


def held_out_rates(
    policy: Policy,
    rows: Sequence[Mapping[str, Any]],
    accuracy: Callable[..., Any],
    format: Callable[..., Any] | None = None,
    *,
    params: Any = None,
    samples: int = 1,
    max_completion_length: int,
    batch_size: int,
    seed: int,
) -> tuple[Rates, list[dict[str, Any]]]:
    """Compute the share of correct completions on held-out prompts, greedy and sampled at temperature 1.

    Args:
      policy: the model and tokenizer.
      rows: the held-out rows.
      accuracy: reward function that returns 1 for a correct completion.
      format: reward function that returns 1 for a well-formed completion, or None if the task has no format.
      params: parameters to use instead of the policy's.
      samples: number of sampled completions per prompt.
      max_completion_length: maximum tokens per completion.
      batch_size: prompts per batch.
      seed: seed for sampling.

    Returns:
      `{"greedy": …, "sampled": …, "format": …}`, where "format" is measured on the samples; and the greedy completions
      in the order of the rows, as `evaluate` returns them.
    """
    settings = {"params": params, "max_completion_length": max_completion_length, "batch_size": batch_size}
    reward_fns = [accuracy] if format is None else [accuracy, format]
    names = reward_names(reward_fns)
    greedy, completions = evaluate(policy, rows, reward_fns, temperature=0.0, **settings)
    sampled, _ = evaluate(policy, rows, reward_fns, temperature=1.0, num_generations=samples, seed=seed, **settings)
    rates = {"greedy": greedy[names[0]], "sampled": sampled[names[0]]}
    if format is not None:
        rates["format"] = sampled[names[1]]
    return {name: round(rate, 4) for name, rate in rates.items()}, completions


def lesson(ids: Sequence[int], own: Sequence[bool]) -> Lesson:
    """Build a row for `sft` from token ids and a mask of the tokens to learn.

    Example:
      >>> lesson([7, 8, 9], [False, True, True])
      {'input_ids': [7, 8, 9], 'labels': [-100, 8, 9]}
    """
    labels = [token if learnt else -100 for token, learnt in zip(ids, own, strict=True)]
    return {"input_ids": list(ids), "labels": labels}


def encode_lessons(policy: Policy, prompts: Sequence[str], replies: Sequence[str]) -> list[Lesson]:
    """Encode prompts and replies as rows for `sft`. Only the replies and their end tokens are learned."""
    if not prompts:
        raise ValueError("prompts must not be empty: there would be nothing to learn.")
    starts, ends = (
        policy.tokenizer(list(texts), add_special_tokens=False)["input_ids"] for texts in (prompts, replies)
    )
    end = policy.eos_token_ids[0]
    return [
        lesson([*start, *reply, end], [False] * len(start) + [True] * (len(reply) + 1))
        for start, reply in zip(starts, ends, strict=True)
    ]


def supervise(
    policy: Policy,
    lessons: Sequence[Mapping[str, Any]],
    *,
    batch: int,
    learning_rate: float = 3e-3,
    adam_beta2: float = 0.999,
) -> Policy:
    """Train on each lesson once, in order, with `sft`: AdamW without weight decay, warm-up, and a cosine to 0.

    Args:
      policy: the policy to train. Its params are not changed.
      lessons: rows from `lesson`, or any other rows for `sft`.
      batch: lessons per step. It must divide the number of lessons.
      learning_rate: peak learning rate.
      adam_beta2: decay of the second moments.
    """
    steps = len(lessons) // batch
    config = SFTConfig(
        max_length=None,
        per_device_train_batch_size=batch,
        train_sampling_strategy="sequential",
        max_steps=steps,
        learning_rate=learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=steps // 8,
        adam_beta2=adam_beta2,
        gradient_checkpointing=False,
        logging_steps=max(1, steps // 4),
        save_steps=None,
    )
    return policy.replace(params=sft(policy, lessons, config).params)


def stop_after(hours: float | None) -> Callback:
    """Return a callback that saves and ends the run at the first logged step after `hours` hours.

    Example:
      >>> stop_after(None)(1, {})
      >>> stop_after(0.0)(1, {})
      Traceback (most recent call last):
      grpo_jax.watch.monitor.StopRun: 0.0 hours are over
    """
    end = None if hours is None else time.monotonic() + 3600 * hours

    def stop(step: int, metrics: Mapping[str, float]) -> None:
        if end is not None and time.monotonic() >= end:
            raise StopRun(f"{hours} hours are over")

    return stop


def coin_flips(seed: int, mean: float = 0.5) -> Callable[..., list[float]]:
    """Return a reward function that ignores the completions and returns 1 with probability `mean`, else 0."""
    draw = random.Random(seed)

    def random_reward(completions: Sequence[Any], **_: Any) -> list[float]:
        return [float(draw.random() < mean) for _ in completions]

    return random_reward


def show_rates(rates: Rates) -> str:
    """Format rates for printing.

    Example:
      >>> show_rates({"greedy": 0.01, "sampled": 0.128})
      'greedy 0.01 · sampled 0.13'
    """
    return " · ".join(f"{name} {rate:.2f}" for name, rate in rates.items())


def show_completions(title: str, completions: Sequence[Mapping[str, Any]]) -> None:
    """Print a title, then each prompt with its completion."""
    print(f"\n{title}:")
    for row in completions:
        prompt = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]
        print(f"  {prompt} → {completion_text(row['completion']).strip()}")


def draw_hero(run_dir: Path, samples: Mapping[str, Sequence[Mapping[str, Any]]], *, title: str) -> None:
    """Draw a held-out score over the run, and completions of one prompt before and after, as the files in `HEROES`.

    Args:
      run_dir: directory of a run with evaluations in its `metrics.jsonl`.
      samples: "before" and "after" → rows from `evaluate`, all for one prompt. The first reward marks correct ones.
      title: the picture's title.
    """
    lines = [line for line in read_lines(run_dir / "metrics.jsonl") if any(map(held_out, line))]
    name = next(name for name in lines[0] if held_out(name))
    steps, scores = zip(*((line["step"], line[name]) for line in lines), strict=True)
    for file, (narrow, dark) in HEROES.items():
        figure, above, below = _panels(title, narrow=narrow, dark=dark)
        _draw_scores(above, steps, scores, str(held_out(name)), dark=dark)
        _draw_texts(below, samples, dark=dark, size=8.5 if narrow else 10.5)
        save_figure(figure, str(run_dir / file))


HEROES = {
    "hero.png": (False, False),
    "hero-dark.png": (False, True),
    "hero-narrow.png": (True, False),
    "hero-narrow-dark.png": (True, True),
}
"""Files that `draw_hero` writes → (narrow, for phones; dark)."""


def copy_hero(run_dir: Path, picture: Path) -> None:
    """Copy the files from `draw_hero` to `picture` and its directory, with the same suffixes (-dark, -narrow)."""
    for file in HEROES:
        shutil.copyfile(run_dir / file, picture.with_stem(Path(file).stem.replace("hero", picture.stem)))


def _panels(title: str, *, narrow: bool, dark: bool) -> tuple[Any, Any, Any]:
    """Create a titled figure with two panels, side by side or, if narrow, one above the other."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    theme = DARK if dark else LIGHT
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)
    figure = Figure(
        figsize=(4.1, 6.4) if narrow else (11, 4.2), dpi=190 if narrow else 110, layout=layout, facecolor=theme.page
    )
    figure.suptitle(
        textwrap.fill(title, 42) if narrow else title,
        x=0.03 if narrow else 0.01,
        ha="left",
        fontsize=12 if narrow else 14,
        weight="bold",
        color=theme.ink,
    )
    panels = figure.subplots(2, 1, height_ratios=(1, 1)) if narrow else figure.subplots(1, 2, width_ratios=(1, 1.15))
    for axes in panels:
        axes.set_facecolor(theme.page)
    return (figure, *panels)


def _draw_scores(axes: Any, steps: Sequence[int], scores: Sequence[float], name: str, *, dark: bool) -> None:
    """Draw the curve of the held-out score."""
    theme, pick = DARK if dark else LIGHT, functools.partial(color, dark=dark)
    axes.plot(steps, scores, color=pick("policy"), lw=2.4, marker="o", markersize=6)
    for i, what, where in ((0, "before", (10, 2)), (-1, "after", (-6, -20))):
        axes.annotate(
            f"{what}: {scores[i]:.2f}",
            (steps[i], scores[i]),
            xytext=where,
            textcoords="offset points",
            ha="left" if i == 0 else "right",
            fontsize=12,
            weight="bold",
            color=pick("start" if i == 0 else "policy"),
        )
    axes.set_title(f"{name.capitalize()} on prompts that no training saw", loc="left", fontsize=12, color=theme.ink)
    axes.set_xlabel("steps of training by GRPO", fontsize=10, color=theme.gray)
    axes.set_ylim(0, 1.05)
    axes.grid(color=theme.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9, colors=theme.gray, length=0)
    axes.spines[:].set_visible(False)


def _draw_texts(axes: Any, samples: Mapping[str, Sequence[Mapping[str, Any]]], *, dark: bool, size: float) -> None:
    """Draw the completions in two columns, before and after."""
    theme, pick = DARK if dark else LIGHT, functools.partial(color, dark=dark)
    axes.set_axis_off()
    prompt = next(iter(samples.values()))[0]["prompt"]
    axes.set_title(f"What it writes after “{prompt}”", loc="left", fontsize=12, color=theme.ink)
    for column, (what, rows) in enumerate(samples.items()):
        at = 0.02 + 0.52 * column
        told = {"color": pick("policy" if column else "start"), "fontsize": 12, "weight": "bold"}
        axes.text(at, 0.95, what, transform=axes.transAxes, va="center", **told)
        for i, row in enumerate(rows):
            y, good = 0.95 - 0.9 * (i + 1) / len(rows), bool(next(iter(row["rewards"].values())))
            text = completion_text(row["completion"]).strip()
            shown = {"transform": axes.transAxes, "va": "center", "fontsize": size}
            axes.text(at, y, "✓" if good else "✗", color=pick("reward0" if good else "high"), **shown)
            short = text if len(text) < 25 else f"{text[:24]}…"
            axes.text(at + 0.05, y, short, color=theme.ink, family="monospace", **shown)


def report_results(run_dir: Path, arms: Mapping[str, Mapping[str, Rates]], watch: Stopwatch) -> dict[str, Any]:
    """Print the results as one line of JSON, write it to `results.json`, and return them."""
    results = {"arms": arms, "seconds": watch.seconds, "run_dir": str(run_dir)}
    line = json.dumps(results)
    if jax.process_index() == 0:
        (run_dir / "results.json").write_text(line + "\n", encoding="utf-8")
    print(line, flush=True)
    return results
