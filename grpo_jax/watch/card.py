"""The model card of a policy: what a stranger on the hub reads of it, made from the directory of its run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_jax.config.config import GRPOConfig
from grpo_jax.watch.headline import headline
from grpo_jax.watch.lines import read_lines
from grpo_jax.watch.names import held_out, many

MARK = "<!-- Made by grpo_jax. Without this line it is yours: a later push leaves it as it is. -->"
"""Stands in a card that a push may replace."""

_NOT_TOLD = ("push_to_hub", "hub_", "run_name", "project", "report_to", "logging_")
"""Beginnings of fields that say nothing of what was learned."""


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
    """Return a model card: Markdown under the hub's metadata.

    The command line of the run, its paths and its prompts are not in it: they may be nobody else's business.

    Args:
      repo_id: of the repository, for the lines that load it.
      run_dir: the directory of the run; None leaves out what only a run can tell.
      adapters: PEFT's format, rather than all weights.
      base_model: name on the hub of the model that training began with, or None.
      dataset: name on the hub of the data, or None.
      license: the hub's name of a licence, such as "apache-2.0"; None leaves the field out.
      picture: name of the file in the repository with the curves, or None.

    Example:
      >>> card = model_card("me/sums", base_model="Qwen/Qwen3-0.6B", license="apache-2.0")
      >>> "license: apache-2.0" in card, 'from_pretrained("me/sums")' in card
      (True, True)
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
    name = repo_id.rpartition("/")[2]
    origin = f" of [{base_model}](https://huggingface.co/{base_model})" if base_model else ""
    method = "[GRPO](https://arxiv.org/abs/2402.03300), by `grpo_jax`"
    what = f"Adapters (LoRA){origin}, trained" if adapters else f"A language model, trained{' from' * bool(origin)}"
    parts = [f"# {name}", f"{what}{'' if adapters else origin.removeprefix(' of')} with {method}."]
    if run_dir is not None:
        parts += _run_parts(Path(run_dir), dataset, picture)
    parts += ["## How to load it", _loading(repo_id, adapters, base_model), MARK]
    return f"---\n{metadata.to_yaml()}\n---\n\n" + "\n\n".join(part for part in parts if part) + "\n"


def _run_parts(run_dir: Path, dataset: str | None, picture: str | None) -> list[str]:
    """What a run tells: its sentence and picture, what it was trained on, scores, settings, versions."""
    lines = list(read_lines(run_dir / "metrics.jsonl"))
    path = run_dir / "config.json"
    about = json.loads(path.read_text("utf-8")) if path.exists() else {}
    sentence = headline(lines)
    parts = [f"{sentence[0].upper()}{sentence[1:]}." if sentence else ""]
    parts += [f"![Curves of the run]({picture})"] if picture else []
    parts += ["## What it was trained on", _training(lines, about, dataset)]
    scores = _scores(lines)
    parts += ["## Scores", scores] if scores else []
    usual = json.loads(json.dumps(GRPOConfig().to_dict()))
    config = {name: value for name, value in about.get("config", {}).items() if not name.startswith(_NOT_TOLD)}
    changed = {name: value for name, value in config.items() if usual.get(name, ...) != value}
    if changed:
        settings = "\n".join(f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in changed.items())
        parts += ["## Settings", "Those that are not the defaults of `GRPOConfig`:", f"```\n{settings}\n```"]
    versions = about.get("versions", {})
    if versions:
        parts += ["## Versions", ", ".join(f"{package} {version}" for package, version in versions.items())]
    return parts


def _training(lines: Sequence[Mapping[str, Any]], about: Mapping[str, Any], dataset: str | None) -> str:
    """The data and the rewards in a sentence or two."""
    data = f"[{dataset}](https://huggingface.co/datasets/{dataset})" if dataset else ""
    count = about.get("prompts")
    prompts = many(count, "prompt") if count else "prompts"
    names = [name[8:-5] for line in lines for name in line if name.startswith("rewards/") and name.endswith("/mean")]
    rewards = ", ".join(f"`{name}`" for name in dict.fromkeys(names))
    tokens = next((line["num_tokens"] for line in reversed(lines) if line.get("num_tokens")), None)
    told = [f"{prompts[:1].upper()}{prompts[1:]}{f' of {data}' * bool(data)}"]
    told += [f"rewarded by {rewards}"] if rewards else []
    told += [f"{tokens:,.0f} tokens of completions sampled"] if tokens else []
    return "; ".join(told) + "."


def _scores(lines: Sequence[Mapping[str, Any]]) -> str:
    """A table of the held-out scores: before the first step and after the last."""
    rows = []
    for name in dict.fromkeys(name for line in lines for name in line if held_out(name)):
        values = [line[name] for line in lines if isinstance(line.get(name), int | float)]
        if values:
            rows.append(f"| {held_out(name)} | {values[0]:.3g} | {values[-1]:.3g} |")
    return "\n".join(["| on held-out prompts | before | after |", "|---|---|---|", *rows]) if rows else ""


def _loading(repo_id: str, adapters: bool, base_model: str | None) -> str:
    """The lines that load it, in transformers with PyTorch and in grpo_jax."""
    base = base_model or "NAME OF THE BASE"
    if adapters:
        torch = (
            "from peft import PeftModel\nfrom transformers import AutoModelForCausalLM\n\n"
            f'base = AutoModelForCausalLM.from_pretrained("{base}")\n'
            f'model = PeftModel.from_pretrained(base, "{repo_id}")'
        )
        ours = (
            "from grpo_jax import from_pretrained, load_lora\n\n"
            f'policy = load_lora("{repo_id}", from_pretrained("{base}"))'
        )
    else:
        torch = (
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            f'model = AutoModelForCausalLM.from_pretrained("{repo_id}")\n'
            f'tokenizer = AutoTokenizer.from_pretrained("{repo_id}")'
        )
        ours = f'from grpo_jax import from_pretrained\n\npolicy = from_pretrained("{repo_id}")'
    return f"In transformers, with PyTorch:\n\n```python\n{torch}\n```\n\nIn grpo_jax:\n\n```python\n{ours}\n```"
