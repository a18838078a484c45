"""Report figures and panels show the logged metrics, with gaps, empty runs and unusual names."""

import io

import numpy as np
import pytest

from grpo_jax.watch.plots import draw_report, find_panels, save_figure
from grpo_jax.watch.summary import held_out, held_out_scores


def run(steps=40):
    """Return lines with every kind of metric, an evaluation every ten steps and one at step 0."""
    usual = {"reward_std": 0.4, "rewards/accuracy/std": 0.3, "entropy": 1.0, "frac_reward_zero_std": 0.25}
    usual |= {"completions/mean_length": 20.0, "completions/min_length": 5.0, "completions/max_length": 64.0}
    usual |= {"completions/clipped_ratio": 0.05, "clip_fraction": 0.03, "clip_fraction_low": 0.01, "turns/mean": 2.0}
    usual |= {"clip_fraction_high": 0.02, "grad_norm": 0.5, "learning_rate": 1e-6, "seconds/total": 3.5}
    lines = [{"step": 0, "eval/accuracy": 0.1, "eval/mean_length": 30.0}]
    for step in range(1, steps + 1):
        rising = {"reward": 0.02, "rewards/accuracy/mean": 0.01, "rewards/format/mean": 0.03, "kl": 0.001}
        rising |= {"kl_initial": 0.002}
        evaluated = {"eval/accuracy": 0.1 + 0.02 * step, "eval/mean_length": 30.0} if step % 10 == 0 else {}
        lines.append({"step": step, **usual, **{name: rate * step for name, rate in rising.items()}, **evaluated})
    return lines


def drawn(figure, title, label):
    """Return x and y of the curve `label` in the panel `title`."""
    axes = next(axes for axes in figure.axes if axes.get_title(loc="left") == title)
    line = next(line for line in axes.get_lines() if str(line.get_label()).endswith(f"  {label}"))
    return np.asarray(line.get_xdata()), np.asarray(line.get_ydata())


def png(figure):
    buffer = io.BytesIO()
    save_figure(figure, buffer)
    return buffer.getvalue()


def labels(lines):
    """Return {panel title: labels of its curves}."""
    return {panel.title: [curve.label for curve in panel.curves] for panel in find_panels(lines)}


def test_every_panel_is_drawn_with_its_curves():
    assert len(labels(run())) == 11, "all panels except the SFT loss"
    figure = draw_report(run(), title="demo")
    legends = {
        axes.get_title(loc="left"): [text.get_text().split("  ", 1)[1] for text in axes.get_legend().get_texts()]
        for axes in figure.axes
    }
    assert legends == labels(run())
    assert figure.get_suptitle() == "demo: accuracy on held-out prompts 0.1 → 0.9 in 40 steps"
    assert png(figure).startswith(b"\x89PNG")


@pytest.mark.quick
def test_curves_have_the_values_at_their_steps_without_gaps():
    lines = run()
    lines[5]["reward"] = None
    del lines[6]["reward"]
    lines[7]["reward"] = float("nan")
    lines[8]["reward"] = "text"
    figure = draw_report(lines, only=["Held-out prompts", "KL divergence", "Reward"])
    steps, values = drawn(figure, "Held-out prompts", "accuracy")
    np.testing.assert_array_equal(steps, [0, 10, 20, 30, 40])
    np.testing.assert_allclose(values, [0.1, 0.3, 0.5, 0.7, 0.9])
    steps, values = drawn(figure, "KL divergence", "to the initial policy")
    np.testing.assert_array_equal(steps, np.arange(1, 41))
    np.testing.assert_allclose(values[10:30], 0.002 * np.arange(11, 31), atol=1e-12)  # smoothing keeps straight lines
    steps, values = drawn(figure, "Reward", "weighted sum")
    np.testing.assert_array_equal(steps, [step for step in range(1, 41) if step not in (5, 6, 7, 8)])
    assert np.isfinite(values).all()


def test_short_and_empty_runs_and_any_name_are_drawn():
    assert draw_report([], title="x").get_suptitle() == "x: nothing was logged"
    assert draw_report([{"step": 1}]).get_suptitle() == "1 step"
    for lines in ([], [{"step": 1, "reward": None}], run(1)):
        assert png(draw_report(lines, only=["Reward"])).startswith(b"\x89PNG")
    names = ["_private", "__", "a$b$", "奖励函数", "<lambda>", "x" * 60, r"$\frac{$", "{x}"]
    lines = [{"step": step, "reward": 0.0, **{f"rewards/{name}/mean": 0.1 * step for name in names}} for step in (1, 2)]
    figure = draw_report(lines, title=" ".join(names), only=["Reward"])
    assert png(figure).startswith(b"\x89PNG")
    assert len(figure.axes[0].get_legend().get_texts()) == 1 + len(names)


REWARDS = [{"step": step, "reward": 0.1 * step, "rewards/accuracy/mean": 0.1 * step} for step in range(5)]
NO_KL = {"step": 1, "kl": 0.0, "kl_initial": None, "clip_fraction_low": 0.0, "clip_fraction_high": 0.0}


@pytest.mark.quick
@pytest.mark.parametrize(("lines", "panels"), [
    (REWARDS, {"Reward": ["accuracy"]}),  # with a single function, the weighted sum is redundant
    ([{**line, "reward": 2 * line["reward"]} for line in REWARDS], {"Reward": ["weighted sum", "accuracy"]}),
    ([NO_KL], {}),  # no reference and no second update per batch
    ([NO_KL | {"clip_fraction_high": 0.01}], {"Clip fraction": ["above the range"]}),
    ([{"step": 1, "loss": 2.0, "eval/loss": 2.5}], {"Loss": ["training", "held out"]}),  # in SFT only
    ([{"step": 1, "loss": 0.0, "reward": 1.0}], {"Reward": ["weighted sum"]}),
    ([{"step": 3, "entropy": 0.5, "unknown": 1.0, "sums/long": 0.5}], {"Entropy": ["policy"]}),
])  # fmt: skip
def test_which_panels_are_shown(lines, panels):
    assert labels(lines) == panels


@pytest.mark.quick
def test_held_out_scores():
    scores = {"eval/accuracy": "accuracy", "eval/length_reward": "length_reward", "eval/greedy/format": "greedy/format"}
    assert {name: held_out(name) for name in scores} == scores
    assert not any(held_out(f"eval/{name}") for name in ("mean_length", "clipped_ratio", "rewards/a/std", "seconds"))
    assert held_out_scores(["kl", *scores, "eval/reward"]) == scores | {"eval/reward": "reward"}
    assert held_out_scores(["eval/accuracy", "eval/reward"]) == {"eval/accuracy": "accuracy"}, "eval/reward repeats it"
    assert held_out_scores(["eval/reward"]) == {"eval/reward": "reward"}
