"""Conflicts between config fields."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from types import SimpleNamespace

from grpo_jax.config.settings import Settings, shown

_CAP = "in cispo, the cap on the ratio is epsilon_high itself, not 1 + epsilon_high"
_PAPER = "(ScaleRL, arXiv 2510.13786: 5.0)"

# Fields that the condition reads (the message starts with the first one), the condition, and the rest of the message.
_CONTRADICTIONS: tuple[tuple[str, Callable[[SimpleNamespace], bool], str], ...] = (
    (
        "epsilon_high loss_type",
        lambda c: c.loss_type == "cispo" and c.epsilon_high is None,
        f"{_CAP}; None would use epsilon as the cap and scale every gradient down; set a value {_PAPER}",
    ),
    (
        "epsilon_high loss_type",
        lambda c: c.loss_type == "cispo" and c.epsilon_high is not None and c.epsilon_high < 1,
        f"{_CAP}; a cap below 1 scales every gradient down; use 1 or more {_PAPER}",
    ),
    (
        "epsilon_high loss_type",
        lambda c: c.loss_type in ("sapo", "vespo") and c.epsilon_high is not None,
        "sapo and vespo weight ratios smoothly and do not clip them; set epsilon_high to None",
    ),
    (
        "delta loss_type",
        lambda c: c.loss_type in ("cispo", "sapo", "vespo") and c.delta is not None,
        "cispo, sapo and vespo do not use it; set it to None",
    ),
    (
        "scale_rewards advantage_estimator",
        lambda c: c.advantage_estimator != "grpo" and c.scale_rewards != "none",
        'only supported with advantage_estimator = "grpo"; use "none"',
    ),
    (
        "multi_objective_aggregation advantage_estimator",
        lambda c: c.advantage_estimator != "grpo" and c.multi_objective_aggregation != "sum_then_normalize",
        'only supported with advantage_estimator = "grpo"; use "sum_then_normalize"',
    ),
    (
        "turn_credit advantage_estimator",
        lambda c: c.turn_credit == "to_go" and c.advantage_estimator == "opo",
        'advantage_estimator = "opo" weights whole completions by length; change it, or use turn_credit="episode"',
    ),
    (
        "importance_sampling_level loss_type",
        lambda c: c.loss_type == "luspo" and c.importance_sampling_level != "sequence",
        'loss_type = "luspo" weights whole completions; use importance_sampling_level="sequence"',
    ),
    (
        "sampler_correction_min sampler_correction_max",
        lambda c: (
            c.sampler_correction_min is not None
            and c.sampler_correction_max is not None
            and c.sampler_correction_min >= c.sampler_correction_max
        ),
        "must be below sampler_correction_max; lower sampler_correction_min or raise sampler_correction_max",
    ),
    (
        "sampler_correction sampler_correction_max sampler_correction_min",
        lambda c: (
            str(c.sampler_correction).endswith("truncate")
            and c.sampler_correction_max is c.sampler_correction_min is None
        ),
        "needs a bound; set sampler_correction_max or sampler_correction_min",
    ),
    (
        "sync_ref_model beta",
        lambda c: c.sync_ref_model and c.beta == 0,
        "a run with beta = 0 does not have a reference; set beta above 0, or sync_ref_model=False",
    ),
    (
        "distillation_coef top_k top_p min_p",
        lambda c: c.distillation_coef > 0 and bool(c.top_k or c.top_p < 1 or c.min_p),
        "with top_k, top_p or min_p, the divergence from the teacher is infinite; sample from the full distribution"
        " (top_k=0, top_p=1.0, min_p=None)",
    ),
    (
        "distillation_topk distillation_mode",
        lambda c: (c.distillation_topk is None) == (c.distillation_mode == "topk_logits"),
        'must be set if and only if distillation_mode = "topk_logits"; set both or neither',
    ),
    (
        "entropy_coef use_adaptive_entropy entropy_coef_min entropy_coef_max",
        lambda c: c.use_adaptive_entropy and not c.entropy_coef_min <= c.entropy_coef <= c.entropy_coef_max,
        "with use_adaptive_entropy, must be between entropy_coef_min and entropy_coef_max; change one of them",
    ),
    (
        "reward_weights",
        lambda c: c.reward_weights is not None and len(c.reward_weights) > 0 and not any(c.reward_weights),
        "all weights are 0; use at least one nonzero weight",
    ),
    (
        "max_steps",
        lambda c: c.max_steps == 0,
        "the run would not train; use at least 1 optimizer step, or -1 to train for num_train_epochs",
    ),
    (
        "warmup_steps",
        lambda c: c.warmup_steps > 1 and c.warmup_steps != int(c.warmup_steps),
        "must be an integer, or below 1 for a fraction of the total steps",
    ),
    (
        "warmup_steps max_steps",
        lambda c: 0 < c.max_steps < c.warmup_steps,
        "the run ends before the warm-up does; decrease warmup_steps or increase max_steps",
    ),
    (
        "warmup_steps lr_scheduler_type",
        lambda c: c.lr_scheduler_type == "constant" and c.warmup_steps > 0,
        'a constant schedule has no warm-up; use lr_scheduler_type="constant_with_warmup"',
    ),
    (
        "metric_for_best_model save_steps eval_steps",
        lambda c: (
            c.save_steps is not None
            and (c.metric_for_best_model or "").startswith("eval/")
            and (c.eval_steps is None or c.save_steps % c.eval_steps != 0)
        ),
        "not evaluated at every checkpoint; set eval_steps, and set save_steps to a multiple of it",
    ),
    (
        "load_best_model_at_end metric_for_best_model",
        lambda c: c.load_best_model_at_end and c.metric_for_best_model is None,
        'needs metric_for_best_model; set it, for example to "eval/<function>" or "reward" (SFT: "eval/loss")',
    ),
    (
        "load_best_model_at_end save_steps",
        lambda c: c.load_best_model_at_end and c.save_steps is None,
        "without save_steps, only the checkpoint at the end can be the best one; set save_steps",
    ),
    (
        "num_generations_eval temperature_eval",
        lambda c: c.temperature_eval == 0 and c.num_generations_eval not in (None, 1),
        "greedy completions (temperature_eval = 0) of the same prompt are identical; use 1 or None",
    ),
)


def contradictions(config: Settings, invalid: Container[str]) -> Iterator[str]:
    """Yield an error message for each conflict between fields that are not in `invalid`."""
    valid = SimpleNamespace()
    vars(valid).update((name, value) for name, value in vars(config).items() if name not in invalid)
    for names, condition, fix in _CONTRADICTIONS:
        fields = names.split()
        if vars(valid).keys() >= {*fields} and condition(valid):
            yield f"{shown(config, fields[0])}: {fix}"
