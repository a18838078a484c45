"""Validation of the arguments to `train`, and construction of its `Run`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import optax
from jax.sharding import Mesh

from grpo_jax.config.config import GRPOConfig
from grpo_jax.config.sft import GRPOOrSFTConfig, SFTConfig
from grpo_jax.maths.surrogates import Surrogate
from grpo_jax.messages import ErrorList, show
from grpo_jax.models.devices import compute_dtype, memory_of
from grpo_jax.models.threads import devices_of
from grpo_jax.policy import Policy
from grpo_jax.rewards.contract import as_list, check_reward_fns
from grpo_jax.rollout.ends import TurnEnds
from grpo_jax.run.compilation_cache import enable_compilation_cache
from grpo_jax.run.images import Encoded, check_text_only, with_encoder, with_tower
from grpo_jax.run.placement import place_policy, run_mesh, with_settings
from grpo_jax.run.policy_checks import (
    check_context_length,
    check_ends,
    check_is_policy,
    check_policy,
    check_tokens,
    group_problems,
    run_problems,
    warn_of_tokens,
)
from grpo_jax.run.run import Run
from grpo_jax.text.images import load_processor_if_needed
from grpo_jax.text.prompts import EncodedPrompts, encode_prompts, join_prompts
from grpo_jax.text.rows import load_rows
from grpo_jax.text.sources import Dataset, check_finite, named_datasets
from grpo_jax.types import AdvantageFn, Environments, RewardFn, Row, is_builtin
from grpo_jax.update.optimizer import make_optimizer, make_schedule
from grpo_jax.update.packed import choose_updater

if TYPE_CHECKING:  # imported at runtime only when a run needs them
    from grpo_jax.rollout.episode_setup import EpisodeSetup
    from grpo_jax.run.sampler import Sampler
    from grpo_jax.run.teacher import Scorer

_Config = TypeVar("_Config", GRPOConfig, SFTConfig)


def prepare(
    policy: Policy,
    dataset: Dataset,
    reward_fns: RewardFn | Sequence[RewardFn],
    config: GRPOConfig,
    *,
    eval_dataset: Dataset | None = None,
    optimizer: optax.GradientTransformation | None = None,
    tools: Sequence[Callable[..., Any]] | None = None,
    environment_factory: Environments | None = None,
    sampler: Sampler | None = None,
    advantage_fn: AdvantageFn | None = None,
    surrogate: Surrogate | None = None,
    teacher: Policy | Scorer | None = None,
) -> Run:
    """Validate the arguments to `train` and build the `Run`. Most errors are collected and raised as one ValueError."""
    if not isinstance(config, GRPOConfig):
        raise ValueError(
            f"config must be a GRPOConfig; got {type(config).__name__}. Convert a dict with GRPOConfig.from_dict."
        )
    check_is_policy(policy)
    policy.check_held()
    ends, errors = TurnEnds.of(config), ErrorList()
    errors.check(check_policy, policy, ends)
    errors.check(check_ends, ends, policy, policy.params)
    errors.check(check_optimizer, optimizer)
    fns = errors.check(as_list, reward_fns)
    rows = {"dataset": errors.check(_training_rows, dataset, policy, config)}
    for name, held_out in named_datasets(eval_dataset).items():
        argument = f"eval_dataset[{name!r}]" if name else "eval_dataset"
        rows[argument] = errors.check(functools.partial(load_rows, held_out, argument=argument))
    episode_setup = errors.check(prepare_episode_setup, policy, config, rows, tools, environment_factory)
    failed = fns is None or (episode_setup is None and environment_factory is not None)  # rewards cannot be checked
    if sampler is not None:
        from grpo_jax.run.sampler import check_sampler

        errors.check(check_sampler, sampler, episode_setup, ends)
    errors.check(check_text_only, rows, "sampler", sampler)
    errors.check(check_text_only, rows, "teacher", teacher)
    if fns is not None and (fns or not failed):
        fns, config = check_functions(fns, rows, config, episode_setup, errors, required=teacher is None)
    if teacher is not None or config.distillation_coef > 0:
        from grpo_jax.run.teacher import check_teacher

        errors.check(functools.partial(check_teacher, teacher, policy, config, has_rewards=failed or bool(fns)))
    checked_fn = None
    if advantage_fn is not None or surrogate is not None:
        from grpo_jax.run.custom import check_advantage_fn, check_surrogate

        errors.check(check_surrogate, surrogate, config)
        checked_fn = errors.check(check_advantage_fn, advantage_fn, config, len(fns or ()) or 1)
    encode = functools.partial(encode_rows, policy, config, episode_setup)
    num_fns, has_eval_data = len(fns or ()) or len(errors[:1]), len(rows) > 1  # invalid functions (reported) count as 1
    policy, config, mesh, encoded = encode_datasets(policy, config, rows, encode, errors)
    longest = max((len(ids) for part in encoded.values() for ids in part.token_ids), default=1)
    errors.check(check_context_length, policy, longest, config.max_completion_length)
    problems = group_problems(config, num_reward_fns=num_fns, has_eval_data=has_eval_data)
    errors.raise_together(problems + run_problems(policy, config, has_eval_data=has_eval_data))
    policy, encoded = place_run(policy, encoded, config, mesh, ends)
    devices = list(mesh.devices.flat if mesh else devices_of(policy.params))
    if isinstance(teacher, Policy):
        check_tokens(teacher, encoded["dataset"], config.max_completion_length, prefix="teacher: ")
        teacher = place_policy(teacher.replace(model=with_settings(teacher.model, config, devices, mesh)), mesh)
    data, *eval_data = encoded.values()
    run = dataclasses.replace(
        derive_run(policy, config, data, mesh=mesh, optimizer=optimizer, surrogate=surrogate, teacher=teacher),
        eval_data=join_prompts(dict(zip(named_datasets(eval_dataset), eval_data, strict=True))) if eval_data else None,
        reward_fns=fns or (),
        episode_setup=episode_setup,
        sampler=sampler,
        custom_advantages=None if checked_fn is None else dataclasses.replace(checked_fn, config=config),
    )
    from grpo_jax.run.memory import decide_checkpointing

    local = next((device for device in devices if device.process_index == jax.process_index()), None)
    return decide_checkpointing(run, None if local is None else memory_of(local))


def encode_datasets(
    policy: Policy,
    config: _Config,
    rows: Mapping[str, Sequence[Row] | None],
    encode: Callable[[Sequence[Row], str], Encoded],
    errors: ErrorList,
) -> tuple[Policy, _Config, Mesh | None, dict[str, Encoded]]:
    """Tokenize the datasets, choose the run's devices, and add the vision tower to the params if it is trainable.

    `rows` and the encoded datasets are keyed by argument name. In the returned config and model, the mesh and the
    compute dtype are resolved for these devices. Errors are appended to `errors`.
    """
    mesh, config = errors.check(run_mesh, policy, config) or (None, config)
    nonempty = {name: part for name, part in rows.items() if part and policy.tokenizer is not None}
    results = {name: errors.check(encode, part, name) for name, part in nonempty.items()}
    encoded = {name: part for name, part in results.items() if part is not None}
    policy = errors.check(functools.partial(with_tower, freeze=config.freeze_vision), policy, encoded) or policy
    devices = list(mesh.devices.flat if mesh else devices_of(policy.params))
    config = dataclasses.replace(config, compute_dtype=compute_dtype(config.compute_dtype, devices))
    return policy.replace(model=with_settings(policy.model, config, devices, mesh)), config, mesh, encoded


def place_run(
    policy: Policy, encoded: Mapping[str, Encoded], config: GRPOOrSFTConfig, mesh: Mesh | None, ends: TurnEnds
) -> tuple[Policy, dict[str, Encoded]]:
    """Place the policy on the run's devices and add the image encoder to the datasets. Calls `warn_of_tokens`."""
    for name, part in encoded.items():
        warn_of_tokens(part, policy, name, ends=ends, template_kwargs=config.chat_template_kwargs)
    enable_compilation_cache()  # must precede the first compilation
    policy = place_policy(policy, mesh)
    return policy, with_encoder(policy, encoded, mesh)


