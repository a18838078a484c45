"""Runs over each other: the values are those of the files, at the steps, tokens and seconds at which they were had."""

import io
import json
import re

import numpy as np
import pytest
from browsing import browser, no_browser

from grpo_jax import GRPOConfig
from grpo_jax.watch.compare import (
    against,
    choose_metric,
    comparison_page,
    comparison_tables,
    draw_comparison,
    level,
    read_runs,
)
from grpo_jax.watch.plots import save_figure
from grpo_jax.watch.writer import RunWriter

NASTY = "</script><b>$x$"


def write(folder, *, steps, gain, tokens, seconds, **settings):
    """A run that gains so much reward a step, and draws so many tokens in so many seconds; evaluated at both ends."""
    writer = RunWriter(folder)
    writer.config(GRPOConfig(**settings))
    writer.metrics(0, {"eval/right": 0.25})
    for step in range(2, steps + 1, 2):
        line = {"reward": gain * step, "kl": 0.1, "num_tokens": tokens * step, "seconds/total": 2 * seconds}
        writer.metrics(step, line)
    writer.metrics(steps, {"eval/right": 0.75})


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write(folder / "fast" / "run", steps=40, gain=0.02, tokens=100, seconds=1.0, learning_rate=1e-4)
    write(folder / NASTY.replace("/", "") / "run", steps=20, gain=0.01, tokens=1000, seconds=4.0, beta=0.5)
    return read_runs(sorted(folder.glob("*/run"), reverse=True))


@pytest.mark.quick
def test_a_metric_stands_at_its_steps_tokens_and_seconds(runs):
    fast, slow = runs
    x, y = against(slow.lines, "reward")
    steps = np.arange(2.0, 21, 2)
    np.testing.assert_array_equal(x["steps"], steps)
    np.testing.assert_array_equal(x["tokens"], 1000 * steps)
    np.testing.assert_array_equal(x["seconds"], 4 * steps)
    np.testing.assert_allclose(y, 0.01 * steps)
    x, y = against(fast.lines, "eval/right")  # before the first step, and after the last
    assert ([x["steps"].tolist(), x["tokens"].tolist(), x["seconds"].tolist()], y.tolist()) == (
        [[0, 40], [0, 4000], [0, 40]],
        [0.25, 0.75],
    )


@pytest.mark.quick
def test_gaps_and_what_was_not_logged():
    lines = [{"step": 2, "reward": None, "seconds/total": 3.0}, {"step": 3, "reward": 1.0}, {"step": 4, "reward": 2.0}]
    x, y = against([*lines, {"step": 6, "seconds/total": 5.0}], "reward")
    assert sorted(x) == ["seconds", "steps"]
    assert (x["seconds"].tolist(), y.tolist()) == ([4.25, 5.5], [1.0, 2.0])


@pytest.mark.quick
def test_tables_compare_at_what_all_have_reached(runs):
    came_to, same, settings = comparison_tables(runs, "reward")
    assert came_to.head == ["run", "steps", "tokens", "seconds", "first reward", "last"]
    assert came_to.rows[0][1:] == ["40", "4000", "40", "0.04", f"{0.02 * 39:.4g}"]  # a tenth of 20 values is two
    assert came_to.rows[1][1:] == ["20", "20 k", "80", "0.02", "0.2"]
    assert same.head == ["run", "20 steps", "4000 tokens", "40 seconds"]
    # After 20 steps, 4,000 tokens and 40 seconds the one had made 20, 40 and 40 steps, the other 20, 4 and 10.
    assert same.rows[0][1:] == ["0.4", "0.78", "0.78"]
    assert same.rows[1][1:] == ["0.2", "0.04", "0.1"]
    assert settings.rows == [["learning_rate", "0.0001", "1e-06"], ["beta", "0.0", "0.5"]]
    assert np.isnan(level(np.array([2.0]), np.array([1.0]), 1.0))


@pytest.mark.quick
def test_runs_are_named_by_what_tells_them_apart(runs, tmp_path):
    assert [run.name for run in runs] == ["fast/run", f"{NASTY.replace('/', '')}/run"]
    for name in ("a", "b"):
        RunWriter(tmp_path / name).metrics(1, {"loss": 1.0})
    named = read_runs([tmp_path / "a", tmp_path / "b"])
    assert ([run.name for run in named], choose_metric(named)) == (["a", "b"], "loss")
    assert len(comparison_tables(named, "loss")) == 2  # neither has settings


