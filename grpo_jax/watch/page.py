"""A run's report: `report.png`, and the page `report.html` with curves, times, completions and settings.

The page does not need a server, and its content security policy forbids requests. Data is embedded as escaped JSON and
inserted as text, never as markup. `plots.POINTS`, `STEPS` and `COMPLETION_BYTES` limit the page's size.
"""

from __future__ import annotations

import base64
import contextlib
import html
import json
import os
import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from grpo_jax.watch.display import escape_controls
from grpo_jax.watch.plots import COLORS, Panel, draw_report, find_panels, reward_colors, save_figure
from grpo_jax.watch.summary import changed_settings, finite_values, headline, metric_names
from grpo_jax.watch.writer import Line, read_lines, read_settings, replace_file

RUN_COLUMNS = ("step", "prompt", "images", "completion", "turns", "rewards", "turn_rewards", "advantage", "ended")
"""Columns in `completions.jsonl` that the run itself writes. All others are logged by reward functions."""

STEPS = 12
"""Maximum number of steps whose completions are shown: evenly spaced logged steps, including the first and last."""
COMPLETION_BYTES = 2_000_000
"""Approximate limit on the total size of completions and images, in bytes."""
TEXT = 6000
"""Maximum length of a prompt or completion, in characters. Longer text is abbreviated in the middle."""


