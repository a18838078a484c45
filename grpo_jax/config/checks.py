"""Checks of settings against the data, the devices and the model of a run."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_jax.config.config import GRPOConfig
from grpo_jax.config.fields import nearest_sizes
from grpo_jax.config.settings import Settings, shown
from grpo_jax.config.sft import SFTConfig


def run_problems(
    config: GRPOConfig,
    *,
    num_devices: int,
    num_rows: int,
    num_reward_fns: int,
    num_eval_rows: int | None = None,
    longest_prompt: int | None = None,
    context_length: int | None = None,
    num_experts: int | None = None,
) -> list[str]:
    """Return an error line for each setting that does not fit the run; what is None is unknown and not checked.

    Rows are counted without dropped long prompts; `num_eval_rows` is None without an evaluation dataset. If the longest
    prompt is unknown, `max_prompt_length` is used. A dense model has 0 experts.
    """
    problems = list(config.device_problems(num_devices))
    if num_rows < 1:
        problems.append("dataset: there are 0 rows to train on; check the rows, and max_prompt_length if it drops them")
    if num_reward_fns < 1:
        problems.append("reward_fns: the list is empty; pass at least one function")
    elif config.reward_weights is not None and len(config.reward_weights) != num_reward_fns:
        functions = f"{num_reward_fns} reward function{'s' * (num_reward_fns > 1)}"
        problems.append(
            f"{shown(config, 'reward_weights')}: {len(config.reward_weights)} weights for {functions};"
            " pass one weight per function, or None for 1.0 each"
        )
    problems += _eval_problems(config, num_eval_rows)
    prompt = (config.max_prompt_length if longest_prompt is None else longest_prompt) or 1
    if context_length is not None:
        problems += position_problems(prompt, config.max_completion_length, context_length)
    problems += router_problems(config, num_experts)
    return problems


def position_problems(longest_prompt: int, max_completion_length: int, context_length: int) -> Iterator[str]:
    """Yield the error line if prompts and completions need more positions than the model has."""
    left = context_length - longest_prompt
    if max_completion_length > left:
        fix = (
            f"use {left} or less, or shorter prompts"
            if left > 0
            else "the prompts alone fill them: shorten the prompts, drop long ones (max_prompt_length with"
            ' on_long_prompt="drop"), or use another model'
        )
        yield (
            f"max_completion_length = {max_completion_length}: with prompts of up to {longest_prompt} tokens this"
            f" exceeds the {context_length} positions of the model; {fix}"
        )


def _eval_problems(config: GRPOConfig, num_rows: int | None) -> Iterator[str]:
    """Yield the error lines of an evaluation dataset and its batch size."""
    if num_rows is None:
        yield from missing_evaluation(config, "train")
        return
    if num_rows < 1:
        yield "eval_dataset: there are 0 rows to evaluate on; pass rows, or leave the argument out"
    batch, group = config.per_device_eval_batch_size, config.eval_generations
    if batch % group:
        yield (
            f"{shown(config, 'per_device_eval_batch_size')}: is not a multiple of the group size, {group}"
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
    """Return an error line for each setting that does not fit the SFT run; arguments as in `run_problems`."""
    problems = list(config.device_problems(num_devices))
    if not has_eval_data:
        problems += missing_evaluation(config, "sft")
    if context_length is not None and longest > context_length:
        problems.append(
            f"{shown(config, 'max_length')}: the longest example has {longest} tokens, and the model has"
            f" {context_length} positions; use max_length={context_length} or less"
        )
    problems += router_problems(config, num_experts)
    return problems


def missing_evaluation(config: Settings, function: str) -> Iterator[str]:
    """Yield the error line of a setting that needs the `eval_dataset` of `train` or `sft` (`function`)."""
    missing = f"needs an evaluation dataset; pass eval_dataset to {function}"
    if config.eval_steps is not None:
        yield f"{shown(config, 'eval_steps')}: {missing}"
    elif (config.metric_for_best_model or "").startswith("eval/"):
        yield f"{shown(config, 'metric_for_best_model')}: {missing}"


def router_problems(config: Settings, num_experts: int | None) -> Iterator[str]:
    """Yield the error line of a router loss for a dense model."""
    if config.router_aux_loss_coef and num_experts == 0:
        yield f"{shown(config, 'router_aux_loss_coef')}: the model is not a mixture of experts; leave it at None"
