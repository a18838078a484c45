"""What the scripts share: supervised steps, held-out rates, a stopwatch, a fresh run directory, the JSON at the end."""

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
from grpo_jax.run.kept_programs import keep_programs
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
    """Wall seconds of each phase under its name in `seconds`, and of everything so far under "total"."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._phases: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time a phase; entering it again adds to it."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._phases[phase] = self._phases.get(phase, 0.0) + time.perf_counter() - start

    def put(self, phase: str, seconds: float) -> None:
        """Seconds of a phase that was timed by an earlier process; "total" is without them."""
        self._phases[phase] = seconds

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds to a tenth."""
        phases = {**self._phases, "total": time.perf_counter() - self._start}
        return {phase: round(seconds, 1) for phase, seconds in phases.items()}


def on_mesh(config: GRPOConfig, mesh: str) -> GRPOConfig:
    """The same batches cut over the devices of a mesh, which is written as "data=2,fsdp=4"; "" changes nothing.

    Example:
      >>> config = GRPOConfig(num_generations=8, per_device_train_batch_size=8, gradient_accumulation_steps=16)
      >>> spread = on_mesh(config, "fsdp=4")
      >>> spread.gradient_accumulation_steps, spread.sizes().prompts == config.sizes().prompts
      (4, True)
      >>> on_mesh(config, "data=3")
      Traceback (most recent call last):
      SystemExit: --mesh data=3: 16 prompts per step do not divide by 3 devices; along data and fsdp 1, 2, 4 do
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
        f"--mesh {mesh}: {size * steps // group} prompts per step do not divide by {shards} devices; along data and"
        f" fsdp {', '.join(map(str, fitting))} do"
    )


def add_device_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of a run on several devices, of one process or of several.

    Example:
      >>> parser = argparse.ArgumentParser()
      >>> add_device_flags(parser)
      >>> parser.parse_args(["--mesh", "fsdp=8"]).mesh
      'fsdp=8'
    """
    parser.add_argument("--mesh", default="", help="devices as data=2,fsdp=4 (default: one)")
    distributed.add_flags(parser)


def start_processes(arguments: argparse.Namespace) -> None:
    """Join the other processes, if the flags say that there are some; only the first one of them prints."""
    distributed.start(arguments)
    if jax.distributed.is_initialized() and jax.process_index() > 0:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (as long as the process)


def use_compile_cache() -> None:
    """Keep compiled programs from run to run, as `train` does: for what a script compiles before it calls that."""
    keep_programs()


