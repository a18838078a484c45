"""The page of a run: one HTML file with curves, times, completions, settings and warnings, which needs no server.

Everything stands in the file: the page asks for nothing from anywhere, and its content policy forbids it to. What comes
from data is embedded as JSON in which no character can end a script, and the page puts it in as text, never as markup.
The size is bounded: curves are thinned to `POINTS` values, and completions are kept of `STEPS` steps, as many of each
as `COMPLETION_BYTES` allow.
"""

from __future__ import annotations

import html
import json
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from grpo_jax.config.config import GRPOConfig
from grpo_jax.watch.colours import PHASES, as_css
from grpo_jax.watch.headline import headline, phase_seconds
from grpo_jax.watch.lines import read_lines
from grpo_jax.watch.names import held_out, is_dialogue
from grpo_jax.watch.plots import find_panels, reward_colours, smooth, thin, usual_times

POINTS = 400
"""Values of a curve; a panel is some 400 pixels wide."""
STEPS = 12
"""Steps of which completions are kept: the first, the last, and others evenly between."""
COMPLETION_BYTES = 2_000_000
"""What all completions together may take."""
TEXT = 6000
"""Characters of a prompt or completion; of a longer one, the middle is left out."""


def html_report(run_dir: str | os.PathLike[str]) -> str:
    """Return the page of a run, made from the files of its directory.

    Args:
      run_dir: with `metrics.jsonl`, `completions.jsonl`, `config.json` and `warnings.jsonl`, as far as they are there.

    Returns:
      HTML, for UTF-8.

    Example:
      >>> import tempfile
      >>> from grpo_jax.watch.writer import RunWriter
      >>> with tempfile.TemporaryDirectory() as run_dir:
      ...     RunWriter(run_dir).metrics(1, {"reward": 0.5})
      ...     page = html_report(run_dir)
      >>> page.startswith("<!doctype html>"), '"title": "Reward"' in page
      (True, True)
    """
    run_dir = pathlib.Path(run_dir)
    lines = list(read_lines(run_dir / "metrics.jsonl"))
    about = json.loads((run_dir / "config.json").read_text("utf-8")) if (run_dir / "config.json").exists() else {}
    steps, kept = _completions(run_dir / "completions.jsonl", about.get("config", {}).get("num_generations"))
    rows = [row for step in steps for group in step["groups"] for row in group["rows"]]
    data = {
        "about": f"started {about['started']} · {about['platform']}" if about else "",
        "tiles": _tiles(lines),
        "warnings": list(read_lines(run_dir / "warnings.jsonl")),
        "panels": _panels(lines),
        "seconds": list(phase_seconds(lines).items()),
        "phases": PHASES,
        "functions": reward_colours(lines),
        "rewards": list(dict.fromkeys(name for row in rows for name in row["rewards"])),
        "extras": sorted({name for row in rows for name in row.keys() - _shown_of(row)}),
        "steps": steps,
        "kept": kept,
        "settings": _settings(about),
    }
    sentence = headline(lines)
    filled = {
        "%TITLE%": html.escape(run_dir.resolve().name),
        "%HEADLINE%": html.escape(f"{sentence[0].upper()}{sentence[1:]}." if sentence else "Nothing was logged."),
        "%LIGHT%": as_css(dark=False),
        "%DARK%": as_css(dark=True),
        "%DATA%": _embedded(data),
    }
    template = pathlib.Path(__file__).with_suffix(".html").read_text("utf-8")
    return re.sub("|".join(filled), lambda match: filled[match[0]], template)


