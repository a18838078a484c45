"""The colours are told apart, seen on both pages, and in the pictures of the docs as they stand in the table."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from grpo_jax.watch.colours import COLOURS, DARK, LIGHT, PHASES, SERIES, as_css, colour, reward_meanings

DOCS = Path(__file__).parent.parent.parent / "docs"


def rgb(text):
    return np.array([int(text[i : i + 2], 16) for i in (1, 3, 5)])


def contrast(one, other):
    """WCAG's contrast ratio."""

    def luminance(text):
        share = rgb(text) / 255
        return np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4) @ (0.2126, 0.7152, 0.0722)

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.quick
@pytest.mark.parametrize("dark", [False, True])
def test_meanings_are_told_apart_and_seen(dark):
    page = (DARK if dark else LIGHT).page
    assert min(contrast(colour(meaning, dark=dark), page) for meaning in COLOURS) >= 3
    shown = {meaning: rgb(colour(meaning, dark=dark)) for meaning in COLOURS}
    near = {pair for pair in itertools.combinations(shown, 2) if np.abs(shown[pair[0]] - shown[pair[1]]).sum() < 45}
    assert not near


@pytest.mark.quick
def test_phases_and_functions_have_colours_of_the_table():
    assert set(PHASES.values()) <= set(COLOURS)
    assert len(set(PHASES.values())) == len(PHASES)
    many = reward_meanings(f"f{i}" for i in range(30))
    assert set(many.values()) <= set(COLOURS)
    assert len(set(list(many.values())[:4])) == 4
    assert set(SERIES) <= set(COLOURS)
    assert len(set(SERIES)) == len(SERIES)
    assert "--policy: #56b4e9;" in as_css(dark=True)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("picture", "dark", "meanings"),
    [
        ("sort_digits", False, ("policy",)),
        ("sort_digits-dark", True, ("policy",)),
        ("sort_digits-narrow", False, ("policy",)),
        ("sort_digits-narrow-dark", True, ("policy",)),
        ("guess", False, ("policy", "start", "high")),
        ("kl_estimators", False, ("policy", "start", "high", "low")),
        ("old_and_new_policy", False, ("policy", "high")),
        ("reference_sync", False, ("policy", "high")),
    ],
)
def test_the_pictures_of_the_docs_have_the_colours_of_the_table(picture, dark, meanings):
    """No palette has been laid over them that makes two colours one."""
    pixels = np.round(255 * imread(DOCS / f"{picture}.png")[..., :3]).astype(int).reshape(-1, 3)
    for meaning in meanings:
        assert (pixels == rgb(colour(meaning, dark=dark))).all(axis=1).sum() > 100, meaning
