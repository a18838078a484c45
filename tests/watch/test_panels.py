"""Which metrics stand together in a panel, under which labels."""

import numpy as np
import pytest

from grpo_jax.watch.panels import find_panels, reward_colours


def found(*lines):
    return {panel.title: {label: y.tolist() for label, y in curves.items()} for panel, curves, _ in find_panels(lines)}


@pytest.mark.quick
def test_a_panel_holds_what_was_logged_with_gaps_where_nothing_was():
    first = {"step": 1, "reward": 0.5, "rewards/right/mean": 0.25, "kl": 0.1, "unknown": 3.0}
    second = {"step": 2, "reward": None, "rewards/right/mean": 0.75}
    panels = found(first, second)
    assert list(panels) == ["Reward", "KL divergence"]
    np.testing.assert_equal(panels["Reward"], {"weighted sum": [0.5, np.nan], "right": [0.25, 0.75]})
    np.testing.assert_equal(panels["KL divergence"], {"to the reference": [0.1, np.nan]})


@pytest.mark.quick
def test_the_loss_is_shown_where_there_is_no_reward():
    assert list(found({"step": 1, "loss": 2.0, "eval/loss": 2.5})) == ["Loss"]
    assert list(found({"step": 1, "loss": 0.0, "reward": 1.0})) == ["Reward"]


@pytest.mark.quick
def test_a_function_has_one_colour_in_training_and_on_held_out_prompts():
    lines = [{"step": 1, "reward": 1.0, "rewards/a/mean": 1.0, "rewards/b/mean": 0.0, "eval/b": 0.5, "eval/c": 0.5}]
    assert reward_colours(lines) == {"reward": "policy", "a": "reward0", "b": "reward1", "c": "reward2"}
    meanings = {label: meaning for _, _, panel in find_panels(lines) for label, meaning in panel.items()}
    assert (meanings["b"], meanings["c"]) == ("reward1", "reward2")


@pytest.mark.quick
def test_the_tasks_of_a_suite_have_a_panel_of_their_own():
    """Reward functions log them under one first name."""
    line = {
        "step": 1,
        "reward": 1.0,
        "sums/long": 0.5,
        "sums/short": 0.25,
        "alone/x": 1.0,
        "turns/mean": 2.0,
        "turns/max": 3,
    }
    panels = found(line)
    assert list(panels) == ["Reward", "sums"]
    assert panels["sums"] == {"long": [0.5], "short": [0.25]}
    (_, _, meanings) = find_panels([line])[1]
    assert len(set(meanings.values())) == 2
