"""Settings held against each other, and against the data, the devices and the model of a run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Container, Iterator
from typing import TYPE_CHECKING, cast

from grpo_jax.config.fields import nearest_sizes
from grpo_jax.messages import show

if TYPE_CHECKING:  # which reads these rules
    from grpo_jax.config.config import GRPOConfig
    from grpo_jax.config.sft import Config, SFTConfig


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
    """Return an error line for each setting that does not fit what it is to be run with.

    Args:
      config: the run's settings, which are right by themselves.
      num_devices: devices of the run (1 without a mesh).
      num_rows: rows of the dataset that are left after long prompts were dropped.
      num_reward_fns: K, reward functions.
      num_eval_rows: rows of the evaluation dataset; None: there is none.
      longest_prompt: tokens of the longest prompt; None: not known.
      context_length: positions that the model has; None: not known.
      num_experts: experts of each of its sparse layers, 0 where it has none; None: not known.

    Example:
      >>> from grpo_jax import GRPOConfig
      >>> config = GRPOConfig(reward_weights=[1.0, 0.5])
      >>> for line in run_problems(config, num_devices=1, num_rows=100, num_reward_fns=1):
      ...     print(line)
      reward_weights = (1.0, 0.5): 2 weights for 1 reward function; give one weight per function, or None for 1.0 each
    """
    problems = list(device_problems(config, num_devices))
    if num_rows < 1:
        problems.append("dataset: there is no row to train on; look at the rows, and at max_prompt_length if it drops")
    if num_reward_fns < 1:
        problems.append("reward_fns: there is no reward function; give at least one")
    elif config.reward_weights is not None and len(config.reward_weights) != num_reward_fns:
        functions = f"{num_reward_fns} reward function{'s' * (num_reward_fns > 1)}"
        problems.append(
            f"{_setting(config, 'reward_weights')}: {len(config.reward_weights)} weights for {functions};"
            " give one weight per function, or None for 1.0 each"
        )
    problems += _eval_problems(config, num_eval_rows)
    prompt = (config.max_prompt_length if longest_prompt is None else longest_prompt) or 1
    if context_length is not None and prompt + config.max_completion_length > context_length:
        room = context_length - prompt
        mend = f"use {room} or less, or shorter prompts"
        if room < 1:
            mend = (
                "no value helps, the prompts fill them: shorten the prompts, drop long ones (max_prompt_length with"
                ' on_long_prompt="drop"), or use another model'
            )
        problems.append(
            f"{_setting(config, 'max_completion_length')}: with prompts of up to {prompt} tokens this passes"
            f" the {context_length} positions of the model; {mend}"
        )
    problems += router_problems(config, num_experts)
    return problems


def device_problems(config: GRPOConfig, num_devices: int) -> Iterator[str]:
    """Yield the error lines of batches and of a mesh that do not fit the devices."""
    shards, group = config.data_shards(num_devices), config.num_generations
    yield from split_problems(config, shards)
    if shards > 1 and config.rollout_batch_size is not None and config.rollout_batch_size < shards * group:
        yield (
            f"{_setting(config, 'rollout_batch_size')}: does not hold a group of num_generations = {group} on each of"
            f" the {shards} devices that prompts are cut over; use {shards * group} or more, or None for all at once"
        )
    yield from mesh_problems(config, num_devices)


def _eval_problems(config: GRPOConfig, num_rows: int | None) -> Iterator[str]:
    """Yield the error lines of an evaluation dataset that is empty, does not fit or is missing."""
    if num_rows is None:
        yield from missing_evaluation(config, "train")
        return
    if num_rows < 1:
        yield "eval_dataset: there is no row to evaluate on; give rows, or leave the argument out"
    batch, group = config.per_device_eval_batch_size, config.eval_generations
    if batch % group:
        yield (
            f"{_setting(config, 'per_device_eval_batch_size')}: does not hold whole groups of {group} completions"
            f" (num_generations_eval); {nearest_sizes(batch, lambda size: size % group == 0)}"
        )


def _setting(config: Config, name: str) -> str:
    """Return "name = value", the head of an error line."""
    return f"{name} = {show(getattr(config, name))}"


def batch_problems(config: GRPOConfig, wrong: Container[str]) -> Iterator[str]:
    """Yield the error lines of batch sizes that don't divide, whatever the number of devices."""
    sizes = ("num_generations", "per_device_train_batch_size", "gradient_accumulation_steps")
    if any(name in wrong for name in (*sizes, "steps_per_generation", "generation_batch_size")):
        return
    group, micro = config.num_generations, config.per_device_train_batch_size
    accumulated = config.gradient_accumulation_steps

    def whole_groups(size: int) -> bool:
        return (size % group == 0 or group % size == 0) and size * accumulated % group == 0

    if not whole_groups(micro):
        yield (
            f"{_setting(config, 'per_device_train_batch_size')}: times gradient_accumulation_steps = {accumulated}"
            f" it makes {micro * accumulated} completions per device and update, which cannot be cut into whole"
            f" groups of num_generations = {group}; {nearest_sizes(micro, whole_groups)}"
        )
    steps = config.steps_per_generation
    if steps is not None and steps % accumulated:
        yield (
            f"{_setting(config, 'steps_per_generation')}: is not a multiple of gradient_accumulation_steps ="
            f" {accumulated}; {nearest_sizes(steps, lambda size: size % accumulated == 0)}"
        )
    if steps is not None and config.generation_batch_size is not None:
        yield (
            f"{_setting(config, 'generation_batch_size')}: steps_per_generation = {steps} says the same in another way;"
            " set one of the two"
        )
    elif whole_groups(micro):
        yield from split_problems(config, shards=1)