def write_report(run_dir: str | os.PathLike[str]) -> None:
    """Write `report.html` and `report.png`. If a file cannot be written, issues a warning and keeps the old file."""
    run_dir = Path(run_dir)

    def draw(file: IO[bytes]) -> None:
        save_figure(draw_report(list(read_lines(run_dir / "metrics.jsonl")), title=run_dir.resolve().name), file)

    def write_page(file: IO[bytes]) -> None:
        file.write(html_report(run_dir).encode("utf-8", "backslashreplace"))

    for name, write in (("report.html", write_page), ("report.png", draw)):
        try:
            replace_file(run_dir / name, write)
        except Exception as error:
            warnings.warn(f"could not write {name}: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=2)


def html_report(run_dir: str | os.PathLike[str]) -> str:
    """Return a run's HTML report, built from the files in `run_dir`. It must be encoded as UTF-8."""
    run_dir = Path(run_dir)
    lines, about = list(read_lines(run_dir / "metrics.jsonl")), read_settings(run_dir)
    config = about.get("config", {})
    steps, totals = _completions(run_dir / "completions.jsonl", config.get("num_generations"))
    rows = [row for step in steps for group in step["groups"] for row in group["rows"]]
    phases = _phase_seconds(lines)
    settings = [
        ("Config (bold: differs from the default)", config, list(changed_settings(config)) if about else []),
        ("Versions", about.get("versions", {}), []),
    ]
    data = {
        "about": f"started {about['started']} · {about['platform']}" if about else "",
        "warnings": [_printable(line) for line in read_lines(run_dir / "warnings.jsonl")],
        "panels": [_as_json(panel) for panel in find_panels(lines)],
        "seconds": [(name, x) for name, x in phases.items() if x > 1e-3 * sum(phases.values())],
        "functions": reward_colors(metric_names(lines)),
        "rewards": list(dict.fromkeys(name for row in rows for name in row["rewards"])),
        "extras": sorted({name for row in rows for name in row.keys() - {*RUN_COLUMNS}}),
        "steps": steps,
        "totals": totals,
        "settings": settings if about else [],
    }
    sentence = headline(lines)
    light, dark = (" ".join(f"--{name}: {pair[i]};" for name, pair in COLORS.items()) for i in (0, 1))
    values = {
        "%TITLE%": html.escape(run_dir.resolve().name),
        "%HEADLINE%": html.escape(f"{sentence[0].upper()}{sentence[1:]}." if sentence else "Nothing was logged."),
        "%LIGHT%": light,
        "%DARK%": dark,
        "%DATA%": _embedded(data),
    }
    template = Path(__file__).with_suffix(".html").read_text("utf-8")
    return re.sub("|".join(values), lambda match: values[match[0]], template)


def _embedded(data: object) -> str:
    """Return ASCII JSON for a script element. `<`, `>` and `&` are escaped, so that data cannot close the element."""
    text = json.dumps(data, allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _as_json(panel: Panel) -> dict[str, object]:
    """Convert a panel to JSON, with values rounded to five significant digits."""

    def rounded(values: np.ndarray) -> list[float | None]:
        return [float(f"{value:.5g}") if np.isfinite(value) else None for value in values]

    curves = [
        {"label": curve.label, "color": curve.color, "y": rounded(curve.values)}
        | ({} if curve.smoothed is None else {"smooth": rounded(curve.smoothed)})
        for curve in panel.curves
    ]
    return {"title": panel.title, "unit": panel.unit, "low": panel.low, "x": panel.steps.tolist(), "curves": curves}


def _phase_seconds(lines: Sequence[Line]) -> dict[str, float]:
    """Return the total seconds per phase. The time outside all phases is "other"."""
    names = [name for name in metric_names(lines) if name.startswith("seconds/")]
    seconds = {name.removeprefix("seconds/"): sum(values) for name in names if (values := finite_values(lines, name))}
    other = seconds.pop("total", 0.0) - sum(seconds.values())
    return seconds | ({"other": other} if other > 0 else {})


def _completions(path: Path, num_generations: int | None) -> tuple[list[dict[str, Any]], str]:
    """Return the completions of up to `STEPS` steps, grouped by prompt, and a sentence about all logged completions."""
    if not path.exists():
        return [], "completions.jsonl does not exist"
    with open(path, "rb") as file:
        counts = Counter(step for line in file if (step := _step_of(line)) >= 0)
        logged = list(counts)
        selected = {logged[round(i)] for i in np.linspace(0, len(logged) - 1, min(STEPS, len(logged)))}
        groups: dict[int, list[dict[str, Any]]] = {step: [] for step in sorted(selected)}
        sizes = dict.fromkeys(selected, 0)
        file.seek(0)
        for line in file:
            step = _step_of(line)
            if step in selected and sizes[step] < COMPLETION_BYTES // STEPS:
                sizes[step] += _add_row(groups[step], _printable(json.loads(line)), num_generations, path.parent)
    steps = [{"step": step, "groups": of_step} for step, of_step in groups.items()]
    return steps, f"completions.jsonl contains {counts.total():,} completions from {len(logged):,} steps"


def _add_row(groups: list[dict[str, Any]], row: dict[str, Any], num_generations: int | None, run_dir: Path) -> int:
    """Add a completion to the last group, or to a new one. Returns the number of bytes added."""
    size = len(_embedded(row))
    prompt = row.pop("prompt")
    images = [_data_url(run_dir, image) for image in row.pop("images", ()) if isinstance(image, dict)]
    del row["step"]
    if row.get("turns"):
        del row["completion"]  # the turns contain the same text
    # Consecutive groups may have the same prompt.
    last = groups[-1] if groups else None
    if last is None or (last["prompt"], last["images"]) != (prompt, images) or len(last["rows"]) == num_generations:
        last = {"prompt": prompt, "images": images, "rows": []}
        groups.append(last)
        size += sum(map(len, images))
    last["rows"].append(row)
    return size


def _step_of(line: bytes) -> int:
    """Return the step of a line, or −1 if the line is incomplete. For speed, the JSON is not parsed."""
    match = re.match(rb'\{"step": (\d+)', line)
    return int(match[1]) if match and line.endswith(b"\n") else -1


def _data_url(run_dir: Path, image: Mapping[str, str]) -> str:
    """Return the thumbnail of an image as a data URL, or "" if there is no such file."""
    with contextlib.suppress(OSError):  # `.name` excludes files in other directories
        content = (run_dir / "images" / Path(image["thumbnail"]).name).read_bytes()
        return f"data:image/jpeg;base64,{base64.b64encode(content).decode()}"
    return ""


def _printable(value: Any) -> Any:
    """Escape control characters in all strings of a JSON value, and shorten long strings."""
    if isinstance(value, str):
        if len(value) > TEXT:
            value = f"{value[: TEXT // 2]} […{len(value) - TEXT} characters…] {value[-TEXT // 2 :]}"
        return escape_controls(value)
    if isinstance(value, list):
        return [_printable(item) for item in value]
    return {name: _printable(item) for name, item in value.items()} if isinstance(value, Mapping) else value