def _embedded(data: Any) -> str:
    r"""Return JSON that may stand in a script: `</script>` and `<!--` are written with \u003c, all of it in ASCII."""
    text = json.dumps(data, allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _rounded(value: float) -> float | None:
    """Return a value with the five digits that a curve shows; None for NaN."""
    return float(f"{value:.5g}") if np.isfinite(value) else None


def _panels(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The panels of `report.png` with the values that they show, and curves smoothed where there are 20 or more."""
    every = np.array([line["step"] for line in lines], float)
    panels = []
    for panel, curves, meanings in find_panels(lines):
        if panel.stacked:
            steps, values = usual_times(every, curves)
        else:
            values = np.array(list(curves.values()))
            there = np.isfinite(values).any(axis=0)
            steps, values = every[there], values[:, there]
        drawn = []
        for label, raw in zip(curves, values, strict=True):
            y = thin(raw, POINTS)
            curve: dict[str, Any] = {"label": label, "colour": meanings[label], "y": [_rounded(value) for value in y]}
            if np.isfinite(y).sum() >= 20:
                curve["smooth"] = [_rounded(value) for value in smooth(y, width=len(y) / 40)]
            drawn.append(curve)
        about = {"title": panel.title, "unit": panel.unit, "stacked": panel.stacked, "low": panel.low}
        panels.append({**about, "x": [round(step) for step in thin(steps, POINTS).tolist()], "curves": drawn})
    return panels


def _tiles(lines: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """What the run came to: a name and a text each, rewards and held-out scores from the first line to the last."""
    tiles = [("steps", f"{max(line['step'] for line in lines):,}")] if lines else []
    for name in dict.fromkeys(name for line in lines for name in line):
        label = "reward" if name == "reward" else f"held out: {held_out(name)}" if held_out(name) else ""
        values = [line[name] for line in lines if line.get(name) is not None] if label else []
        if values:
            tiles.append((label, f"{values[0]:.3g} → {values[-1]:.3g}"))
    tokens = [line["num_tokens"] for line in lines if line.get("num_tokens") is not None]
    return [*tiles, *([("completion tokens", f"{tokens[-1]:,.0f}")] if tokens else [])]


def _settings(about: Mapping[str, Any]) -> list[tuple[str, Any, list[str]]]:
    """The lists of settings: a title, names with values, and the names that are shown in bold."""
    if not about:
        return []
    usual = json.loads(json.dumps(GRPOConfig().to_dict()))
    config = about.get("config", {})
    changed = [name for name, value in config.items() if name not in usual or usual[name] != value]
    command = {"argv": " ".join(about.get("argv", []))}
    return [
        ("Config (bold: not the default)", config, changed),
        ("Versions", about.get("versions", {}), []),
        ("Command", command, []),
    ]


def _completions(path: pathlib.Path, num_generations: int | None) -> tuple[list[dict[str, Any]], str]:
    """The completions of some steps by groups, and a sentence that says which part of all of them that is."""
    places = _places(path)
    chosen = sorted({round(i) for i in np.linspace(0, len(places) - 1, STEPS)}) if places else []
    steps: list[dict[str, Any]] = []
    kept, total = 0, sum(count for _, _, count in places)
    for step, start, count in (places[i] for i in chosen):
        groups: list[dict[str, Any]] = []
        size = 0
        with open(path, "rb") as file:
            file.seek(start)
            for _ in range(count):
                row = _cut(json.loads(file.readline()))
                size += len(_embedded(row))
                if size > COMPLETION_BYTES // STEPS and groups:
                    break
                prompt = row.pop("prompt")
                del row["step"]
                if is_dialogue(row.get("turns")):
                    del row["completion"]  # the same once more
                # Groups that follow each other may have the same prompt.
                if not groups or groups[-1]["prompt"] != prompt or len(groups[-1]["rows"]) == num_generations:
                    groups.append({"prompt": prompt, "rows": []})
                groups[-1]["rows"].append(row)
                kept += 1
        steps.append({"step": step, "groups": groups})
    return steps, "these are all" if kept == total else f"completions.jsonl has all {total:,} of {len(places):,} steps"


def _shown_of(row: Mapping[str, Any]) -> set[str]:
    """The names of a row that have columns of their own; of several turns, those are the completion."""
    return {"completion" if "completion" in row else "turns", "rewards", "advantage", "ended"}


def _places(path: pathlib.Path) -> list[tuple[int, int, int]]:
    """(step, offset of its first line, lines) of each step, without parsing what may be gigabytes."""
    places: list[tuple[int, int, int]] = []
    if not path.exists():
        return places
    start = 0
    with open(path, "rb") as file:
        for line in file:
            step = re.match(rb'\{"step": (\d+)', line)
            if step is None or not line.endswith(b"\n"):
                break
            if places and places[-1][0] == int(step[1]):
                places[-1] = (places[-1][0], places[-1][1], places[-1][2] + 1)
            else:
                places.append((int(step[1]), start, 1))
            start += len(line)
    return places


def _cut(value: Any) -> Any:
    """Return a row, a list or a text without the middle of each text that is too long."""
    if isinstance(value, str) and len(value) > TEXT:
        return f"{value[: TEXT // 2]} […{len(value) - TEXT} characters…] {value[-TEXT // 2 :]}"
    if isinstance(value, list):
        return [_cut(item) for item in value]
    return {name: _cut(item) for name, item in value.items()} if isinstance(value, dict) else value
