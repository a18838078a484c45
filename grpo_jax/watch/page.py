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
import warnings
from collections.abc import Mapping, Sequence
from typing import IO, Any

import numpy as np

from grpo_jax.config.config import GRPOConfig
from grpo_jax.watch.breakdown import column_tables, iteration, turn_table
from grpo_jax.watch.colours import PHASES, as_css
from grpo_jax.watch.panels import find_panels, reward_colours, usual_times
from grpo_jax.watch.plots import draw_report, save_figure, smooth, thin
from grpo_jax.watch.summary import changed_settings, headline, held_out_scores, metric_names, numbers, phase_seconds
from grpo_jax.watch.writer import JSON, CompletionRow, Line, RunWriter, is_dialogue, read_lines, read_settings

POINTS = 400
"""Values of a curve; a panel is some 400 pixels wide."""
STEPS = 12
"""Steps of which completions are kept: the first, the last, and others evenly between."""
COMPLETION_BYTES = 2_000_000
"""Bytes that all completions together may take."""
TEXT = 6000
"""Characters of a prompt or completion; of a longer one, the middle is left out."""


def write_pictures(writer: RunWriter, *, page_only: bool = False) -> None:
    """Draw `report.png` and `report.html`, each whole or not at all; a failure is a warning and ends nothing.

    Args:
      writer: the files of the run; where its directory is None, nothing is drawn.
      page_only: leave out `report.png`, which takes most of the time of both.
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
    """Return the page of a run, made from the files of its directory.

    Returns:
      HTML, for UTF-8.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as run_dir:
      ...     RunWriter(run_dir).metrics(1, {"reward": 0.5})
      ...     page = html_report(run_dir)
      >>> page.startswith("<!doctype html>"), '"title": "Reward"' in page
      (True, True)
    """
    run_dir = pathlib.Path(run_dir)
    lines = list(read_lines(run_dir / "metrics.jsonl"))
    about = read_settings(run_dir)
    steps, kept = _completions(run_dir / "completions.jsonl", about.get("config", {}).get("num_generations"))
    rows = [row for step in steps for group in step["groups"] for row in group["rows"]]
    spent = phase_seconds(lines)
    extras = sorted({name for row in rows for name in row.keys() - _shown_of(row)})
    tables = turn_table(rows) + column_tables(rows, extras)
    data = {
        "about": f"started {about['started']} · {about['platform']}" if about else "",
        "tiles": _tiles(lines),
        "warnings": list(read_lines(run_dir / "warnings.jsonl")),
        "panels": _panels(lines),
        "seconds": [(name, x) for name, x in spent.items() if x > 1e-3 * sum(spent.values())],
        "phases": PHASES,
        "functions": reward_colours(lines),
        "rewards": list(dict.fromkeys(name for row in rows for name in row["rewards"])),
        "extras": extras,
        "iteration": [span._asdict() for span in iteration(lines, _updates(about.get("config", {})))],
        "tables": [table._asdict() for table in tables],
        "steps": steps,
        "kept": kept,
        "settings": _settings(about),
    }
    sentence = headline(lines)
    told = f"{sentence[0].upper()}{sentence[1:]}." if sentence else "Nothing was logged."
    return fill_page(run_dir.resolve().name, told, data)


def fill_page(title: str, sentence: str, data: Mapping[str, object]) -> str:
    """Return the page that shows `data`: `about`, `panels`, and what else of `html_report` there is."""
    filled = {
        "%TITLE%": html.escape(title),
        "%HEADLINE%": html.escape(sentence),
        "%LIGHT%": as_css(dark=False),
        "%DARK%": as_css(dark=True),
        "%DATA%": _embedded(data),
    }
    template = pathlib.Path(__file__).with_suffix(".html").read_text("utf-8")
    return re.sub("|".join(filled), lambda match: filled[match[0]], template)


def _embedded(data: object) -> str:
    r"""Return JSON that may stand in a script: `</script>` and `<!--` are written with \u003c, all of it in ASCII."""
    text = json.dumps(data, allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _panels(lines: Sequence[Line]) -> list[dict[str, object]]:
    """Return the panels of `report.png` with the values that they show, smoothed too where there are 20 or more."""
    every = np.array([line["step"] for line in lines], float)
    panels: list[dict[str, object]] = []
    for panel, curves, meanings in find_panels(lines):
        if panel.stacked:
            steps, values = usual_times(every, curves)
        else:
            values = np.array(list(curves.values()))
            there = np.isfinite(values).any(axis=0)
            steps, values = every[there], values[:, there]
        drawn = [page_curve(label, meanings[label], raw) for label, raw in zip(curves, values, strict=True)]
        x = [round(step) for step in thin(steps, POINTS).tolist()]
        about = {"title": panel.title, "unit": panel.unit, "stacked": panel.stacked, "low": panel.low}
        panels.append({**about, "x": x, "curves": drawn})
    return panels


def page_curve(label: str, meaning: str, values: np.ndarray) -> dict[str, object]:
    """Return a curve as the page draws it: thinned to `POINTS` values, and smoothed where there are 20 or more."""
    y = thin(values, POINTS)
    curve: dict[str, object] = {"label": label, "colour": meaning, "y": _rounded(y)}
    if np.isfinite(y).sum() >= 20:
        curve["smooth"] = _rounded(smooth(y, width=len(y) / 40))
    return curve


def _rounded(values: np.ndarray) -> list[float | None]:
    """Return values with the five digits that a curve shows; None for NaN."""
    return [float(f"{value:.5g}") if np.isfinite(value) else None for value in values]


def _tiles(lines: Sequence[Line]) -> list[tuple[str, str]]:
    """Return what the run came to, a name and a text each: steps, rewards and held-out scores, tokens."""
    tiles = [("steps", f"{max(numbers(lines, 'step')):,}")] if lines else []
    scores = held_out_scores(metric_names(lines))
    for name in metric_names(lines):
        label = "reward" if name == "reward" else f"held out: {scores[name]}" if name in scores else ""
        values = numbers(lines, name) if label else []
        if values:
            tiles.append((label, f"{values[0]:.3g} → {values[-1]:.3g}"))
    tokens = numbers(lines, "num_tokens")
    return tiles + ([("completion tokens", f"{tokens[-1]:,.0f}")] if tokens else [])


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


def _shown_of(row: CompletionRow) -> set[str]:
    """Return the names of a row that have columns of their own; `turns` take the place of the completion."""
    text = {"completion"} if "completion" in row else {"turns", "turn_rewards"}
    return text | {"rewards", "advantage", "ended"}


def _updates(config: Mapping[str, JSON]) -> int:
    """Return the optimizer steps of an iteration, 1 where the settings do not say."""
    try:
        return GRPOConfig.from_dict(dict(config)).sizes(None).updates if config else 1
    except ValueError:  # a run of another version
        return 1


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


def _cut(value: Any) -> Any:
    """Return a row, a list or a text without the middle of each text that is too long."""
    if isinstance(value, str) and len(value) > TEXT:
        return f"{value[: TEXT // 2]} […{len(value) - TEXT} characters…] {value[-TEXT // 2 :]}"
    if isinstance(value, list):
        return [_cut(item) for item in value]
    return {name: _cut(item) for name, item in value.items()} if isinstance(value, dict) else value
