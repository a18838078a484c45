"""Fields of a config that contradict each other."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from types import SimpleNamespace

from grpo_jax.config.settings import Settings, shown

_CAP = "in cispo it is the cap of the ratio itself, not 1 + ε_high"
_PAPER = "(ScaleRL, arXiv 2510.13786: 5.0)"

# The fields that a test reads (the message starts with the first one), the test, and the fix.
_CONTRADICTIONS: tuple[tuple[str, Callable[[SimpleNamespace], bool], str], ...] = (
    (
        "epsilon_high loss_type",
        lambda c: c.loss_type == "cispo" and c.epsilon_high is None,
        f"{_CAP}; if it is unset, every gradient is scaled down to epsilon; set it {_PAPER}",
    ),
    (
        "epsilon_high loss_type",
        lambda c: c.loss_type == "cispo" and c.epsilon_high is not None and c.epsilon_high < 1,
        f"{_CAP}; a cap below 1 scales every gradient down; use 1 or more {_PAPER}",
    ),
    (
        "epsilon_high loss_type",
        lambda c: c.loss_type in ("sapo", "vespo") and c.epsilon_high is not None,
        "sapo and vespo weight ratios smoothly and do not clip; leave it at None",
    ),
    (
        "delta loss_type",
        lambda c: c.loss_type in ("cispo", "sapo", "vespo") and c.delta is not None,
        "cispo, sapo and vespo do not use it; leave it at None",
    ),
    (
        "scale_rewards advantage_estimator",
        lambda c: c.advantage_estimator != "grpo" and c.scale_rewards != "none",
        'applies to advantage_estimator = "grpo" only, since other estimators have their own scale; use "none"',
    ),
    (
        "multi_objective_aggregation advantage_estimator",
        lambda c: c.advantage_estimator != "grpo" and c.multi_objective_aggregation != "sum_then_normalize",
        'applies to advantage_estimator = "grpo" only; use "sum_then_normalize"',
    ),
    (
        "turn_credit advantage_estimator",
        lambda c: c.turn_credit == "to_go" and c.advantage_estimator == "opo",
        'advantage_estimator = "opo" weights whole completions by length; use another, or turn_credit="episode"',
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
        "must be below sampler_correction_max; lower it or raise sampler_correction_max",
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
        "rollout_batch_size num_generations",
        lambda c: c.rollout_batch_size is not None and c.rollout_batch_size < c.num_generations,
        "must hold a group of num_generations completions; raise it or use None",
    ),
    (
        "sync_ref_model beta",
        lambda c: c.sync_ref_model and c.beta == 0,
        "needs a reference, which a run with beta = 0 does not keep; set beta above 0, or sync_ref_model=False",
    ),
    (
        "distillation_coef top_k top_p min_p",
        lambda c: c.distillation_coef > 0 and bool(c.top_k or c.top_p < 1 or c.min_p),
        "with top_k, top_p or min_p the divergence from the teacher is infinite; sample from the whole distribution"
        " (top_k=0, top_p=1.0, min_p=None)",
    ),
    (
        "distillation_topk distillation_mode",
        lambda c: (c.distillation_topk is None) == (c.distillation_mode == "topk_logits"),
        'requires distillation_mode = "topk_logits", which requires it in turn; set both or neither',
    ),
    (
        "entropy_coef use_adaptive_entropy entropy_coef_min entropy_coef_max",
        lambda c: c.use_adaptive_entropy and not c.entropy_coef_min <= c.entropy_coef <= c.entropy_coef_max,
        "with use_adaptive_entropy it must lie between entropy_coef_min and entropy_coef_max; change one of the three",
    ),
    (
        "reward_weights",
        lambda c: c.reward_weights is not None and len(c.reward_weights) > 0 and not any(c.reward_weights),
        "all rewards are multiplied by 0; use at least one weight that is not 0",
    ),
    (
        "max_steps",
        lambda c: c.max_steps == 0,
        "there is nothing to train; use a number of optimizer steps, or -1 to train for num_train_epochs",
    ),
    (
        "warmup_steps",
        lambda c: c.warmup_steps > 1 and c.warmup_steps != int(c.warmup_steps),
        "must be an integer, or a fraction of all steps below 1",
    ),
    (
        "warmup_steps max_steps",
        lambda c: 0 < c.max_steps < c.warmup_steps,
        "the run ends before the warm-up; use fewer warmup_steps or more max_steps",
    ),
    (
        "warmup_steps lr_scheduler_type",
        lambda c: c.lr_scheduler_type == "constant" and c.warmup_steps > 0,
        'a constant schedule does not warm up; use lr_scheduler_type="constant_with_warmup"',
    ),
    (
        "metric_for_best_model save_steps eval_steps",
        lambda c: (
            c.save_steps is not None
            and (c.metric_for_best_model or "").startswith("eval/")
            and (c.eval_steps is None or c.save_steps % c.eval_steps != 0)
        ),
        "is not measured at every checkpoint; make save_steps a multiple of eval_steps",
    ),
    (
        "load_best_model_at_end metric_for_best_model",
        lambda c: c.load_best_model_at_end and c.metric_for_best_model is None,
        'needs metric_for_best_model, such as "eval/<function>" or "reward", in SFT "eval/loss"',
    ),
    (
        "load_best_model_at_end save_steps",
        lambda c: c.load_best_model_at_end and c.save_steps is None,
        "the only checkpoint is the one at the end (checkpoints of save_minutes do not count); set save_steps",
    ),
    (
        "num_generations_eval temperature_eval",
        lambda c: c.temperature_eval == 0 and c.num_generations_eval not in (None, 1),
        "greedy completions of one prompt (temperature_eval = 0) are identical; use 1 or None",
    ),
)


def contradictions(config: Settings, wrong: Container[str]) -> Iterator[str]:
    """Yield an error line for each contradiction between fields that are not in `wrong`."""
    right = SimpleNamespace()
    vars(right).update((name, value) for name, value in vars(config).items() if name not in wrong)
    for names, holds, fix in _CONTRADICTIONS:
        fields = names.split()
        if vars(right).keys() >= {*fields} and holds(right):
            yield f"{shown(config, fields[0])}: {fix}"
