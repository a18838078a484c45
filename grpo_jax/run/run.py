"""A run's settings and objects, built from the validated arguments to `train` or `sft`, and its initial state."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import optax

from grpo_jax.config.config import GRPOConfig
from grpo_jax.config.settings import Sizes
from grpo_jax.config.sft import GRPOOrSFTConfig, SFTConfig
from grpo_jax.models.lora import LoraModel
from grpo_jax.models.sharding import device_bytes, place
from grpo_jax.policy import Policy
from grpo_jax.rewards.contract import TrainerState
from grpo_jax.text.prompts import EncodedPrompts, prompt_indices
from grpo_jax.types import Batch, Params, PromptImages, Prompts, RewardFn, as_jit_argument
from grpo_jax.update.state import TrainState, create_state
from grpo_jax.update.step import Updater

if TYPE_CHECKING:  # imported at runtime only when a run needs them
    from grpo_jax.rollout.episode_setup import EpisodeSetup
    from grpo_jax.run.custom import CheckedAdvantageFn
    from grpo_jax.run.sampler import Sampler
    from grpo_jax.run.teacher import TeacherScoring
    from grpo_jax.text.examples import Examples


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseRun:
    """The constant part of a `train` or `sft` run. Except for `images`, fields with a default are used only by `train`.

    `policy.params` are the initial params, released once a `TrainState` holds them. Prompts are padded to
    `prompt_length` tokens and images to the shapes in `images`, so that each program is compiled only once. `mesh` is
    None for a single device, and `schedule` is None for a custom optimizer.
    """

    policy: Policy
    config: GRPOOrSFTConfig
    data: EncodedPrompts
    prompt_length: int
    mesh: jax.sharding.Mesh | None
    sizes: Sizes
    total_steps: int
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule | None
    updater: Updater
    images: PromptImages | None = None
    reward_fns: Sequence[RewardFn] = ()
    episode_setup: EpisodeSetup | None = None  # the tools and environments of multi-turn rollouts
    sampler: Sampler | None = None
    custom_advantages: CheckedAdvantageFn | None = None
    teacher_scoring: TeacherScoring | None = None

    @property
    def keeps_old_params(self) -> bool:
        """Whether `TrainState.old_params` is set."""
        return False

    @property
    def batch_shape(self) -> tuple[int, int]:
        """Shape (B, G) of an update's batch."""
        return self.sizes.prompts_per_update, self.config.num_generations

    def param_bytes(self, params: Params) -> int:
        """Return the number of bytes per device used by the params and the adapters' frozen base model."""
        return device_bytes((as_jit_argument(self.policy.model), params))

    def zero_batch(self, state: TrainState) -> Batch:
        """Return a minibatch of zeros with the fields that an update reads. For shapes only, use `jax.eval_shape`."""
        (b, g), t = self.batch_shape, self.updater.config.max_completion_length
        images = jax.tree.map(lambda x: jnp.zeros((b, *x.shape[1:]), x.dtype), self.images)
        return Batch(
            prompts=Prompts(jnp.zeros((b, self.prompt_length), jnp.int32), jnp.zeros(b, jnp.int32), images),
            tokens=jnp.zeros((b, g, t), jnp.int32),
            mask=jnp.zeros((b, g, t), bool),
            advantages=jnp.zeros((b, g)),
            sampling_log_probs=jnp.zeros((b, g, t)),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(BaseRun):
    """A run of `train`, which samples its batches."""

    config: GRPOConfig
    eval_data: EncodedPrompts | None = None

    @property
    def samples_during_updates(self) -> bool:
        """Whether an engine samples during updates. False with several processes, whose collectives could deadlock."""
        takes_params = callable(getattr(self.sampler, "set_params", None))
        return self.config.rollout_ahead and takes_params and jax.process_count() == 1

    @property
    def keeps_old_params(self) -> bool:
        """True with several updates per iteration, or if an engine samples during updates."""
        return self.sizes.updates_per_iteration > 1 or self.samples_during_updates

    @property
    def eval_datasets(self) -> tuple[EncodedPrompts, ...]:
        """The encoded evaluation datasets. On resume, they must be unchanged if they select the best checkpoint."""
        return () if self.eval_data is None else (self.eval_data,)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids of the tokens that end a sampled completion. They must match the saved run's on resume."""
        return self.policy.eos_token_ids

    def row_indices(self, cursor: int, count: int) -> list[int]:
        """Return the row indices of `count` prompts, starting at position `cursor` in the shuffled epochs."""
        config, num_rows = self.config, len(self.data.rows)
        return prompt_indices(cursor, count, num_rows=num_rows, seed=config.seed, shuffle=config.shuffle_dataset)

    def trainer_state(self, step: int, cursor: int) -> TrainerState:
        """Return the `trainer_state` for reward functions after `step` optimizer steps and `cursor` sampled prompts."""
        return TrainerState(step, self.total_steps, cursor / len(self.data.rows))

    def zero_batch(self, state: TrainState) -> Batch:
        batch, config = super().zero_batch(state), self.config
        log_probs = batch.sampling_log_probs
        per_token = (
            config.turn_credit == "to_go" if self.custom_advantages is None else self.custom_advantages.per_token
        )
        batch = batch.replace(
            advantages=log_probs if per_token else batch.advantages,
            ref_log_probs=None if state.ref_params is None else log_probs,
            initial_log_probs=None if state.initial_params is None else log_probs,
            counted=jnp.zeros(self.batch_shape[0], bool) if config.dynamic_sampling else None,
            old_log_probs=None if self.sampler is None else log_probs,
        )
        if self.teacher_scoring is None or config.distillation_mode == "full_logits":
            return batch
        if config.distillation_mode == "sampled_token":
            return batch.replace(teacher_log_probs=log_probs)
        top = jnp.zeros((*log_probs.shape, config.distillation_topk or 1))
        return batch.replace(teacher_top_ids=top.astype(jnp.int32), teacher_top_log_probs=top)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SFTRun(BaseRun):
    """A run of `sft`, whose batches contain examples from a dataset.

    `sizes.prompts_per_iteration` counts blocks of examples, but `sizes.prompts_per_update` counts examples. A common
    prefix that is excluded from the loss becomes the batch's prompt, repeated `num_groups` times (once per data shard).
    Without such a prefix, or with images or a custom model, `num_groups` is None.
    """

    config: SFTConfig
    data: Examples
    eval_data: Mapping[str, Examples]
    num_groups: int | None

    @property
    def eval_datasets(self) -> tuple[EncodedPrompts, ...]:
        """The encoded evaluation datasets. On resume, they must be unchanged if they select the best checkpoint."""
        return tuple(self.eval_data.values())

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Empty, since SFT does not sample."""
        return ()

    @property
    def batch_shape(self) -> tuple[int, int]:
        rows = self.sizes.prompts_per_update
        return (rows, 1) if self.num_groups is None else (self.num_groups, rows // self.num_groups)


def new_state(run: BaseRun, *, donate: bool = False) -> TrainState:
    """Create the state at step 0, with only the fields that the config needs. See `create_state` for `donate`."""
    config = run.config
    adapted = isinstance(run.policy.model, LoraModel)
    state = create_state(
        run.policy.params,
        run.optimizer,
        jax.random.key(config.seed),
        keep_old=run.keeps_old_params,
        keep_reference=config.beta > 0,
        keep_initial=config.sync_ref_model,
        adapter_mixup_alpha=config.ref_model_mixup_alpha if config.sync_ref_model and adapted else None,
        entropy_coef=config.entropy_coef,
        # The adaptive bonus depends on a measured entropy, which is not available before the first update.
        entropy_bonus=0.0 if config.use_adaptive_entropy else None,
        donate=donate,
    )
    return place(state, run.mesh)
