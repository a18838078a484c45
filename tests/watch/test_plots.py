"""The picture shows what was logged: every panel, gaps, long runs, hostile names."""

import io
import time

import numpy as np
import pytest
from matplotlib.colors import to_hex

from grpo_jax.watch.colours import DARK, LIGHT, colour
from grpo_jax.watch.plots import draw_report, save_figure, smooth


def run(steps=40):
    """Metrics of every kind that the loop logs, an evaluation every ten steps and one before the first."""
    lines = [{"step": 0, "eval/accuracy": 0.1, "eval/mean_length": 30.0}]
    for step in range(1, steps + 1):
        line = {
            "step": step,
            "reward": 0.02 * step,
            "rewards/accuracy/mean": 0.01 * step,
            "rewards/accuracy/std": 0.3,
            "rewards/format/mean": 0.01 * step + 0.1,
            "kl": 0.001 * step,
            "kl_initial": 0.002 * step,
            "entropy": 1.0 - 0.01 * step,
            "completions/mean_length": 20.0,
            "completions/min_length": 5.0,
            "completions/max_length": 64.0,
            "completions/clipped_ratio": 0.05,
            "frac_reward_zero_std": 0.25,
            "clip_fraction": 0.03,
            "clip_fraction_low": 0.01,
            "clip_fraction_high": 0.02,
            "grad_norm": 0.5,
            "seconds/rollout": 2.0,
            "seconds/update": 1.0,
            "seconds/total": 3.5,
        }
        if step % 10 == 0:
            line |= {"eval/accuracy": 0.1 + 0.02 * step, "eval/mean_length": 30.0}
        lines.append(line)
    return lines


def panels(figure):
    """Title → labels of its legend, without the last values."""
    return {
        axes.get_title(loc="left"): [text.get_text().rsplit("  ", 1)[0] for text in axes.get_legend().get_texts()]
        for axes in figure.axes
    }


def curve(figure, title, label):
    """x and y of a labelled curve."""
    axes = next(axes for axes in figure.axes if axes.get_title(loc="left") == title)
    line = next(line for line in axes.get_lines() if str(line.get_label()).startswith(f"{label}  "))
    return np.asarray(line.get_xdata()), np.asarray(line.get_ydata())


def png(figure):
    buffer = io.BytesIO()
    save_figure(figure, buffer)
    return buffer.getvalue()


def test_every_panel_of_a_full_run_is_there_with_its_curves():
    figure = draw_report(run(), title="demo")
    assert panels(figure) == {
        "Reward": ["weighted sum", "accuracy", "format"],
        "Held-out prompts": ["accuracy"],
        "KL divergence": ["to the reference", "to the initial policy"],
        "Entropy of the policy": ["all tokens"],
        "Completion length": ["mean", "longest", "shortest"],
        "Clipped ratios": ["too low", "too high"],
        "Groups that teach nothing, completions cut off": ["groups with equal rewards", "completions cut off"],
        "Gradient norm": ["all parameters"],
        "Time": ["update", "rollout"],
    }
    told = "demo: accuracy on held-out prompts 0.1 → 0.9 in 40 steps; 57 % of the time in rollouts"
    assert figure.get_suptitle() == told
    assert all(axes.get_ylabel() for axes in figure.axes)
    assert png(figure).startswith(b"\x89PNG")


@pytest.mark.quick
def test_curves_hold_the_values_at_their_steps():
    figure = draw_report(run())
    steps, values = curve(figure, "Held-out prompts", "accuracy")
    np.testing.assert_array_equal(steps, [0, 10, 20, 30, 40])
    np.testing.assert_allclose(values, [0.1, 0.3, 0.5, 0.7, 0.9])
    steps, values = curve(figure, "KL divergence", "to the initial policy")
    np.testing.assert_array_equal(steps, np.arange(1, 41))
    np.testing.assert_allclose(values[10:30], 0.002 * np.arange(11, 31), atol=1e-12)  # a line stays one inside
    steps, values = curve(figure, "Clipped ratios", "too high")
    np.testing.assert_allclose(values, 0.02)


