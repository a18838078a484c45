"""The batch sizes that the fields of a config come to on a number of devices."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from grpo_jax.config.checks import split_problems
from grpo_jax.messages import raise_all

if TYPE_CHECKING:  # whose method `sizes` this is
    from grpo_jax.config.config import GRPOConfig


class Sizes(NamedTuple):
    """The sizes of an iteration, its updates and their micro-batches, over all devices.

    ```
    iteration:  prompts × G = completions          sampled together from one snapshot of the policy
      pass:     num_iterations (μ) times over the same completions
        update: minibatches in a pass; prompts_per_update prompts each; one optimizer step each
          micro-batch: micro_batches in an update; [micro_prompts, micro_completions] completions each
    ```

    Attributes:
      prompts: B, prompts of an iteration, over all devices.
      completions: B × G, completions of an iteration, over all devices (TRL's `generation_batch_size`).
      minibatches: that one pass over the completions is cut into, along B.
      updates: optimizer steps of an iteration, `num_iterations` × `minibatches`.
      prompts_per_update: prompts in one minibatch, over all devices.
      micro_batches: micro-batches of one minibatch (`gradient_accumulation_steps`).
      micro_prompts: prompts in one micro-batch, over all devices.
      micro_completions: completions of each of them in one micro-batch: G, or a divisor of G when a micro-batch is
        smaller than a group.
    """

    prompts: int
    completions: int
    minibatches: int
    updates: int
    prompts_per_update: int
    micro_batches: int
    micro_prompts: int
    micro_completions: int


def sizes_of(config: GRPOConfig, num_devices: int | None) -> Sizes:
    """Return the sizes that `GRPOConfig.sizes` documents."""
    shards, group = config.data_shards(num_devices), config.num_generations
    raise_all("GRPOConfig", list(split_problems(config, shards)))
    micro = config.per_device_train_batch_size * shards
    steps = config.steps_per_generation or config.gradient_accumulation_steps
    if config.generation_batch_size is not None:
        steps = config.generation_batch_size // micro
    minibatches = steps // config.gradient_accumulation_steps
    micro_completions = min(group, config.per_device_train_batch_size)
    return Sizes(
        prompts=micro * steps // group,
        completions=micro * steps,
        minibatches=minibatches,
        updates=config.num_iterations * minibatches,
        prompts_per_update=micro * config.gradient_accumulation_steps // group,
        micro_batches=config.gradient_accumulation_steps,
        micro_prompts=micro // micro_completions,
        micro_completions=micro_completions,
    )


def most_prompts_of(config: GRPOConfig, num_devices: int | None) -> int | None:
    """Return what `GRPOConfig.most_prompts` documents."""
    if config.max_steps <= 0:
        return None
    sizes = sizes_of(config, num_devices)
    # With max_kl_old an iteration may end after its first update.
    iterations = math.ceil(config.max_steps / (sizes.updates if config.max_kl_old is None else 1))
    return iterations * sizes.prompts * (1 + config.max_refills if config.dynamic_sampling else 1)