@pytest.mark.quick
def test_what_cannot_be_compared_is_refused(runs, tmp_path):
    RunWriter(tmp_path / "a").metrics(1, {"reward": 1.0})
    RunWriter(tmp_path / "b").metrics(1, {"loss": 1.0})
    RunWriter(tmp_path / "empty")
    (tmp_path / "empty" / "metrics.jsonl").touch()
    with pytest.raises(ValueError, match=r"^run_dirs: 1 given; give the directories of two runs or more$"):
        read_runs([tmp_path / "a"])
    with pytest.raises(ValueError, match=r"a is given twice; give each run once$"):
        read_runs([tmp_path / "a", tmp_path / "b" / ".." / "a"])
    with pytest.raises(FileNotFoundError, match=r"nowhere has no metrics.jsonl; is it the directory of a run\?$"):
        read_runs([tmp_path / "a", tmp_path / "nowhere"])
    with pytest.raises(ValueError, match=r"empty has nothing in metrics.jsonl yet; compare it after its first"):
        read_runs([tmp_path / "a", tmp_path / "empty"])
    mixed = read_runs([tmp_path / "a", tmp_path / "b"])
    with pytest.raises(ValueError, match=r"^metric = 'reward': b has logged no such metric; all runs have step$"):
        choose_metric(mixed)
    with pytest.raises(ValueError, match=r"^metric = 'rewad': fast/run has logged no such metric; did you mean reward"):
        choose_metric(runs, "rewad")


def embedded(page):
    return json.loads(re.search('id="data">(.*?)</script>', page)[1])


@pytest.mark.quick
def test_the_page_holds_the_curves_and_nothing_from_data_is_markup(runs):
    page = comparison_page(runs, "reward")
    assert NASTY.replace("/", "") not in page
    panels = {panel["title"]: panel for panel in embedded(page)["panels"]}
    expected = [
        f"{name} against {axis}" for name in ("Reward", "Held out: right") for axis in ("steps", "tokens", "seconds")
    ]
    assert list(panels) == expected
    (fast, slow) = panels["Reward against tokens"]["curves"]
    assert fast["x"] == [200 * i for i in range(1, 21)]
    assert fast["y"] == pytest.approx([0.04 * i for i in range(1, 21)], rel=1e-4)
    assert "smooth" in fast
    assert "smooth" not in slow  # ten values
    assert fast["colour"] != slow["colour"]


@pytest.mark.quick
def test_the_picture_has_a_panel_for_each_axis(runs):
    figure = draw_comparison(runs, "reward", dark=True)
    assert [axes.get_title(loc="left") for axes in figure.axes][:3] == [
        "Reward against steps",
        "Reward against tokens",
        "Reward against seconds",
    ]
    smoothed = figure.axes[2].get_lines()[1]
    np.testing.assert_array_equal(smoothed.get_xdata(), 2.0 * np.arange(1, 21))
    save_figure(figure, file := io.BytesIO())
    assert file.getvalue().startswith(b"\x89PNG")


@pytest.mark.quick
@pytest.mark.skipif(no_browser, reason="no Chromium with its driver (Debian: chromium, chromium-driver)")
def test_the_page_in_a_real_browser(runs, tmp_path):
    page = tmp_path / "compare.html"
    page.write_text(comparison_page(runs, "reward"), encoding="utf-8")
    with browser(tmp_path) as session:

        def run(script):
            return session("POST", "execute/sync", script=f"return {script}", args=[])

        session("POST", "url", url=page.as_uri())
        assert run("document.querySelectorAll('.panel').length") == 6
        # On one axis of tokens the run with a tenth of them ends a fifth of the way (4,000 of 20,000).
        ends = run(
            "[...document.querySelectorAll('.panel')[1].querySelectorAll('path.curve')].map(path =>"
            " Number(path.getAttribute('d').split(/[ML]/).pop().split(',')[0]))"
        )
        left = ends[1] - 400 + 14  # the last place is 14 from the right
        assert abs(left) < 0.1
        assert 42 < ends[0] < 150
        assert run("[...document.querySelectorAll('h2')].map(node => node.textContent)") == [
            "Curves",
            "What the runs came to",
            "reward at the same steps, tokens and seconds",
            "Settings that differ",
        ]
        assert run("document.querySelectorAll('#tables tbody tr').length") == 2 + 2 + 2
        assert run("document.querySelectorAll('#tables b').length") == 0
        svg = "document.querySelectorAll('.panel svg')[1]"
        run(
            f"(box => {svg}.dispatchEvent(new PointerEvent('pointermove', {{clientX: box.right - 20}})))"
            f"({svg}.getBoundingClientRect())"
        )
        assert "completion tokens 20000" in run("document.querySelectorAll('.panel h3')[1].textContent")
        phone = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
        session("POST", "goog/cdp/execute", cmd="Emulation.setDeviceMetricsOverride", params=phone)
        assert run("[innerWidth, document.documentElement.scrollWidth]") == [390, 390]
        assert "NaN" not in run("document.body.innerHTML")
        assert [entry for entry in session("POST", "se/log", type="browser") if entry["level"] != "INFO"] == []
