"""Checks of the arguments of `train`, alone and together, before anything runs; and the run that follows from them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import optax

from grpo_jax.config.checks import run_problems
from grpo_jax.config.config import GRPOConfig
from grpo_jax.maths.surrogates import Surrogate
from grpo_jax.messages import Faults, show
from grpo_jax.models.devices import compute_dtype, memory_of
from grpo_jax.models.sharding import mesh_of
from grpo_jax.models.streams import devices_of
from grpo_jax.policy import Policy
from grpo_jax.rewards.contract import arguments_of, check_reward_fns, reward_names
from grpo_jax.rollout.ends import TurnEnds
from grpo_jax.run.kept_programs import keep_programs
from grpo_jax.run.placement import place_policy, run_mesh, shape_of, with_settings
from grpo_jax.run.policy_checks import check_ends, check_policy, check_tokens, warn_of_tokens
from grpo_jax.run.run import Run
from grpo_jax.text.prompts import EncodedPrompts, encode_prompts, join_prompts
from grpo_jax.text.rows import load_rows
from grpo_jax.text.sources import Dataset, is_stream, named_datasets
from grpo_jax.types import AdvantageFn, Environments, RewardFn, Row, is_cached
from grpo_jax.update.optimizer import make_optimizer, make_schedule
from grpo_jax.update.packed import choose_updater

if TYPE_CHECKING:  # optional capabilities
    from grpo_jax.rollout.interaction import Interaction
    from grpo_jax.run.custom import CheckedAdvantageFn
    from grpo_jax.run.sampler import Sampler
    from grpo_jax.run.teacher import Scorer


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
    """Check the arguments of `train` and derive its run; one `ValueError` lists everything that is wrong."""
    if not isinstance(config, GRPOConfig):
        raise ValueError(
            f"config must be a GRPOConfig; got {type(config).__name__} (GRPOConfig.from_dict takes a dict)."
        )
    faults = Faults()
    if isinstance(policy, Policy):
        policy.check_held()  # nothing else can be checked without params
    faults.of(check_policy, policy, TurnEnds.of(config))
    faults.of(check_optimizer, optimizer)
    fns = faults.of(_as_functions, reward_fns)
    rows = {"dataset": faults.of(_training_rows, dataset, policy, config)}
    for name, some in named_datasets(eval_dataset).items():
        argument = f"eval_dataset[{name!r}]" if name else "eval_dataset"
        rows[argument] = faults.of(load_rows, some, argument=argument)
    interaction = None
    if isinstance(policy, Policy) and (tools or environment_factory is not None):
        interaction = faults.of(_make_interaction, policy, config, rows, tools, environment_factory)
    has_rewards = fns is None or bool(fns) or environment_factory is not None
    _check_engines(policy, config, interaction, sampler, teacher, faults, has_rewards=has_rewards)
    # Environments that could not be read may have been the only source of rewards.
    if fns is not None and (fns or interaction is not None or environment_factory is None):
        fns = _check_functions(fns, rows, config, interaction, faults, required=teacher is None)
    if not isinstance(policy, Policy):
        faults.raise_together("this run")
    checked_fn = faults.of(_check_custom, advantage_fn, surrogate, config, len(fns or ()) or 1)
    policy, config, mesh, encoded = _encode(policy, config, rows, fns or (), interaction, faults)
    devices = list(mesh.devices.flat if mesh else devices_of(policy.params))
    if isinstance(teacher, Policy):
        teacher = place_policy(teacher.replace(model=with_settings(teacher.model, config, devices, mesh)), mesh)
    data, *held_out = encoded.values()
    names = named_datasets(eval_dataset)
    run = derive_run(
        policy,
        config,
        data,
        join_prompts(dict(zip(names, held_out, strict=True))) if held_out else None,
        mesh=mesh,
        reward_fns=fns or (),
        interaction=interaction,
        sampler=sampler,
        optimizer=optimizer,
        advantage_fn=None if checked_fn is None else dataclasses.replace(checked_fn, config=config),
        surrogate=surrogate,
        teacher=teacher,
    )
    return _decide_checkpointing(run, devices)


def _check_engines(
    policy: object,
    config: GRPOConfig,
    interaction: Interaction | None,
    sampler: Sampler | None,
    teacher: Policy | Scorer | None,
    faults: Faults,
    *,
    has_rewards: bool,
) -> None:
    """Check the sampler, what ends its turns, and the teacher."""
    ends = TurnEnds.of(config)
    if sampler is not None:
        from grpo_jax.run.sampler import check_sampler

        faults.of(check_sampler, sampler, interaction, ends)
    if not isinstance(policy, Policy):
        return
    if policy.tokenizer is not None:
        faults.of(check_ends, ends, policy, policy.params)
    if teacher is not None or config.distillation_coef > 0:
        from grpo_jax.run.teacher import check_teacher

        faults.of(check_teacher, teacher, policy, config, has_rewards=has_rewards)


def _decide_checkpointing(run: Run, devices: Sequence[jax.Device]) -> Run:
    """The run with `gradient_checkpointing` decided by the memory of its devices, if its config leaves it open."""
    if run.config.gradient_checkpointing is not None:
        return run
    from grpo_jax.run.memory import decide_checkpointing

    local = next((device for device in devices if device.process_index == jax.process_index()), None)
    return decide_checkpointing(run, None if local is None else memory_of(local))


def _encode(
    policy: Policy,
    config: GRPOConfig,
    rows: Mapping[str, Sequence[Row] | None],
    reward_fns: Sequence[RewardFn],
    interaction: Interaction | None,
    faults: Faults,
) -> tuple[Policy, GRPOConfig, jax.sharding.Mesh | None, dict[str, EncodedPrompts]]:
    """The policy and the config on the devices of the run, its mesh, and the tokens of its datasets by their arguments.

    Raises the `faults` so far together with errors of tokens, sizes and devices.
    """
    mesh, config = faults.of(run_mesh, policy, config) or (None, config)
    found = {
        name: faults.of(_encode_rows, policy, some, config, interaction, name) for name, some in rows.items() if some
    }
    encoded = {name: some for name, some in found.items() if some is not None}
    devices = list(mesh.devices.flat if mesh else devices_of(policy.params))
    config = dataclasses.replace(config, compute_dtype=compute_dtype(config.compute_dtype, devices))
    if interaction is not None:
        from grpo_jax.rollout.interaction import environment_weights

        config = dataclasses.replace(config, reward_weights=environment_weights(config.reward_weights, reward_fns))
    policy = policy.replace(model=with_settings(policy.model, config, devices, mesh))
    shape, (data, *held_out) = shape_of(policy), (encoded.get(name) for name in rows)
    problems = run_problems(
        config,
        num_devices=mesh.size if mesh else math.prod((config.mesh or {}).values()),
        num_rows=len(data.rows) if data else 1,
        num_reward_fns=len(reward_fns) or 1,
        num_eval_rows=sum(len(some.rows) for some in held_out if some) or 1 if held_out else None,
        longest_prompt=max((len(ids) for some in encoded.values() for ids in some.token_ids), default=1),
        context_length=None if shape is None else shape.max_position_embeddings,
        num_experts=0 if shape is None else shape.num_experts,
    )
    faults.raise_together("this run", problems)
    for name, some in encoded.items():
        kwargs = config.chat_template_kwargs
        warn_of_tokens(some, policy, name, ends=TurnEnds.of(config), template_kwargs=kwargs)
    keep_programs()  # before anything is compiled
    return place_policy(policy, mesh), config, mesh, encoded


def derive_run(
    policy: Policy,
    config: GRPOConfig,
    data: EncodedPrompts,
    eval_data: EncodedPrompts | None = None,
    *,
    prompt_length: int | None = None,
    mesh: jax.sharding.Mesh | None,
    reward_fns: Sequence[Callable[..., Any]] = (),
    interaction: Interaction | None = None,
    sampler: Sampler | None = None,
    optimizer: optax.GradientTransformation | None = None,
    advantage_fn: CheckedAdvantageFn | None = None,
    surrogate: Surrogate | None = None,
    teacher: Policy | Scorer | None = None,
) -> Run:
    """The run of checked arguments, with the fields of `Run`; params of policy and teacher may be shapes."""
    if prompt_length is None:
        longest = max(map(len, data.token_ids))
        prompt_length = -(-longest // config.padding) * config.padding
    sizes, total_steps = config.sizes(), config.total_steps(len(data.rows))
    schedule = make_schedule(config, total_steps) if optimizer is None else None
    optimizer = make_optimizer(config, total_steps) if optimizer is None else optimizer
    micro = (sizes.micro_prompts, sizes.micro_completions)
    teaching = distributions = None
    if teacher is not None:
        from grpo_jax.run.teacher import make_teaching

        teaching = make_teaching(teacher, functools.partial(choose_updater, config=config, micro=micro, mesh=mesh))
        distributions = teaching.teacher if teaching and config.distillation_mode == "full_logits" else None
    return Run(
        policy=policy,
        config=config,
        data=data,
        eval_data=eval_data,
        prompt_length=prompt_length,
        reward_fns=reward_fns,
        interaction=interaction,
        sampler=sampler,
        mesh=mesh,
        sizes=sizes,
        total_steps=total_steps,
        optimizer=optimizer,
        schedule=schedule,
        updater=choose_updater(
            policy.model,
            config,
            micro=micro,
            optimizer=optimizer,
            mesh=mesh,
            surrogate=surrogate,
            teacher=distributions,
        ),
        advantage_fn=advantage_fn,
        teaching=teaching,
    )


def check_optimizer(optimizer: Any) -> None:
    """Raise unless it is an optax transformation, or None."""
    if optimizer is not None and not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise ValueError(
            f"optimizer is {show(optimizer)}: give an optax transformation, such as optax.adamw(1e-6), or None for the "
            "config's"
        )


def _as_functions(reward_fns: Any) -> list[RewardFn]:
    """Reward functions as a list."""
    if callable(reward_fns):
        return [reward_fns]
    if isinstance(reward_fns, dict) or not hasattr(reward_fns, "__iter__"):
        raise ValueError(f"reward_fns is {show(reward_fns)}: give a function, or a list of functions")
    return list((reward_fns,) if isinstance(reward_fns, str) else reward_fns)


def _training_rows(dataset: Dataset, policy: object, config: GRPOConfig) -> list[Row]:
    """Rows to train on; of an iterable dataset as many as the run samples."""
    if not isinstance(policy, Policy):
        return load_rows(dataset, max_rows=1)  # already refused
    if config.max_steps <= 0 and is_stream(dataset):
        raise ValueError(
            "dataset is an IterableDataset, which does not say how many rows it has: set max_steps, by which as many"
            " are read as the run takes, or give a part of it, list(dataset.take(1000))"
        )
    mesh = mesh_of(policy.params) if config.mesh is None else None
    try:
        most = config.most_prompts(None if mesh is None else mesh.size)
    except ValueError:  # a batch that does not split, which the checks of the run report
        most = 1
    return load_rows(dataset, max_rows=most)


def _check_functions(
    reward_fns: list[RewardFn],
    rows: Mapping[str, Sequence[Row] | None],
    config: GRPOConfig,
    interaction: Interaction | None,
    faults: Faults,
    *,
    required: bool,
) -> list[RewardFn]:
    """Check reward functions against the datasets; returns them with the environments' own."""
    own_columns: Sequence[str] = ()
    if interaction is not None:
        from grpo_jax.rollout.interaction import reward_columns, with_environments

        reward_fns, own_columns = with_environments(reward_fns, interaction), reward_columns((), interaction)
    faults.of(_check_no_environments, reward_fns, config)
    read = {name: some for name, some in rows.items() if some} or {"dataset": []}
    for name, some in read.items() if reward_fns or required else ():
        faults.of(
            check_reward_fns,
            reward_fns,
            [*some[0], *own_columns] if some else None,
            argument="the dataset" if name == "dataset" else name,
            rows=some,
        )
    return reward_fns


