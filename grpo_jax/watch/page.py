"""The report page of a run: one HTML file with curves, times, completions, settings and warnings.

The page needs no server, requests nothing, and its content policy forbids requests. Data is embedded as JSON in which
no character can end a script, and is inserted as text, never as markup. The size is bounded: curves are thinned to
`POINTS` values, and completions are kept for `STEPS` steps, as many of each as `COMPLETION_BYTES` allow.
"""

from __future__ import annotations

import html
import json
import os
import pathlib
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import IO, Any

import numpy as np

from grpo_jax.watch.display import escape_controls
from grpo_jax.watch.plots import (
    SMOOTHED,
    Curve,
    as_css,
    draw_report,
    find_panels,
    reward_colours,
    save_figure,
    smooth,
    thin,
)
from grpo_jax.watch.summary import changed_settings, headline, metric_names, phase_seconds
from grpo_jax.watch.writer import JSON, CompletionRow, Line, RunWriter, is_dialogue, read_lines, read_settings

POINTS = 400
"""Values of a curve; a panel is about 400 pixels wide."""
STEPS = 12
"""Steps whose completions are kept: the first, the last, and others evenly between."""
COMPLETION_BYTES = 2_000_000
"""Bytes of all completions together."""
TEXT = 6000
"""Characters of a prompt or completion; a longer one loses its middle."""


def write_pictures(writer: RunWriter, *, page_only: bool = False) -> None:
    """Draw `report.png` and `report.html`, each whole or not at all; a failure is a warning and does not end the run.

    Without a run directory nothing is drawn. `page_only` leaves out `report.png`, which takes most of the time of both.
    """
    run_dir = writer.run_dir
    if run_dir is None:
        return

    def draw(file: IO[bytes]) -> None:
        save_figure(draw_report(list(read_lines(run_dir / "metrics.jsonl")), title=run_dir.resolve().name), file)

    def write_page(file: IO[bytes]) -> None:
        file.write(html_report(run_dir).encode("utf-8", "backslashreplace"))

    for name, write in [("report.png", draw), ("report.html", write_page)][page_only:]:
        try:
            writer.replace(name, write)
        except Exception as error:
            message = f"{name} was not drawn: {type(error).__name__}: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)


def html_report(run_dir: str | os.PathLike[str]) -> str:
    """Return the page of a run as HTML for UTF-8, made from the files of its directory."""
    run_dir = pathlib.Path(run_dir)
    lines = list(read_lines(run_dir / "metrics.jsonl"))
    about = read_settings(run_dir)
    steps, kept = _completions(run_dir / "completions.jsonl", about.get("config", {}).get("num_generations"))
    rows = [row for step in steps for group in step["groups"] for row in group["rows"]]
    spent = phase_seconds(lines)
    data = {
        "about": f"started {about['started']} · {about['platform']}" if about else "",
        "warnings": [_shown(line) for line in read_lines(run_dir / "warnings.jsonl")],
        "panels": _panels(lines),
        "seconds": [(name, x) for name, x in spent.items() if x > 1e-3 * sum(spent.values())],
        "functions": reward_colours(metric_names(lines)),
        "rewards": list(dict.fromkeys(name for row in rows for name in row["rewards"])),
        "extras": sorted({name for row in rows for name in row.keys() - _columns_of(row)}),
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


def _embedded(data: object) -> str:
    r"""Return JSON for a script element: all ASCII, with `<`, `>` and `&` escaped as \u003c, \u003e and \u0026."""
    text = json.dumps(data, allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _panels(lines: Sequence[Line]) -> list[dict[str, object]]:
    """Return the panels of `report.png` with the values that they show."""
    every = np.array([line["step"] for line in lines], float)
    panels: list[dict[str, object]] = []
    for panel in find_panels(lines):
        there = np.isfinite([curve.values for curve in panel.curves]).any(axis=0)
        curves = [_curve(curve._replace(values=curve.values[there])) for curve in panel.curves]
        x = [round(step) for step in thin(every[there], POINTS).tolist()]
        panels.append({"title": panel.title, "unit": panel.unit, "low": panel.low, "x": x, "curves": curves})
    return panels


def _curve(curve: Curve) -> dict[str, object]:
    """Return a curve as the page draws it: thinned, and smoothed if it has enough values."""
    y = thin(curve.values, POINTS)
    drawn: dict[str, object] = {"label": curve.label, "colour": curve.colour, "y": _rounded(y)}
    if np.isfinite(y).sum() >= SMOOTHED:
        drawn["smooth"] = _rounded(smooth(y, width=len(y) / 40))
    return drawn


def _rounded(values: np.ndarray) -> list[float | None]:
    """Return values to five digits; None for NaN."""
    return [float(f"{value:.5g}") if np.isfinite(value) else None for value in values]


def _settings(about: Mapping[str, Any]) -> list[tuple[str, Mapping[str, JSON], list[str]]]:
    """Return the lists of settings: a title, names with values, and the names that are shown in bold."""
    if not about:
        return []
    config = about.get("config", {})
    return [
        ("Config (bold: not the default)", config, list(changed_settings(config))),
        ("Versions", about.get("versions", {}), []),
        ("Command", {"argv": " ".join(about.get("argv", []))}, []),
    ]


def _completions(path: pathlib.Path, num_generations: int | None) -> tuple[list[dict[str, Any]], str]:
    """Return the completions of some steps by groups, and a sentence that says which part of all of them that is."""
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
                row = _shown(json.loads(file.readline()))
                size += len(_embedded(row))
                if size > COMPLETION_BYTES // STEPS and groups:
                    break
                prompt = row.pop("prompt")
                del row["step"]
                if is_dialogue(row.get("turns")):
                    del row["completion"]  # the turns hold the same text
                # Consecutive groups may have the same prompt.
                if not groups or groups[-1]["prompt"] != prompt or len(groups[-1]["rows"]) == num_generations:
                    groups.append({"prompt": prompt, "rows": []})
                groups[-1]["rows"].append(row)
                kept += 1
        steps.append({"step": step, "groups": groups})
    return steps, "these are all" if kept == total else f"completions.jsonl has all {total:,} of {len(places):,} steps"


def _columns_of(row: CompletionRow) -> set[str]:
    """Return the names of a row that the table has fixed columns for; `turns` replace the completion."""
    text = {"completion"} if "completion" in row else {"turns", "turn_rewards"}
    return text | {"rewards", "advantage", "ended"}


def _places(path: pathlib.Path) -> list[tuple[int, int, int]]:
    """Return (step, offset of its first line, number of lines) of each step, without parsing gigabytes."""
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


def _shown(value: Any) -> Any:
    """Return a row, a list or a text as it is shown: control characters escaped, long texts without their middle."""
    if isinstance(value, str):
        if len(value) > TEXT:
            value = f"{value[: TEXT // 2]} […{len(value) - TEXT} characters…] {value[-TEXT // 2 :]}"
        return escape_controls(value)
    if isinstance(value, list):
        return [_shown(item) for item in value]
    return {name: _shown(item) for name, item in value.items()} if isinstance(value, dict) else value
