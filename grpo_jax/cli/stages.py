"""The stages of a run: `stages: [sft, grpo]` in a RUN.yaml, with the data and the settings of SFT under `sft`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from grpo_jax.cli.named import examples_of
from grpo_jax.config.fields import unknown_field
from grpo_jax.config.sft import SFTConfig
from grpo_jax.devices.sharding import parse_mesh
from grpo_jax.messages import problems_of, raise_all, show
from grpo_jax.types import Json, Row

NAMES = ("sft", "grpo")

_OWN = ("data", "eval_data", "columns", "prompt")
_SHARED = ("seed", "mesh", "compute_dtype", "chat_template_kwargs")
"""Settings of the run that its SFT stage has too, unless `sft` says otherwise."""


class SFTStage(NamedTuple):
    """The stage before GRPO, in the arguments of `sft`; its run directory is `sft` in that of the run."""

    config: SFTConfig
    rows: list[Row]
    eval_rows: list[Row] | None


def read_stages(stated: Json) -> tuple[str, ...]:
    """Return the stages of a run, GRPO alone where nothing is said.

    Example:
      >>> read_stages({}), read_stages({"stages": ["sft", "grpo"], "sft": {"data": "lessons.jsonl"}})
      (('grpo',), ('sft', 'grpo'))
    """
    found = stated.get("stages", ["grpo"])
    if found not in (["sft"], ["grpo"], ["sft", "grpo"]):
        raise ValueError(f"stages = {show(found)}: give [sft, grpo], [sft] or [grpo]")
    if "sft" in found and not isinstance(stated.get("sft"), dict):
        raise ValueError("sft: is missing; give a mapping of data and of the settings of SFTConfig")
    if "sft" not in found and "sft" in stated:
        raise ValueError("sft: the stages have none; give stages: [sft, grpo], or leave it out")
    return tuple(found)


def read_sft(stated: Json, folder: Path) -> SFTStage:
    """Read the stage before GRPO.

    Args:
      stated: the keys of the run, `sft` among them.
      folder: what files are named from.

    Raises:
      ValueError: with one line per fault.
    """
    asked: dict[str, object] = dict(stated["sft"])
    config, problems = _read_config(stated)
    rows = dict[str, list[Row]]()
    if asked.get("data") is None:
        problems.append("sft.data: is missing; give a file, the name of a dataset, or module:name")
    for name in ("data", "eval_data"):
        try:
            if asked.get(name) is not None:
                rows[name] = examples_of(
                    asked[name],
                    folder,
                    argument=f"sft.{name}",
                    columns=stated["sft"].get("columns"),
                    prompt=stated["sft"].get("prompt"),
                    text_field=config.dataset_text_field,
                )
        except (ValueError, OSError) as error:
            problems += problems_of(error)
    raise_all("sft", problems)
    return SFTStage(config, rows["data"], rows.get("eval_data"))


def read_sft_config(stated: Json) -> SFTConfig:
    """Read the settings of the stage before GRPO and leave its data alone; errors as in `read_sft`."""
    config, problems = _read_config(stated)
    raise_all("sft", problems)
    return config


def _read_config(stated: Json) -> tuple[SFTConfig, list[str]]:
    """The settings of the stage, those of the run where it has none of its own, and the faults that were found."""
    asked: dict[str, object] = dict(stated["sft"])
    fields = {field.name for field in dataclasses.fields(SFTConfig)}
    problems = [
        f"sft.{unknown_field(name, fields | {*_OWN}, {})}" for name in asked if name not in fields and name not in _OWN
    ]
    settings = {name: stated[name] for name in _SHARED if name in stated}
    settings |= {name: value for name, value in asked.items() if name in fields}
    if isinstance(settings.get("mesh"), str):
        settings["mesh"] = parse_mesh(settings["mesh"])
    try:
        return SFTConfig.from_dict(settings), problems
    except ValueError as error:
        return SFTConfig(), [*problems, *(f"sft.{line}" for line in problems_of(error))]


def has_checkpoints(run_dir: Path) -> bool:
    """Return whether a run has begun to keep checkpoints there."""
    return any((run_dir / "checkpoints").glob("[0-9]*"))


def last_dir(stages: Sequence[str], run_dir: Path) -> Path:
    """Return the directory of the last stage that has begun, in that of the run."""
    return run_dir if "sft" not in stages or has_checkpoints(run_dir) else run_dir / "sft"