def _check_no_environments(reward_fns: Sequence[RewardFn], config: GRPOConfig) -> None:
    """Raise if a reward function reads environments that are closed when it is called."""
    if not config.rollout_ahead:
        return
    for fn, name in zip(reward_fns, reward_names(reward_fns), strict=True):
        if "environments" in arguments_of(fn):
            raise ValueError(
                f"rollout_ahead = True: reward function {name!r} reads environments, and they cannot wait in a"
                " checkpoint: let their get_reward() return the reward (reward functions get environment_rewards), or"
                " leave rollout_ahead False"
            )


def _check_custom(
    advantage_fn: AdvantageFn | None, surrogate: Surrogate | None, config: GRPOConfig, num_reward_fns: int
) -> CheckedAdvantageFn | None:
    """Check the caller's functions of the algorithm; returns the one that computes the advantages, if there is one."""
    if advantage_fn is None and surrogate is None and config.turn_credit == "episode":
        return None
    from grpo_jax.run.custom import check_advantage_fn, check_surrogate

    check_surrogate(surrogate, config)
    return check_advantage_fn(advantage_fn, config, num_reward_fns)


def _make_interaction(
    policy: Policy,
    config: GRPOConfig,
    rows: Mapping[str, Sequence[Row] | None],
    tools: Sequence[Callable[..., Any]] | None,
    environment_factory: Environments | None,
) -> Interaction | None:
    """The tools and environments of completions of several turns."""
    from grpo_jax.rollout.interaction import make_interaction

    if not is_cached(policy.model):
        raise ValueError(
            "tools and environment_factory: policy.model has no cache: several turns need a model of this package"
        )
    return make_interaction(
        policy.tokenizer,
        policy.eos_token_ids,
        [row for some in rows.values() for row in some or ()],
        tools=tools,
        environment_factory=environment_factory,
        chat_template_kwargs=config.chat_template_kwargs,
        most_calls=config.max_tool_calling_iterations,
        seconds=config.environment_timeout,
        on_error=config.on_environment_error,
        ends=TurnEnds.of(config),
    )


def _encode_rows(
    policy: Policy, rows: Sequence[Row], config: GRPOConfig, interaction: Interaction | None, argument: str
) -> EncodedPrompts | None:
    """The tokens of a dataset's prompts; None without a tokenizer, which `check_policy` reports."""
    if policy.tokenizer is None:
        return None
    shown = interaction is not None and interaction.format is not None
    data = encode_prompts(
        rows,
        policy.tokenizer,
        max_prompt_length=config.max_prompt_length,
        on_long_prompt=config.on_long_prompt,
        chat_template_kwargs=config.chat_template_kwargs,
        tools=[interaction.schemas(row) for row in rows] if interaction is not None and shown else None,
        argument=argument,
    )
    check_tokens(policy, data)
    return data