def derive_run(
    policy: Policy,
    config: GRPOConfig,
    data: EncodedPrompts,
    *,
    mesh: Mesh | None,
    prompt_length: int | None = None,
    optimizer: optax.GradientTransformation | None = None,
    surrogate: Surrogate | None = None,
    teacher: Policy | Scorer | None = None,
) -> Run:
    """Build a `Run` from validated arguments, without reward functions or evaluation data. Params may be abstract."""
    if prompt_length is None:
        prompt_length = config.padded(max(map(len, data.token_ids)))
    sizes, total_steps = config.sizes(), config.total_steps(len(data.rows))
    schedule = make_schedule(config, total_steps) if optimizer is None else None
    optimizer = make_optimizer(config, total_steps) if optimizer is None else optimizer
    micro_shape = (sizes.micro_prompts, sizes.micro_completions)
    make_updater = functools.partial(choose_updater, config=config, micro_shape=micro_shape, mesh=mesh)
    teacher_scoring = distributions = None
    if teacher is not None:
        from grpo_jax.run.teacher import make_teacher_scoring

        teacher_scoring = make_teacher_scoring(teacher, make_updater)
        distributions = teacher_scoring.local if config.distillation_mode == "full_logits" else None
    return Run(
        policy=policy,
        config=config,
        data=data,
        images=None if data.image_encoder is None else data.prompts([0], length=prompt_length).images,
        prompt_length=prompt_length,
        mesh=mesh,
        sizes=sizes,
        total_steps=total_steps,
        optimizer=optimizer,
        schedule=schedule,
        updater=make_updater(policy.model, optimizer=optimizer, surrogate=surrogate, teacher=distributions),
        teacher_scoring=teacher_scoring,
    )


