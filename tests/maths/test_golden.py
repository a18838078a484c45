"""Advantages, losses and gradients compared with TRL 1.16 and verl 0.9.1, with the reasons where they differ."""

import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from precision import x64

from grpo_jax.maths.advantages import compute_advantages
from grpo_jax.maths.losses import grpo_loss

sys.path.append(str(Path(__file__).with_name("golden")))
import make_estimators as made


@functools.cache
def golden():
    with np.load(Path(made.__file__).with_name("estimators.npz")) as file:
        return {name: file[name] for name in file}


def advantages(rewards=made.REWARDS, **settings):
    with x64():
        return np.asarray(compute_advantages(rewards, **settings))


def loss_and_gradient(old="old", **settings):
    """Compute (loss, gradient) for the golden inputs in float64."""
    given = {name.removeprefix("inputs/"): value for name, value in golden().items() if name.startswith("inputs/")}
    with_entropy = settings.get("entropy_coef") or settings.get("top_entropy_quantile", 1) < 1

    def loss(l):
        return grpo_loss(
            l, jnp.asarray(given[old]), jnp.asarray(given["ref"]), jnp.asarray(given["A"]), jnp.asarray(given["mask"]),
            entropies=jnp.asarray(given["H"]) if with_entropy else None, **settings,
        )  # fmt: skip

    with x64():
        (value, _), gradient = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(given["l"]))
    return float(value), np.asarray(gradient)


def assert_golden(name, value, gradient, tolerance):
    assert value == pytest.approx(float(golden()[name.replace("/", "/loss/")]), rel=tolerance)
    expected = golden()[name.replace("/", "/gradient/")]
    np.testing.assert_allclose(gradient, expected, rtol=tolerance, atol=tolerance)
    assert np.abs(expected).max() > 1e-3


@pytest.mark.quick
def test_stored_inputs_are_those_of_the_script():
    for name, value in made.make_inputs().items():
        np.testing.assert_array_equal(golden()[f"inputs/{name}"], value)


# Advantages ---------------------------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize("case", made.TRL_ADVANTAGES)
def test_advantages_equal_trl(case):
    settings = made.TRL_ADVANTAGES[case]
    if settings is None:
        settings = {"estimator": "rloo", "scale_rewards": "none"}
    got = advantages(made.TWO_REWARDS, weights=made.WEIGHTS, **settings)
    np.testing.assert_allclose(got, golden()[f"trl/advantages/{case}"], atol=2e-6)


@pytest.mark.quick
@pytest.mark.parametrize("case", made.VERL_ADVANTAGES)
def test_advantages_equal_verl(case):
    none = {"scale_rewards": "none"}
    settings = {
        "grpo": {"epsilon": 1e-6},  # verl's; here and in TRL it is 1e-4
        "grpo none": none,
        "rloo": {"estimator": "rloo", **none},
        "opo": {"estimator": "opo", "lengths": made.make_inputs()["lengths"], **none},
        "reinforce_pp": {"estimator": "reinforce_pp", "epsilon": 0.0, **none},
    }[case]
    got, expected = advantages(**settings), golden()[f"verl/advantages/{case}"]
    if case != "reinforce_pp":
        np.testing.assert_allclose(got, expected, atol=2e-6)
        return
    # Both subtract the group's mean and divide by the std of the batch. Ours is the std over completions. verl uses the
    # std over tokens and also subtracts the mean over tokens, so long completions count more, and a group of equal
    # rewards gets a nonzero advantage. If all completions have the same length, only the ddof differs: 12 completions
    # compared with 60 tokens.
    one_length = golden()["verl/advantages/reinforce_pp, one length"]
    np.testing.assert_allclose(got, one_length * np.sqrt((60 / 59) * (11 / 12)), atol=1e-6)
    assert np.abs(expected[2]).min() > 0.05
    np.testing.assert_array_equal(got[2], 0)
    lengths = made.make_inputs()["lengths"]
    centred = made.REWARDS - made.REWARDS.mean(1, keepdims=True)
    tokens = np.repeat(centred.reshape(-1), lengths.reshape(-1))
    np.testing.assert_allclose(expected, (centred - tokens.mean()) / tokens.std(ddof=1), atol=1e-6)


# Losses -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", made.TRL_LOSSES)
def test_losses_equal_trl(case):
    settings = {"loss_type": case, **made.TRL_LOSSES[case]}
    value, gradient = loss_and_gradient(**settings)
    assert_golden(f"trl/{case}", value, gradient, 1e-6)  # TRL's epsilon and similar constants are float32


@pytest.mark.parametrize(("case", "settings"), [
    # verl's dual clip, a cap on the ratio for negative advantages, is our delta.
    ("vanilla", {"loss_type": "dapo", "epsilon_high": 0.3, "delta": 1.6}),
    # verl's gradient flows through each token's log-prob, ours through their mean. The sums are equal because all
    # tokens in a completion have the same weight.
    ("gspo", {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
    ("sapo", {"loss_type": "sapo"}),
    # verl clips the weight to 1 ± ε; the paper, like our implementation, has no lower bound.
    ("cispo", {"loss_type": "cispo", "epsilon_high": 1.5}),
])  # fmt: skip
def test_losses_equal_verl(case, settings):
    value, gradient = loss_and_gradient(**settings)
    assert_golden(f"verl/{case}", value, gradient, 1e-7)  # verl adds 1e-8 to the lengths
