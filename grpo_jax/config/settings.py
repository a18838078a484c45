"""`Settings`: the fields shared by `GRPOConfig` and `SFTConfig`, and the validation of all fields."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self

from grpo_jax.config.fields import (
    Count,
    In,
    NotNegative,
    Positive,
    read,
    read_dtype,
    read_keywords,
    read_mesh,
    read_trackers,
    setting,
    unknown_field,
)
from grpo_jax.messages import foreign_names, raise_all, show

if TYPE_CHECKING:  # `types` imports jax
    from grpo_jax.types import Json


class Sizes(NamedTuple):
    """Sizes of an iteration and of its minibatches and micro-batches, summed over all devices.

    An iteration samples G (`num_generations`) completions for each of B prompts, and makes `num_iterations` (μ) passes
    over them. Each pass is split into minibatches (one optimizer step each), and each minibatch into micro-batches.

    Attributes:
      prompts_per_iteration: B, prompts per iteration.
      completions: B × G, completions per iteration (TRL's `generation_batch_size`).
      minibatches: minibatches per pass.
      updates_per_iteration: optimizer steps per iteration, `num_iterations` × `minibatches`.
      prompts_per_update: prompts per minibatch.
      micro_batches: micro-batches per minibatch (`gradient_accumulation_steps`).
      micro_prompts: prompts per micro-batch.
      micro_completions: completions of each prompt in a micro-batch: G, or a divisor of G.
    """

    prompts_per_iteration: int
    completions: int
    minibatches: int
    updates_per_iteration: int
    prompts_per_update: int
    micro_batches: int
    micro_prompts: int
    micro_completions: int


OTHER_NAMES = {
    "warmup_ratio": "use warmup_steps; a value below 1 is a ratio",
    "max_new_tokens": "use max_completion_length",
    "kl_coef": "use beta",
    "lr": "use learning_rate",
    "epochs": "use num_train_epochs",
    "max_length": "use max_completion_length, or max_prompt_length",
    "max_seq_length": "use max_prompt_length and max_completion_length (SFTConfig: max_length)",
    "vllm_sampling_params": "use temperature, top_p, top_k and min_p; for vLLM pass sampler=engines.vllm(...)",
    "clip_eps": "use epsilon",
    "group_size": "use num_generations",
    "batch_size": "use per_device_train_batch_size (completions)",
}
"""Advice for users of other libraries, keyed by the names of those libraries' settings."""


def hints() -> dict[str, str]:
    """Return advice for unknown fields, from `OTHER_NAMES` and the tables registered in `messages`."""
    return OTHER_NAMES | {name: advice for table in foreign_names for name, advice in table().items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Base class for the configs, with their common fields. Each field is validated against its annotation."""

    # Text.
    chat_template_kwargs: Annotated[dict[str, Any] | None, read_keywords] = setting(None, resume="free", hash=False)
    """Additional keyword arguments for the tokenizer's `apply_chat_template` (TRL's SFT: a column with that name). A
    resumed run compares only the resulting prompts."""
    pad_to_multiple_of: Count | Literal["auto"] | None = "auto"
    """Pad prompts (SFT: examples) to a multiple of this many tokens, to limit the number of compiled shapes. "auto"
    uses 16 (TRL: only on Trainium). None pads to the longest prompt."""

    # Batches (see `Sizes`).
    per_device_train_batch_size: Count = setting(8, resume="rounding")
    """Completions (SFT: examples or blocks) per micro-batch and device: a multiple or a divisor of the group size."""
    gradient_accumulation_steps: Count = setting(1, resume="rounding")
    """Micro-batches per optimizer step. The split does not change the gradient."""
    max_steps: Annotated[int, In("[-1, inf)", "use -1 to train for num_train_epochs")] = setting(-1, resume="length")
    """Number of optimizer steps. -1 trains for `num_train_epochs` instead."""
    num_train_epochs: Positive = setting(3.0, resume="length")
    """Passes over the dataset if `max_steps` is -1. A batch may contain rows from two consecutive epochs."""
    seed: Annotated[int, In("[0, 4294967295]", "use an integer from 0 to 2**32 - 1")] = 42
    """Random seed for sampling and shuffling."""

    # Optimizer, memory and devices.
    learning_rate: NotNegative = 1e-6
    """Peak learning rate of AdamW."""
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = "linear"
    """Learning rate schedule: decay to 0 ("linear", "cosine"), or constant."""
    warmup_steps: NotNegative = 0
    """Number of optimizer steps for linear warm-up from 0. A value below 1 is a fraction of all steps."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay of AdamW for all parameters except norms and biases, as in transformers."""
    adam_beta1: Annotated[float, In("[0, 1)", "0.9 is usual")] = 0.9
    """Decay rate of AdamW's first moment."""
    adam_beta2: Annotated[float, In("[0, 1)", "0.999 is usual")] = 0.999
    """Decay rate of AdamW's second moment."""
    adam_epsilon: Positive = 1e-8
    """Constant that AdamW adds to the square root of the second moment."""
    max_grad_norm: NotNegative = 1.0
    """Largest global gradient norm. 0 disables clipping."""
    router_aux_loss_coef: NotNegative | None = None
    """Weight of the load-balancing loss for a mixture of experts; see `models.experts.router_loss`. None uses the
    checkpoint's value (Qwen3: 0.001), and 0 disables the loss."""
    compute_dtype: Annotated[Literal["auto", "float32", "bfloat16"], read_dtype] = "auto"
    """Dtype of matrix products. Softmax, norms, logits and log-probs are always float32. "auto" uses bfloat16 on TPUs
    and on GPUs with compute capability 8.0 or higher, and float32 elsewhere. TRL: `bf16`."""
    freeze_vision: bool = True
    """Whether the vision tower of a vision-language model is frozen, in which case each image is encoded only once per
    iteration. TRL trains the tower."""
    mesh: Annotated[dict[str, int] | None, read_mesh] = setting(None, resume="rounding", hash=False)
    """Sizes of the mesh axes "data", "fsdp" and "tensor", such as {"data": 2}. None uses one device. Not in TRL."""

    # Evaluation, logging, checkpoints.
    eval_steps: Count | None = setting(None, resume="free")
    """Optimizer steps between two evaluations. None evaluates only before the first step and after the last."""
    per_device_eval_batch_size: Count = setting(8, resume="free")
    """Completions (SFT: examples) evaluated at a time on one device."""
    logging_steps: Count = setting(10, resume="free")
    """Optimizer steps between two log lines. Metrics are means over these steps. TRL also accepts a fraction."""
    logging_first_step: bool = setting(True, resume="free")
    """Whether to also log the first optimizer step, so that curves start at step 1 (TRL: False)."""
    save_steps: Count | None = setting(500, resume="free")
    """Optimizer steps between two checkpoints. None disables these checkpoints. A run always saves at the end."""
    save_minutes: Positive | None = setting(5.0, resume="free")
    """Also write a checkpoint after an optimizer step if the last one is at least this many minutes old, according to
    the clock of process 0. None disables it. Not in TRL."""
    save_total_limit: Count | None = setting(None, resume="free")
    """Number of newest `save_steps` checkpoints to keep, in addition to the best. None keeps all. Checkpoints written
    because of signals or `save_minutes` are deleted at the next `save_steps` checkpoint, or earlier."""
    max_skipped_updates: Count | None = setting(10, resume="free")
    """Fail after this many consecutive updates with a non-finite loss or gradient. None disables it. Not in TRL."""
    metric_for_best_model: str | None = setting(None, resume="free")
    """Metric in `metrics.jsonl` whose last value is used to compare checkpoints, such as "reward" or "eval/reward"
    (SFT: "eval/loss"). The best checkpoint is kept in addition to `save_total_limit`."""
    greater_is_better: bool | None = setting(None, resume="free")
    """Whether greater values of `metric_for_best_model` are better. None means yes, unless its name ends in "loss"."""
    load_best_model_at_end: bool = setting(False, resume="free")
    """Whether to return the state from the checkpoint with the best `metric_for_best_model`, not the last state."""

    # Trackers and the hub.
    report_to: Annotated[str | Sequence[str] | None, read_trackers] = setting("none", resume="free")
    """Trackers: "tensorboard", "wandb", "trackio", a list of these, "all" (all that are installed), or "none"."""
    run_name: str | None = setting(None, resume="free")
    """Name of the run in the trackers. If None, each tracker generates a name."""
    project: str = setting("huggingface", resume="free")
    """Project name in trackio, and in Weights & Biases unless the environment variable WANDB_PROJECT is set."""
    push_to_hub: bool = setting(False, resume="free")
    """Whether to push the policy to the hub at the end and (see `hub_strategy`) at every `save_steps` checkpoint."""
    hub_model_id: str | None = setting(None, resume="free")
    """Repository on the hub, "name" or "owner/name". None uses the name of the run directory."""
    hub_private_repo: bool | None = setting(None, resume="free")
    """Whether a new repository is private. None uses its owner's default, usually public."""
    hub_strategy: Literal["end", "every_save"] = setting("every_save", resume="free")
    """When to push the policy ("every_save": also at the end). TRL's other strategies are not supported."""
    hub_revision: str | None = setting(None, resume="free")
    """Branch to push to. None uses the main branch."""

    def __new__(cls, *args: object, **values: object) -> Self:
        """Create a config. Overridden to report unknown fields together with all other errors."""
        if args:
            raise ValueError(
                f"{cls.__name__} takes keyword arguments only; to pass a dict, use {cls.__name__}.from_dict(...)"
            )
        self = super().__new__(cls)
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := [name for name in values if name not in known]:
            vars(self).update((name, value) for name, value in values.items() if name in known)
            table = hints()
            raise_all(cls.__name__, [unknown_field(name, known, table) for name in unknown] + self._read())
        return self

    def __post_init__(self) -> None:
        raise_all(type(self).__name__, self._read())

    def contradictions(self, invalid: set[str]) -> Iterator[str]:
        """Yield an error message for each conflict between fields that are not in `invalid`."""
        raise NotImplementedError

    def _read(self) -> list[str]:
        """Convert each value to a built-in type in place, and return the error messages."""
        problems, invalid = [], set()
        for field in dataclasses.fields(self):
            original = getattr(self, field.name)
            value, error = read(field.type, original)
            object.__setattr__(self, field.name, value)
            if error:
                invalid.add(field.name)
                problems.append(f"{field.name} = {show(original)}: {error}")
        return [*problems, *self.contradictions(invalid)]

    @classmethod
    def from_dict(cls, values: "Json") -> Self:
        """Build a config from a mapping of field names to values, such as the result of `to_dict` or a JSON file."""
        return cls(**{str(name): value for name, value in values.items()})

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as a JSON-serializable dict, which `from_dict` converts back to an equal config."""
        values = dataclasses.asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def sizes(self) -> Sizes:
        """Compute the batch sizes for the devices in `mesh`, or for one device without a mesh."""
        raise NotImplementedError

    def data_shards(self) -> int:
        """Return the number of shards that prompts are split into: the device count divided by the size of "tensor"."""
        return math.prod(size for axis, size in (self.mesh or {}).items() if axis != "tensor")

    def total_steps(self, num_rows: int) -> int:
        """Return the number of optimizer steps: `max_steps`, or the steps in ceil(epochs × rows / B) iterations."""
        if self.max_steps > 0:
            return self.max_steps
        sizes = self.sizes()
        iterations = math.ceil(round(self.num_train_epochs * num_rows / sizes.prompts_per_iteration, 9))
        return iterations * sizes.updates_per_iteration

    def total_warmup_steps(self, total_steps: int) -> int:
        """Return the number of warm-up steps. `warmup_steps` below 1 is a fraction of `total_steps`, rounded up."""
        return int(self.warmup_steps) if self.warmup_steps >= 1 else math.ceil(total_steps * self.warmup_steps)

    def padded(self, length: int) -> int:
        """Round the length in tokens of a prompt or example up to a multiple of `pad_to_multiple_of`."""
        multiple = 16 if self.pad_to_multiple_of == "auto" else self.pad_to_multiple_of or 1
        return -(-length // multiple) * multiple

    def logs_at(self, step: int) -> bool:
        """Return whether the settings request a log line after this optimizer step. A run also logs its last step."""
        return step % self.logging_steps == 0 or (step == 1 and self.logging_first_step)

    @property
    def best_is_greatest(self) -> bool:
        """Whether greater values of `metric_for_best_model` are better."""
        if self.greater_is_better is not None:
            return self.greater_is_better
        return not (self.metric_for_best_model or "").endswith("loss")


def shown(config: Settings, name: str) -> str:
    """Return "name = value", the start of an error message."""
    return f"{name} = {show(getattr(config, name))}"


MAX_REFILLS = 4
"""Largest number of additional rollouts per iteration with `dynamic_sampling`."""
