"""Validation of settings against a run's data, devices and model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from grpo_jax.config.config import GRPOConfig
from grpo_jax.config.fields import nearest_sizes
from grpo_jax.config.settings import Settings, shown
from grpo_jax.config.sft import SFTConfig


def run_problems(
    config: GRPOConfig,
    *,
    num_devices: int,
    num_reward_fns: int,
    longest_prompt: int,
    has_eval_data: bool = False,
    context_length: int | None = None,
    num_experts: int | None = None,
) -> list[str]:
    """Return one error message for each setting that is incompatible with the run. Unset arguments are not checked.

    `num_experts` is 0 for dense models.
    """
    problems = list(config.device_problems(num_devices))
    if config.reward_weights is not None and len(config.reward_weights) != num_reward_fns:
        functions = f"{num_reward_fns} reward function{'s' * (num_reward_fns != 1)}"
        problems.append(
            f"{shown(config, 'reward_weights')}: got {len(config.reward_weights)} weights for {functions};"
            " pass one weight per function, or None for 1.0 each"
        )
    problems += _eval_problems(config) if has_eval_data else missing_evaluation(config, "train")
    if context_length is not None:
        problems += position_problems(longest_prompt, config.max_completion_length, context_length)
    problems += router_problems(config, num_experts)
    return problems


def position_problems(longest_prompt: int, max_completion_length: int, context_length: int) -> Iterator[str]:
    """Yield an error message if prompts and completions need more positions than the model has."""
    left = context_length - longest_prompt
    if max_completion_length > left:
        fix = (
            f"use {left} or less, or shorter prompts"
            if left > 0
            else "the prompts leave no room for completions: shorten them, drop long ones (max_prompt_length with"
            ' on_long_prompt="drop"), or use a model with a longer context'
        )
        yield (
            f"max_completion_length = {max_completion_length}: with prompts of up to {longest_prompt} tokens, this"
            f" exceeds the model's {context_length} positions; {fix}"
        )


def _eval_problems(config: GRPOConfig) -> Iterator[str]:
    """Yield an error message about the evaluation batch size."""
    batch, group = config.per_device_eval_batch_size, config.eval_generations
    if batch % group:
        yield (
            f"{shown(config, 'per_device_eval_batch_size')}: must be a multiple of the group size {group}"
            f" (num_generations_eval); {nearest_sizes(batch, lambda size: size % group == 0)}"
        )


def sft_problems(
    config: SFTConfig,
    *,
    num_devices: int,
    has_eval_data: bool,
    longest: int,
    context_length: int | None,
    num_experts: int | None,
) -> list[str]:
    """Return one error message for each setting that is incompatible with the SFT run, as in `run_problems`."""
    problems = list(config.device_problems(num_devices))
    if not has_eval_data:
        problems += missing_evaluation(config, "sft")
    if context_length is not None and longest > context_length:
        problems.append(
            f"{shown(config, 'max_length')}: the longest example has {longest} tokens, but the model has only"
            f" {context_length} positions; use max_length={context_length} or less"
        )
    problems += router_problems(config, num_experts)
    return problems


def missing_evaluation(config: Settings, function: str) -> Iterator[str]:
    """Yield an error message if a setting needs an evaluation dataset. `function` is "train" or "sft"."""
    missing = f"needs an evaluation dataset; pass eval_dataset to {function}"
    if config.eval_steps is not None:
        yield f"{shown(config, 'eval_steps')}: {missing}"
    elif (config.metric_for_best_model or "").startswith("eval/"):
        yield f"{shown(config, 'metric_for_best_model')}: {missing}"


def check_best_metric(config: Settings, names: Iterable[str]) -> None:
    """Raise ValueError if `metric_for_best_model` is an evaluation metric whose name is not in `names`."""
    metric, known = config.metric_for_best_model or "", [f"eval/{name}" for name in names]
    if metric.startswith("eval/") and metric not in known:
        raise ValueError(f"metric_for_best_model must be an evaluation metric ({', '.join(known)}); got {metric!r}")


def router_problems(config: Settings, num_experts: int | None) -> Iterator[str]:
    """Yield an error message if a router loss is set for a dense model."""
    if config.router_aux_loss_coef and num_experts == 0:
        yield f"{shown(config, 'router_aux_loss_coef')}: the model is not a mixture of experts; set it to None"
