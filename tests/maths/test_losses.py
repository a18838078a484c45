"""`grpo_loss`: comparison with an independent NumPy version (complex-step derivatives), hand tables, symmetries."""

import dataclasses
import functools
import math
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from precision import x64

from grpo_jax.maths.checks import MAX_LOG_RATIO
from grpo_jax.maths.losses import grpo_loss, grpo_loss_terms
from grpo_jax.maths.metrics import (
    MetricSums,
    batch_totals,
    empty_sums,
    finalize_metrics,
    merge_metrics,
    token_totals,
    top_entropy_mask,
    top_entropy_threshold,
    update_entropy_coef,
)
from grpo_jax.maths.surrogates import LOSS_TYPES, Counts, LossSettings, mean_of_tokens

TYPES = [*LOSS_TYPES]
LEVELS = ["token", "sequence", "trajectory"]
ONLY_REDUCED = ["bnpo", "dr_grpo", "dapo", "luspo"]
SURROGATES = [name for name in TYPES if name not in ONLY_REDUCED]
NAN, INF = float("nan"), float("inf")


# An independent implementation --------------------------------------------------------------------------------------
# It loops over completions and tokens in Python numbers. `l` is a list of lists, which is differentiated and may be
# complex; `l0` holds the same values as constants and stands for stop_gradient(l).


def smaller(a, b):
    return a if a.real <= b.real else b


def larger(a, b):
    return a if a.real >= b.real else b


def numpy_loss(l, l0, c):
    """Return the loss and the metrics, from the documented formulas."""
    rows = [[t for t in range(c.T) if c.mask[i][t]] for i in range(c.R)]
    n_tokens = sum(map(len, rows))
    eps_high = c.epsilon if c.epsilon_high is None else c.epsilon_high
    old = l0 if c.old is None else c.old
    advantage = lambda i, t: c.A[i] if np.ndim(c.A) == 1 else c.A[i][t]

    chosen = [[True] * c.T for _ in range(c.R)]
    if c.H is not None and c.top_entropy_quantile < 1:
        threshold = np.quantile([c.H[i][t] for i in range(c.R) for t in rows[i]], 1 - c.top_entropy_quantile)
        chosen = threshold <= c.H if c.selected is None else c.selected

    p, k, w = [{} for _ in rows], [{} for _ in rows], [{} for _ in rows]
    count = dict.fromkeys(["low", "high", "delta", "bounded", "off_policy"], 0)
    kl = approx = 0.0
    for i, row in enumerate(rows):
        n = max(len(row), 1)
        ratio_of = lambda x, t: x[i][t] - old[i][t]
        total0 = sum(ratio_of(l0, t) for t in row)
        for t in row:
            if c.importance_sampling_level == "token":
                w[i][t] = np.exp(ratio_of(l, t))
            elif c.importance_sampling_level == "sequence":
                w[i][t] = np.exp(sum(ratio_of(l, s) for s in row) / n)
            else:
                w[i][t] = np.exp(total0) * np.exp(l[i][t] - l0[i][t])

        if c.off_policy_mask_threshold is not None:
            sampler = old if c.sampling is None else c.sampling
            drift = [0.0 if np.isnan(sampler[i][t]) else sampler[i][t] - l0[i][t] for t in row]
            drift = sum(drift) / n
        for t in row:
            A, v, v0 = advantage(i, t), w[i][t], w[i][t].real
            if c.loss_type == "cispo":
                p[i][t] = -min(v0, eps_high) * A * l[i][t]
                count["high"] += v0 > eps_high
            elif c.loss_type == "sapo":
                tau = c.sapo_temperature_pos if A > 0 else c.sapo_temperature_neg
                p[i][t] = -A * 4 / tau / (1 + np.exp(-tau * (v - 1)))
            elif c.loss_type == "vespo":
                s = sum(min(max(ratio_of(l0, u), -20), 20) for u in row)
                if c.weights is not None and np.ndim(c.weights) == 1:
                    s += np.log(c.weights[i])
                elif c.weights is not None:
                    s += sum(np.log(c.weights[i][u]) for u in row)
                s = min(max(s, np.log(1e-8)), 20)
                power, rate = (c.vespo_k_pos, c.vespo_lambda_pos) if A >= 0 else (c.vespo_k_neg, c.vespo_lambda_neg)
                p[i][t] = -np.exp(rate + power * s - rate * np.exp(s)) * A * l[i][t]
            else:
                first = v if c.delta is None else smaller(v, c.delta + 0j)
                second = smaller(larger(v, 1 - c.epsilon + 0j), 1 + eps_high + 0j)
                p[i][t] = -smaller(first * A, second * A)
                count["low"] += v0 < 1 - c.epsilon and A < 0
                count["high"] += v0 > 1 + eps_high and A > 0
                count["delta"] += c.delta is not None and v0 > c.delta and A < 0
            if c.off_policy_mask_threshold is not None and A < 0 and drift > c.off_policy_mask_threshold:
                p[i][t] *= 0
                count["off_policy"] += 1
            if not chosen[i][t]:
                p[i][t] *= 0
            if c.weights is not None and c.loss_type != "vespo":
                p[i][t] *= c.weights[i] if np.ndim(c.weights) == 1 else c.weights[i][t]

            log_ratio = ratio_of(l0, t)
            approx += np.exp(log_ratio) - 1 - log_ratio
            if c.ref is not None:
                d, d0 = l[i][t] - c.ref[i][t], l0[i][t] - c.ref[i][t]
                kl += np.exp(-d0) - 1 + d0
                count["bounded"] += d0 < -20
                if c.kl_placement == "reward":
                    k[i][t] = v * sum(l0[i][s] - c.ref[i][s] for s in row if s >= t)
                else:
                    k[i][t] = {"k1": d, "k2": d * d / 2, "k3": np.exp(-d) - 1 + d}[c.kl_estimator]
                    u = v
                    if c.importance_sampling_level == "sequence" and c.kl_correction_level == "token":
                        u = np.exp(ratio_of(l, t))
                    if c.use_bias_correction_kl:
                        k[i][t] = (u.real if c.kl_estimator == "k2" else u) * k[i][t]

    R = c.R if c.num_rows is None else c.num_rows
    N = n_tokens if c.num_tokens is None else c.num_tokens

    def reduce(x):
        total = sum(sum(row.values()) for row in x)
        if c.loss_type in ("grpo", "sapo"):
            return sum(sum(row.values()) / max(len(row), 1) for row in x) / R
        if c.loss_type == "luspo":
            return total / R
        if c.loss_type == "dr_grpo":
            return total / (R * (c.T if c.max_completion_length is None else c.max_completion_length))
        if c.loss_type == "bnpo":
            return total / max(N, 1)
        return total / max(N if c.normalizer is None else c.normalizer, 1)

    policy_loss = reduce(p)
    kl_in_loss = c.beta * reduce(k) if c.beta else 0.0
    loss = policy_loss + kl_in_loss
    mean = lambda x: x / max(n_tokens, 1)
    all_w = [v.real for row in w for v in row.values()]
    metrics = {
        "policy_loss": policy_loss.real,
        "kl_in_loss": kl_in_loss.real,
        "kl": mean(kl),
        "approx_kl_old": mean(approx),
        "ratio_mean": mean(sum(all_w)),
        "ratio_max": max(all_w, default=0.0),
        "clip_fraction": mean(count["low"] + count["high"]),
        "clip_fraction_low": mean(count["low"]),
        "clip_fraction_high": mean(count["high"]),
        "clip_fraction_delta": mean(count["delta"]),
        "kl_bounded_tokens": count["bounded"],
        "tokens": n_tokens,
        "rows": c.R,
    }
    if c.off_policy_mask_threshold is not None:
        metrics["off_policy_fraction"] = mean(count["off_policy"])
    if c.H is not None:
        inside = [c.H[i][t] for i in range(c.R) for t in rows[i]]
        bonus = [c.H[i][t] for i in range(c.R) for t in rows[i] if chosen[i][t]]
        denominator = c.num_selected_tokens
        if denominator is None:
            denominator = N if c.top_entropy_quantile == 1 else len(bonus)
        metrics |= {
            "entropy": mean(sum(inside)),
            "selected_tokens": len(bonus),
            "selected_entropy": sum(bonus) / max(len(bonus), 1),
            "entropy_bonus": c.entropy_coef * sum(bonus) / max(denominator, 1),
        }
        loss = loss - metrics["entropy_bonus"]
    return loss, metrics | {"loss": loss.real}


