"""The batch sizes among the settings of a run of `train`: how they go together, and what they come to."""

import math
from collections.abc import Container, Iterator
from typing import TYPE_CHECKING

from grpo_jax.config.fields import nearest_sizes
from grpo_jax.config.settings import Settings, shown
from grpo_jax.config.sizes import Sizes
from grpo_jax.messages import raise_all

MAX_REFILLS = 4
"""Further rollouts that `dynamic_sampling` adds to one iteration at most."""


class Batches(Settings):
    """The part of `GRPOConfig` that is about batches; the fields are that class's."""

    if TYPE_CHECKING:
        num_generations: int
        per_device_train_batch_size: int
        gradient_accumulation_steps: int
        steps_per_generation: int | None
        generation_batch_size: int | None
        num_iterations: int
        rollout_ahead: bool
        dynamic_sampling: bool

    def sizes(self, num_devices: int | None = None) -> Sizes:
        """Return the batch sizes that the fields come to.

        Args:
          num_devices: devices of the run; None: those of `mesh`, 1 without one.

        Raises:
          ValueError: if `generation_batch_size` does not split evenly over that many devices.

        Example:
          >>> from grpo_jax import GRPOConfig
          >>> GRPOConfig(per_device_train_batch_size=32, gradient_accumulation_steps=2, num_iterations=3).sizes()[:4]
          (8, 64, 1, 3)
        """
        shards, group = self.data_shards(num_devices), self.num_generations
        raise_all("GRPOConfig", list(self.split_problems(shards)))
        micro = self.per_device_train_batch_size * shards
        steps = self.steps_per_generation or self.gradient_accumulation_steps
        if self.generation_batch_size is not None:
            steps = self.generation_batch_size // micro
        minibatches = steps // self.gradient_accumulation_steps
        micro_completions = min(group, self.per_device_train_batch_size)
        return Sizes(
            prompts=micro * steps // group,
            completions=micro * steps,
            minibatches=minibatches,
            updates=self.num_iterations * minibatches,
            prompts_per_update=micro * self.gradient_accumulation_steps // group,
            micro_batches=self.gradient_accumulation_steps,
            micro_prompts=micro // micro_completions,
            micro_completions=micro_completions,
        )

    def most_prompts(self, num_devices: int | None = None) -> int | None:
        """Return the prompts that a run of `max_steps` samples at most, refills among them; None without `max_steps`.

        Example:
          >>> from grpo_jax import GRPOConfig
          >>> GRPOConfig(max_steps=5, per_device_train_batch_size=16, num_iterations=2).most_prompts()
          6
        """
        if self.max_steps <= 0:
            return None
        sizes = self.sizes(num_devices)
        iterations = math.ceil(self.max_steps / sizes.updates)
        return iterations * sizes.prompts * (1 + MAX_REFILLS if self.dynamic_sampling else 1)

    @property
    def on_policy(self) -> bool:
        """Whether every update begins with the very policy that sampled its completions: the ratio is 1 then."""
        return self.sizes().updates == 1 and not self.rollout_ahead

    def batch_problems(self, wrong: Container[str]) -> Iterator[str]:
        """Yield the error lines of batch sizes that don't divide, whatever the number of devices."""
        sizes = ("num_generations", "per_device_train_batch_size", "gradient_accumulation_steps")
        if any(name in wrong for name in (*sizes, "steps_per_generation", "generation_batch_size")):
            return
        group, micro, accumulated = (getattr(self, name) for name in sizes)

        def whole_groups(size: int) -> bool:
            return (size % group == 0 or group % size == 0) and size * accumulated % group == 0

        if not whole_groups(micro):
            yield (
                f"{shown(self, 'per_device_train_batch_size')}: times gradient_accumulation_steps = {accumulated}"
                f" it makes {micro * accumulated} completions per device and update, which cannot be cut into whole"
                f" groups of num_generations = {group}; {nearest_sizes(micro, whole_groups)}"
            )
        steps = self.steps_per_generation
        if steps is not None and steps % accumulated:
            yield (
                f"{shown(self, 'steps_per_generation')}: is not a multiple of gradient_accumulation_steps ="
                f" {accumulated}; {nearest_sizes(steps, lambda size: size % accumulated == 0)}"
            )
        if steps is not None and self.generation_batch_size is not None:
            yield (
                f"{shown(self, 'generation_batch_size')}: steps_per_generation = {steps} says the same in another way;"
                " set one of the two"
            )
        elif whole_groups(micro):
            yield from self.split_problems(shards=1)

    def split_problems(self, shards: int) -> Iterator[str]:
        """Yield the error line of a generation batch that does not split into the minibatches of so many shards."""
        micro, accumulated = self.per_device_train_batch_size, self.gradient_accumulation_steps
        update, batch = micro * accumulated * shards, self.generation_batch_size
        if batch is not None and batch % update:
            devices = f" × {shards} devices" if shards > 1 else ""
            product = f"per_device_train_batch_size = {micro} × gradient_accumulation_steps = {accumulated}{devices}"
            yield (
                f"{shown(self, 'generation_batch_size')}: does not split into minibatches of {update}"
                f" completions ({product}); {nearest_sizes(batch, lambda size: size % update == 0)}"
            )
