"""The promised signatures: names, order, kind and defaults. Other code calls these; further keywords are free."""

import dataclasses
import inspect

import pytest

from grpo_jax.maths import losses
from grpo_jax.maths.advantages import compute_advantages
from grpo_jax.maths.kl import kl_divergence
from grpo_jax.maths.losses import grpo_loss, grpo_loss_terms
from grpo_jax.maths.reference import mixup, sync_reference
from grpo_jax.maths.surrogates import LossSettings

REQUIRED = inspect.Parameter.empty

# function, positional parameters, keyword-only parameters with their defaults.
PROMISED = [
    (
        compute_advantages,
        ["rewards"],
        {
            "weights": None,
            "scale_rewards": "group",
            "multi_objective_aggregation": "sum_then_normalize",
            "epsilon": 1e-4,
            "estimator": "grpo",
            "lengths": None,
        },
    ),
    (
        grpo_loss,
        ["log_probs", "old_log_probs", "ref_log_probs", "advantages", "mask"],
        {
            "loss_type": "dapo",
            "beta": 0.0,
            "epsilon": 0.2,
            "epsilon_high": None,
            "delta": None,
            "importance_sampling_level": "token",
            "kl_estimator": "k3",
            "use_bias_correction_kl": True,
            "kl_placement": "loss",
            "max_completion_length": None,
            "normalizer": None,
            "sapo_temperature_neg": 1.05,
            "sapo_temperature_pos": 1.0,
            "vespo_k_pos": 2.0,
            "vespo_lambda_pos": 3.0,
            "vespo_k_neg": 3.0,
            "vespo_lambda_neg": 2.0,
            "entropies": None,
            "entropy_coef": 0.0,
            "top_entropy_quantile": 1.0,
            "sampling_log_probs": None,
            "off_policy_mask_threshold": None,
            "kl_correction_level": "token",
            "importance_weights": None,
        },
    ),
    (kl_divergence, ["log_probs", "ref_log_probs"], {"estimator": "k3"}),
    (mixup, ["ref_params", "params", "alpha"], {}),
    (sync_reference, ["ref_params", "params", "step"], {"every": REQUIRED, "alpha": REQUIRED}),
]


@pytest.mark.quick
@pytest.mark.parametrize(("function", "positional", "keywords"), PROMISED, ids=lambda x: getattr(x, "__name__", ""))
def test_signature_is_the_promised_one(function, positional, keywords):
    parameters = inspect.signature(function).parameters
    by_position = [p for p in parameters.values() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in by_position] == positional
    assert all(p.default is REQUIRED for p in by_position)

    by_keyword = {p.name: p.default for p in parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY}
    assert {name: by_keyword[name] for name in keywords} == keywords
    # Order too: documentation and completion show it.
    assert list(by_keyword)[: len(keywords)] == list(keywords)
    assert all(default is not REQUIRED for name, default in by_keyword.items() if name not in keywords)
    assert len(by_position) + len(by_keyword) == len(parameters), "no *args or **kwargs"


@pytest.mark.quick
def test_both_forms_of_the_loss_take_the_same_arguments():
    whole = {name: x.default for name, x in inspect.signature(grpo_loss).parameters.items()}
    parts = {name: x.default for name, x in inspect.signature(grpo_loss_terms).parameters.items() if name != "settings"}
    fields = {field.name: field.default for field in dataclasses.fields(LossSettings)}
    assert parts | fields == whole
    assert not parts.keys() & fields.keys()


@pytest.mark.quick
def test_the_loss_hands_on_each_of_its_arguments(monkeypatch):
    """Under its own name, to the settings or to the terms."""
    given = {name: object() for name in inspect.signature(grpo_loss).parameters}
    terms = inspect.signature(grpo_loss_terms)
    monkeypatch.setattr(losses, "LossSettings", dict)
    monkeypatch.setattr(losses, "grpo_loss_terms", lambda *some, **rest: (0.0, terms.bind(*some, **rest).arguments))
    monkeypatch.setattr(losses, "finalize_metrics", lambda metrics: metrics)
    _, handed = losses.grpo_loss(**given)
    assert handed.pop("settings") | handed == given
