"""Texts about a run: its sizes at the start and its headline at the end."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence

from grpo_jax.config.sft import Config, SFTConfig, config_class
from grpo_jax.watch.writer import JSON, Line

_NO_SCORE = {"mean_length", "min_length", "max_length", "clipped_ratio"}
_NO_SCORE |= {"seconds", "std", "missing", "errors", "unscored"}
"""Last parts of the names of `eval/` metrics that do not count as scores."""


def numbers(lines: Iterable[Line], name: str) -> list[float]:
    """Return the finite values of a metric, in the order in which they were logged."""
    values = (line.get(name) for line in lines)
    return [value for value in values if isinstance(value, int | float) and math.isfinite(value)]


def metric_names(lines: Iterable[Line]) -> list[str]:
    """Return the names of all metrics of some lines, in the order in which they came up."""
    return list(dict.fromkeys(name for line in lines for name in line))


def held_out(name: str) -> str | None:
    """Return the name of the score that an `eval/` metric measures; None for other metrics."""
    if not name.startswith("eval/") or name.rpartition("/")[2] in _NO_SCORE:
        return None
    return name.removeprefix("eval/").removeprefix("rewards/").removesuffix("/mean")


def held_out_scores(names: Iterable[str]) -> dict[str, str]:
    """Return the scores among these metrics, by metric; the reward of a single function only once."""
    found = {name: score for name in names if (score := held_out(name))}
    if len(found) == 2:
        found.pop("eval/reward", None)
    return found


def many(count: int, noun: str, plural: str = "s") -> str:
    """Return a count with its noun: "1 prompt", "2 prompts"."""
    return f"{count} {noun}{plural if count != 1 else ''}"


def short_number(number: float, unit: str = "") -> str:
    """Return a number to three digits with its SI prefix: "1.23 M", "14.8 GB"."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * factor:
            return f"{number / factor:.3g} {prefix}{unit}"
    return f"{number:.3g} {unit}".rstrip()


def describe_run(config: Config, *, num_rows: int, num_parameters: int, state_bytes: int, device: str = "") -> str:
    """Return the sizes of a run in three lines, for its start.

    `state_bytes` is the size of the whole training state: policy, old policy, references, optimizer. `device` names the
    kind of the devices.
    """
    sizes, steps = config.sizes(), config.total_steps(num_rows)
    devices, iterations = math.prod((config.mesh or {}).values()), math.ceil(steps / sizes.updates)
    if isinstance(config, SFTConfig):
        row = "block" if config.packing else "example"
        iteration, total = f"update: {many(sizes.prompts, row)}", many(steps, "optimizer step")
    else:
        row = "prompt"
        iteration = (
            f"iteration: {many(sizes.prompts, row)} × {config.num_generations} = {sizes.completions} completions of up"
            f" to {config.max_completion_length} tokens ·"
            f" {many(config.num_iterations, 'pass', 'es')} × {many(sizes.minibatches, 'minibatch', 'es')} ="
            f" {many(sizes.updates, 'update')} of {many(sizes.prompts_per_update, row)}"
        )
        total = f"{many(steps, 'optimizer step')} · {many(iterations, 'iteration')}"
    micro = f" in {many(sizes.micro_batches, 'micro-batch', 'es')}" if sizes.micro_batches > 1 else ""
    epochs = float(f"{iterations * sizes.prompts / max(num_rows, 1):.2g}")
    checkpointing = {None: "", True: " · activations recomputed", False: " · activations kept"}
    return (
        f"{short_number(num_parameters)} parameters · {short_number(state_bytes, 'B')} of training state ·"
        f" {many(devices, 'device')}{f' ({device})' if device else ''}{checkpointing[config.gradient_checkpointing]}\n"
        f"each {iteration}{micro}\n"
        f"{total} · {many(num_rows, row)}, gone through {epochs:g} time{'s' * (epochs != 1)}"
    )


def headline(lines: Sequence[Line]) -> str:
    """Return the result of a run in one line: its first held-out score, or else its reward, and the number of steps.

    Without a full stop; "" if nothing was logged.
    """
    if not lines:
        return ""
    steps = max(numbers(lines, "step"))
    count = f"{steps:,} step{'s' * (steps != 1)}"
    scores = {name: f"{score} on held-out prompts" for name, score in held_out_scores(metric_names(lines)).items()}
    for name, label in {**scores, "reward": "reward"}.items():
        values = numbers(lines, name)
        if values:
            return f"{label} {values[0]:.3g}{f' → {values[-1]:.3g}' if len(values) > 1 else ''} in {count}"
    return count


def changed_settings(config: Mapping[str, JSON]) -> dict[str, JSON]:
    """Return the settings of a run's `run.json` that are not the defaults of its config's class."""
    usual: dict[str, JSON] = json.loads(json.dumps(config_class(config)().to_dict()))
    return {name: value for name, value in config.items() if name not in usual or usual[name] != value}
