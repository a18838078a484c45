"""`Settings`: a frozen dataclass that checks all of its fields at once; `Batches`: the batch sizes of `GRPOConfig`."""

import dataclasses
import math
from collections.abc import Container, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

from grpo_jax.config.fields import nearest_sizes, read, unknown_field
from grpo_jax.messages import names_from_elsewhere, raise_all, show

if TYPE_CHECKING:  # which imports jax
    from grpo_jax.types import Json


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


OTHER_NAMES = {
    "warmup_ratio": "use warmup_steps: below 1 it is a ratio",
    "max_new_tokens": "use max_completion_length",
    "kl_coef": "use beta",
    "lr": "use learning_rate",
    "max_length": "use max_completion_length, or max_prompt_length",
    "max_seq_length": "use max_prompt_length and max_completion_length, in SFTConfig max_length",
    "vllm_sampling_params": "use temperature, top_p, top_k and min_p; sampler=engines.vllm(...) samples by vLLM",
    "clip_eps": "use epsilon",
    "group_size": "use num_generations",
    "batch_size": "use per_device_train_batch_size (completions)",
}
"""Names that people bring from elsewhere, and what to do."""


def hints() -> dict[str, str]:
    """Name that no field has → what to do in its place: `OTHER_NAMES`, and what was handed in to `messages`."""
    return OTHER_NAMES | {name: advice for table in names_from_elsewhere for name, advice in table().items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of a frozen dataclass of settings, whose values are read and checked before anybody sees an object of it.

    The annotation of a field is its rule (`config.fields`); fields that a subclass of a settings class adds are kept as
    they come.
    """

    if TYPE_CHECKING:  # fields that each of these classes has, and that the methods below read
        mesh: dict[str, int] | None
        max_steps: int
        num_train_epochs: float
        warmup_steps: float
        pad_to_multiple_of: int | Literal["auto"] | None
        logging_steps: int
        logging_first_step: bool
        eval_steps: int | None
        metric_for_best_model: str | None
        greater_is_better: bool | None
        router_aux_loss_coef: float | None

        def sizes(self, num_devices: int | None = None) -> Sizes: ...

    def __new__(cls, *args: object, **values: object) -> Self:
        """Refuse names that are no fields, together with all else that is wrong."""
        if args:
            raise ValueError(
                f"{cls.__name__} takes its fields by keyword; for a dict use {cls.__name__}.from_dict(...)"
            )
        self = super().__new__(cls)
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := [name for name in values if name not in known]:
            vars(self).update((name, value) for name, value in values.items() if name in known)
            table = hints()
            raise_all(cls.__name__, [unknown_field(name, known, table) for name in unknown] + self._read())
        return self

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raise one `ValueError` that lists every error; runs at construction, so on settings that exist it passes."""
        raise_all(type(self).__name__, self._read())

    def contradictions(self, wrong: set[str]) -> Iterator[str]:
        """Yield an error line for each contradiction between fields, none of which is in `wrong`: bad by themselves."""
        yield from ()

    def _read(self) -> list[str]:
        """Put the plain Python type of each value in its place, and return the error lines."""
        # What a subclass adds to the first class with fields is not read.
        first = next(kind for kind in reversed(type(self).__mro__) if getattr(kind, "__dataclass_fields__", None))
        problems, wrong = [], set()
        for field in dataclasses.fields(first):
            came = getattr(self, field.name)
            value, fault = read(field.type, came)
            object.__setattr__(self, field.name, value)
            if fault:
                wrong.add(field.name)
                problems.append(f"{field.name} = {show(came)}: {fault}")
        return [*problems, *self.contradictions(wrong)]

    @classmethod
    def from_dict(cls, values: "Json") -> Self:
        """Build a config from field names and values, such as `to_dict` returns or a JSON file holds."""
        if not isinstance(values, Mapping):
            raise ValueError(f"{cls.__name__}.from_dict takes a dict of fields, not {show(values)}")
        return cls(**{str(name): value for name, value in values.items()})

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as values that `json.dumps` takes and `from_dict` turns back into an equal config."""
        values = dataclasses.asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def data_shards(self, num_devices: int | None = None) -> int:
        """Return over how many devices prompts or examples are split: all but for those along the mesh's "tensor" axis.

        Args:
          num_devices: devices of the run; None: those of `mesh`, 1 without one.
        """
        mesh = self.mesh or {}
        devices = math.prod(mesh.values()) if num_devices is None else num_devices
        return max(devices // mesh.get("tensor", 1), 1)

    def total_steps(self, num_rows: int, num_devices: int | None = None) -> int:
        """Return the optimizer steps of the run: `max_steps`, or what `num_train_epochs` over `num_rows` rows takes.

        Of an SFT run rows are examples, or blocks of them. Batches run on over the end of an epoch, so that no row is
        left out: ceil(epochs × rows / B) iterations.

        Example:
          >>> from grpo_jax import GRPOConfig
          >>> GRPOConfig(num_train_epochs=2, num_iterations=3).total_steps(num_rows=10)
          60
        """
        if self.max_steps > 0:
            return self.max_steps
        sizes = self.sizes(num_devices)
        return math.ceil(round(self.num_train_epochs * num_rows / sizes.prompts, 9)) * sizes.updates

    def total_warmup_steps(self, total_steps: int) -> int:
        """Return the warm-up in optimizer steps: `warmup_steps`, or that share of `total_steps` (rounded up)."""
        return int(self.warmup_steps) if self.warmup_steps >= 1 else math.ceil(total_steps * self.warmup_steps)

    @property
    def padding(self) -> int:
        """Multiple that prompts or examples are padded to, in tokens (1: to the longest)."""
        if isinstance(self.pad_to_multiple_of, int):
            return self.pad_to_multiple_of
        return 32 if self.pad_to_multiple_of == "auto" else 1

    def logs_at(self, step: int) -> bool:
        """Return whether there is a line of metrics after this optimizer step; there is one after the last too."""
        return step % self.logging_steps == 0 or (step == 1 and self.logging_first_step)

    @property
    def best_is_greatest(self) -> bool:
        """Whether the greatest `metric_for_best_model` is the best."""
        if self.greater_is_better is not None:
            return self.greater_is_better
        return not (self.metric_for_best_model or "").endswith("loss")


def shown(config: Settings, name: str) -> str:
    """Return "name = value", the head of an error line."""
    return f"{name} = {show(getattr(config, name))}"


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
        """Return the prompts that a run of `max_steps` samples at most, with refills; None without `max_steps`."""
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