def split_problems(config: GRPOConfig, shards: int) -> Iterator[str]:
    """Yield the error line of a generation batch that does not split into the minibatches of so many shards."""
    micro, accumulated = config.per_device_train_batch_size, config.gradient_accumulation_steps
    update = micro * accumulated * shards
    if config.generation_batch_size is not None and config.generation_batch_size % update:
        devices = f" × {shards} devices" if shards > 1 else ""
        product = f"per_device_train_batch_size = {micro} × gradient_accumulation_steps = {accumulated}{devices}"
        yield (
            f"{_setting(config, 'generation_batch_size')}: does not split into minibatches of {update}"
            f" completions ({product}); {nearest_sizes(config.generation_batch_size, lambda size: size % update == 0)}"
        )


_CAP = "in cispo it is the cap of the ratio itself, not 1 + ε_high"
_PAPER = "(ScaleRL, arXiv 2510.13786: 5.0)"


# Fields that are right one by one and not together: all that the test reads, the one to show first; the test; the mend.
_CONTRADICTIONS: tuple[tuple[str, Callable[[GRPOConfig], bool], str], ...] = (
    (
        "epsilon_high loss_type",
        lambda c: c.loss_type == "cispo" and c.epsilon_high is None,
        f"{_CAP}; unset, epsilon would scale every gradient down to 0.2; set it {_PAPER}",
    ),
    (
        "epsilon_high loss_type",
        lambda c: c.loss_type == "cispo" and c.epsilon_high is not None and c.epsilon_high < 1,
        f"{_CAP}; below 1 it scales every gradient down; use 1 or more {_PAPER}",
    ),
    (
        "epsilon_high loss_type",
        lambda c: c.loss_type in ("sapo", "vespo") and c.epsilon_high is not None,
        "sapo and vespo weigh ratios smoothly and do not clip; leave it at None",
    ),
    (
        "delta loss_type",
        lambda c: c.loss_type in ("cispo", "sapo", "vespo", "gmpo", "dppo_tv", "dppo_kl") and c.delta is not None,
        "cispo, sapo, vespo, gmpo and dppo have no such cap; leave it at None",
    ),
    (
        "importance_sampling_level loss_type",
        lambda c: c.loss_type == "gmpo" and c.importance_sampling_level != "token",
        'loss_type = "gmpo" takes the geometric mean itself; leave importance_sampling_level at "token"',
    ),
    (
        "top_entropy_quantile loss_type",
        lambda c: c.loss_type == "gmpo" and c.top_entropy_quantile < 1,
        'loss_type = "gmpo" weighs whole completions, and no token can be left out; use 1.0',
    ),
    (
        "scale_rewards advantage_estimator",
        lambda c: c.advantage_estimator != "grpo" and c.scale_rewards != "none",
        'only advantage_estimator = "grpo" is divided by it, the others have a scale of their own; use "none"',
    ),
    (
        "multi_objective_aggregation advantage_estimator",
        lambda c: c.advantage_estimator != "grpo" and c.multi_objective_aggregation != "sum_then_normalize",
        'only advantage_estimator = "grpo" normalizes reward by reward; use "sum_then_normalize"',
    ),
    (
        "turn_gamma turn_credit",
        lambda c: c.turn_credit == "episode" and c.turn_gamma != 1,
        'discounts what is to go from a turn; set turn_credit="to_go", or leave it at 1.0',
    ),
    (
        "turn_baseline turn_credit",
        lambda c: c.turn_credit == "episode" and c.turn_baseline != "turn",
        'is the baseline of what is to go from a turn; set turn_credit="to_go", or leave it at "turn"',
    ),
    (
        "turn_credit advantage_estimator",
        lambda c: c.turn_credit == "to_go" and c.advantage_estimator == "opo",
        'advantage_estimator = "opo" weighs whole completions by their length; use another, or turn_credit="episode"',
    ),
    (
        "turn_credit loss_type",
        lambda c: c.turn_credit == "to_go" and c.loss_type == "gmpo",
        'loss_type = "gmpo" takes one advantage for the whole completion; use another, or turn_credit="episode"',
    ),
    (
        "importance_sampling_level loss_type",
        lambda c: c.loss_type == "luspo" and c.importance_sampling_level != "sequence",
        'loss_type = "luspo" weighs whole completions; use importance_sampling_level="sequence"',
    ),
    (
        "sampler_correction_min sampler_correction_max",
        lambda c: (
            c.sampler_correction_min is not None
            and c.sampler_correction_max is not None
            and c.sampler_correction_min >= c.sampler_correction_max
        ),
        "must be below sampler_correction_max; lower the one or raise the other",
    ),
    (
        "sampler_correction sampler_correction_max sampler_correction_min",
        lambda c: (
            (c.sampler_correction or "").endswith("truncate")
            and c.sampler_correction_max is None
            and c.sampler_correction_min is None
        ),
        "truncates at a bound, and there is none; set sampler_correction_max, or sampler_correction_min",
    ),
    (
        "rollout_batch_size num_generations",
        lambda c: c.rollout_batch_size is not None and c.rollout_batch_size < c.num_generations,
        "must hold a group of num_generations completions; raise it or use None",
    ),
    (
        "sync_ref_model beta",
        lambda c: c.sync_ref_model and c.beta == 0,
        "with beta = 0 there is no reference to sync; set beta above 0, or sync_ref_model=False",
    ),
    (
        "entropy_coef_min entropy_coef_max",
        lambda c: c.entropy_coef_min > c.entropy_coef_max,
        "must not be above entropy_coef_max; lower the one or raise the other",
    ),
    (
        "entropy_coef use_adaptive_entropy entropy_coef_min entropy_coef_max",
        lambda c: c.use_adaptive_entropy and not c.entropy_coef_min <= c.entropy_coef <= c.entropy_coef_max,
        "with use_adaptive_entropy it starts between entropy_coef_min and entropy_coef_max; move one of the three",
    ),
    (
        "reward_weights",
        lambda c: c.reward_weights is not None and len(c.reward_weights) > 0 and not any(c.reward_weights),
        "no reward would count; give at least one weight that is not 0",
    ),
    (
        "max_steps",
        lambda c: c.max_steps == 0,
        "nothing would be learnt; use a number of optimizer steps, or -1 to train by num_train_epochs",
    ),
    (
        "warmup_steps",
        lambda c: c.warmup_steps > 1 and c.warmup_steps != int(c.warmup_steps),
        "must be a whole number of steps, or a share of all steps below 1",
    ),
    (
        "warmup_steps max_steps",
        lambda c: 0 < c.max_steps < c.warmup_steps,
        "the run ends (max_steps) before the learning rate has risen; shorten the one or lengthen the other",
    ),
    (
        "warmup_steps lr_scheduler_type",
        lambda c: c.lr_scheduler_type == "constant" and c.warmup_steps > 0,
        'a constant schedule has no warm-up; use lr_scheduler_type="constant_with_warmup"',
    ),
    (
        "greater_is_better metric_for_best_model",
        lambda c: c.greater_is_better is not None and c.metric_for_best_model is None,
        "there is nothing that could be better; set metric_for_best_model, or leave it at None",
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
        'what is best? set metric_for_best_model, such as "eval/<function>" or "reward", in SFT "eval/loss"',
    ),
    (
        "load_best_model_at_end save_steps",
        lambda c: c.load_best_model_at_end and c.save_steps is None,
        "there is one checkpoint, at the end, and nothing to choose from (those of save_minutes are not chosen among);"
        " set save_steps",
    ),
    (
        "num_generations_eval temperature_eval",
        lambda c: c.temperature_eval == 0 and c.num_generations_eval not in (None, 1),
        "greedy completions of one prompt (temperature_eval = 0) are all the same; use 1 or None",
    ),
)


