"""`SFTConfig`: the settings of an SFT run, with TRL's names."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal

from grpo_jax.config.config import GRPOConfig
from grpo_jax.config.contradictions import contradictions
from grpo_jax.config.fields import In, NotNegative, setting
from grpo_jax.config.settings import Settings, Sizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class SFTConfig(Settings):
    """Settings of an SFT run, validated by the constructor. Fields shared with GRPO are in `Settings`.

    Raises:
      ValueError: if fields are invalid. The message has one line per error with the field, its value, and the fix.

    Example:
      >>> config = SFTConfig(per_device_train_batch_size=4, gradient_accumulation_steps=2)
      >>> config.sizes().prompts_per_iteration, config.total_steps(num_rows=100)
      (8, 38)
      >>> SFTConfig(completion_only_loss=True, assistant_only_loss=True, max_len=64)
      Traceback (most recent call last):
      ValueError: SFTConfig has 1 error:
        max_len: no such field; did you mean max_length?
    """

    # Data.
    max_length: Annotated[int, In("[2, inf)", "the first token is not predicted; use 2 or more")] | None = 1024
    """Maximum number of tokens per example. None disables truncation. Examples without target tokens are dropped."""
    packing: bool = False
    """Whether to pack examples into blocks of `max_length` tokens. Batch sizes then count blocks instead of examples.
    With or without packing, examples do not attend to each other; for padding, see `sft`."""
    packing_strategy: Literal["bfd"] = "bfd"
    """Packing strategy: best-fit decreasing. TRL's other strategies split examples and are not supported."""
    completion_only_loss: bool | None = None
    """Whether to train only on the `completion` of rows with a `prompt` or, in tokenized rows, only on the tokens for
    which `completion_mask` is 1. None means True for both kinds of rows."""
    assistant_only_loss: bool = False
    """Whether to train only on assistant messages, located with generation tags, by rendering prefixes of the
    conversation, or with `assistant_masks`."""
    dataset_text_field: str = "text"
    """Column that contains the text of rows without a prompt or messages."""
    shuffle_dataset: bool = False
    """Whether to shuffle the rows once, before packing."""
    train_sampling_strategy: Literal["random", "sequential"] = "random"
    """Order of the examples or blocks: shuffled in each epoch, or in dataset order."""

    # The loss.
    loss_type: Literal["nll", "dft"] = "nll"
    """Loss of a token with probability p: −log p, or −stop_gradient(p)·log p (Dynamic Fine-Tuning, arXiv 2508.05629).
    The loss is averaged over the target tokens of an update."""
    learning_rate: NotNegative = 2e-5
    """Peak learning rate of AdamW."""
    gradient_checkpointing: bool = setting(True, resume="rounding")
    """Whether to recompute activations in the backward pass, which saves memory; see `GRPOConfig`."""

    # Constants for GRPO settings, so that shared code can handle both configs.
    num_generations: ClassVar = 1
    num_iterations: ClassVar = 1
    temperature: ClassVar = 1.0
    top_k: ClassVar = 0
    top_p: ClassVar = 1.0
    min_p: ClassVar = None
    on_policy: ClassVar = True
    top_entropy_quantile: ClassVar = 1.0
    beta: ClassVar = 0.0
    sync_ref_model: ClassVar = False
    ref_model_sync_steps: ClassVar = 1
    ref_model_mixup_alpha: ClassVar = 1.0
    distillation_coef: ClassVar = 0.0
    use_adaptive_entropy: ClassVar[Literal[False]] = False
    entropy_coef: ClassVar = 0.0
    log_completions: ClassVar = False
    num_completions_to_print: ClassVar = None
    eval_generations: ClassVar = 1
    eval_temperature: ClassVar = 1.0

    def contradictions(self, invalid: set[str]) -> Iterator[str]:
        yield from contradictions(self, invalid)
        if self.packing and self.max_length is None and "max_length" not in invalid:
            yield "max_length = None: packing=True needs a block length; set max_length, or packing=False"

    @property
    def max_completion_length(self) -> int:
        """T, the length of completions in batch arrays. An example's first token is its prompt and is not predicted."""
        return (self.max_length or 2) - 1

    def sizes(self) -> Sizes:
        """Compute the batch sizes in examples, or in blocks if `packing` is True."""
        micro = self.per_device_train_batch_size * self.data_shards()
        count = micro * self.gradient_accumulation_steps
        return Sizes(
            prompts_per_iteration=count,
            completions=count,
            minibatches=1,
            updates_per_iteration=1,
            prompts_per_update=count,
            micro_batches=self.gradient_accumulation_steps,
            micro_prompts=micro,
            micro_completions=1,
        )


GRPOOrSFTConfig = GRPOConfig | SFTConfig
"""Config of a GRPO or an SFT run."""


def config_class(values: Mapping[str, object]) -> type[GRPOConfig] | type[SFTConfig]:
    """Return the config class whose `to_dict` returned `values`."""
    return SFTConfig if "completion_only_loss" in values else GRPOConfig