def complex_step(c):
    """Return the NumPy version's loss, metrics and d loss / d l; complex steps are exact up to rounding."""
    l0 = c.l
    loss, metrics = numpy_loss([[x + 0j for x in row] for row in l0], l0, c)
    gradient = np.zeros((c.R, c.T))
    for i in range(c.R):
        for t in range(c.T):
            if c.mask[i][t]:
                l = [[x + 0j for x in row] for row in l0]
                l[i][t] += 1e-30j
                gradient[i, t] = numpy_loss(l, l0, c)[0].imag / 1e-30
    return loss.real, metrics, gradient


R, T = 6, 5
MASK = np.array(
    [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0], [1, 0, 1, 1, 1]], bool
)


def data(seed=0):
    """Return six completions: full, two short, one token, all masked, with a hole in the mask; ratios are 0.5 to 2."""
    rng = np.random.default_rng(seed)
    l = -rng.uniform(0.1, 2.0, (R, T))
    old = l - rng.uniform(-0.7, 0.7, (R, T))
    return {
        "l": l,
        "old": old,
        "ref": l - rng.normal(0, 0.8, (R, T)),
        "sampling": old + rng.normal(0, 0.2, (R, T)),
        "A": np.array([1.2, -0.7, -1.5, 0.4, 2.0, -0.3]),
        "A_token": rng.normal(size=(R, T)),
        "H": rng.uniform(0.05, 2.0, (R, T)),
        "weights_token": rng.uniform(0.4, 1.6, (R, T)),
        "weights_row": rng.uniform(0.4, 1.6, R),
    }


FIELDS = {field.name: field.default for field in dataclasses.fields(LossSettings) if field.name != "surrogate"}
COUNTS = ("num_rows", "num_tokens", "num_selected_tokens", "selected")
DEFAULTS = FIELDS | {"normalizer": None, "entropy_coef": 0.0} | dict.fromkeys(COUNTS)
EVERYTHING = dict(
    epsilon=0.1, epsilon_high=0.35, delta=1.6, beta=0.3, max_completion_length=9, normalizer=23, entropy_coef=0.2,
    top_entropy_quantile=0.6, off_policy_mask_threshold=0.05, use=["old", "ref", "sampling", "A", "H", "weights_token"],
)  # fmt: skip
SETTINGS = {
    "plain": {},
    "one update": {"use": ["ref", "A"], "beta": 0.2},
    "asymmetric clip": {"epsilon": 0.1, "epsilon_high": 0.35},
    "delta": {"delta": 1.4},
    "k3 corrected": {"beta": 0.3},
    "k3 corrected as in TRL": {"beta": 0.3, "kl_correction_level": "importance_sampling_level"},
    "k3": {"beta": 0.3, "use_bias_correction_kl": False},
    "k2 corrected": {"beta": 0.3, "kl_estimator": "k2"},
    "k2": {"beta": 0.3, "kl_estimator": "k2", "use_bias_correction_kl": False},
    "k1 corrected": {"beta": 0.3, "kl_estimator": "k1"},
    "k1": {"beta": 0.3, "kl_estimator": "k1", "use_bias_correction_kl": False},
    "kl in reward": {"beta": 0.3, "kl_placement": "reward"},
    "no reference": {"use": ["old", "A"]},
    "length and normalizer": {"max_completion_length": 9, "normalizer": 23},
    "part of a batch": {"beta": 0.1, "num_rows": 11, "num_tokens": 40},
    "token advantages": {"use": ["old", "ref", "A_token"], "epsilon_high": 0.3},
    "token weights": {"use": ["old", "ref", "A", "weights_token"], "beta": 0.1},
    "row weights": {"use": ["old", "ref", "A", "weights_row"], "beta": 0.1},
    "off-policy by sampler": {"use": ["old", "ref", "A", "sampling"], "off_policy_mask_threshold": -0.02, "beta": 0.1},
    "off-policy by old": {"off_policy_mask_threshold": 0.02},
    "off-policy, one update": {"use": ["ref", "A"], "off_policy_mask_threshold": -0.01},
    "entropy bonus": {"use": ["old", "ref", "A", "H"], "entropy_coef": 0.2},
    "entropy measured": {"use": ["old", "ref", "A", "H"]},
    "top entropy": {"use": ["old", "ref", "A", "H"], "top_entropy_quantile": 0.35, "entropy_coef": 0.2, "beta": 0.1},
    "top entropy of a part": dict(use=["old", "ref", "A", "H"], top_entropy_quantile=0.35, entropy_coef=0.2,
                                  selected=data()["H"] >= 1.1, num_selected_tokens=30, num_tokens=50),
    "other shapes of the gate": dict(sapo_temperature_neg=2.5, sapo_temperature_pos=0.5, vespo_k_pos=1.2,
                                     vespo_lambda_pos=0.7, vespo_k_neg=0.5, vespo_lambda_neg=1.5),
    "everything": EVERYTHING,
}  # fmt: skip


def case(loss_type, level, settings, arrays=None):
    """Return the arguments for the NumPy version."""
    settings = dict(settings)
    use = settings.pop("use", ["old", "ref", "A"])
    arrays = data() if arrays is None else arrays
    pick = lambda *names: next((arrays[name] for name in names if name in use), None)
    c = SimpleNamespace(**DEFAULTS | {"loss_type": loss_type, "importance_sampling_level": level})
    c.R, c.T, c.mask, c.l = R, T, MASK, arrays["l"]
    c.old, c.ref, c.sampling, c.H = pick("old"), pick("ref"), pick("sampling"), pick("H")
    c.A, c.weights = pick("A_token", "A"), pick("weights_token", "weights_row")
    vars(c).update(settings)
    if loss_type == "cispo" and c.epsilon_high is None:
        c.epsilon_high = 1.5
    return c