def contradictions(config: Config, wrong: Container[str]) -> Iterator[str]:
    """Yield an error line for each contradiction between fields that are right by themselves, of those it has."""
    known = {field.name for field in dataclasses.fields(config)}
    for names, holds, mend in _CONTRADICTIONS:
        fields = names.split()
        read = known.issuperset(fields) and not any(field in wrong for field in fields)
        if read and holds(cast("GRPOConfig", config)):  # it has all the fields that are read
            yield f"{_setting(config, fields[0])}: {mend}"


def sft_problems(
    config: SFTConfig,
    *,
    num_devices: int,
    has_eval_data: bool,
    longest: int,
    context_length: int | None,
    num_experts: int | None,
) -> list[str]:
    """Return an error line for each setting of an SFT run that does not fit what it is to be run with.

    Args:
      config: the run's settings, which are right by themselves.
      num_devices: devices of the run (1 without a mesh).
      has_eval_data: whether there is a dataset to evaluate on.
      longest: tokens of the longest example.
      context_length: positions that the model has; None: not known.
      num_experts: experts of each of its sparse layers, 0 where it has none; None: not known.
    """
    problems = list(mesh_problems(config, num_devices))
    if not has_eval_data:
        problems += missing_evaluation(config, "sft")
    if context_length is not None and longest > context_length:
        problems.append(
            f"{_setting(config, 'max_length')}: the longest example has {longest} tokens, and the model"
            f" {context_length} positions; lower it to that"
        )
    problems += router_problems(config, num_experts)
    return problems


