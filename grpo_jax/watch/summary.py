"""Texts about a run: its sizes at the start, its headline at the end, and the model card of its policy."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from grpo_jax.config.sft import Config, SFTConfig, config_class
from grpo_jax.watch.writer import JSON, Line, read_lines, read_settings

MARK = "<!-- Made by grpo_jax. Without this line it is yours: a later push leaves it as it is. -->"
"""Line of a card that a push may replace."""

_PRIVATE = ("push_to_hub", "hub_", "run_name", "project", "report_to", "logging_")
"""Prefixes of fields that a card leaves out."""

_NO_SCORE = {"mean_length", "min_length", "max_length", "clipped_ratio"}
_NO_SCORE |= {"seconds", "std", "missing", "errors", "unscored"}
"""Last parts of the names of `eval/` metrics that are no scores."""


def numbers(lines: Iterable[Line], name: str) -> list[float]:
    """Return the finite values of a metric, in the order in which they were logged."""
    values = (line.get(name) for line in lines)
    return [value for value in values if isinstance(value, int | float) and math.isfinite(value)]


def metric_names(lines: Iterable[Line]) -> list[str]:
    """Return the names of all metrics of some lines, in the order in which they came up."""
    return list(dict.fromkeys(name for line in lines for name in line))


def held_out(name: str) -> str | None:
    """Return what an `eval/` metric is a score of; None for one that is no score, or not of an evaluation."""
    if not name.startswith("eval/") or name.rpartition("/")[2] in _NO_SCORE:
        return None
    return name.removeprefix("eval/").removeprefix("rewards/").removesuffix("/mean")


def held_out_scores(names: Iterable[str]) -> dict[str, str]:
    """Return the score that each `eval/` metric among these measures; the reward of a single function only once."""
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
    sft, row = isinstance(config, SFTConfig), "prompt"
    if isinstance(config, SFTConfig):
        row = "block" if config.packing else "example"
    devices = math.prod((config.mesh or {}).values())
    iterations = math.ceil(steps / sizes.updates)
    micro = f" in {many(sizes.micro_batches, 'micro-batch', 'es')}" if sizes.micro_batches > 1 else ""
    epochs = float(f"{iterations * sizes.prompts / max(num_rows, 1):.2g}")
    iteration = (
        f"{many(sizes.prompts, 'prompt')} × {config.num_generations} = {sizes.completions} completions"
        f" of up to {config.max_completion_length} tokens ·"
        f" {many(config.num_iterations, 'pass', 'es')} × {many(sizes.minibatches, 'minibatch', 'es')} ="
        f" {many(sizes.updates, 'update')} of {many(sizes.prompts_per_update, 'prompt')}"
    )
    if sft:
        iteration, iterations_of = f"update: {many(sizes.prompts, row)}", ""
    else:
        iteration, iterations_of = f"iteration: {iteration}", f" · {many(iterations, 'iteration')}"
    checkpointing = {None: "", True: " · activations recomputed", False: " · activations kept"}
    return (
        f"{short_number(num_parameters)} parameters · {short_number(state_bytes, 'B')} of training state ·"
        f" {many(devices, 'device')}{f' ({device})' if device else ''}{checkpointing[config.gradient_checkpointing]}\n"
        f"each {iteration}{micro}\n"
        f"{many(steps, 'optimizer step')}{iterations_of} ·"
        f" {many(num_rows, row)}, gone through {epochs:g} time{'s' * (epochs != 1)}"
    )


def headline(lines: Sequence[Line]) -> str:
    """Return the result of a run in one line: its first held-out score, or else its reward, and the number of steps.

    The line has no full stop; it is "" if nothing was logged.
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


def phase_seconds(lines: Sequence[Line]) -> dict[str, float]:
    """Return the seconds of each phase over a run; "other" are those in no phase."""
    names = [name for name in metric_names(lines) if name.startswith("seconds/")]
    seconds = {name.removeprefix("seconds/"): sum(values) for name in names if (values := numbers(lines, name))}
    total = seconds.pop("total", 0.0)
    other = total - sum(seconds.values())
    return seconds | ({"other": other} if other > 0 else {})


def model_card(
    repo_id: str,
    *,
    run_dir: str | os.PathLike[str] | None = None,
    adapters: bool = False,
    base_model: str | None = None,
    dataset: str | None = None,
    license: str | None = None,
    picture: str | None = None,
) -> str:
    """Return a model card: the hub's metadata, the result of the run, its settings, and how to load the policy.

    It leaves out the command line of the run, its paths and its prompts, which may be private.

    Args:
      run_dir: the directory of the run; None leaves out its result and settings.
      adapters: PEFT's format, rather than all weights.
      base_model: name on the hub of the model that training began with, or None.
      dataset: name on the hub of the data, or None.
      license: the hub's name of a licence, such as "apache-2.0"; None leaves the field out.
      picture: name of the file in the repository with the curves, or None.
    """
    from huggingface_hub import ModelCardData

    metadata = ModelCardData(
        base_model=base_model,
        datasets=None if dataset is None else [dataset],
        library_name="peft" if adapters else "transformers",
        license=license,
        pipeline_tag="text-generation",
        tags=["grpo", "grpo_jax"],
    )
    names, load = "from_pretrained", f'from_pretrained("{repo_id}")'
    if adapters:
        names, base = "from_pretrained, load_lora", base_model or "NAME OF THE BASE"
        load = f'load_lora("{repo_id}", from_pretrained("{base}"))'
    subject = "Adapters (LoRA)" if adapters else "A language model"
    source = f" from [{base_model}](https://huggingface.co/{base_model})" if base_model else ""
    parts = [
        f"---\n{metadata.to_yaml()}\n---",
        f"# {repo_id.rpartition('/')[2]}",
        f"{subject}, trained{source} with [GRPO](https://arxiv.org/abs/2402.03300), by `grpo_jax`.",
        *([] if run_dir is None else _result(Path(run_dir), picture)),
        f"```python\nfrom grpo_jax import {names}\n\npolicy = {load}\n```",
        f"The files are in the format of {'PEFT' if adapters else 'transformers'}.",
        MARK,
    ]
    return "\n\n".join(parts) + "\n"


def _result(run_dir: Path, picture: str | None) -> list[str]:
    """Return the parts of a card about its run: headline, picture, and a table of settings that are not defaults."""
    about, sentence = read_settings(run_dir), headline(list(read_lines(run_dir / "metrics.jsonl")))
    changed = changed_settings(about.get("config", {})).items()
    rows = [f"| {name} | {_cell(x)} |" for name, x in changed if not name.startswith(_PRIVATE)]
    parts = [f"{sentence[0].upper()}{sentence[1:]}."] if sentence else []
    parts += [f"![Curves of the run]({picture})"] if picture else []
    return parts + ["\n".join(["| setting | value |", "|---|---|", *rows])] * bool(rows)


def _cell(value: JSON) -> str:
    return json.dumps(value, ensure_ascii=False).replace("|", "\\|")


def changed_settings(config: Mapping[str, JSON]) -> dict[str, JSON]:
    """Return the settings of a run's `run.json` that are not the defaults of its config's class."""
    usual: dict[str, JSON] = json.loads(json.dumps(config_class(config)().to_dict()))
    return {name: value for name, value in config.items() if name not in usual or usual[name] != value}
