"""`Monitor` writes lines to the right files and steps; rates, warnings and hints are correct after a resume."""

import contextlib
import dataclasses
import json
import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_jax import GRPOConfig
from grpo_jax.run.session import open_session
from grpo_jax.update.state import create_state
from grpo_jax.watch import trackers
from grpo_jax.watch.hints import MetricHints
from grpo_jax.watch.monitor import Monitor, Phases, Progress, notify
from grpo_jax.watch.trackers import Tracker
from grpo_jax.watch.writer import read_lines

pytestmark = pytest.mark.quick

STATE = create_state({"w": jax.numpy.ones(3)}, optax.sgd(0.1), jax.random.key(0))
CONFIG = GRPOConfig(beta=0.1)
lines = lambda run_dir, name="metrics.jsonl": list(read_lines(run_dir / name))


def test_trackers_in_report_to_are_opened_fed_and_closed_by_the_logging_process(tmp_path, monkeypatch):
    done = []
    tracker = Tracker(lambda step, metrics: done.append((step, metrics["reward"])), lambda: done.append("closed"))
    opening = lambda config, run_dir, *, step: done.append((config.report_to, run_dir, step)) or [tracker]
    monkeypatch.setattr(trackers, "open_trackers", opening)
    config = dataclasses.replace(CONFIG, report_to="wandb")
    for quiet in (False, True):
        with Monitor(tmp_path, config, quiet=quiet) as monitor:
            monitor.start(STATE, Progress(step=3), total_steps=5, num_rows=4, resumed=True)
            monitor.log(4, {"num_tokens": 60, "reward": 0.25})
    assert done == [("wandb", tmp_path, 3), (4, 0.25), "closed"]


def test_resumed_run_truncates_its_files_and_continues_token_counts(tmp_path):
    with Monitor(tmp_path, CONFIG, quiet=True) as monitor:
        monitor.start(STATE, Progress(), total_steps=4, num_rows=4)
        for step in (1, 2, 3):
            monitor.log(step, {"num_tokens": 100 * step})
    with Monitor(tmp_path, CONFIG, quiet=True) as monitor:
        monitor.start(STATE, Progress(step=2, tokens=200), total_steps=4, num_rows=4, resumed=True)
        monitor.log(3, {"num_tokens": 300})
        monitor.end(3, 4)
    assert (tmp_path / "report.html").exists()
    third = lines(tmp_path)[-1]
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]
    assert third["tokens_per_second"] * third["seconds/total"] == pytest.approx(100)


def test_hint_is_shown_and_stored_once_across_a_resume(tmp_path, capsys):
    def cut_off(monitor, steps):  # causes a hint at step 10
        for step in steps:
            monitor.log(step, {"num_tokens": 0, "completions/clipped_ratio": 1.0})

    with Monitor(tmp_path, CONFIG, hints=MetricHints(CONFIG)) as monitor:
        monitor.start(STATE, Progress(), total_steps=30, num_rows=4)
        cut_off(monitor, range(1, 13))
    (kept,) = lines(tmp_path, "warnings.jsonl")
    assert (kept["step"], kept["category"]) == (10, "hint")
    assert f"hint: {kept['message']}" in capsys.readouterr().err
    with Monitor(tmp_path, CONFIG, hints=MetricHints(CONFIG)) as monitor:
        monitor.start(STATE, Progress(step=11), total_steps=30, num_rows=4, resumed=True)
        cut_off(monitor, range(12, 25))
    assert "hint" not in capsys.readouterr().err
    assert lines(tmp_path, "warnings.jsonl") == [kept]


