"""The monitor: lines in the right files under the right step, rates that survive a resume, one hint and no more."""

import warnings

import jax
import optax
import pytest

from grpo_jax import GRPOConfig
from grpo_jax.monitor import KL_WINDOW, Monitor
from grpo_jax.progress import Progress
from grpo_jax.report import read_lines
from grpo_jax.state import create_state

STATE = create_state({"w": jax.numpy.ones(3)}, optax.sgd(0.1), jax.random.key(0))
CONFIG = GRPOConfig(beta=0.1)


def lines(run_dir, name="metrics.jsonl"):
    return list(read_lines(run_dir / name))


def test_lines_go_to_files_and_callbacks_alike(tmp_path):
    seen = []
    with Monitor(tmp_path, CONFIG, callbacks=[lambda step, m: seen.append((step, m))], quiet=True) as monitor:
        monitor.start(STATE, Progress(), total_steps=2, num_rows=4)
        monitor.evaluation(0, {"right": 0.5})
        monitor.completions(1, [{"prompt": "a", "completion": "b", "rewards": {"r": 1.0}, "advantage": 0.0}])
        monitor.log(1, {"num_tokens": 60, "reward": 0.25})
    assert [line["step"] for line in lines(tmp_path)] == [0, 1]
    assert lines(tmp_path)[0] == {"step": 0, "eval/right": 0.5}
    assert lines(tmp_path)[1]["tokens_per_second"] > 0
    assert lines(tmp_path, "completions.jsonl")[0]["step"] == 1
    assert [step for step, _ in seen] == [0, 1]
    assert seen[1][1]["reward"] == 0.25
    assert (tmp_path / "report.png").exists()


def test_a_resumed_run_cuts_its_files_back_and_counts_tokens_from_there(tmp_path):
    with Monitor(tmp_path, CONFIG, quiet=True) as monitor:
        monitor.start(STATE, Progress(), total_steps=4, num_rows=4)
        for step in (1, 2, 3):
            monitor.log(step, {"num_tokens": 100 * step})
    with Monitor(tmp_path, CONFIG, quiet=True) as monitor:
        monitor.start(STATE, Progress(step=2, tokens=200), total_steps=4, num_rows=4, resumed=True)
        monitor.log(3, {"num_tokens": 300})
    third = lines(tmp_path)[-1]
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]
    assert third["tokens_per_second"] * third["seconds/total"] == pytest.approx(100)


def feed(config, kls):
    with warnings.catch_warnings(record=True) as caught, Monitor(None, config, quiet=True) as monitor:
        warnings.simplefilter("always")
        for step, kl in enumerate(kls):
            monitor.log(step, {"num_tokens": step, "kl": kl})
    return [str(warning.message) for warning in caught]


def test_a_kl_that_rises_for_long_is_hinted_at_once():
    rising = [0.01 * step for step in range(4 * KL_WINDOW)]
    (message,) = feed(CONFIG, rising)
    assert "sync_ref_model=True" in message
    assert "has risen over the last 50 logged steps" in message


@pytest.mark.parametrize(
    ("config", "kls"),
    [
        (CONFIG, [0.01 * step for step in range(KL_WINDOW - 1)]),
        (CONFIG, [0.3] * 200),
        (CONFIG, [0.1 + 0.05 * (step % 20) for step in range(200)]),
        (CONFIG, [1 + 0.001 * step for step in range(200)]),
        (GRPOConfig(beta=0.1, sync_ref_model=True), [0.01 * step for step in range(200)]),
    ],
    ids=["too short", "flat", "up and down", "hardly", "synced already"],
)
def test_no_hint_where_none_is_due(config, kls):
    assert feed(config, kls) == []


def test_a_note_for_what_was_left_out_and_where_it_goes_on(capsys):
    with Monitor(None, CONFIG) as monitor:
        monitor.start(STATE, Progress(step=3), total_steps=9, num_rows=4, num_dropped=7, resumed=True)
    shown = capsys.readouterr().err
    assert "7 rows are left out" in shown
    assert "going on after step 3" in shown