def check_optimizer(optimizer: object) -> None:
    """Raise ValueError unless `optimizer` is an optax transformation or None."""
    if optimizer is not None and not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise ValueError(f"optimizer must be an optax transformation, such as optax.adamw(1e-6); got {show(optimizer)}")


def _training_rows(dataset: Dataset, policy: Policy, config: GRPOConfig) -> list[Row]:
    """Load the training rows. A stream is read only as far as the run needs, unless prompts may be dropped."""
    check_finite(dataset, "dataset", config.max_steps)
    try:
        max_rows = run_mesh(policy, config)[1].max_prompts()
    except ValueError:  # invalid mesh or batch size; reported later
        max_rows = 1
    return load_rows(dataset, max_rows=None if config.on_long_prompt == "drop" else max_rows)


def check_functions(
    reward_fns: list[RewardFn],
    rows: Mapping[str, Sequence[Row] | None],
    config: GRPOConfig,
    episode_setup: EpisodeSetup | None,
    errors: ErrorList,
    *,
    required: bool,
) -> tuple[list[RewardFn], GRPOConfig]:
    """Validate reward functions against the datasets, and append the errors to `errors`.

    Returns the functions and the config, with reward functions and weights for environments added.
    """
    environment_columns: Sequence[str] = ()
    if episode_setup is not None:
        from grpo_jax.rollout.episode_setup import REWARD_COLUMNS, environment_weights, with_environments

        reward_fns, environment_columns = with_environments(reward_fns, episode_setup), REWARD_COLUMNS
        config = dataclasses.replace(config, reward_weights=environment_weights(config.reward_weights, reward_fns))
        if config.rollout_ahead:  # prefetched completions have no environments
            environment_columns = [name for name in environment_columns if name != "environments"]
    readable = {name: part for name, part in rows.items() if part} or {"dataset": []}
    for name, part in readable.items() if reward_fns or required else ():
        columns = [*part[0], *environment_columns] if part else None
        argument = "the dataset" if name == "dataset" else name
        errors.check(functools.partial(check_reward_fns, reward_fns, columns, argument=argument, rows=part))
    return reward_fns, config


def prepare_episode_setup(
    policy: Policy,
    config: GRPOConfig,
    rows: Mapping[str, Sequence[Row] | None],
    tools: Sequence[Callable[..., Any]] | None,
    environment_factory: Environments | None,
) -> EpisodeSetup | None:
    """Build the `EpisodeSetup` from tools and environments. Returns None if neither is given."""
    if not tools and environment_factory is None:
        return None
    from grpo_jax.rollout.episode_setup import make_episode_setup

    if not is_builtin(policy.model):
        raise ValueError(
            "tools and environment_factory need a model with a KV cache; use a model loaded by from_pretrained"
        )
    return make_episode_setup(
        policy.tokenizer,
        policy.eos_token_ids,
        [row for part in rows.values() for row in part or ()],
        config,
        tools=tools,
        environment_factory=environment_factory,
    )


def encode_rows(
    policy: Policy, config: GRPOConfig, episode_setup: EpisodeSetup | None, rows: Sequence[Row], argument: str
) -> EncodedPrompts:
    """Tokenize a dataset's prompts and check their token ids."""
    data = encode_prompts(
        rows,
        policy.tokenizer,
        max_prompt_length=config.max_prompt_length,
        on_long_prompt=config.on_long_prompt,
        chat_template_kwargs=config.chat_template_kwargs,
        tools=None if episode_setup is None else [episode_setup.schemas(row) for row in rows],
        processor=load_processor_if_needed(policy, rows, argument),
        argument=argument,
    )
    check_tokens(policy, data)
    return data