@pytest.mark.quick
def test_raw_values_lie_under_the_smoothed_curve():
    rng = np.random.default_rng(0)
    rewards = rng.normal(size=100)
    figure = draw_report([{"step": step, "reward": value} for step, value in enumerate(rewards)])
    raw, smoothed = figure.axes[0].get_lines()
    np.testing.assert_array_equal(raw.get_ydata(), rewards)
    assert raw.get_alpha() < 0.5
    assert np.std(smoothed.get_ydata()) < 0.6 * np.std(rewards)


@pytest.mark.quick
def test_gaps_and_missing_metrics_leave_a_run_readable():
    lines = run()
    lines[5]["reward"] = None
    del lines[6]["reward"]
    lines[7]["reward"] = float("nan")
    lines[8]["reward"] = "text"
    steps, values = curve(draw_report(lines), "Reward", "weighted sum")
    np.testing.assert_array_equal(steps, [step for step in range(1, 41) if step not in (5, 6, 7, 8)])
    assert np.isfinite(values).all()
    assert list(panels(draw_report([{"step": 3, "entropy": 0.5}]))) == ["Entropy of the policy"]


def test_no_lines_no_metrics_and_one_line_are_pictures_too():
    assert draw_report([], title="x").get_suptitle() == "x: nothing was logged"
    assert draw_report([{"step": 1}]).get_suptitle() == "1 step"
    for lines in ([], [{"step": 1}], [{"step": 1, "reward": None}], run(1), run(2)):
        assert png(draw_report(lines)).startswith(b"\x89PNG")


@pytest.mark.quick
def test_a_sum_that_is_its_only_reward_is_shown_once():
    lines = [{"step": step, "reward": 0.1 * step, "rewards/accuracy/mean": 0.1 * step} for step in range(5)]
    assert panels(draw_report(lines)) == {"Reward": ["accuracy"]}
    lines = [{**line, "reward": 2 * line["reward"]} for line in lines]
    assert panels(draw_report(lines)) == {"Reward": ["weighted sum", "accuracy"]}


@pytest.mark.quick
def test_a_run_without_a_reference_has_no_kl_panel():
    lines = [{**line, "kl": 0.0, "kl_initial": None} for line in run()]
    assert "KL divergence" not in panels(draw_report(lines))


@pytest.mark.quick
def test_ratios_that_nothing_clips_leave_no_empty_panel():
    lines = [{**line, "clip_fraction_low": 0.0, "clip_fraction_high": 0.0} for line in run()]
    assert "Clipped ratios" not in panels(draw_report(lines))
    lines[7]["clip_fraction_high"] = 0.01
    assert panels(draw_report(lines))["Clipped ratios"] == ["too low", "too high"]
    # What is all zero and says something stays.
    assert "Reward" in panels(draw_report([{**line, "reward": 0.0} for line in run()]))


@pytest.mark.parametrize("count", [1, 5, 8])
def test_panels_fill_their_rows_and_legends_lie_off_the_curves(count):
    names = list(panels(draw_report(run())))[:count]
    figure = draw_report(run(), title="demo", only=names)
    png(figure)  # laid out
    width = figure.bbox.width
    rows: dict[int, float] = {}
    for axes in figure.axes:
        box, legend = axes.get_window_extent(), axes.get_legend().get_window_extent()
        assert legend.y0 >= box.y1 - 3
        assert legend.x1 <= width
        row = axes.get_subplotspec().rowspan.start
        rows[row] = rows.get(row, 0) + len(axes.get_subplotspec().colspan)
    assert set(rows.values()) == {6}
    assert len(figure.axes) == count