@pytest.mark.parametrize(("updates", "printed"), [(1, [1, 10, 13]), (4, [1, 9, 13])])
def test_completions_of_logged_steps_are_printed(updates, printed, capsys):
    """Of an iteration with four updates, any may be a logging step; the last step is logged, too."""
    shown = []
    with Monitor(None, dataclasses.replace(CONFIG, log_completions=True)) as monitor:
        monitor.start(STATE, Progress(), total_steps=13 if updates == 1 else 16, num_rows=4, updates=updates)
        for step in range(1, 14, updates):
            row = {"prompt": "1 + 1", "completion": f"written at {step}", "rewards": {}, "advantage": 0.0}
            monitor.completions(step, [row])
            shown += [step] * (f"written at {step}" in capsys.readouterr().err)
    assert shown == printed


def test_warnings_are_shown_as_usual_and_stored_once(tmp_path):
    texts = ["an early warning", *["a slow reward"] * 3, "a number"]  # the first is shown but not stored
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", message="an? ")
        outside = warnings.showwarning
        with Monitor(tmp_path, CONFIG, quiet=True) as monitor:
            warnings.warn(texts[0], RuntimeWarning, stacklevel=1)  # before the files are truncated
            monitor.start(STATE, Progress(step=5), total_steps=9, num_rows=4)
            monitor.completions(6, [])
            for text in texts[1:3]:
                warnings.warn(text, UserWarning, stacklevel=1)
        assert warnings.showwarning is outside
        assert texts[1] in (tmp_path / "report.html").read_text(encoding="utf-8")
        with Monitor(tmp_path, CONFIG, quiet=True) as monitor:
            monitor.start(STATE, Progress(step=6), total_steps=9, num_rows=4, resumed=True)
            for text in texts[3:]:
                warnings.warn(text, UserWarning, stacklevel=1)
    assert [str(warning.message) for warning in caught] == texts
    kept = [(6, "UserWarning", texts[1]), (6, "UserWarning", "a number")]
    assert [tuple(line.values()) for line in lines(tmp_path, "warnings.jsonl")] == kept


def test_counts_and_means_over_a_logging_window():
    progress = Progress()
    progress.count_batch(8, {"num_tokens": 100, "reward": 0.25})
    for value in (1.0, math.nan, 3.0):
        progress.count_update({"loss": value, "kl": math.nan})
    again = Progress(**json.loads(json.dumps(dataclasses.asdict(progress))))
    assert again == progress, "the progress of a window survives JSON"
    assert (progress.step, progress.updates_done, progress.cursor) == (3, 3, 8)
    line = progress.log_line()
    assert math.isnan(line.pop("kl"))
    assert line == {"num_tokens": 100, "reward": 0.25, "loss": 2.0, "num_prompts": 8}
    progress.count_batch(16, {"num_tokens": 50, "reward": 0.75})
    assert progress.log_line() == {"num_tokens": 150, "reward": 0.75, "num_prompts": 16}


def test_phases_count_each_second_once():
    now = [100.0]
    phases = Phases(lambda: now[0])
    now[0] += 1  # outside any phase
    with phases("rollout"):
        now[0] += 2
        with contextlib.suppress(KeyError), phases("rewards"):
            now[0] += 4
            raise KeyError
        now[0] += 8
    with phases("rollout"):
        now[0] += 32
    assert phases.take() == {"seconds/rollout": 42, "seconds/rewards": 4, "seconds/total": 47}
    with phases("update"):
        now[0] += 2
        assert phases.take() == {"seconds/update": 2, "seconds/total": 2}
        now[0] += 4
    assert phases.take() == {"seconds/update": 4, "seconds/total": 4}


def test_callbacks_receive_plain_numbers_in_their_own_copies():
    seen = []

    def spoil(step, metrics):
        seen.append((step, dict(metrics)))
        metrics.clear()

    notify([spoil, spoil], 4, {"loss": jnp.float32(0.5), "n": np.int64(2), "inf": np.float32("inf")})
    assert seen == [(4, {"loss": 0.5, "n": 2, "inf": float("inf")})] * 2
    assert [type(value) for value in seen[0][1].values()] == [float, int, float]
    message = r"callbacks must be functions of \(step, metrics\); got str"
    with pytest.raises(TypeError, match=message), open_session(None, None, None, [print, "wandb"]):
        pass
