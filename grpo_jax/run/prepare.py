"""Checks of a run's arguments, each by itself and against the others, before anything runs; all errors at once."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import optax

from grpo_jax.config.checks import run_problems
from grpo_jax.config.config import GRPOConfig
from grpo_jax.config.sft import SFTConfig
from grpo_jax.hub.policy import place_policy, with_settings
from grpo_jax.maths.surrogates import Surrogate
from grpo_jax.messages import Faults, show
from grpo_jax.models.platform import compute_dtype, memory_of
from grpo_jax.models.sharding import AXES, check_fits, make_mesh, mesh_of
from grpo_jax.models.streams import devices_of
from grpo_jax.policy import Policy
from grpo_jax.rewards.contract import arguments_of, check_reward_fns, reward_names
from grpo_jax.rollout.ends import BY_EOS, TurnEnds
from grpo_jax.rollout.interaction import (
    Interaction,
    encode_rows,
    environment_weights,
    make_interaction,
    reward_columns,
    with_environments,
)
from grpo_jax.run.beginning import decide_checkpointing
from grpo_jax.run.cautions import check_policy, check_tokens, shape_of, warn_of_tokens
from grpo_jax.run.kept_programs import keep_programs
from grpo_jax.run.resume import describe
from grpo_jax.run.run import Arguments, Run, SFTRun
from grpo_jax.run.sampler import Sampler, check_ends, check_sampler
from grpo_jax.run.seams import OwnAdvantages, check_surrogate, own_advantages
from grpo_jax.run.teacher import Scorer, check_teacher, make_teaching
from grpo_jax.text.prompts import EncodedPrompts, join_prompts
from grpo_jax.text.rows import load_rows
from grpo_jax.text.sources import Dataset, is_stream, several
from grpo_jax.types import RewardFn, Row, is_cached
from grpo_jax.update.optimizer import make_optimizer, make_schedule
from grpo_jax.update.packed import choose_updater
from grpo_jax.update.state import TrainState

_Config = TypeVar("_Config", GRPOConfig, SFTConfig)


def prepare(arguments: Arguments) -> Run:
    """Check the arguments of a run, and derive what follows from them; a `ValueError` names all that is wrong."""
    policy, config = arguments.policy, arguments.config
    if isinstance(policy, Policy):
        policy.check_held()  # without params nothing can be said of the rest
    faults = Faults()
    faults.of(_check_config, config)
    ends = TurnEnds.of(config) if isinstance(config, GRPOConfig) else BY_EOS
    faults.of(check_policy, policy, ends)
    faults.of(check_optimizer, arguments.optimizer)
    fns = faults.of(_functions, arguments.reward_fns)
    rows = {"dataset": faults.of(training_rows, arguments.dataset, policy, config)}
    for part, some in several(arguments.eval_dataset).items():
        rows[_eval_name(part)] = faults.of(load_rows, some, argument=_eval_name(part))
    known = isinstance(policy, Policy) and isinstance(config, GRPOConfig)
    interaction = faults.of(_interaction, arguments, rows) if known else None
    faults.of(check_sampler, arguments.sampler, interaction, ends)
    if isinstance(policy, Policy) and policy.tokenizer is not None:
        faults.of(check_ends, ends, policy, policy.params)
    if known:
        rewarded = fns is None or bool(fns) or arguments.environment_factory is not None
        faults.of(check_teacher, arguments.teacher, policy, config, has_rewards=rewarded)
    unread = interaction is None and arguments.environment_factory is not None  # its reward would be one of them
    if fns is not None and (fns or not unread):
        fns = with_environments(fns, interaction)
        faults.of(_check_no_environments, fns, config)
        read = {name: some for name, some in rows.items() if some} or {"dataset": []}
        for name, some in read.items() if fns or arguments.teacher is None else ():
            faults.of(
                check_reward_fns,
                fns,
                reward_columns(some[0], interaction) if some else None,
                argument="the dataset" if name == "dataset" else name,
                rows=some,
            )
    if not known:
        faults.raise_together("this run")
    return _encoded_run(arguments, faults, rows, fns or [], interaction)


def _encoded_run(
    arguments: Arguments,
    faults: Faults,
    rows: Mapping[str, Sequence[Row] | None],
    reward_fns: Sequence[RewardFn],
    interaction: Interaction | None,
) -> Run:
    """The run of a policy, a config and rows that have been read, unless there are faults."""
    policy, config = arguments.policy, arguments.config
    own = faults.of(own_advantages, arguments.advantage_fn, config, len(reward_fns) or 1)
    faults.of(check_surrogate, arguments.surrogate, config)
    mesh, config = faults.of(run_mesh, policy, config) or (None, config)
    config = dataclasses.replace(config, reward_weights=environment_weights(config.reward_weights, reward_fns))
    encoded = {name: faults.of(_encode, policy, some, config, interaction, name) for name, some in rows.items() if some}
    data = encoded.get("dataset")
    parts = {part: encoded.get(_eval_name(part)) for part in several(arguments.eval_dataset)}
    held = {part: some for part, some in parts.items() if some is not None}
    eval_data = join_prompts(held) if held else None
    devices = list(mesh.devices.flat if mesh else devices_of(policy.params))
    config = dataclasses.replace(config, compute_dtype=compute_dtype(config.compute_dtype, devices))
    policy = policy.replace(model=with_settings(policy.model, config, devices, mesh))
    shape = shape_of(policy)
    longest, longest_of_eval = (max(map(len, some.token_ids)) if some else 1 for some in (data, eval_data))
    problems = run_problems(
        config,
        num_devices=mesh.size if mesh else math.prod((config.mesh or {}).values()),
        num_rows=len(data.rows) if data else 1,
        num_reward_fns=len(reward_fns) or 1,
        num_eval_rows=None if not parts else len(eval_data.rows) if eval_data else 1,
        longest_prompt=max(longest, longest_of_eval),
        context_length=None if shape is None else shape.max_position_embeddings,
        num_experts=0 if shape is None else shape.num_experts,
    )
    faults.raise_together("this run", problems)
    assert data is not None, "what has no data has faults"
    for name, some in encoded.items():
        if some is not None:
            kwargs = config.chat_template_kwargs
            warn_of_tokens(some, policy, name, reward_fns=reward_fns, ends=TurnEnds.of(config), template_kwargs=kwargs)
    keep_programs()  # what is compiled from here on
    teacher = arguments.teacher
    if isinstance(teacher, Policy):
        teacher = place_policy(teacher.replace(model=with_settings(teacher.model, config, devices, mesh)), mesh)
    run = derive_run(
        place_policy(policy, mesh),
        config,
        data,
        eval_data,
        prompt_length=-(-longest // config.padding) * config.padding,
        mesh=mesh,
        reward_fns=reward_fns,
        interaction=interaction,
        sampler=arguments.sampler,
        optimizer=arguments.optimizer,
        own_advantages=own,
        surrogate=arguments.surrogate,
        teacher=teacher,
    )
    here = next((device for device in devices if device.process_index == jax.process_index()), None)
    return decide_checkpointing(run, None if here is None else memory_of(here))


def derive_run(
    policy: Policy,
    config: GRPOConfig,
    data: EncodedPrompts,
    eval_data: EncodedPrompts | None = None,
    *,
    prompt_length: int,
    mesh: jax.sharding.Mesh | None,
    reward_fns: Sequence[Callable[..., Any]] = (),
    interaction: Interaction | None = None,
    sampler: Sampler | None = None,
    optimizer: optax.GradientTransformation | None = None,
    own_advantages: OwnAdvantages | None = None,
    surrogate: Surrogate | None = None,
    teacher: Policy | Scorer | None = None,
) -> Run:
    """The run of arguments that have been checked; params of policy and teacher may be shapes. Fields as in `Run`."""
    sizes, total_steps = config.sizes(), config.total_steps(len(data.rows))
    schedule = make_schedule(config, total_steps) if optimizer is None else None
    optimizer = make_optimizer(config, total_steps) if optimizer is None else optimizer
    micro = (sizes.micro_prompts, sizes.micro_completions)

    score_by = functools.partial(choose_updater, config=config, micro=micro, mesh=mesh)
    teaching = make_teaching(teacher, score_by)
    heard = None if teaching is None or config.distillation_mode != "full_logits" else teaching.teacher
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
            policy.model, config, micro=micro, optimizer=optimizer, mesh=mesh, surrogate=surrogate, teacher=heard
        ),
        own_advantages=own_advantages,
        teaching=teaching,
    )


def _check_config(config: Any) -> None:
    """Raise unless it is a config."""
    if not isinstance(config, GRPOConfig):
        raise ValueError(
            f"config must be a GRPOConfig; got {type(config).__name__} (GRPOConfig.from_dict takes a dict)."
        )


def training_rows(dataset: Dataset, policy: Any, config: Any) -> list[Row]:
    """Rows to train on; of what can only be iterated over as many as the run samples."""
    if not (isinstance(policy, Policy) and isinstance(config, GRPOConfig)):
        return load_rows(dataset, most=1)  # this has been refused already
    if config.max_steps <= 0 and is_stream(dataset):
        raise ValueError(
            "dataset is an IterableDataset, which does not say how many rows it has: set max_steps, by which as many"
            " are read as the run takes, or give a part of it, list(dataset.take(1000))"
        )
    mesh = mesh_of(policy.params) if config.mesh is None else None
    try:
        most = config.most_prompts(None if mesh is None else mesh.size)
    except ValueError:  # a batch that does not split, which the checks of the run say
        most = 1
    return load_rows(dataset, most=most)


def run_mesh(policy: Policy, config: _Config) -> tuple[jax.sharding.Mesh | None, _Config]:
    """The mesh of a run, and the config that names its sizes: that of the config, or the one that the policy is on."""
    mesh = mesh_of(policy.params) if config.mesh is None else make_mesh(config.mesh)
    if mesh is None:
        return None, config
    if not set(mesh.axis_names) <= set(AXES):
        raise ValueError(f"policy is on a mesh with the axes {mesh.axis_names}: they have to be of {', '.join(AXES)}")
    axes = dict(mesh.shape) if config.mesh is None else config.mesh
    if (shape := shape_of(policy)) is not None:
        channels = math.gcd(shape.intermediate_size, shape.expert_size if shape.num_experts else 0)
        check_fits(axes, width=shape.hidden_size, heads=shape.num_heads, channels=channels)
    return mesh, dataclasses.replace(config, mesh=axes)


def check_optimizer(optimizer: Any) -> None:
    """Raise unless it is an optax transformation, or None."""
    if optimizer is not None and not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise ValueError(
            f"optimizer is {show(optimizer)}: give an optax transformation, such as optax.adamw(1e-6), or None for the "
            "config's"
        )


def _functions(reward_fns: Any) -> list[Callable[..., Any]]:
    """Reward functions as a list."""
    if callable(reward_fns):
        return [reward_fns]
    if isinstance(reward_fns, dict) or not hasattr(reward_fns, "__iter__"):
        raise ValueError(f"reward_fns is {show(reward_fns)}: give a function, or a list of functions")
    return list((reward_fns,) if isinstance(reward_fns, str) else reward_fns)


def _check_no_environments(fns: list[Callable[..., Any]], config: Any) -> None:
    """Raise if a reward function reads environments that are no longer there when it is called."""
    if not (isinstance(config, GRPOConfig) and config.rollout_ahead):
        return
    for fn, name in zip(fns, reward_names(fns), strict=True):
        if "environments" in arguments_of(fn):
            raise ValueError(
                f"rollout_ahead = True: reward function {name!r} reads environments, and they cannot wait in a"
                " checkpoint: let their get_reward() say what is wanted (reward functions get environment_rewards), or"
                " leave rollout_ahead False"
            )


def _interaction(arguments: Arguments, rows: Mapping[str, Sequence[Row] | None]) -> Interaction | None:
    """The tools and environments that answer completions of several turns."""
    policy, config = arguments.policy, arguments.config
    if not arguments.tools and arguments.environment_factory is None:
        return None
    if not is_cached(policy.model):
        raise ValueError(
            "tools and environment_factory: policy.model has no cache: several turns need a model of this package"
        )
    return make_interaction(
        policy.tokenizer,
        policy.eos_token_ids,
        [row for some in rows.values() for row in some or ()],
        tools=arguments.tools,
        environment_factory=arguments.environment_factory,
        chat_template_kwargs=config.chat_template_kwargs,
        most_calls=config.max_tool_calling_iterations,
        seconds=config.environment_timeout,
        on_error=config.on_environment_error,
        ends=TurnEnds.of(config),
    )


def _encode(
    policy: Policy, rows: Sequence[Row], config: GRPOConfig, interaction: Interaction | None, argument: str
) -> EncodedPrompts | None:
    """The tokens of a dataset's prompts, which the model has to know."""
    if policy.tokenizer is None:
        return None  # check_policy has said so
    data = encode_rows(
        interaction,
        rows,
        policy.tokenizer,
        max_prompt_length=config.max_prompt_length,
        on_long_prompt=config.on_long_prompt,
        chat_template_kwargs=config.chat_template_kwargs,
        argument=argument,
    )
    check_tokens(policy, data)
    return data


def _eval_name(part: str) -> str:
    """The name of a dataset to evaluate on in messages; of one of several with its own."""
    return f"eval_dataset[{part!r}]" if part else "eval_dataset"


def about(run: Run | SFTRun, state: TrainState) -> dict[str, Any]:
    """The settings, data and model that a run begins with, as its checkpoints describe them."""
    return describe(
        run.config,
        data=run.data,
        reward_fns=run.reward_fns if isinstance(run, Run) else (),
        model=run.policy.model,
        state=state,
        total_steps=run.total_steps,
        eos_token_ids=run.policy.eos_token_ids if isinstance(run, Run) else (),
        eval_data=run.eval_data,
        interaction=run.interaction if isinstance(run, Run) else None,
        own_optimizer=run.schedule is None,
        own_sampler=isinstance(run, Run) and run.sampler is not None,
        own_functions={
            "advantage_fn": run.advantage_fn if isinstance(run, Run) else None,
            "surrogate": run.updater.surrogate,
        },
        teacher=run.teaching.identity if isinstance(run, Run) and run.teaching is not None else None,
    )
