"""A run as two values: its arguments as they came, and what they come to once they have been checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

from grpo_jax.config.config import GRPOConfig
from grpo_jax.config.settings import Sizes
from grpo_jax.config.sft import Config, SFTConfig
from grpo_jax.maths.surrogates import Surrogate
from grpo_jax.policy import Policy
from grpo_jax.rewards.contract import TrainerState
from grpo_jax.rollout.interaction import Interaction
from grpo_jax.run.sampler import Sampler, follows
from grpo_jax.run.seams import OwnAdvantages
from grpo_jax.run.teacher import Scorer, Teaching
from grpo_jax.text.examples import Examples
from grpo_jax.text.prompts import EncodedPrompts, prompt_indices
from grpo_jax.text.sources import Dataset
from grpo_jax.types import AdvantageFn, Environments, RewardFn
from grpo_jax.update.packed import Updater


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The arguments of `train` that say what is trained and how, as they came; `prepare` checks them."""

    policy: Policy
    dataset: Dataset
    reward_fns: RewardFn | Sequence[RewardFn]
    config: GRPOConfig
    eval_dataset: Dataset | None = None
    optimizer: optax.GradientTransformation | None = None
    tools: Sequence[Callable[..., Any]] | None = None
    environment_factory: Environments | None = None
    sampler: Sampler | None = None
    advantage_fn: AdvantageFn | None = None
    surrogate: Surrogate | None = None
    teacher: Policy | Scorer | None = None


@dataclasses.dataclass(frozen=True)
class BaseRun:
    """All that every run needs and never changes. Its arguments have been checked before it is made.

    Attributes:
      policy: model, tokenizer and ids; the params are those of its `TrainState`, once there is one.
      config: the settings, with the mesh and the dtype that the devices have decided.
      data: the encoded dataset.
      eval_data: the rows to evaluate on; None for no evaluation.
      prompt_length: P, one for all batches, so that nothing is compiled twice.
      mesh: where params and batches are; None for one device.
      sizes: prompts, minibatches and micro-batches of an iteration.
      total_steps: optimizer steps.
      optimizer: the transformation of the state's `opt_state`.
      schedule: its learning rate by step; None where the caller has given an optimizer.
      updater: scores completions and makes updates.
    """

    policy: Policy
    config: Config
    data: EncodedPrompts
    eval_data: EncodedPrompts | None
    prompt_length: int
    mesh: jax.sharding.Mesh | None
    sizes: Sizes
    total_steps: int
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule | None
    updater: Updater

    @property
    def batch_shape(self) -> tuple[int, int]:
        """B and G of an update's batch."""
        return self.sizes.prompts_per_update, self.config.num_generations


@dataclasses.dataclass(frozen=True)
class Run(BaseRun):
    """A run of `train`, whose batches are sampled and scored.

    Attributes:
      reward_fns: K reward functions, those of environments included.
      interaction: who answers completions of several turns; None: they have one.
      sampler: the engine in the place of `generate`; None for that.
      own_advantages: in the place of `compute_advantages`: the caller's function or that of `turn_credit`; else None.
      teaching: the teacher; None: there is none.
    """

    config: GRPOConfig
    reward_fns: Sequence[RewardFn]
    interaction: Interaction | None
    sampler: Sampler | None
    own_advantages: OwnAdvantages | None = None
    teaching: Teaching | None = None

    @property
    def samples_beside(self) -> bool:
        """Whether an engine samples the next completions beside the rewards and the updates (`run.beside`).

        Not with several processes, whose threads would have to agree on the order of what they ask of one another.
        """
        return self.config.rollout_ahead and follows(self.sampler) and jax.process_count() == 1

    def numbers(self, cursor: int, count: int) -> list[int]:
        """The rows of the prompts from `cursor` on, by their indices: `count` entries of the epochs."""
        config, num_rows = self.config, len(self.data.rows)
        entries = prompt_indices(cursor, count, num_rows=num_rows, seed=config.seed, shuffle=config.shuffle_dataset)
        return [row for _, row in entries]

    @property
    def per_token(self) -> bool:
        """Whether each token has an advantage of its own; a plan has no functions, and its config says so."""
        return self.config.turn_credit != "episode" if self.own_advantages is None else self.own_advantages.per_token

    @property
    def advantage_fn(self) -> AdvantageFn | None:
        """The caller's own function in the place of the config's advantages."""
        own = self.own_advantages
        return None if own is None or self.config.turn_credit != "episode" else own.function

    def trainer_state(self, step: int, cursor: int) -> TrainerState:
        """The progress that reward functions may know, after so many optimizer steps and sampled prompts."""
        return TrainerState(step, self.total_steps, cursor / len(self.data.rows))


@dataclasses.dataclass(frozen=True)
class SFTRun(BaseRun):
    """A run of `sft`, whose batches are examples of its dataset; `sizes.prompts` counts blocks of them.

    Attributes:
      num_groups: prompts of a batch, which are all the beginning that the examples share; None: each has its own.
    """

    config: SFTConfig
    data: Examples
    eval_data: Examples | None
    num_groups: int | None

    @property
    def batch_shape(self) -> tuple[int, int]:
        """B and G of an update's batch."""
        rows = self.sizes.prompts_per_update
        return (rows, 1) if self.num_groups is None else (self.num_groups, rows // self.num_groups)
