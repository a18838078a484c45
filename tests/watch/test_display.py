"""The progress display in a log and in a terminal; `quiet` disables it."""

import contextlib
import io
import re
import time

import pytest
from rich.console import Console

from grpo_jax.watch import display as display_module
from grpo_jax.watch.display import Display

pytestmark = pytest.mark.quick

METRICS = {"reward": 0.5, "kl": 0.00123, "completions/mean_length": 41.26, "tokens_per_second": 4120.4, "loss": 3.0}
METRICS |= {"eval/accuracy": 0.9, "eval/mean_length": 40.0}
METRICS |= {"seconds/rollout": 2.14, "seconds/update": 2.4, "seconds/total": 5.0}
NUMBERS = "reward 0.500 · KL 0.00123 · length 41.3 · tokens/s 4,120 · held-out accuracy 0.900"


def console(terminal=False, width=200):
    return Console(file=io.StringIO(), force_terminal=terminal, width=width, force_jupyter=False, color_system=None)


def test_log_has_one_line_per_step_with_the_time_left():
    now = [0.0]
    with Display(console=(out := console(width=40)), clock=lambda: now[0]) as display:
        display.start(total_steps=1000, step=10)
        display(10, {"eval/accuracy": 0.1})
        for now[0], step, metrics in ((40.0, 20, METRICS), (320.0, 90, {"reward": 0.75}), (400.0, 1000, {})):
            display(step, metrics)
    assert out.file.getvalue().splitlines() == [
        "step   10/1000 · held-out accuracy 0.100",
        f"step   20/1000 · {NUMBERS} · 0.5 s per iteration: rollout 0.2, update 0.2",
        "step   90/1000 · reward 0.750 · 1:00:40 left",  # 910 steps of 280 s / 70 each
        "step 1000/1000",
    ]


def test_log_shows_activity_in_long_iterations(monkeypatch):
    """A log gets a line every 30 s, also within an iteration that compiles or samples for minutes."""
    now = [0.0]
    with Display(console=(out := console(width=40)), clock=lambda: now[0], activity=lambda: "rollout") as display:
        display.start(total_steps=100, updates=2)
        for now[0], step in ((29.0, 0), (30.0, 0), (40.0, 2), (59.0, 4), (100.0, 0)):
            if step > 0:
                display.advance(step)
            display.report_activity()
    # The first step compiles and is excluded from the estimate: 96 steps of 9.5 s are left.
    lines = ["step   0/100 · rollout (30 s since the last step)"]
    lines += ["step   4/100 · rollout (41 s since the last step) · 0:15:12 left"]
    assert out.file.getvalue().splitlines() == lines
    monkeypatch.setattr(display_module, "SILENCE", 0.02)
    with Display(console=out) as display:  # reported by a thread
        display.start(total_steps=7)
        for _ in range(100):
            time.sleep(0.02)
            if "step 0/7" in out.file.getvalue():
                break
    assert "step 0/7" in out.file.getvalue()


def test_terminal_has_a_bar_below_the_lines_and_the_cursor_is_restored():
    out = console(terminal=True)
    with contextlib.suppress(KeyboardInterrupt), Display(console=out) as display:
        display.start(total_steps=4, step=1)
        display(2, METRICS)
        display.advance(3)
        display.say("[note] kept above")
        raise KeyboardInterrupt
    text = out.file.getvalue()
    assert "\x1b[?25l" in text  # the cursor is hidden,
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # and shown again despite the exception
    screen = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", text)
    assert all(part in screen for part in ("[note] kept above", "3/4", NUMBERS, "rollout 2.1, update 2.4"))


def test_display_writes_to_stderr_and_quiet_shows_nothing(capsys):
    for quiet in (False, True):
        with Display(quiet=quiet) as display:
            display.start(total_steps=4)
            display(1, {"reward": 0.5})
            display.completions([])
        printed = capsys.readouterr()
        assert printed.out == ""
        assert ("step 1/4 · reward 0.500" in printed.err) is not quiet


def rows():
    row = {"prompt": "[b]3 1 2", "rewards": {"accuracy": 0.0, "judge": None}, "advantage": 0.7, "ended": True}
    messages = [{"role": "user", "content": "hi"}]
    return [
        row | {"completion": "<answer>0[/b]</answer>"},
        row | {"completion": "<answer>1[/b]</answer>", "rewards": {"accuracy": 1.0}, "ended": False},
        {"prompt": messages, "completion": "ho", "rewards": {}, "advantage": float("nan")},
    ]


def test_completions_are_shown_in_a_table_and_cannot_control_the_terminal():
    out = console()
    Display(console=out).completions(rows())
    lines = out.file.getvalue().splitlines()
    assert [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in lines if line[0] in "│┃"] == [
        ["prompt", "completion", "accuracy", "judge", "advantage"],
        ["[b]3 1 2", "<answer>0[/b]</answer>", "0.00", "–", "0.70"],
        ["", "<answer>1[/b]</answer> …", "1.00", "–", "0.70"],
        ["user: hi", "ho", "–", "–", "–"],
    ]
    nasty = "a\x1b[2J\x1b]0;title\x07\x9b31m\r\x08b\ud800\u202ec\u2066[red]d[/red]"
    row = rows()[0]
    for unsafe in ({**row, "completion": nasty}, {**row, "prompt": [{"content": nasty}]}):
        out = console()
        Display(console=out).completions([unsafe])
        text = out.file.getvalue()
        assert r"a\x1b[2J\x1b]0;title\x07\x9b31m\r\x08b\ud800\u202ec\u2066[red]d[/red]" in re.sub(r"[\s│]", "", text)
        assert not set(text) & set(map(chr, (*range(10), *range(11, 32), *range(127, 160), 0x202E, 0x2066)))