def loss_by_terms(*arrays, **arguments):
    """Call `grpo_loss_terms` like `grpo_loss`, with the counts of a whole minibatch as additional arguments."""
    settings = LossSettings(**{name: arguments.pop(name) for name in FIELDS.keys() & arguments.keys()})
    loss, metrics = grpo_loss_terms(*arrays, settings, **arguments)
    return loss, finalize_metrics(metrics)


def jax_loss(c, dtype=jnp.float32, loss=grpo_loss, junk=NAN, shape=None):
    """Return the JAX loss, metrics and gradients; `junk` fills masked tokens, `shape` sets the leading axes."""

    shape = (c.R,) if shape is None else shape

    def tokens(x):
        x = np.where(c.mask, x, junk) if np.ndim(x) == 2 else np.asarray(x)
        return jnp.asarray(x.reshape(*shape, *x.shape[1:]), dtype)

    optional = lambda x: None if x is None else tokens(x)
    settings = {name: getattr(c, name) for name in DEFAULTS}
    counts = {name: settings.pop(name) for name in COUNTS}
    if any(value is not None for value in counts.values()):
        loss = functools.partial(loss_by_terms, **counts)

    def objective(l, H):
        return loss(
            l,
            optional(c.old),
            optional(c.ref),
            tokens(c.A),
            jnp.asarray(c.mask.reshape(*shape, c.T)),
            entropies=H,
            sampling_log_probs=optional(c.sampling),
            importance_weights=optional(c.weights),
            **settings,
        )

    if c.H is None:
        (value, metrics), gradient = jax.value_and_grad(lambda l: objective(l, None), has_aux=True)(tokens(c.l))
        return value, metrics, gradient.reshape(c.R, c.T), None
    (value, metrics), gradients = jax.value_and_grad(objective, (0, 1), has_aux=True)(tokens(c.l), tokens(c.H))
    return value, metrics, *(g.reshape(c.R, c.T) for g in gradients)


def assert_equal_to_numpy(c, dtype, tolerance, **kwargs):
    loss, metrics, gradient = complex_step(c)
    value, got, got_gradient, entropy_gradient = jax_loss(c, dtype, **kwargs)
    assert value.shape == ()
    assert value.dtype == dtype
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
    close(value, loss)
    assert np.abs(gradient).max() > 1e-3, "the expected gradient must not be near 0"
    close(got_gradient, gradient)
    assert set(got) == set(metrics)
    for name in metrics:
        assert got[name].dtype == dtype
        np.testing.assert_allclose(got[name], metrics[name], rtol=tolerance, atol=tolerance, err_msg=name)
    if c.H is not None:
        step = 1e-3
        expected = np.zeros((R, T))
        if c.entropy_coef:
            # The loss is linear in each entropy while the selection is fixed, so a finite difference is exact.
            for i, t in np.argwhere(MASK):
                moved = SimpleNamespace(**vars(c))
                moved.H = c.H.copy()
                moved.H[i, t] += step
                l = [[x + 0j for x in row] for row in c.l]
                same = SimpleNamespace(**vars(c))
                if c.top_entropy_quantile < 1 and c.selected is None:
                    moved.selected = same.selected = np.quantile(c.H[MASK], 1 - c.top_entropy_quantile) <= c.H
                expected[i, t] = (numpy_loss(l, c.l, moved)[0] - numpy_loss(l, c.l, same)[0]).real / step
        np.testing.assert_allclose(entropy_gradient, expected, atol=max(tolerance, 1e-11))


LEVEL_MATTERS = ["plain", "one update", "delta", "k3 corrected", "k3 corrected as in TRL", "kl in reward", "everything"]

# The types in ONLY_REDUCED differ from "grpo" only in the reduction, and the KL, masks and entropies do not depend on
# the surrogate. So only "grpo" is tested with all settings.
REDUCED = ["plain", "length and normalizer", "part of a batch", "token weights", "top entropy of a part", "everything"]
POLICY_TERM = [*REDUCED, "one update", "asymmetric clip", "delta", "k3 corrected", "kl in reward", "token advantages",
               "row weights", "other shapes of the gate"]  # fmt: skip
GRID = [("grpo", name) for name in SETTINGS]
GRID += [(loss_type, name) for loss_type in SURROGATES[1:] for name in POLICY_TERM]
GRID += [(loss_type, name) for loss_type in ONLY_REDUCED for name in REDUCED]


@pytest.mark.parametrize(("loss_type", "name"), GRID)
def test_equal_to_numpy_in_float64(loss_type, name):
    # All three levels are tested where they matter; elsewhere each combination uses one of them in turn.
    turn = (TYPES.index(loss_type) + list(SETTINGS).index(name)) % len(LEVELS)
    with x64():
        for level in LEVELS if name in LEVEL_MATTERS else [LEVELS[turn]]:
            assert_equal_to_numpy(case(loss_type, level, SETTINGS[name]), jnp.float64, 1e-11)


@pytest.mark.parametrize("loss_type", TYPES)
def test_equal_to_numpy_in_float32(loss_type):
    for level in LEVELS:
        assert_equal_to_numpy(case(loss_type, level, EVERYTHING), jnp.float32, 1e-6)


@pytest.mark.quick
def test_settings_of_the_grid_exercise_every_branch():
    """The settings in the grid above exercise every clip, the off-policy mask, the entropy selection and the KL."""
    seen = set()
    for name, settings in SETTINGS.items():
        metrics = numpy_loss(data()["l"] + 0j, data()["l"], case("grpo", "token", settings))[1]
        seen |= {key for key, value in metrics.items() if value != 0}
        if name in ("off-policy by sampler", "off-policy by old", "off-policy, one update", "everything"):
            assert 0 < metrics["off_policy_fraction"] < 0.9, name
        if "top entropy" in name:
            assert 0 < metrics["selected_tokens"] < metrics["tokens"]
    assert seen >= {"clip_fraction_low", "clip_fraction_high", "clip_fraction_delta", "entropy_bonus", "kl"}


# Tables by hand -----------------------------------------------------------------------------------------------------
# ε = 0.2, ε_high = 0.3, delta = 2 (cispo's cap is 2). Value p and derivative dp/dl at each ratio w, for A = +1 and
# A = −1. As dw/dl = w, an unclipped −w·A has the derivative −w·A.


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