def fresh_directory(run_dir: str | Path | None, name: str) -> Path:
    """Make the directory of a run; one that is not empty is refused, since `train` would resume a run in it.

    Args:
      run_dir: the directory; None: `runs/<name>-<time>`.
      name: of the run.
    """
    directory = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}" if run_dir is None else Path(run_dir)
    # Of several processes, which share their files, process 0 checks and makes it before the others continue.
    taken = False
    if jax.process_index() == 0:
        directory.mkdir(parents=True, exist_ok=True)
        taken = any(directory.iterdir())
    name, taken = gather_objects([str(directory), taken])[0]
    directory = Path(name)
    if taken:
        raise SystemExit(f"--run-dir {directory} is not empty: give every run a directory of its own.")
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
    """Share of right completions of held-out prompts, greedy and sampled at temperature 1.

    Args:
      policy: model and tokenizer.
      rows: held-out rows.
      accuracy: reward function, 1 for a right completion.
      format: reward function, 1 for a completion in the right format; None: a task without a format.
      params: parameters instead of the policy's own.
      samples: sampled completions of each prompt.
      max_completion_length: tokens.
      batch_size: prompts at a time.
      seed: of the samples.

    Returns:
      `{"greedy": …, "sampled": …, "format": …}`, with the "format" of the samples; and the greedy completions, in the
      order of the rows, as `evaluate` returns them.
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
    """A row that `sft` learns from: tokens, and which of them are learnt.

    Example:
      >>> lesson([7, 8, 9], [False, True, True])
      {'input_ids': [7, 8, 9], 'labels': [-100, 8, 9]}
    """
    labels = [token if learnt else -100 for token, learnt in zip(ids, own, strict=True)]
    return {"input_ids": list(ids), "labels": labels}


def encode_lessons(policy: Policy, prompts: Sequence[str], replies: Sequence[str]) -> list[Lesson]:
    """Prompts with the replies that shall be learnt, each with its end."""
    if not prompts:
        raise ValueError("prompts is empty: there is nothing to learn")
    starts, ends = (
        policy.tokenizer(list(texts), add_special_tokens=False)["input_ids"] for texts in (prompts, replies)
    )
    end = policy.eos_token_ids[0]
    return [
        lesson([*start, *reply, end], [False] * len(start) + [True] * (len(reply) + 1))
        for start, reply in zip(starts, ends, strict=True)
    ]


def supervise(
    policy: Policy, lessons: Sequence[Lesson], *, batch: int, learning_rate: float = 3e-3, adam_beta2: float = 0.999
) -> Policy:
    """Learn lessons, each once and in their order, by `sft`: AdamW without decay, warm-up, and a cosine to 0.

    Args:
      policy: the policy to train; its params are not changed.
      lessons: as `lesson` makes them.
      batch: lessons of a step; it divides their number.
      learning_rate: the highest.
      adam_beta2: the second moments' decay.
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
    """A callback that ends a run, saved, at the first logged step after so many hours from now.

    Example:
      >>> stop_after(None)(1, {})
      >>> stop_after(0.0)(1, {})
      Traceback (most recent call last):
      grpo_jax.watch.trackers.StopRun: 0.0 hours are over
    """
    end = None if hours is None else time.monotonic() + 3600 * hours

    def stop(step: int, metrics: Mapping[str, float]) -> None:
        if end is not None and time.monotonic() >= end:
            raise StopRun(f"{hours} hours are over")

    return stop


def coin_flips(seed: int) -> Callable[..., list[float]]:
    """A reward function that does not look: 0 or 1 by chance."""
    draw = random.Random(seed)

    def random_reward(completions: Sequence[Any], **_: Any) -> list[float]:
        return [float(draw.random() < 0.5) for _ in completions]

    return random_reward


def show_rates(rates: Rates) -> str:
    """Rates as a person reads them.

    Example:
      >>> show_rates({"greedy": 0.01, "sampled": 0.128})
      'greedy 0.01 · sampled 0.13'
    """
    return " · ".join(f"{name} {rate:.2f}" for name, rate in rates.items())


def show_completions(title: str, completions: Sequence[Mapping[str, Any]]) -> None:
    """Print some prompts with their completions."""
    print(f"\n{title}:")
    for row in completions:
        prompt = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]
        print(f"  {prompt} → {completion_text(row['completion']).strip()}")


def draw_hero(run_dir: Path, samples: Mapping[str, Sequence[Mapping[str, Any]]], *, title: str) -> None:
    """Draw a held-out score on its way, and one prompt's completions before and after, as the four files of `HEROES`.

    Args:
      run_dir: with the `metrics.jsonl` of a run that has evaluated.
      samples: "before" and "after" → rows of `evaluate`, all of one prompt; the first reward says which are right.
      title: of the picture.
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
"""The files of `draw_hero`: whether each is narrow, for a phone, and whether dark."""


def copy_hero(run_dir: Path, picture: Path) -> None:
    """Copy the files of `draw_hero` to `picture` and its directory, with the same endings."""
    for file in HEROES:
        shutil.copyfile(run_dir / file, picture.with_stem(Path(file).stem.replace("hero", picture.stem)))


def _panels(title: str, *, narrow: bool, dark: bool) -> tuple[Any, Any, Any]:
    """A figure with its title, and its two panels: side by side, or for a phone one above the other."""
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
    """The curve of the held-out score."""
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
    """The completions, before and after in a column each."""
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
    """Print the results as one line of JSON, keep it in `results.json`, and return them."""
    results = {"arms": arms, "seconds": watch.seconds, "run_dir": str(run_dir)}
    line = json.dumps(results)
    if jax.process_index() == 0:
        (run_dir / "results.json").write_text(line + "\n", encoding="utf-8")
    print(line, flush=True)
    return results
