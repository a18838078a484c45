"""Run summaries: sizes at the start, the result in one line, and the names of logged metrics."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence

import jax

from grpo_jax.config.sft import GRPOOrSFTConfig, config_class
from grpo_jax.update.state import TrainState
from grpo_jax.watch.writer import JSON, Line

_NOT_REWARDS = {"mean_length", "min_length", "max_length", "clipped_ratio"}
_NOT_REWARDS |= {"seconds", "std", "missing", "errors", "unscored"}
"""Last components of the names of `eval/` metrics that are not rewards."""


def finite_values(lines: Iterable[Line], name: str) -> list[float]:
    """Return a metric's finite values, in the order of the lines."""
    values = (line.get(name) for line in lines)
    return [value for value in values if isinstance(value, int | float) and math.isfinite(value)]


def metric_names(lines: Iterable[Line]) -> list[str]:
    """Return the names of all metrics in the lines, in order of first appearance."""
    return list(dict.fromkeys(name for line in lines for name in line))


def held_out(name: str) -> str | None:
    """Return the label of a held-out reward, such as "accuracy" for "eval/accuracy". Returns None for other metrics."""
    if not name.startswith("eval/") or name.rpartition("/")[2] in _NOT_REWARDS:
        return None
    return name.removeprefix("eval/").removeprefix("rewards/").removesuffix("/mean")


def held_out_scores(names: Iterable[str]) -> dict[str, str]:
    """Return a dict from names of held-out rewards to labels. Omits `eval/reward` if there is only one other reward."""
    labels = {name: label for name in names if (label := held_out(name))}
    if len(labels) == 2:
        labels.pop("eval/reward", None)
    return labels


def short_number(number: float, unit: str = "") -> str:
    """Format a number with three significant digits and an SI prefix: "1.23 M", "14.8 GB"."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * factor:
            return f"{number / factor:.3g} {prefix}{unit}"
    return f"{number:.3g} {unit}".rstrip()


def describe_run(config: GRPOOrSFTConfig, state: TrainState, *, num_rows: int) -> str:
    """Return a description of a run's sizes, in three lines."""
    parameters = short_number(sum(leaf.size for leaf in jax.tree.leaves(state.params)))
    device = jax.devices()[0].device_kind
    state_bytes = short_number(sum(leaf.nbytes for leaf in jax.tree.leaves(state)), "B")
    sizes, steps = config.sizes(), config.total_steps(num_rows)
    iterations = math.ceil(steps / sizes.updates_per_iteration)
    if config.num_generations == 1:  # SFT: a row of a batch is an example or a packed block
        rows = "sequences"
        batch = f"each update: {sizes.prompts_per_iteration} sequences"
    else:
        rows = "prompts"
        batch = (
            f"each iteration: {sizes.prompts_per_iteration} prompts × {config.num_generations} ="
            f" {sizes.completions} completions of up to {config.max_completion_length} tokens ·"
            f" passes: {config.num_iterations} ·"
            f" minibatches: {sizes.minibatches}, of {sizes.prompts_per_update} prompts"
        )
    recomputes = config.gradient_checkpointing
    checkpointing = "" if recomputes is None else f" · activations {'recomputed' if recomputes else 'kept'}"
    return (
        f"{parameters} parameters · {state_bytes} of training state ·"
        f" devices: {math.prod((config.mesh or {}).values())} ({device}){checkpointing}\n"
        f"{batch} · micro-batches: {sizes.micro_batches}\n"
        f"optimizer steps: {steps} · iterations: {iterations} · {rows}: {num_rows} ·"
        f" epochs: {iterations * sizes.prompts_per_iteration / max(num_rows, 1):.2g}"
    )


def headline(lines: Sequence[Line]) -> str:
    """Return a run's result in one line: the first and last value of a reward, and the number of steps.

    The reward is the first held-out reward or, without one, the training reward. Returns "" if nothing was logged.
    """
    if not lines:
        return ""
    steps = max(finite_values(lines, "step"))
    count = f"{steps:,} step{'s' * (steps != 1)}"
    labels = {name: f"{label} on held-out prompts" for name, label in held_out_scores(metric_names(lines)).items()}
    for name, label in {**labels, "reward": "reward"}.items():
        values = finite_values(lines, name)
        if values:
            return f"{label} {values[0]:.3g}{f' → {values[-1]:.3g}' if len(values) > 1 else ''} in {count}"
    return count


def changed_settings(config: Mapping[str, JSON]) -> dict[str, JSON]:
    """Return the settings in a `run.json` that differ from the defaults of the run's config class."""
    defaults: dict[str, JSON] = json.loads(json.dumps(config_class(config)().to_dict()))
    return {name: value for name, value in config.items() if name not in defaults or defaults[name] != value}