@pytest.mark.quick
@pytest.mark.parametrize("dark", [False, True])
def test_a_meaning_has_one_colour_in_every_panel(dark):
    figure = draw_report(run(), dark=dark)
    drawn = {
        (axes.get_title(loc="left"), str(line.get_label()).rsplit("  ", 1)[0]): line.get_color()
        for axes in figure.axes
        for line in axes.get_lines()
    }
    assert drawn["Reward", "accuracy"] == drawn["Held-out prompts", "accuracy"] == colour("reward0", dark=dark)
    assert drawn["Reward", "format"] == colour("reward1", dark=dark)
    assert drawn["KL divergence", "to the reference"] == colour("reference", dark=dark)
    times = {str(a.get_label()).rsplit("  ", 1)[0]: a.get_facecolor()[0] for a in figure.axes[-1].collections}
    assert to_hex(times["update"]) == colour("policy", dark=dark)
    assert to_hex(figure.get_facecolor()) == (DARK if dark else LIGHT).page


@pytest.mark.quick
def test_times_are_seconds_of_one_step_without_those_that_compiled():
    lines = [{"step": 0, "eval/accuracy": 0.1}]
    lines += [{"step": 10 * i, "seconds/rollout": 20.0, "seconds/update": 10.0} for i in range(1, 31)]
    lines[1]["seconds/rollout"] = 500.0
    axes = draw_report(lines).axes[-1]
    top = axes.collections[-1].get_paths()[0].vertices
    assert top[:, 0].min() == 20  # the first line compiled
    np.testing.assert_allclose(top[:, 1].max(), 3.0)  # (20 + 10) / 10 steps
    np.testing.assert_allclose(top[:, 1].min(), 2.0)
    # The first line counts from step 0.
    axes = draw_report([{"step": step, "seconds/update": 8.0} for step in (4, 8)]).axes[-1]
    corners = axes.collections[-1].get_paths()[0].vertices
    assert {tuple(corner) for corner in corners.round(9)} == {(4, 0), (4, 2), (8, 2), (8, 0)}


@pytest.mark.parametrize("name", ["_private", "__", "a$b$", "奖励函数", "<lambda>", "x" * 60, r"$\frac{$", "{x}"])
def test_any_name_of_a_reward_function_is_drawn(name):
    lines = [{"step": step, "reward": 0.0, f"rewards/{name}/mean": 0.1 * step} for step in range(3)]
    figure = draw_report(lines, title=name)
    assert png(figure).startswith(b"\x89PNG")
    assert len(panels(figure)["Reward"]) == 2


@pytest.mark.quick
def test_a_long_run_is_drawn_in_seconds():
    rng = np.random.default_rng(0)
    lines = [
        {
            "step": step,
            "reward": step / 5e4 + rng.normal(),
            "seconds/update": 1.0,
            "eval/a": 0.5 if step == 777 else None,
        }
        for step in range(50_000)
    ]
    start = time.process_time()
    figure = draw_report(lines)
    png(figure)
    assert time.process_time() - start < 10
    assert all(len(line.get_xdata()) <= 2000 for axes in figure.axes for line in axes.get_lines())
    steps, values = curve(figure, "Reward", "weighted sum")
    np.testing.assert_allclose(values[500:1500], steps[500:1500] / 5e4, atol=0.12)  # the mean stays where it is
    assert curve(figure, "Held-out prompts", "a")[0] == [777]  # a lone value is not thinned out


@pytest.mark.quick
def test_smoothing_by_another_road():
    rng = np.random.default_rng(0)
    values = rng.normal(size=30)
    values[[3, 4, 29]] = np.nan
    at = np.arange(30)
    weights = np.exp(-0.5 * ((at[:, None] - at[None]) / 2.0) ** 2) * np.isfinite(values)
    weights[np.abs(at[:, None] - at[None]) > 9] = 0
    expected = weights @ np.nan_to_num(values) / weights.sum(axis=1)
    expected[np.isnan(values)] = np.nan
    np.testing.assert_allclose(smooth(values, width=2.0), expected)
    np.testing.assert_allclose(smooth(values, width=1e-6), values)
    assert smooth(np.array([2.0]), width=5.0) == [2.0]


@pytest.mark.quick
def test_pyplot_is_left_alone(monkeypatch):
    import sys

    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)  # another package may have imported it
    draw_report(run())
    assert "matplotlib.pyplot" not in sys.modules
