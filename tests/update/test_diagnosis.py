"""Which number went bad first: each term is spoilt in turn, and is named with its place."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from grpo_jax import Batch, GRPOConfig, Prompts
from grpo_jax.update import diagnosis
from grpo_jax.update.diagnosis import diagnose
from grpo_jax.update.packed import choose_updater
from grpo_jax.update.state import create_state

B, G, T, V = 2, 2, 3, 7
NAN, INF = np.nan, np.inf
MICRO = (B, G)


class Bigram:
    """Logits by the last token alone. The root has no derivative at 0, where a NaN gradient comes from."""

    def apply(self, variables, tokens):
        params = variables["params"]
        return params["table"][tokens] + params["bias"] + 0.0 * jnp.sqrt(params["root"])


MODEL = Bigram()


def params(root=1.0, bias=0.0):
    table = jax.random.normal(jax.random.key(0), (V, V))
    return {"bias": jnp.full((1, 1, V), bias), "root": jnp.asarray(root)[None, None, None], "table": table}


def batch(**changes):
    tokens = jax.random.randint(jax.random.key(1), (B, G, T), 0, V)
    arrays = {
        "tokens": tokens,
        "mask": np.arange(T) < np.array([[2, 3], [3, 1]])[..., None],
        "advantages": np.array([[1.0, -1.0], [0.5, -0.5]], np.float32),
        "sampling_log_probs": np.full((B, G, T), -2.0, np.float32),
        "ref_log_probs": np.full((B, G, T), -2.0, np.float32),
    }
    for name, (at, value) in changes.items():
        arrays[name] = arrays[name].copy()
        arrays[name][at] = value
    return Batch(prompts=Prompts(tokens[:, 0], np.array([3, 2])), **{k: jnp.asarray(x) for k, x in arrays.items()})


def rows(first=0.0):
    texts = [{"prompt": f"p{i // G}", "completion": f"c{i}", "rewards": {"a": 1.0, "b": None}} for i in range(B * G)]
    texts[1]["rewards"] = {"a": first, "b": first}
    return texts


CONFIG = GRPOConfig(num_generations=G, beta=0.1, kl_estimator="k2", reward_weights=[1.0, 1.0])


def updater(config=CONFIG):
    return choose_updater(MODEL, config, micro=MICRO, optimizer=optax.sgd(0.1), on_policy=False)


def state(**of_params):
    return create_state(params(**of_params), optax.sgd(0.1), jax.random.key(0))


CASES = {
    "reward": ({}, {}, 3e38, (INF, 0, 1, None), "the completion 'c1'"),
    "advantage": ({"advantages": ((1, 0), NAN)}, {}, 0.0, (NAN, 1, 0, None), "the prompt is 'p1'"),
    "sampler log-prob": ({"sampling_log_probs": ((0, 1, 2), NAN)}, {}, 0.0, (NAN, 0, 1, 2), "token 2"),
    "reference log-prob": ({"ref_log_probs": ((1, 0, 1), INF)}, {}, 0.0, (INF, 1, 0, 1), "token 1"),
    "log-prob": ({}, {"bias": NAN}, 0.0, (NAN, 0, 0, 0), "the policy's own parameter bias is not finite"),
    "KL": ({"ref_log_probs": ((1, 0, 2), 1e30)}, {}, 0.0, (INF, 1, 0, 2), "a KL, inf"),
    "loss": ({"advantages": ((slice(None), 1), -3e38)}, {}, 0.0, (INF, None, None, None), "a loss"),
    "gradient": ({}, {"root": 0.0}, 0.0, (NAN, None, None, None), "of the parameter root"),
}


@pytest.mark.parametrize("term", CASES)
def test_the_first_term_that_is_not_finite_is_named(term):
    spoilt, of_params, reward, place, words = CASES[term]
    found = diagnose(state(**of_params), batch(**spoilt), updater(), rows=rows(reward))
    assert found.term == term
    np.testing.assert_equal((found.value, found.prompt, found.completion, found.token), place)
    assert words in str(found)
    # And the update itself finds that it must be skipped.
    if term != "reward":  # which reaches the update as an advantage
        _, metrics = updater().update(state(**of_params), batch(**spoilt))
        assert metrics["update_skipped"] == 1


@pytest.mark.quick
def test_a_ratio_that_no_input_could_spoil_is_looked_at_too(monkeypatch):
    monkeypatch.setitem(diagnosis.RATIOS, "token", lambda l, log_ratio, mask: jnp.where(log_ratio > 0, jnp.inf, 1.0))
    assert diagnose(state(), batch(), updater()).term == "ratio"


@pytest.mark.quick
def test_gradients_that_are_finite_one_by_one_and_too_large_together():
    found = diagnose(state(), batch(advantages=((0, 0), 1e25)), updater())
    assert (found.term, found.value, found.parameter) == ("gradient", INF, "bias")


@pytest.mark.quick
def test_what_is_masked_and_what_the_loss_bounds_is_no_fault():
    fine = batch(sampling_log_probs=((0, 0, 2), NAN), ref_log_probs=((0, 0, 1), -INF))
    assert diagnose(state(), fine, updater(), rows=rows()) is None
    _, metrics = updater().update(state(), fine)
    assert metrics["update_skipped"] == 0


@pytest.mark.quick
def test_how_many_are_bad_is_counted():
    found = diagnose(state(), batch(advantages=((slice(None), 0), NAN)), updater())
    assert found.count == 2
    assert "(2 of this term are not finite)" in str(found)


@pytest.mark.quick
def test_an_earlier_term_explains_the_later_ones():
    """All is spoilt; mended one by one from the front, the next in line is named."""
    spoilt = {"advantages": ((0, 0), NAN), "sampling_log_probs": ((0, 0, 0), NAN), "ref_log_probs": ((0, 0, 0), NAN)}
    bad = state(bias=NAN)
    terms = [diagnose(bad, batch(**spoilt), updater(), rows=rows(3e38)).term]
    while spoilt:
        terms.append(diagnose(bad, batch(**spoilt), updater(), rows=rows()).term)
        del spoilt[next(iter(spoilt))]
    terms.append(diagnose(bad, batch(), updater(), rows=rows()).term)
    assert terms == ["reward", "advantage", "sampler log-prob", "reference log-prob", "log-prob"]