def mesh_problems(config: Config, num_devices: int) -> Iterator[str]:
    """Yield the error line of a mesh that does not fit the devices."""
    if config.mesh is not None and math.prod(config.mesh.values()) != num_devices:
        product = " × ".join(str(size) for size in config.mesh.values())
        yield (
            f"{_setting(config, 'mesh')}: {product} devices, and this run has {num_devices}; make the sizes multiply to"
            " that, or leave mesh at None for one device"
        )


def missing_evaluation(config: Config, function: str) -> Iterator[str]:
    """Yield the error line of a setting that asks for an evaluation where `function` was given nothing for one."""
    missing = f"there is nothing to evaluate on; pass eval_dataset to {function}"
    if config.eval_steps is not None:
        yield f"{_setting(config, 'eval_steps')}: {missing}"
    elif (config.metric_for_best_model or "").startswith("eval/"):
        yield f"{_setting(config, 'metric_for_best_model')}: {missing}"


def router_problems(config: Config, num_experts: int | None) -> Iterator[str]:
    """Yield the error line of a router's loss where there is no router."""
    if config.router_aux_loss_coef and num_experts == 0:
        yield (
            f"{_setting(config, 'router_aux_loss_coef')}: the model is no mixture of experts, so there is no router to"
            " balance; leave it at None"
        )