L_OLD = math.log(0.2)
TABLES = {
    "grpo": {
        +1: {0.5: (-0.5, -0.5), 0.9: (-0.9, -0.9), 1: (-1, -1), 1.25: (-1.25, -1.25), 1.5: (-1.3, 0), 4: (-1.3, 0)},
        -1: {0.5: (0.8, 0), 0.9: (0.9, 0.9), 1: (1, 1), 1.25: (1.25, 1.25), 1.5: (1.5, 1.5), 4: (2, 0)},
    },
    # The weight is a constant, so the derivative of −weight·A·l is −weight·A; l = log(0.2·w).
    "cispo": {
        A: {w: (-weight * A * math.log(0.2 * w), -weight * A)
            for w, weight in {0.5: 0.5, 0.9: 0.9, 1: 1, 1.25: 1.25, 1.5: 1.5, 4: 2}.items()}
        for A in (+1, -1)
    },
    # −A·(4/τ)·σ(τ(w − 1)) with τ = 1 for A > 0, 2 for A < 0; derivative −A·4·σ(1 − σ)·w.
    "sapo": {
        +1: {w: (-4 * sigmoid(x), -4 * sigmoid(x) * sigmoid(-x) * w)
             for w, x in {0.5: -0.5, 0.9: -0.1, 1: 0, 1.25: 0.25, 1.5: 0.5, 4: 3}.items()},
        -1: {w: (2 * sigmoid(x), 4 * sigmoid(x) * sigmoid(-x) * w)
             for w, x in {0.5: -1, 0.9: -0.2, 1: 0, 1.25: 0.5, 1.5: 1, 4: 6}.items()},
    },
    # φ = w^k·exp(λ(1 − w)): (k, λ) = (2, 3) for A > 0, (3, 2) for A < 0.
    "vespo": {
        +1: {w: (-phi * math.log(0.2 * w), -phi)
             for w, phi in {0.5: 0.25 * math.exp(1.5), 0.9: 0.81 * math.exp(0.3), 1: 1,
                            1.25: 1.5625 * math.exp(-0.75), 1.5: 2.25 * math.exp(-1.5), 4: 16 * math.exp(-9)}.items()},
        -1: {w: (phi * math.log(0.2 * w), phi)
             for w, phi in {0.5: 0.125 * math.exp(1), 0.9: 0.729 * math.exp(0.2), 1: 1,
                            1.25: 1.953125 * math.exp(-0.5), 1.5: 3.375 * math.exp(-1), 4: 64 * math.exp(-6)}.items()},
    },
}  # fmt: skip


@pytest.mark.parametrize("loss_type", SURROGATES)
@pytest.mark.parametrize("level", LEVELS)
def test_hand_table(loss_type, level):
    # With one completion of one token, all levels and all reductions are equal.
    @jax.jit
    def loss(l, A):
        cap = 2.0 if loss_type == "cispo" else 0.3
        settings = {"epsilon_high": cap, "delta": 2.0, "sapo_temperature_neg": 2.0, "importance_sampling_level": level}
        return grpo_loss(l[None, None], jnp.full((1, 1), L_OLD), None, A[None], jnp.ones((1, 1)),
                         loss_type=loss_type, **settings)[0]  # fmt: skip

    for A, row in TABLES[loss_type].items():
        for w, expected in row.items():
            got = jax.value_and_grad(loss)(jnp.float32(L_OLD + math.log(w)), jnp.float32(A))
            assert [float(x) for x in got] == pytest.approx(expected, rel=2e-6, abs=1e-6), (A, w)


@pytest.mark.quick
@pytest.mark.parametrize("A", [1.0, -1.0])
def test_gradient_on_the_edge_of_the_clip_is_not_halved(A):
    # With ε = 0 the ratio 1 is on both bounds, where jnp.minimum and jnp.clip would each halve the gradient.
    l = jnp.full((1, 1), -1.0)
    for delta in (None, 1.0):
        loss = lambda l: grpo_loss(l, None, None, jnp.full(1, A), jnp.ones((1, 1)), epsilon=0.0, delta=delta)[0]
        assert float(jax.grad(loss)(l)[0, 0]) == -A


def test_tokens_on_a_clip_bound_or_without_advantage_are_not_counted_as_clipped():
    def fractions(ratio, A, **settings):
        l = jnp.array([[-1.0]])
        old = None if ratio == 1 else l - math.log(ratio)
        metrics = grpo_loss(l, old, None, jnp.array([A]), jnp.ones((1, 1)), **settings)[1]
        return [float(metrics["clip_fraction" + which]) for which in ("", "_low", "_high", "_delta")]

    for A in (1.0, -1.0):
        assert fractions(1, A, epsilon=0.0, delta=1.0) == [0, 0, 0, 0]
        assert fractions(1, A, epsilon_high=1.0, loss_type="cispo") == [0, 0, 0, 0]
    for ratio in (0.3, 3.0):
        assert fractions(ratio, 0.0, delta=2.0) == [0, 0, 0, 0]
    assert fractions(0.3, -1.0) == [1, 1, 0, 0]
    assert fractions(3.0, 1.0) == [1, 0, 1, 0]
    assert fractions(3.0, -1.0, delta=2.0) == [0, 0, 0, 1]


# Special cases -------------------------------------------------------------------------------------------------------


def outcome(c, **kwargs):
    value, metrics, gradient, _ = jax_loss(c, **kwargs)
    return value, gradient, metrics


