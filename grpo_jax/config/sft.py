"""`SFTConfig`: every setting of an SFT run, with TRL's names; the fields that `GRPOConfig` has too are its fields.

What an SFT run has none of (groups, rewards, a reference) stands below as constants: the update, the checkpoints and
the loop read those of either config by one name.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from grpo_jax.config import readers
from grpo_jax.config.config import GRPOConfig
from grpo_jax.config.contradictions import contradictions
from grpo_jax.config.fields import Count, In, NotNegative, Positive, setting
from grpo_jax.config.settings import Settings, Sizes


def same_field(name: str) -> Any:
    """Return the field of that name for another class of settings: the same default, the same rule on resume."""
    (field,) = (field for field in dataclasses.fields(GRPOConfig) if field.name == name)
    return dataclasses.field(default=field.default, hash=field.hash, metadata=field.metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SFTConfig(Settings):
    """Settings of an SFT run, checked at construction as those of `GRPOConfig` are.

    A field without a text of its own is that of `GRPOConfig`, its default too.

    Raises:
      ValueError: with one line per error, each with the field, the value that came and what to do.

    Example:
      >>> config = SFTConfig(per_device_train_batch_size=4, gradient_accumulation_steps=2)
      >>> config.sizes().prompts, config.total_steps(num_rows=100)
      (8, 38)
      >>> SFTConfig(completion_only_loss=True, assistant_only_loss=True, max_len=64)
      Traceback (most recent call last):
      ValueError: SFTConfig has 1 error:
        max_len: no such field; did you mean max_length?
    """

    # Data.
    max_length: Annotated[int, In("[2, inf)", "a token is learned after another: use 2 or more")] | None = 1024
    """Tokens of an example; what comes after is cut off, and an example without a token to learn is left out."""
    packing: bool = False
    """Lay examples together in blocks of `max_length` tokens (best fit, the longest first), and let batch sizes count
    blocks. No example sees another, and without it, too, examples are laid end to end."""
    packing_strategy: Literal["bfd"] = "bfd"
    """How blocks are filled: "bfd", best fit decreasing. TRL's other ways cut examples."""
    completion_only_loss: bool | None = None
    """Learn the `completion` alone of rows with a `prompt` (of tokens, what `completion_mask` marks); False: the prompt
    too; None: where there is one."""
    assistant_only_loss: bool = False
    """Learn the assistant's messages alone, by generation tags, growing conversations or `assistant_masks`."""
    dataset_text_field: str = "text"
    """Column of rows that are text to be learned as a whole."""
    chat_template_kwargs: Annotated[dict[str, object] | None, readers.keywords] = setting(None, hash=False)
    """Further keywords of the tokenizer's `apply_chat_template`. Ours (TRL: a column of that name)."""
    pad_to_multiple_of: Count | Literal["auto"] | None = "auto"
    """Tokens that the longest example is rounded up to a multiple of, so that few shapes are compiled; "auto": 32."""
    shuffle_dataset: bool = False
    """Shuffle the rows once, before they are packed."""
    train_sampling_strategy: Literal["random", "sequential"] = "random"
    """Order of the examples or blocks: anew in every epoch, or as they stand."""

    # The loss.
    loss_type: Literal["nll", "dft"] = "nll"
    """−log p of each token, or that times the constant p (Dynamic Fine-Tuning, arXiv 2508.05629); the mean over the
    tokens of an update."""
    router_aux_loss_coef: NotNegative | None = same_field("router_aux_loss_coef")

    # Batches.
    per_device_train_batch_size: Count = same_field("per_device_train_batch_size")
    """Examples (with `packing` blocks) of one micro-batch on one device."""
    gradient_accumulation_steps: Count = same_field("gradient_accumulation_steps")
    max_steps: Annotated[int, In("[-1, inf)", "use -1 to train by num_train_epochs")] = same_field("max_steps")
    num_train_epochs: Positive = same_field("num_train_epochs")
    """Times the dataset is gone through, where `max_steps` is -1; batches run on over the end of an epoch."""
    seed: Annotated[int, In("[0, 4294967295]", "use a whole number from 0 to 2**32 - 1")] = same_field("seed")

    # Optimizer.
    learning_rate: NotNegative = 2e-5
    """Peak of the schedule, for AdamW."""
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = same_field("lr_scheduler_type")
    warmup_steps: NotNegative = same_field("warmup_steps")
    weight_decay: NotNegative = same_field("weight_decay")
    adam_beta1: Annotated[float, In("[0, 1)", "0.9 is usual")] = same_field("adam_beta1")
    adam_beta2: Annotated[float, In("[0, 1)", "0.999 is usual")] = same_field("adam_beta2")
    adam_epsilon: Positive = same_field("adam_epsilon")
    max_grad_norm: NotNegative = same_field("max_grad_norm")

    # Memory and devices.
    gradient_checkpointing: bool = setting(True, resume="rounding")
    """Recompute a layer's activations in the backward pass: less memory, about a fifth more time."""
    compute_dtype: Annotated[Literal["auto", "float32", "bfloat16"], readers.compute_dtype] = same_field(
        "compute_dtype"
    )
    mesh: Annotated[dict[str, int] | None, readers.mesh] = same_field("mesh")

    # Evaluation, logging, checkpoints.
    eval_steps: Count | None = same_field("eval_steps")
    per_device_eval_batch_size: Count = same_field("per_device_eval_batch_size")
    """Examples evaluated at a time on one device."""
    logging_steps: Count = same_field("logging_steps")
    logging_first_step: bool = same_field("logging_first_step")
    save_steps: Count | None = same_field("save_steps")
    save_minutes: Positive | None = same_field("save_minutes")
    save_total_limit: Count | None = same_field("save_total_limit")
    max_skipped_updates: Count | None = same_field("max_skipped_updates")
    metric_for_best_model: str | None = same_field("metric_for_best_model")
    """Name as in `metrics.jsonl`, such as "eval/loss"; the checkpoint with the best is kept."""
    greater_is_better: bool | None = same_field("greater_is_better")
    load_best_model_at_end: bool = same_field("load_best_model_at_end")
    """Let `sft` return the state of the checkpoint with the best `metric_for_best_model`, not of the last step."""

    # Trackers and the hub.
    report_to: Annotated[str | Sequence[str] | None, readers.trackers] = same_field("report_to")
    run_name: str | None = same_field("run_name")
    project: str = same_field("project")
    push_to_hub: bool = same_field("push_to_hub")
    hub_model_id: str | None = same_field("hub_model_id")
    hub_private_repo: bool | None = same_field("hub_private_repo")
    hub_strategy: Literal["end", "every_save"] = same_field("hub_strategy")
    hub_revision: str | None = same_field("hub_revision")

    # Constants in the place of settings that only rollouts have.
    num_generations: ClassVar = 1
    num_iterations: ClassVar = 1
    rollout_ahead: ClassVar = False
    dynamic_sampling: ClassVar = False
    on_policy: ClassVar = True
    top_entropy_quantile: ClassVar = 1.0
    beta: ClassVar = 0.0
    sync_ref_model: ClassVar = False
    ref_model_sync_steps: ClassVar = 1
    ref_model_mixup_alpha: ClassVar = 1.0
    distillation_coef: ClassVar = 0.0
    use_adaptive_entropy: ClassVar = False
    entropy_coef: ClassVar = 0.0
    log_completions: ClassVar = False
    num_completions_to_print: ClassVar = None
    eval_generations: ClassVar = 1
    eval_temperature: ClassVar = 1.0

    def contradictions(self, wrong: set[str]) -> Iterator[str]:
        """Yield the error lines of fields that don't go together."""
        yield from contradictions(self, wrong)
        if self.packing and self.max_length is None and "max_length" not in wrong:
            yield "max_length = None: packing fills blocks of max_length tokens; give a number, or packing=False"

    @property
    def max_completion_length(self) -> int:
        """T of the arrays of a batch: an example is its first token, which nothing predicts, and a completion of it."""
        return (self.max_length or 2) - 1

    def sizes(self, num_devices: int | None = None) -> Sizes:
        """Return the batch sizes, in examples or blocks; devices as in `GRPOConfig.sizes`."""
        micro = self.per_device_train_batch_size * self.data_shards(num_devices)
        count = micro * self.gradient_accumulation_steps
        return Sizes(
            prompts=count,
            completions=count,
            minibatches=1,
            updates=1,
            prompts_per_update=count,
            micro_batches=self.gradient_accumulation_steps,
            micro_prompts=micro,
            micro_completions=1,
        )


Config = GRPOConfig | SFTConfig
"""The settings of a run of either kind."""


def config_class(values: Mapping[str, object]) -> type[GRPOConfig] | type[SFTConfig]:
    """Return the class of the config whose `to_dict` a file holds."""
    return SFTConfig if "completion_only_loss" in values else GRPOConfig


def stored_config(values: Mapping[str, object]) -> Config:
    """Return the config whose `to_dict` a file holds."""
    return config_class(values).from_dict(values)
