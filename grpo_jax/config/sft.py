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
      ValueError: with one line per error: the field, its value, and the fix.

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
    max_length: Annotated[int, In("[2, inf)", "the first token is not learned: use 2 or more")] | None = 1024
    """Tokens of an example. Longer ones are truncated, and examples without a token to learn are dropped."""
    packing: bool = False
    """Pack examples into blocks of `max_length` tokens. Batch sizes then count blocks instead of examples. Examples do
    not attend to each other, and are stored without padding either way."""
    packing_strategy: Literal["bfd"] = "bfd"
    """Best fit decreasing. TRL's other strategies, which split examples, are not supported."""
    completion_only_loss: bool | None = None
    """Learn only the `completion` of rows with a `prompt` (for token ids: where `completion_mask` is 1); None: True for
    such rows."""
    assistant_only_loss: bool = False
    """Learn only the assistant's messages, given by generation tags, growing conversations or `assistant_masks`."""
    dataset_text_field: str = "text"
    """Column of rows that are plain text."""
    shuffle_dataset: bool = False
    """Shuffle the rows once, before they are packed."""
    train_sampling_strategy: Literal["random", "sequential"] = "random"
    """Order of the examples or blocks: shuffled in every epoch, or as in the dataset."""

    # The loss.
    loss_type: Literal["nll", "dft"] = "nll"
    """−log p of each token, or −log p times sg(p) (Dynamic Fine-Tuning, arXiv 2508.05629); the mean over the tokens of
    an update."""
    learning_rate: NotNegative = 2e-5
    """Peak of the schedule, for AdamW."""
    gradient_checkpointing: bool = setting(True, resume="rounding")
    """Recompute activations in the backward pass: less memory, about a fifth slower."""

    # Values of GRPO's settings, for code that handles both kinds of run.
    num_generations: ClassVar = 1
    num_iterations: ClassVar = 1
    temperature: ClassVar = 1.0
    top_k: ClassVar = 0
    top_p: ClassVar = 1.0
    min_p: ClassVar = None
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
        """Yield the error lines of fields that contradict each other."""
        yield from contradictions(self, wrong)
        if self.packing and self.max_length is None and "max_length" not in wrong:
            yield "max_length = None: packing fills blocks of max_length tokens; give a number, or packing=False"

    @property
    def max_completion_length(self) -> int:
        """T of a batch's arrays. The first token of an example, which is not predicted, is its prompt."""
        return (self.max_length or 2) - 1

    def sizes(self, num_devices: int | None = None) -> Sizes:
        """Return the batch sizes in examples, or blocks with `packing`."""
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
"""The settings of either kind of run."""


def config_class(values: Mapping[str, object]) -> type[GRPOConfig] | type[SFTConfig]:
    """Return the class of a config from its `to_dict`."""
    return SFTConfig if "completion_only_loss" in values else GRPOConfig
