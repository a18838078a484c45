"""`Settings`: the fields that `GRPOConfig` and `SFTConfig` share, and the validation of all fields."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
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

if TYPE_CHECKING:  # which imports jax
    from grpo_jax.types import Json


class Sizes(NamedTuple):
    """The sizes of an iteration, its updates and their micro-batches, over all devices.

    An iteration samples `prompts` × G completions and passes over them `num_iterations` (μ) times. A pass is split into
    minibatches (one optimizer step each), and a minibatch into micro-batches.

    Attributes:
      prompts: B, prompts of an iteration.
      completions: B × G, completions of an iteration (TRL's `generation_batch_size`).
      minibatches: minibatches of one pass.
      updates: optimizer steps of an iteration, `num_iterations` × `minibatches`.
      prompts_per_update: prompts of a minibatch.
      micro_batches: micro-batches of a minibatch (`gradient_accumulation_steps`).
      micro_prompts: prompts of a micro-batch.
      micro_completions: completions per prompt of a micro-batch: G, or a divisor of G.
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
"""Advice for settings of other libraries, by name."""


def hints() -> dict[str, str]:
    """Return the advice for unknown fields: `OTHER_NAMES` and the tables registered in `messages`."""
    return OTHER_NAMES | {name: advice for table in foreign_names for name, advice in table().items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Base class of the configs, with their common fields. The constructor validates them by their annotations."""

    # Text.
    chat_template_kwargs: Annotated[dict[str, Any] | None, read_keywords] = setting(None, hash=False)
    """Further keywords for the tokenizer's `apply_chat_template` (TRL's SFT: a column of that name)."""
    pad_to_multiple_of: Count | Literal["auto"] | None = "auto"
    """Pad prompts (SFT: examples) to a multiple of this many tokens, so that few shapes are compiled; "auto": 32 (TRL:
    only on Trainium); None: pad to the longest only."""

    # Batches (see `Sizes`).
    per_device_train_batch_size: Count = setting(8, resume="rounding")
    """Completions of one micro-batch on one device: whole groups, or a divisor of one (SFT: examples or blocks)."""
    gradient_accumulation_steps: Count = setting(1, resume="rounding")
    """Micro-batches of one optimizer step; the split does not change the gradient."""
    max_steps: Annotated[int, In("[-1, inf)", "use -1 to train by num_train_epochs")] = setting(-1, resume="length")
    """Optimizer steps of the run; -1: as many as `num_train_epochs` takes."""
    num_train_epochs: Positive = setting(3.0, resume="length")
    """Passes over the dataset if `max_steps` is -1; batches continue across the end of an epoch."""
    seed: Annotated[int, In("[0, 4294967295]", "use a whole number from 0 to 2**32 - 1")] = 42
    """Seed of sampling and shuffling."""

    # Optimizer, memory and devices.
    learning_rate: NotNegative = 1e-6
    """Peak of the schedule, for AdamW."""
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = "linear"
    """Schedule over the run: decay to 0 ("linear", "cosine"), or constant."""
    warmup_steps: NotNegative = 0
    """Optimizer steps of linear warm-up from 0; below 1: a fraction of all steps."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay of AdamW, on all parameters except norms and biases, as in transformers."""
    adam_beta1: Annotated[float, In("[0, 1)", "0.9 is usual")] = 0.9
    """Decay of the first moment."""
    adam_beta2: Annotated[float, In("[0, 1)", "0.999 is usual")] = 0.999
    """Decay of the second moment."""
    adam_epsilon: Positive = 1e-8
    """Added to the root of the second moment."""
    max_grad_norm: NotNegative = 1.0
    """Bound of the global gradient norm; 0: no clipping."""
    router_aux_loss_coef: NotNegative | None = None
    """Weight of the load-balancing loss of a mixture of experts, see `models.experts.router_loss`; None: the
    checkpoint's own (Qwen3: 0.001); 0: off."""
    compute_dtype: Annotated[Literal["auto", "float32", "bfloat16"], read_dtype] = "auto"
    """Dtype of matrix products; softmax, norms, logits and log-probs are always float32. "auto": bfloat16 on TPUs and
    GPUs of compute capability 8.0 or higher, float32 elsewhere. Ours (TRL: `bf16`)."""
    mesh: Annotated[dict[str, int] | None, read_mesh] = setting(None, resume="rounding", hash=False)
    """Devices along "data", "fsdp" and "tensor", such as {"data": 2, "fsdp": 4}; None: one device. Ours."""

    # Evaluation, logging, checkpoints.
    eval_steps: Count | None = setting(None, resume="free")
    """Optimizer steps between two evaluations; None: only before the first step and after the last."""
    per_device_eval_batch_size: Count = setting(8, resume="free")
    """Completions (SFT: examples) evaluated at a time on one device."""
    logging_steps: Count = setting(10, resume="free")
    """Optimizer steps per line of metrics, which are means over these steps; not a fraction as in TRL."""
    logging_first_step: bool = setting(True, resume="free")
    """Also log the first optimizer step, so that curves start at step 1 (TRL: False)."""
    save_steps: Count | None = setting(500, resume="free")
    """Optimizer steps between two checkpoints; None: only at the end. One is always written at the end."""
    save_minutes: Positive | None = setting(5.0, resume="free")
    """Also write a checkpoint after an optimizer step if the last one is this many minutes old, by the clock of process
    0; None: off. Ours."""
    save_total_limit: Count | None = setting(None, resume="free")
    """Number of checkpoints of `save_steps` to keep, the newest and the best; None: all. Checkpoints of signals and
    `save_minutes` are deleted when the next one is written."""
    max_skipped_updates: Count | None = setting(10, resume="free")
    """Stop after this many consecutive updates skipped for a non-finite loss or gradient; None: never. Ours."""
    metric_for_best_model: str | None = setting(None, resume="free")
    """Metric of `metrics.jsonl` that compares checkpoints by its last value: "reward", "eval/reward", SFT: "eval/loss".
    The best checkpoint is kept in addition to `save_total_limit`."""
    greater_is_better: bool | None = setting(None, resume="free")
    """Whether the best of `metric_for_best_model` is the greatest; None: unless its name ends in "loss"."""
    load_best_model_at_end: bool = setting(False, resume="free")
    """Return the state of the checkpoint with the best `metric_for_best_model` instead of the last."""

    # Trackers and the hub.
    report_to: Annotated[str | Sequence[str] | None, read_trackers] = setting("none", resume="free")
    """Trackers: "tensorboard", "wandb", "trackio", a list of them, "all" installed ones, or "none"."""
    run_name: str | None = setting(None, resume="free")
    """Name of the run in the trackers; None: they choose one."""
    project: str = setting("huggingface", resume="free")
    """Project in trackio, and in Weights & Biases if the variable WANDB_PROJECT is not set."""
    push_to_hub: bool = setting(False, resume="free")
    """Push the policy to the hub at every checkpoint of `save_steps`, and at the end."""
    hub_model_id: str | None = setting(None, resume="free")
    """Repository, "name" or "owner/name"; None: the name of the run directory."""
    hub_private_repo: bool | None = setting(None, resume="free")
    """Whether a new repository is private; None: the default of its owner, usually public."""
    hub_strategy: Literal["end", "every_save"] = setting("every_save", resume="free")
    """When to push the policy. Checkpoints are not pushed (TRL's "checkpoint" and "all_checkpoints")."""
    hub_revision: str | None = setting(None, resume="free")
    """Branch to push to; None: the main one."""

    def __new__(cls, *args: object, **values: object) -> Self:
        """Report unknown fields together with all other errors."""
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
        raise_all(type(self).__name__, self._read())

    def contradictions(self, wrong: set[str]) -> Iterator[str]:
        """Yield an error line for each contradiction between fields that are not in `wrong`."""
        raise NotImplementedError

    def _read(self) -> list[str]:
        """Convert each value to a plain Python type, and return the error lines."""
        problems, wrong = [], set()
        for field in dataclasses.fields(self):
            stated = getattr(self, field.name)
            value, fault = read(field.type, stated)
            object.__setattr__(self, field.name, value)
            if fault:
                wrong.add(field.name)
                problems.append(f"{field.name} = {show(stated)}: {fault}")
        return [*problems, *self.contradictions(wrong)]

    @classmethod
    def from_dict(cls, values: "Json") -> Self:
        """Build a config from field names and values, as `to_dict` returns them or a JSON file holds them."""
        if not isinstance(values, Mapping):
            raise ValueError(f"{cls.__name__}.from_dict takes a dict of fields, not {show(values)}")
        return cls(**{str(name): value for name, value in values.items()})

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as values that `json.dumps` accepts and `from_dict` converts back to an equal config."""
        values = dataclasses.asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def sizes(self, num_devices: int | None = None) -> Sizes:
        """Return the batch sizes on `num_devices` devices (None: the size of `mesh`, or 1)."""
        raise NotImplementedError

    def data_shards(self, num_devices: int | None = None) -> int:
        """Return the number of devices that prompts are split over, which are all but those along "tensor"."""
        mesh = self.mesh or {}
        devices = math.prod(mesh.values()) if num_devices is None else num_devices
        return max(devices // mesh.get("tensor", 1), 1)

    def device_problems(self, num_devices: int) -> Iterator[str]:
        """Yield the error lines of settings that do not fit the number of devices."""
        if self.mesh is not None and math.prod(self.mesh.values()) != num_devices:
            product = " × ".join(str(size) for size in self.mesh.values())
            yield (
                f"{shown(self, 'mesh')}: {product} devices, but this run has {num_devices}; use sizes whose product is"
                f" {num_devices}, or None for one device"
            )

    def total_steps(self, num_rows: int, num_devices: int | None = None) -> int:
        """Return the optimizer steps of the run: `max_steps`, or the steps of ceil(epochs × rows / B) iterations."""
        if self.max_steps > 0:
            return self.max_steps
        sizes = self.sizes(num_devices)
        return math.ceil(round(self.num_train_epochs * num_rows / sizes.prompts, 9)) * sizes.updates

    def total_warmup_steps(self, total_steps: int) -> int:
        """Return the warm-up in optimizer steps: `warmup_steps`, or that fraction of `total_steps` (rounded up)."""
        return int(self.warmup_steps) if self.warmup_steps >= 1 else math.ceil(total_steps * self.warmup_steps)

    @property
    def padding(self) -> int:
        """Number of tokens whose multiples prompts or examples are padded to."""
        if isinstance(self.pad_to_multiple_of, int):
            return self.pad_to_multiple_of
        return 32 if self.pad_to_multiple_of == "auto" else 1

    def logs_at(self, step: int) -> bool:
        """Return whether metrics are logged after this optimizer step; they always are after the last."""
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
"""Largest number of further rollouts that `dynamic_sampling` adds to one iteration."""