def assert_same(a, b, tolerance=1e-6, metrics=True):
    np.testing.assert_allclose(a[0], b[0], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(a[1], b[1], rtol=tolerance, atol=tolerance)
    if metrics:
        chex.assert_trees_all_close(a[2], b[2], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("loss_type", ["grpo", *ONLY_REDUCED])
def test_custom_surrogate_replaces_the_surrogate_of_the_loss_type(loss_type):
    """A custom surrogate replaces the loss type's surrogate but not its reduction."""

    def of(surrogate, *names):
        loss = functools.partial(grpo_loss, surrogate=surrogate)
        return outcome(case(loss_type, "token", {"use": ["old", "A", *names]}), loss=loss)

    plain = outcome(case(loss_type, "token", {"use": ["old", "A", "ref", "H"]}))
    assert_same(plain, of(LOSS_TYPES[loss_type][0], "ref", "H"), tolerance=0)
    half, whole = of(lambda tokens, _: 0.5 * tokens.ratio), of(lambda tokens, _: tokens.ratio)
    np.testing.assert_allclose(2 * half[0], whole[0], rtol=1e-6)
    with pytest.raises(ValueError, match=r"the result of surrogate has shape \(\); expected"):
        of(lambda tokens, _: tokens.ratio.sum())


# Symmetries ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_type", TYPES)
def test_masked_values_do_not_affect_the_loss(loss_type):
    """Values under the mask are ignored, NaN and inf included."""
    for level in LEVELS:
        c = case(loss_type, level, EVERYTHING)
        reference = outcome(c, junk=-1.0)
        for shift in (0, 1):  # so that each masked token gets two different values
            junk = np.resize(np.roll([NAN, INF, -INF, 1e30, 3.0], shift), R * T).reshape(R, T)
            assert_same(reference, outcome(c, junk=junk), tolerance=0)
        np.testing.assert_array_equal(np.asarray(reference[1])[~MASK], 0.0)


@pytest.mark.parametrize("loss_type", ["grpo", "vespo", *ONLY_REDUCED])
def test_padding_and_row_order_do_not_change_the_result(loss_type):
    c = case(loss_type, "sequence", EVERYTHING)
    value, gradient, metrics = outcome(c)
    arrays = {name: x for name, x in vars(c).items() if np.ndim(x)}
    padded = {name: np.pad(x, ((0, 0), (0, 3))) for name, x in arrays.items() if x.ndim == 2}
    found = outcome(SimpleNamespace(**vars(c) | padded | {"T": T + 3}))
    assert_same((value, gradient, metrics), (found[0], found[1][:, :T], found[2]))
    order = np.array([3, 1, 5, 0, 4, 2])
    shuffled = SimpleNamespace(**vars(c) | {name: x[order] for name, x in arrays.items()})
    assert_same((value, gradient[order], metrics), outcome(shuffled))


def test_leading_axes_may_have_any_shape():
    for c, shapes in (
        (case("grpo", "sequence", EVERYTHING), ((2, 3), (1, 6, 1))),
        (case("vespo", "token", {"use": ["old", "A", "weights_row"]}), ((2, 3),)),
    ):
        for shape in shapes:
            assert_same(outcome(c), jax.jit(functools.partial(outcome, c, shape=shape))())
    # No leading axis: a single completion.
    c = case("luspo", "token", {})
    one = lambda l, old: grpo_loss(l, old, None, jnp.asarray(c.A[1]), MASK[1], loss_type="luspo")[0]
    alone = outcome(SimpleNamespace(**vars(c) | {"A": np.where(np.arange(R) == 1, c.A, 0)}))[0]
    assert float(jax.jit(one)(c.l[1], c.old[1])) == pytest.approx(R * float(alone), rel=1e-6)


@pytest.mark.quick
def test_row_weights_may_have_a_token_axis():
    l, A = jnp.asarray(data()["l"]), jnp.asarray(data()["A"])
    weights = jnp.asarray(data()["weights_row"])
    for loss_type in ("grpo", "vespo"):
        one = grpo_loss(l, None, None, A, MASK, importance_weights=weights, loss_type=loss_type)[0]
        other = grpo_loss(l, None, None, A[:, None], MASK, importance_weights=weights[:, None], loss_type=loss_type)[0]
        assert float(one) == float(other)


@pytest.mark.quick
@pytest.mark.parametrize("mask_dtype", [bool, np.int32, np.float32])
def test_masks_of_any_dtype(mask_dtype):
    l, A = jnp.asarray(data()["l"]), jnp.asarray(data()["A"])
    assert float(grpo_loss(l, None, None, A, MASK.astype(mask_dtype))[0]) == float(grpo_loss(l, None, None, A, MASK)[0])


def with_every_term(loss_type="grpo"):
    """Return a case with every term, its arrays by name, and the loss as a function of these arrays."""
    c = case(loss_type, "token", EVERYTHING)
    arrays = {n: jnp.asarray(getattr(c, n), jnp.float32) for n in ("l", "old", "ref", "A", "sampling", "weights", "H")}
    settings = {name: getattr(c, name) for name in DEFAULTS if name not in COUNTS}

    def objective(a):
        return grpo_loss(a["l"], a["old"], a["ref"], a["A"], MASK, entropies=a["H"], sampling_log_probs=a["sampling"],
                         importance_weights=a["weights"], **settings)  # fmt: skip

    return c, arrays, objective


def test_only_log_probs_and_entropies_have_a_gradient():
    _, arrays, objective = with_every_term()
    gradients = jax.grad(lambda a: objective(a)[0])(arrays)
    moved = {name for name, gradient in gradients.items() if np.any(gradient != 0)}
    assert moved == {"l", "H"}


@pytest.mark.quick
def test_metrics_carry_no_gradient():
    _, arrays, objective = with_every_term()
    gradients = jax.grad(lambda a: sum(objective(a)[1].values()))(arrays)
    for gradient in gradients.values():
        np.testing.assert_array_equal(gradient, 0.0)


# Micro-batches ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_type", TYPES)
def test_micro_batches_do_not_change_the_result(loss_type):
    """Loss, gradient and metrics do not depend on the split into micro-batches."""
    names = ("l", "old", "ref", "sampling", "H", "weights_token", "A")
    l, old, ref, sampling, H, weights, A = (jnp.asarray(data(3)[name], jnp.float32) for name in names)
    mask, step, quantile = jnp.asarray(MASK), 2, 0.4
    settings = {"loss_type": loss_type, "beta": 0.2, "epsilon_high": 0.4, "delta": 1.5, "max_completion_length": 7,
                "top_entropy_quantile": quantile, "off_policy_mask_threshold": 0.1}  # fmt: skip

    def part(l, H, rows, **totals):
        return grpo_loss_terms(
            l, old[rows], ref[rows], A[rows], mask[rows], LossSettings(**settings), entropies=H,
            sampling_log_probs=sampling[rows], importance_weights=weights[rows], entropy_coef=0.1, **totals,
        )  # fmt: skip

    def grad(rows, **totals):
        return jax.value_and_grad(lambda l, H: part(l, H, rows, **totals), (0, 1), has_aux=True)(l[rows], H[rows])

    (whole, metrics), gradient = grad(slice(None))
    selected = top_entropy_mask(H, mask, quantile)
    totals = batch_totals(mask, selected)
    parts = [grad(slice(i, i + step), **totals, selected=selected[i : i + step]) for i in range(0, R, step)]
    np.testing.assert_allclose(sum(float(value) for (value, _), _ in parts), whole, rtol=1e-5, atol=1e-7)
    for which in (0, 1):
        np.testing.assert_allclose(jnp.concatenate([g[which] for _, g in parts]), gradient[which], rtol=1e-5, atol=1e-8)
        assert np.abs(gradient[which]).max() > 1e-4
    merged = parts[0][0][1]
    for (_, more), _ in parts[1:]:
        merged = merge_metrics(merged, more)
    chex.assert_trees_all_close(finalize_metrics(merged), finalize_metrics(metrics), rtol=1e-5, atol=1e-7)
    # Parts that use their own counts give a different objective.
    alone = sum(float(part(l[i : i + step], H[i : i + step], slice(i, i + step))[0]) for i in range(0, R, step))
    assert abs(alone - float(whole)) > 1e-3


def test_batch_totals():
    totals = batch_totals(MASK.reshape(2, 3, T))
    assert {name: int(value) for name, value in totals.items()} == {"num_rows": 6, "num_tokens": 17}
    selected = np.arange(R * T).reshape(R, T) % 3 == 0  # includes masked tokens, which must not be counted
    totals = batch_totals(MASK, selected.astype(int))
    assert set(totals) == {"num_rows", "num_tokens", "num_selected_tokens"}
    assert int(totals["num_selected_tokens"]) == (selected & MASK).sum()
    totals = batch_totals([[1, 0, 1], [1, 1, 0]], selected=[[1, 1, 0], [0, 1, 0]])
    assert all(isinstance(value, jax.Array) for value in totals.values())
    assert {name: int(value) for name, value in totals.items()} == {
        "num_rows": 2, "num_tokens": 4, "num_selected_tokens": 2,
    }  # fmt: skip


def test_metrics_in_edge_cases():
    """Metrics are correct in edge cases: all ratios below 1, a KL exactly at its bound, one selected token."""
    old = np.zeros((1, 3), np.float32)
    l = np.log(np.array([[0.5, 0.25, 0.7]], np.float32))
    H = np.array([[2.0, 1.0, 9.0]], np.float32)
    loss = jax.jit(functools.partial(grpo_loss, entropies=H, entropy_coef=0.5), static_argnames="top_entropy_quantile")
    _, metrics = loss(l, old, l + MAX_LOG_RATIO, [1.0], [[1, 1, 0]])
    assert float(metrics["ratio_max"]) == pytest.approx(0.5), "the maximum is neither the masked token's ratio nor 1"
    assert float(metrics["kl_bounded_tokens"]) == 0, "a KL at the bound is not counted as bounded"
    value, metrics = loss(l, None, None, [0.0], [[1, 1, 0]], top_entropy_quantile=0.2)
    assert (float(metrics["entropy_bonus"]), float(value)) == (1.0, -1.0), "one selected token: the sum is divided by 1"


def test_entropies_are_not_sorted_when_every_token_is_kept():
    l = jnp.zeros((2, 3))
    for quantile, sorts in ((1.0, False), (0.5, True)):
        loss = lambda l, quantile=quantile: grpo_loss(
            l, None, None, [1.0, 2.0], jnp.ones((2, 3)), entropies=l + 1, top_entropy_quantile=quantile
        )
        assert ("sort" in str(jax.make_jaxpr(loss)(l))) == sorts


@pytest.mark.quick
def test_metrics_merge_by_sum_and_maximum():
    first = MetricSums({"a_sum": jnp.float32(1.0), "tokens": jnp.float32(4.0)}, {"ratio_max": jnp.float32(2.0)})
    second = MetricSums({"a_sum": jnp.float32(5.0), "tokens": jnp.float32(0.0)}, {"ratio_max": jnp.float32(1.5)})
    merged = {name: float(value) for name, value in finalize_metrics(merge_metrics(first, second)).items()}
    assert merged == {"a": 1.5, "tokens": 4.0, "ratio_max": 2.0}
    assert merge_metrics(empty_sums(second), first) == first
    negative = MetricSums({}, {"x": jnp.float32(-1e30)})
    assert merge_metrics(empty_sums(jax.eval_shape(lambda: negative)), negative) == negative
    assert float(finalize_metrics(second)["a"]) == 5.0, "without tokens, the sum is divided by 1 instead of 0"
    for selected, mean in ((0.0, 3.0), (1.0, 3.0), (2.0, 1.5)):
        sums = {"selected_entropy_sum": jnp.float32(3.0), "selected_tokens": jnp.float32(selected), "tokens": 9.0}
        assert float(finalize_metrics(MetricSums(sums, {}))["selected_entropy"]) == mean
    one = MetricSums({"a_sum": jnp.float32(3.0), "tokens": jnp.float32(1.0)}, {})
    assert float(finalize_metrics(one)["a"]) == 3.0


# Entropy ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantile", [0.0, 0.1, 0.5, 0.8, 1.0])
def test_top_entropy_threshold_is_the_linear_quantile(quantile):
    H = data()["H"]
    for count in (1, 2, 5, R * T):
        mask = np.arange(R * T).reshape(R, T) < count
        threshold = top_entropy_threshold(jnp.asarray(H, jnp.float32), jnp.asarray(mask), quantile)
        assert float(threshold) == pytest.approx(np.quantile(H[mask], 1 - quantile), rel=1e-5)


@pytest.mark.parametrize("quantile", [0.0, 0.1, 0.35, 0.8, 1.0])
def test_top_entropy_mask_selects_by_the_quantile(quantile):
    H = np.where(MASK, np.round(data()["H"], 1), NAN)  # rounding creates ties; masked entropies are NaN
    got = top_entropy_mask(jnp.asarray(H, jnp.float32), jnp.asarray(MASK), quantile)
    expected = MASK & (np.nan_to_num(H) >= np.quantile(H[MASK], 1 - quantile) - 1e-6)
    np.testing.assert_array_equal(got, expected)
    assert expected.any()


def test_top_entropy_mask_keeps_a_token_however_the_quantile_is_rounded():
    """The top-entropy mask keeps at least one token, even if a + f·(b − a) rounds above b."""
    rng = np.random.default_rng(0)
    pairs = np.sort(rng.uniform(0, 2, (2400, 2)), axis=1).astype(np.float32)
    some = jax.jit(jax.vmap(lambda H: top_entropy_mask(H, jnp.ones(2, bool), 2.0**-24).any()))(pairs)
    assert bool(some.all())


def test_explicit_selection_overrides_the_quantile():
    """An explicit selection overrides the quantile."""
    l, H = jnp.asarray(data()["l"]), jnp.asarray(data()["H"])
    selected = np.arange(T)[None] == np.array([0, 2, 1, 0, 0, 3])[:, None]
    loss = lambda l, selected=selected: loss_by_terms(l, None, None, data()["A"], MASK, entropies=H, selected=selected,
                                                      top_entropy_quantile=0.5)  # fmt: skip
    gradient, metrics = jax.grad(loss, has_aux=True)(l)
    np.testing.assert_array_equal(np.asarray(gradient) != 0, selected & MASK)
    assert float(metrics["selected_tokens"]) == (selected & MASK).sum()
    with pytest.raises(ValueError, match=r"selected has shape \(6, 4\); expected \(6, 5\)"):
        loss(l, selected[:, 1:])


def test_token_totals_are_sums_for_every_length():
    for t in (1, 2, 3, 7, 12):
        x, mask = np.arange(2.0 * t, dtype=np.float32).reshape(2, t) + 1, np.arange(2 * t).reshape(2, t) % 3 > 0
        totals = jax.jit(token_totals)({"x": x, "y": -x}, mask)
        assert {name: float(total) for name, total in totals.items()} == {"x": (x * mask).sum(), "y": -(x * mask).sum()}


def test_totals_carry_no_gradient():
    gradient = jax.grad(lambda x: token_totals({"x": x, "y": x**2}, jnp.ones((2, 3), bool))["y"])(jnp.ones((2, 3)))
    np.testing.assert_array_equal(gradient, 0.0)


def test_the_threshold_carries_no_gradient():
    H = jnp.array([[1.0, 2.0, 4.0]])
    gradient = jax.grad(lambda H: top_entropy_threshold(H, jnp.ones((1, 3), bool), 0.3))(H)
    np.testing.assert_array_equal(gradient, 0.0)


def test_update_entropy_coef():
    settings = {"target": 0.5, "delta": 0.25, "minimum": 0.1, "maximum": 0.6}
    step = lambda coef, entropy: tuple(float(x) for x in update_entropy_coef(coef, entropy, **settings))
    assert step(0.25, 0.4) == (0.5, 0.5)
    assert step(0.25, 0.5) == (0.5, 0.5), "at the target, the bonus is applied"
    assert step(0.5, 0.6) == (0.25, 0.0), "above the target, the coefficient falls and no bonus is applied"
    assert step(0.5, 0.1) == pytest.approx((0.6, 0.6))
    assert step(0.25, 0.9) == pytest.approx((0.1, 0.0))
    low = update_entropy_coef(0.001, 9.0, target=0.2, delta=0.005)
    high = update_entropy_coef(0.999, 0.0, target=0.2, delta=0.005)
    assert (float(low[0]), float(high[0])) == (0.0, 1.0)
    traced = jax.jit(lambda c, h: update_entropy_coef(c, h, **settings))(jnp.float32(0.25), jnp.float32(0.4))
    assert [float(x) for x in traced] == [0.5, 0.5]
    assert traced[0].dtype == jnp.float32
    gradient = jax.grad(lambda c: sum(update_entropy_coef(c, 0.4, **settings)))(0.25)
    assert float(gradient) == 0.0


def test_traced_entropy_coef_and_beta_act_like_numbers():
    l, A, H, ref = (jnp.asarray(data()[name], jnp.float32) for name in ("l", "A", "H", "ref"))
    loss = lambda coef, beta: grpo_loss(l, None, ref, A, MASK, entropies=H, entropy_coef=coef, beta=beta)[0]
    for coef, beta in ((0.0, 0.0), (0.3, 0.2)):
        assert float(jax.jit(loss)(coef, beta)) == pytest.approx(float(loss(coef, beta)), rel=1e-6)


# Extremes -----------------------------------------------------------------------------------------------------------


def all_finite(*trees):
    return all(np.all(np.isfinite(np.asarray(leaf, np.float64))) for leaf in jax.tree.leaves(trees))


@pytest.mark.parametrize("loss_type", SURROGATES)
@pytest.mark.parametrize("level", LEVELS)
def test_extreme_log_probs_give_finite_results(loss_type, level):
    """Extreme log-probs give finite values and gradients."""
    extremes = [0.0, -1e-30, -1.0, -80.0, -1e3, -1e30, -INF]
    grid = np.array([[a, b, c] for a in extremes for b in extremes for c in extremes])
    l, old, ref = (jnp.asarray(grid[:, i : i + 1].repeat(2, 1), jnp.float32) for i in range(3))
    mask = jnp.ones(l.shape)

    @jax.jit
    def run(l, sign):
        def objective(l):
            # The KL term does not depend on the loss type.
            terms = [
                ("k3", "loss"),
                *([("k1", "loss"), ("k2", "loss"), ("k3", "reward")] if loss_type == "grpo" else []),
            ]
            results = [
                grpo_loss(
                    l, old, ref, jnp.full(len(grid), sign), mask, loss_type=loss_type, beta=0.1,
                    importance_sampling_level=level, kl_estimator=estimator, kl_placement=placement,
                    off_policy_mask_threshold=1.0, sampling_log_probs=old, importance_weights=jnp.zeros(len(grid)),
                )
                for estimator, placement in terms
            ]  # fmt: skip
            return sum(value for value, _ in results), [metrics for _, metrics in results]

        return jax.value_and_grad(objective, has_aux=True)(l)

    for sign in (1.0, -1.0):
        assert all_finite(run(l, sign))


def test_overflowing_ratio_and_kl_keep_a_gradient():
    old, ref, A, mask = jnp.array([[-200.0]]), jnp.array([[-1.0]]), -jnp.ones(1), jnp.ones((1, 1))
    run = lambda l, **settings: jax.value_and_grad(lambda l: grpo_loss(l, old, ref, A, mask, **settings)[0])(l)
    value, gradient = run(jnp.array([[-1.0]]))
    assert float(value) == pytest.approx(math.exp(20), rel=1e-5)
    assert float(gradient[0, 0]) == pytest.approx(math.exp(20), rel=1e-5)
    # d = −99 is bounded to −20, with derivative 1 − e²⁰; delta clips the policy term at ratio e¹⁰⁰.
    _, gradient = run(jnp.array([[-100.0]]), beta=1.0, delta=3.0, use_bias_correction_kl=False)
    assert float(gradient[0, 0]) == pytest.approx(1 - math.exp(20), rel=1e-5)


@pytest.mark.quick
def test_token_excluded_by_old_and_new_policy_has_ratio_one():
    excluded = jnp.full((1, 1), -INF)
    metrics = grpo_loss(excluded, excluded, excluded, jnp.ones(1), jnp.ones((1, 1)))[1]
    assert float(metrics["ratio_max"]) == 1.0
    assert float(metrics["approx_kl_old"]) == float(metrics["kl"]) == 0.0


def test_bounded_tokens_are_counted():
    l, ref = jnp.array([[-30.0, -21.0, -20.5, -1.0, -50.0]]), jnp.array([[-1.0, -0.5, -1.0, -50.0, -1.0]])
    mask = jnp.array([[1, 1, 1, 1, 0]])
    assert float(grpo_loss(l, None, ref, jnp.ones(1), mask)[1]["kl_bounded_tokens"]) == 2.0


def test_trajectory_ratio_within_its_bound_is_the_product_of_ratios():
    l = jnp.full((R, T), -1.0)
    metrics = grpo_loss(l, l - 3.0, None, jnp.ones(R), jnp.ones((R, T)), importance_sampling_level="trajectory")[1]
    assert float(metrics["ratio_max"]) == pytest.approx(math.exp(15), rel=1e-5)


def test_vespo_bounds_its_log_weight():
    # φ ≈ eˢ for k = 1, λ → 0 (λ·eˢ = 0.4 at the upper bound). Each row has l = −1 and (old log-probs, weights, φ):
    none = [1.0, 1.0]
    cases = [
        ([-4.0, -4.0], none, math.exp(6)),
        ([-16.0, -16.0], none, math.exp(20 - 1e-9 * math.exp(20))),
        ([14.0, 14.0], none, 1e-8),  # s ≥ log 1e-8
        ([-26.0, 21.0], none, 1.0),  # tokens are bounded to ±20 first: +25 and −22 give 20 − 20 = 0, not 3
        ([-1.0, -1.0], [0.0, 1.0], 1e-8),  # a zero weight counts as 1e-8
        ([9.0, 9.0], [1e30, 1.0], 1.0),  # and a huge weight as e²⁰
        ([-3.0, -1.0], [0.5, 0.25], math.exp(2) / 8),
    ]
    old, weights, phi = (jnp.array(x) for x in zip(*cases, strict=True))

    def loss(l):
        shape = {"vespo_k_pos": 1.0, "vespo_lambda_pos": 1e-9, "normalizer": 1, "importance_weights": weights}
        return grpo_loss(l, old, None, jnp.ones(len(l)), jnp.ones(l.shape), loss_type="vespo", **shape)[0]

    gradient = jax.jit(jax.grad(loss))(jnp.full(old.shape, -1.0))
    np.testing.assert_allclose(gradient, -jnp.stack([phi, phi], axis=1), rtol=1e-3)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_computed_in_float32(dtype):
    _, arrays, objective = with_every_term()
    half = {name: x.astype(dtype) for name, x in arrays.items()}
    value, metrics = objective(half)
    expected, expected_metrics = objective({name: x.astype(jnp.float32) for name, x in half.items()})
    assert value.dtype == jnp.float32
    assert float(value) == float(expected)
    chex.assert_trees_all_equal(metrics, expected_metrics)
    gradient = jax.grad(lambda l: objective(half | {"l": l})[0])(half["l"])
    assert gradient.dtype == dtype
    assert all_finite(gradient)


def test_results_have_the_dtype_of_log_probs():
    _, arrays, objective = with_every_term()
    with x64():
        arrays = {name: jnp.asarray(x, jnp.float64) for name, x in arrays.items()}
        run = jax.value_and_grad(lambda l: objective(arrays | {"l": l}), has_aux=True)
        for dtype in (jnp.float32, jnp.float64):
            found = jax.eval_shape(run, arrays["l"].astype(dtype))
            assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype(dtype)}


@pytest.mark.parametrize("loss_type", ["grpo", *ONLY_REDUCED])
def test_only_masked_rows_give_zero_loss_and_gradient(loss_type):
    junk = jnp.full((R, T), NAN)
    run = lambda l: grpo_loss(l, junk, junk, jnp.full(R, NAN), jnp.zeros((R, T)), beta=0.1, loss_type=loss_type,
                              off_policy_mask_threshold=0.1, entropies=junk, top_entropy_quantile=0.5,
                              entropy_coef=0.1)  # fmt: skip
    (value, metrics), gradient = jax.value_and_grad(run, has_aux=True)(junk)
    assert float(value) == float(metrics["selected_tokens"]) == 0.0
    np.testing.assert_array_equal(gradient, 0.0)
    assert all_finite(metrics)


def test_gradients_pass_through_masked_logits():
    # Banned tokens have −inf logits before the log-softmax. The policy allows the sampled token; the reference bans it.
    logits = jnp.array([[[1.0, -INF, 0.5], [0.2, 0.1, -INF]]])
    tokens = jnp.array([[0, 1]])

    def loss(x):
        x = jnp.where(jnp.isneginf(logits), -INF, x)
        l = jnp.take_along_axis(jax.nn.log_softmax(x), tokens[..., None], -1)[..., 0]
        return grpo_loss(l, None, jnp.array([[-INF, -1.0]]), jnp.ones(1), jnp.ones((1, 2)), beta=0.1)[0]

    assert all_finite(jax.jit(jax.value_and_grad(loss))(jnp.where(jnp.isneginf(logits), 0.0, logits)))


def test_kl_in_the_reward_skips_a_hole_in_the_mask():
    # d = 1, (hole), 2: the KLs-to-go are 3 and 2. The hole also has a value, but no loss.
    l, ref = jnp.full((R, T), -1.0), jnp.full((R, T), NAN).at[0, :3].set(jnp.array([-2.0, NAN, -3.0]))
    mask = jnp.zeros((R, T)).at[0, jnp.array([0, 2])].set(1)
    for loss_type, denominator in {"grpo": 2 * R, "bnpo": 2, "dapo": 2, "luspo": R, "dr_grpo": R * T}.items():
        loss = lambda l: grpo_loss(l, None, ref, jnp.zeros(R), mask, beta=1.0, kl_placement="reward",
                                   loss_type=loss_type)[0]  # fmt: skip
        value, gradient = jax.value_and_grad(loss)(l)
        assert float(value) == pytest.approx(5 / denominator)
        np.testing.assert_allclose(gradient[0, :3], np.array([3.0, 0.0, 2.0]) / denominator, rtol=1e-6)


def test_a_nan_in_an_unmasked_token_propagates():
    l = jnp.asarray(data()["l"], jnp.float32)
    assert np.isnan(grpo_loss(l.at[0, 0].set(NAN), None, None, jnp.ones(R), MASK)[0])


def test_token_without_a_sampler_log_prob_is_no_evidence_of_drift():
    l = jnp.full((R, T), -1.0)
    sampling = l.at[:2, :2].set(jnp.array([[NAN, -0.9], [NAN, -0.5]]))
    metrics = grpo_loss(l, None, None, -jnp.ones(R), np.arange(T) + np.zeros((R, 1)) < 2, sampling_log_probs=sampling,
                        off_policy_mask_threshold=0.2)[1]  # fmt: skip
    assert float(metrics["off_policy_fraction"]) == pytest.approx(1 / R), "only the second row is masked"


@pytest.mark.parametrize(("drift", "kept"), [(0.25, True), (0.2499, True), (0.2501, False)])
def test_rows_at_the_off_policy_threshold_are_kept(drift, kept):
    l, sampling = jnp.array([[-1.0]]), jnp.array([[-1.0 + drift]])
    run = lambda A: grpo_loss(l, None, None, jnp.array([A]), jnp.ones((1, 1)), sampling_log_probs=sampling,
                              off_policy_mask_threshold=0.25)  # fmt: skip
    assert float(run(-1.0)[0]) == (1.0 if kept else 0.0)
    assert float(run(1.0)[0]) == -1.0
    assert float(run(0.0)[1]["off_policy_fraction"]) == 0.0, "only negative advantages are masked"


# Every transformation -----------------------------------------------------------------------------------------------


class VariantsTest(chex.TestCase, parameterized.TestCase):
    @chex.variants(with_jit=True, without_jit=True, with_pmap=True)
    @parameterized.parameters(*SURROGATES)
    def test_grpo_loss(self, loss_type):
        c, arrays, objective = with_every_term(loss_type)
        arrays = {name: jnp.where(MASK, x, NAN) if x.ndim == 2 else x for name, x in arrays.items()}
        value, metrics = self.variant(objective)(arrays)
        expected, expected_metrics, _ = complex_step(c)
        chex.assert_shape(value, ())
        chex.assert_type(value, jnp.float32)
        for metric in metrics.values():
            chex.assert_shape(metric, ())
            chex.assert_type(metric, jnp.float32)
        assert float(value) == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert metrics.keys() == expected_metrics.keys()


def test_means_over_many_tokens_are_accurate():
    """Means over many tokens are accurate to float32 precision; a sequential sum would be off by 9e-7."""
    rng = np.random.default_rng(0)
    entropies = rng.uniform(4.8, 4.9, (8, 4, 70)).astype(np.float32)
    zeros, mask = jnp.zeros(entropies.shape), jnp.ones(entropies.shape, bool)
    sums = jax.jit(lambda x: grpo_loss_terms(zeros, None, None, zeros[..., 0], mask, LossSettings(), entropies=x)[1])(
        entropies
    )
    exact = entropies.astype(np.float64).mean()
    assert float(finalize_metrics(sums)["entropy"]) == pytest.approx(exact, rel=1.5e-7)


@pytest.mark.quick
def test_mean_of_one_token_and_of_none():
    values = jnp.array([[6.0, jnp.nan]])
    for mask, tokens, expected in (([[True, False]], 1, 6.0), ([[False, False]], 0, 0.0)):
        assert float(mean_of_tokens(values, jnp.array(mask), Counts(1, tokens, tokens, 2))) == expected
