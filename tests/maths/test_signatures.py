"""Documented signatures, and the error messages of the functions in `maths` for invalid arguments."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import pytest

from grpo_jax.maths import losses
from grpo_jax.maths.advantages import compute_advantages, zero_signal_groups
from grpo_jax.maths.credit import turn_advantages
from grpo_jax.maths.kl import kl_divergence
from grpo_jax.maths.losses import grpo_loss, grpo_loss_terms
from grpo_jax.maths.reference import mixup, sync_reference
from grpo_jax.maths.sampling import sample_tokens
from grpo_jax.maths.supervised import distillation_loss_terms, divergence, likelihood_loss
from grpo_jax.maths.surrogates import LossSettings, sampler_weights

pytestmark = pytest.mark.quick
REQUIRED = inspect.Parameter.empty

PROMISED = {
    compute_advantages: """rewards, *, weights=None, scale_rewards=None,
        multi_objective_aggregation="sum_then_normalize", epsilon=1e-4, estimator="grpo", lengths=None""",
    grpo_loss: """log_probs, old_log_probs, ref_log_probs, advantages, mask, *, loss_type="dapo", beta=0.0, epsilon=0.2,
        epsilon_high=None, delta=None, importance_sampling_level="token", kl_estimator="k3",
        use_bias_correction_kl=True, kl_placement="loss", max_completion_length=None, normalizer=None,
        sapo_temperature_neg=1.05, sapo_temperature_pos=1.0, vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0,
        vespo_lambda_neg=2.0, entropies=None, entropy_coef=0.0, top_entropy_quantile=1.0, sampling_log_probs=None,
        off_policy_mask_threshold=None, kl_correction_level="token", importance_weights=None""",
    kl_divergence: 'log_probs, ref_log_probs, *, estimator="k3"',
    sampler_weights: """old_log_probs, sampling_log_probs, mask, *, mode="sequence_mask", clip_max=3.0,
        clip_min=None""",
    mixup: "ref_params, params, alpha",
    sync_reference: "ref_params, params, step, *, every, alpha",
}


@pytest.mark.parametrize("function", PROMISED, ids=lambda function: function.__name__)
def test_signatures_are_the_documented_ones(function):
    """The names, order, kinds and defaults of arguments are as documented."""
    promised = inspect.signature(eval(f"(lambda {PROMISED[function]}: None)")).parameters
    found = inspect.signature(function).parameters
    plain = [(x.name, x.kind, x.default) for x in found.values()]
    assert plain[: len(promised)] == [(x.name, x.kind, x.default) for x in promised.values()]
    for _, kind, default in plain[len(promised) :]:
        assert kind is inspect.Parameter.KEYWORD_ONLY
        assert default is not REQUIRED


def test_grpo_loss_and_grpo_loss_terms_take_the_same_arguments():
    whole = {name: x.default for name, x in inspect.signature(grpo_loss).parameters.items()}
    parts = {name: x.default for name, x in inspect.signature(grpo_loss_terms).parameters.items() if name != "settings"}
    fields = {field.name: field.default for field in dataclasses.fields(LossSettings)}
    of_parts = ("num_rows", "num_tokens", "num_selected_tokens", "selected")
    assert parts | fields == whole | dict.fromkeys(of_parts)
    assert not parts.keys() & fields.keys()


def test_grpo_loss_passes_on_all_of_its_arguments(monkeypatch):
    """`grpo_loss` passes each argument to `LossSettings` or `grpo_loss_terms` under the same name."""
    given = {name: object() for name in inspect.signature(grpo_loss).parameters}
    terms = inspect.signature(grpo_loss_terms)
    monkeypatch.setattr(losses.LossSettings, "__post_init__", lambda settings: None)
    monkeypatch.setattr(losses, "grpo_loss_terms", lambda *some, **rest: (0.0, terms.bind(*some, **rest).arguments))
    monkeypatch.setattr(losses, "finalize_metrics", lambda metrics: metrics)
    _, passed = losses.grpo_loss(**given)
    assert vars(passed.pop("settings")) | passed == given


# Bad arguments ------------------------------------------------------------------------------------------------------

zeros = jnp.zeros
L, MASK, W, ONE, IDS = zeros((2, 3)), jnp.ones((2, 3)), {"w": zeros(2)}, {"w": zeros(1)}, zeros((2, 3), int)
INTEGERS, REWARDS, TURNS, KEY = {"w": zeros(2, int)}, zeros((2, 3, 2)), zeros((1, 3, 4), int), jax.random.key(0)
TOP, SUM = {"entropies": L, "top_entropy_quantile": 0.5}, {"multi_objective_aggregation": "sum_then"}
BOTH = (compute_advantages, zero_signal_groups)


def given(function, **usual):
    """Return the function with default arguments."""
    return lambda **changes: function(**usual | changes)


NO_REFERENCE = {"old_log_probs": None, "ref_log_probs": None}
loss = given(grpo_loss, log_probs=L, advantages=L[:, 0], mask=MASK, **NO_REFERENCE)
estimated = given(compute_advantages, rewards=L, scale_rewards="none")
credited = given(turn_advantages, token_rewards=zeros((1, 3, 4, 1)), turns=TURNS)
kl = given(kl_divergence, log_probs=L, ref_log_probs=L)
mixed = given(mixup, ref_params=W, params=W, alpha=0.5)
synced = given(sync_reference, ref_params=W, params=W, step=1, every=2, alpha=0.5)
weighed = given(sampler_weights, old_log_probs=L, sampling_log_probs=L, mask=MASK)
drawn = given(sample_tokens, key=KEY, logits=L)
far = given(divergence, log_probs=L, teacher_log_probs=L)

SCALES = ({"scale_rewards": "group"}, {"scale_rewards": "batch"}, {"multi_objective_aggregation": "normalize_then_sum"})
SHAPES = r"Leaf \['w'\]: ref_params has shape \(2,\) and params has shape \(1,\)"
REFUSED = [
    (loss, {"loss_type": "dappo"}, r"loss_type='dappo' is not supported; use one of 'grpo', .* Did you mean 'dapo'\?"),
    (loss, {"kl_estimator": "k4"}, "kl_estimator='k4' is not supported"),
    (loss, {"beta": 0.1}, "beta=0.1 needs ref_log_probs"),
    (loss, {"entropy_coef": 0.1}, r"entropy_coef=.* with top_entropy_quantile=.* needs entropies"),
    (loss, {"top_entropy_quantile": 0.5}, r"entropy_coef=.* with top_entropy_quantile=.* needs entropies"),
    (loss, {"log_probs": IDS}, "log_probs has dtype int32"),
    (loss, {"log_probs": zeros(())}, r"log_probs has shape \(\)"),
    (loss, {"mask": zeros(2)}, r"mask has shape \(2,\); expected \(2, 3\)"),
    (loss, {"old_log_probs": zeros(3)}, r"old_log_probs has shape \(3,\); expected \(2, 3\)"),
    (loss, {"ref_log_probs": zeros((2, 1))}, r"ref_log_probs has shape \(2, 1\); expected \(2, 3\)"),
    (
        loss,
        {"advantages": zeros(3)},
        r"advantages has shape \(3,\); expected \(2,\) \(per row\) or \(2, 3\) \(per token\)",
    ),
    (loss, {"advantages": zeros(2, int)}, "advantages has dtype int32"),
    (loss, {"entropies": zeros(2)}, r"entropies has shape \(2,\)"),
    (loss, {"importance_weights": zeros((2, 2))}, r"importance_weights has shape \(2, 2\)"),
    (loss, {"sampling_log_probs": zeros(2), "off_policy_mask_threshold": 0.1}, r"sampling_log_probs has shape \(2,\)"),
    *[(f, {"rewards": zeros(3)}, r"rewards has shape .*; expected \[B, G\] or \[B, G, K\]") for f in BOTH],
    *[(f, {"rewards": zeros((1, 2, 3, 4))}, r"rewards has shape .*; expected \[B, G\] or \[B, G, K\]") for f in BOTH],
    *[
        (f, {"rewards": REWARDS, "weights": weights}, r"weights has shape .*; expected \(2,\), one per reward")
        for f in BOTH
        for weights in ([1.0], [1.0, 2.0, 3.0], 1.0)
    ],
    *[(f, {"rewards": L} | SUM, "aggregation='sum_then' is not supported.* Did you mean 'sum_then_n") for f in BOTH],
    (compute_advantages, {"rewards": L, "scale_rewards": "groups"}, r"scale_rewards='groups'.* Did you mean 'group'\?"),
    *[
        (estimated, {"estimator": name} | scale, f"estimator='{name}' does not support scale_rewards.*omit both")
        for name in ("rloo", "maxrl", "opo", "reinforce_pp")
        for scale in SCALES
    ],
    (estimated, {"estimator": "opo"}, r'estimator="opo" needs completion lengths of shape \(2, 3\)'),
    (estimated, {"estimator": "opo", "lengths": zeros(3)}, r'estimator="opo" needs .* of shape \(2, 3\)'),
    (credited, {"estimator": "opo"}, 'estimator="opo" does not support turns'),
    (
        credited,
        {"token_rewards": zeros((1, 3, 4))},
        r"token_rewards must be \[B, G, T, K\] .*; got \(1, 3, 4\) and \(1, 3, 4\)",
    ),
    (kl, {"estimator": "mean"}, r"estimator='mean' is not supported; use one of 'k1', 'k2', 'k3'\.$"),
    (kl, {"ref_log_probs": L[None]}, r"log_probs has shape \(2, 3\) and ref_log_probs has shape \(1, 2, 3\)"),
    (kl, {"log_probs": IDS}, "log_probs has dtype int32"),
    (kl, {"ref_log_probs": IDS}, "ref_log_probs has dtype int32"),
    *[(mixed, {"alpha": alpha}, rf"alpha must be in \[0, 1\]; got {alpha}") for alpha in (-0.1, 1.1, 2)],
    (mixed, {"ref_params": W | {"b": L}, "params": W | {"c": L}}, r"missing from one of them: \['b'\], \['c'\]"),
    (mixed, {"params": ONE}, SHAPES),
    (mixed, {"params": INTEGERS}, r"Leaf \['w'\] of params has dtype int32"),
    (mixed, {"ref_params": INTEGERS}, r"Leaf \['w'\] of ref_params has dtype int32"),
    *[(synced, {"every": every}, f"every must be at least 1; got {every}") for every in (0, -1)],
    (synced, {"params": ONE}, SHAPES),
    (weighed, {"sampling_log_probs": zeros((2, 2))}, r"sampling_log_probs and .*; got \(2, 2\) and \(2, 3\)"),
    (weighed, {"mask": MASK[0]}, r"mask and old_log_probs must .*; got \(3,\)"),
    (weighed, {"old_log_probs": IDS}, "old_log_probs has dtype int32"),
    (weighed, {"mode": "tokenmask"}, "mode='tokenmask' is not supported.*'token_mask'"),
    (drawn, {"temperature": -1.0}, r"temperature must be a finite number ≥ 0 .*; got -1.0"),
    (drawn, {"top_k": -2}, "top_k must be an integer ≥ 0 .*; got -2"),
    (drawn, {"top_p": 0.0}, r"top_p must be in \(0, 1\] .*; got 0.0"),
    (drawn, {"min_p": 2.0}, r"min_p must be None or in \[0, 1\]; got 2.0"),
    (drawn, {"logits": zeros(())}, r"logits must be \[\.\.\., V\]"),
    (drawn, {"key": jax.random.split(KEY, 3)}, r"key must be a single key or have shape \(2,\); got shape \(3,\)"),
    (far, {"kind": "kl"}, "kind"),
    (far, {"teacher_log_probs": zeros((2, 4))}, "teacher_log_probs has shape"),
    (distillation_loss_terms, {"per_token": L, "mask": MASK[0]}, "mask has shape"),
    (given(likelihood_loss, log_probs=L, mask=MASK), {"loss_type": "mle"}, "'mle' is not supported; use one of 'nll'"),
]


@pytest.mark.parametrize(("function", "arguments", "message"), REFUSED, ids=[message[:50] for *_, message in REFUSED])
def test_bad_arguments_are_named(function, arguments, message):
    with pytest.raises(ValueError, match=message):
        function(**arguments)
