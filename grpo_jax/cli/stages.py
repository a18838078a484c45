"""The stages of a run: `stages: [sft, grpo]` in a RUN.yaml, with the data and the settings of SFT under `sft`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from grpo_jax.cli.named import resolve_source
from grpo_jax.cli.yaml12 import pick_fields
from grpo_jax.config.fields import unknown_field
from grpo_jax.config.sft import SFTConfig
from grpo_jax.messages import problems_of, raise_all, show
from grpo_jax.text.examples import load_examples
from grpo_jax.types import Json, Row

_OWN = ("data", "eval_data", "columns", "prompt")
_SHARED = ("seed", "mesh", "compute_dtype", "chat_template_kwargs")
"""Settings of the run that its SFT stage has too, unless `sft` says otherwise."""


class SFTStage(NamedTuple):
    """The stage before GRPO, in the arguments of `sft`; its run directory is `sft` in that of the run."""

    config: SFTConfig
    rows: list[Row]
    eval_rows: list[Row] | None


def read_stages(stated: Json) -> tuple[str, ...]:
    """Return the stages of a run, GRPO alone where nothing is said."""
    found = stated.get("stages", ["grpo"])
    if found not in (["sft"], ["grpo"], ["sft", "grpo"]):
        raise ValueError(f"stages = {show(found)}: give [sft, grpo], [sft] or [grpo]")
    if "sft" in found and not isinstance(stated.get("sft"), dict):
        raise ValueError("sft: is missing; give a mapping of data and of the settings of SFTConfig")
    if "sft" not in found and "sft" in stated:
        raise ValueError("sft: the stages have none; give stages: [sft, grpo], or leave it out")
    return tuple(found)


def read_sft(stated: Json, folder: Path) -> SFTStage:
    """Read the SFT stage from the keys of a run; a ValueError has one line per error."""
    config, problems = _read_config(stated)
    own = stated["sft"]
    rows = dict[str, list[Row]]()
    if own.get("data") is None:
        problems.append("sft.data: is missing; give a file, the name of a dataset, or module:name")
    for name in ("data", "eval_data"):
        try:
            if own.get(name) is not None:
                rows[name] = load_examples(
                    resolve_source(own[name], folder, f"sft.{name}"),
                    text_field=config.dataset_text_field,
                    columns=own.get("columns"),
                    prompt=own.get("prompt"),
                    argument=f"sft.{name}",
                )
        except (ValueError, OSError) as error:
            problems += problems_of(error)
    raise_all("sft", problems)
    return SFTStage(config, rows["data"], rows.get("eval_data"))


def read_sft_config(stated: Json) -> SFTConfig:
    """Read the settings of the SFT stage without its data; errors as in `read_sft`."""
    config, problems = _read_config(stated)
    raise_all("sft", problems)
    return config


def _read_config(stated: Json) -> tuple[SFTConfig, list[str]]:
    """Return the settings of the stage, with the run's `_SHARED` ones as defaults, and the error lines."""
    fields = {field.name for field in dataclasses.fields(SFTConfig)}
    known = fields | {*_OWN}
    problems = [f"sft.{unknown_field(name, known, {})}" for name in stated["sft"] if name not in known]
    try:
        settings = pick_fields(stated, _SHARED) | pick_fields(stated["sft"], fields)
        return SFTConfig.from_dict(settings), problems
    except ValueError as error:
        return SFTConfig(), [*problems, *(f"sft.{line}" for line in problems_of(error))]


def has_checkpoints(run_dir: Path) -> bool:
    """Return whether a run has begun to keep checkpoints there."""
    return any((run_dir / "checkpoints").glob("[0-9]*"))


def last_dir(stages: Sequence[str], run_dir: Path) -> Path:
    """Return the directory of the last stage that has begun, in that of the run."""
    return run_dir if "sft" not in stages or has_checkpoints(run_dir) else run_dir / "sft"
