"""`GRPOConfig`: the settings of a GRPO run.

Fields that also exist in TRL 1.16's `GRPOConfig`, or in its base class `transformers.TrainingArguments`, have the same
names, meanings and defaults here, except for the differences documented at each field.
"""

import dataclasses
import math
from collections.abc import Container, Iterator, Sequence
from typing import Annotated, Literal

from grpo_jax.config.contradictions import contradictions
from grpo_jax.config.fields import (
    Count,
    In,
    LossType,
    NotNegative,
    Positive,
    nearest_sizes,
    read_scale,
    read_stop,
    read_token_ids,
    read_weights,
    setting,
)
from grpo_jax.config.settings import MAX_REFILLS, Settings, Sizes, shown


@dataclasses.dataclass(frozen=True, kw_only=True)
class GRPOConfig(Settings):
    """Settings of a GRPO run. Fields shared with SFT are in `Settings`.

    The constructor validates all fields. Constraints that involve the data or devices are checked when a run starts.

    Raises:
      ValueError: if fields are invalid. The message has one line per error with the field, its value, and the fix.

    Example:
      >>> config = GRPOConfig(num_generations=4, per_device_train_batch_size=16)
      >>> config.sizes().prompts_per_iteration
      4
      >>> GRPOConfig(num_generation=4)
      Traceback (most recent call last):
      ValueError: GRPOConfig has 1 error:
        num_generation: no such field; did you mean num_generations?
    """

    # Sampling.
    num_generations: Annotated[int, In("[2, inf)", "a group of one completion has no baseline; use 2 or more")] = 8
    """G, number of completions per prompt."""
    max_completion_length: Count = 512
    """T, maximum number of tokens in a completion. A completion that reaches it without ending is truncated."""
    max_prompt_length: Count | None = None
    """Maximum number of tokens in a prompt. If None, only the model's context limits it. Not in TRL."""
    on_long_prompt: Literal["error", "drop"] = "error"
    """Whether a prompt longer than `max_prompt_length` raises an error or is dropped and counted. Not in TRL."""
    temperature: Annotated[float, In("(0, inf)", "greedy decoding is for evaluation only (temperature_eval=0)")] = 1.0
    """Divisor of the logits, both for sampling and for the log-probs in the loss."""
    top_p: Annotated[float, In("(0, 1]", "use 1.0 to keep every token")] = 1.0
    """Sample only from the smallest set of most likely tokens with this probability mass. 1.0 keeps all tokens."""
    top_k: Annotated[int, In("[0, inf)", "use 0 to keep every token")] = 0
    """Number of most likely tokens to sample from. 0 keeps all tokens."""
    min_p: Annotated[float, In("[0, 1]", "use None to keep every token")] | None = None
    """Smallest probability of a sampled token, relative to the most likely token's. None disables it."""
    stop: Annotated[str | Sequence[str] | None, read_stop] = None
    """Strings that end a turn or a single-turn completion, such as ["</answer>"], matched across token boundaries. The
    tokens of the matched string are included in training. If None, only token ids end a turn. Not in TRL."""
    stop_token_ids: Annotated[int | Sequence[int] | None, read_token_ids] = None
    """Additional token ids that, like an EOS, end a turn. Not in TRL."""
    max_turn_length: Count | None = None
    """Maximum number of tokens in a turn. None uses `max_completion_length`. A turn cut short by it is passed to the
    environment. The completion is truncated if the turn has no tool call and there is no `respond`. Not in TRL."""

    # Batches (see `Sizes`).
    steps_per_generation: Count | None = setting(None, resume="rounding")
    """Micro-batches per generation batch. None uses `gradient_accumulation_steps`, for one update per pass."""
    generation_batch_size: Count | None = setting(None, resume="rounding")
    """Completions per iteration across all devices. Set this or `steps_per_generation`, or neither."""
    num_iterations: Count = 1
    """μ, number of passes over an iteration's completions."""
    rollout_batch_size: Count | None = setting(None, resume="rounding")
    """Maximum number of completions decoded together, summed over all devices; a batch that exceeds it is decoded in
    parts, one after another. None decodes the whole batch together. Rounded down to whole groups per device. Not in
    TRL."""
    rollout_ahead: bool = False
    """Whether to sample the next iteration's completions while the reward functions run, before the current updates.
    The sampling policy is then one iteration old, and the ratio corrects for this. An inference server also samples
    during the updates. Not in TRL."""
    environment_timeout: Positive | None = 300.0
    """Time limit in seconds for one call to an environment or a tool. None disables it. Not in TRL."""
    max_tool_calling_iterations: Count | None = None
    """Maximum number of turns with tool calls per completion. None disables the limit."""
    on_environment_error: Literal["raise", "end"] = "raise"
    """Whether an environment error ends the run, or only the episode, which `get_reward` still scores. Not in TRL."""
    shuffle_dataset: bool = True
    """Whether to shuffle the prompts in each epoch."""
    dynamic_sampling: bool = False
    """Whether to replace groups without a training signal (`maths.advantages.zero_signal_groups`) by sampling other
    prompts, in at most 4 more rollouts (DAPO, arXiv 2503.14476). Not in TRL."""

    # Rewards and advantages.
    reward_weights: Annotated[Sequence[float] | None, read_weights] = None
    """Weight of each reward function. None uses 1.0 for each."""
    on_reward_error: Literal["raise", "none"] = setting("raise", resume="to none")
    """Whether an error in a reward function ends the run, or is counted and treated as missing rewards. Not in TRL."""
    advantage_estimator: Literal["grpo", "rloo", "maxrl", "opo", "reinforce_pp"] = "grpo"
    """Advantage formula; see `compute_advantages`. All except "grpo" need scale_rewards="none". Not in TRL."""
    scale_rewards: Annotated[Literal["group", "batch", "none"], read_scale] = "group"
    """Scope of the standard deviation that advantages are divided by. True and False mean "group" and "none"."""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """Whether weighted rewards are summed before normalization, or after it (GDPO, arXiv 2601.05242)."""
    turn_credit: Literal["episode", "to_go"] = "episode"
    """Whether a turn is credited with all rewards of its completion or only with rewards from this turn on
    (`turn_advantages`). Reward functions return turn rewards as lists, `respond` one at a time. Not in TRL."""
    mask_truncated_completions: bool = False
    """Whether to exclude truncated completions from the loss (DAPO, arXiv 2503.14476)."""

    # The policy loss.
    loss_type: LossType = "dapo"
    """Surrogate and reduction of the loss; see `maths.surrogates.LOSS_TYPES`."""
    importance_sampling_level: Literal["token", "sequence", "trajectory"] = "token"
    """Ratio per token, or its geometric mean (GSPO, arXiv 2507.18071) or product (not in TRL) per completion."""
    epsilon: Positive = 0.2
    """Lower clip range ε: ratios below 1 − ε are clipped."""
    epsilon_high: Positive | None = None
    """Upper clip range: ratios above 1 + ε_high are clipped. None uses `epsilon` (DAPO: 0.28). In cispo, the cap on the
    ratio itself (ScaleRL: 5.0)."""
    delta: Annotated[float, In("(1, inf)", "a cap of 1 stops the on-policy gradient; use 1 + ε or more")] | None = None
    """Cap on the unclipped ratio for negative advantages (INTELLECT-2, arXiv 2505.07291). None disables it."""
    sapo_temperature_neg: Positive = 1.05
    """Temperature τ of sapo's gate where A ≤ 0 (arXiv 2511.20347)."""
    sapo_temperature_pos: Positive = 1.0
    """Temperature τ of sapo's gate where A > 0."""
    vespo_k_pos: NotNegative = 2.0
    """Exponent of vespo's weight where A ≥ 0 (arXiv 2602.10693)."""
    vespo_lambda_pos: NotNegative = 3.0
    """Decay of vespo's weight where A ≥ 0."""
    vespo_k_neg: NotNegative = 3.0
    """Exponent of vespo's weight where A < 0."""
    vespo_lambda_neg: NotNegative = 2.0
    """Decay of vespo's weight where A < 0."""
    top_entropy_quantile: Annotated[float, In("[0, 1]", "use 1.0 to keep every token")] = 1.0
    """ρ, fraction of tokens in the policy loss. Tokens with the highest entropy are selected (arXiv 2506.01939)."""
    off_policy_mask_threshold: Positive | None = None
    """Threshold in nats. Completions with A < 0 and a mean of log(π_sampling / π) above it are masked out
    (DeepSeek-V3.2). None disables the mask."""
    sampler_correction: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] | None = (
        "sequence_mask"
    )
    """Kind of importance weights π_old / π_sampler for an external `sampler`; see `sampler_weights`. None disables
    them. Not in TRL."""
    sampler_correction_max: Positive | None = 3.0
    """Upper bound on the importance weights. None disables it. Not in TRL."""
    sampler_correction_min: NotNegative | None = None
    """Lower bound on the importance weights. None disables it. Not in TRL."""

    # Entropy, KL and the reference.
    entropy_coef: NotNegative = 0.0
    """Weight of the entropy bonus (mean token entropy in nats), or its initial value if adaptive."""
    use_adaptive_entropy: bool = False
    """Whether to adapt `entropy_coef` in each step to reach `entropy_target` (Skywork-OR1, arXiv 2505.22312)."""
    entropy_coef_min: NotNegative = 0.0
    """Lower bound on the adaptive coefficient."""
    entropy_coef_max: NotNegative = 1.0
    """Upper bound on the adaptive coefficient."""
    entropy_coef_delta: Positive = 0.005
    """Change in the adaptive coefficient per optimizer step."""
    entropy_target: NotNegative = 0.2
    """Target entropy in nats per token; set it near the initial entropy. The bonus applies at or below the target."""
    beta: Annotated[float, In("[0, inf)", "use 0 to disable the KL, or a value such as 0.001 (DeepSeek-R1)")] = 0.0
    """Weight of the KL to the reference policy. With 0, no reference is kept."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Per-token KL estimator in the loss; see `kl_divergence`. TRL supports only k3."""
    use_bias_correction_kl: bool = True
    """Whether to multiply the KL estimator by the ratio, so that its gradient is ∇KL(π‖ref) at each token, given the
    preceding tokens, for any μ (DeepSeek-V3.2). If False, k3's gradient is ∇KL(ref‖π) on-policy and biased off-policy.
    Only `kl_placement="reward"` with `importance_sampling_level="trajectory"` is exact for whole completions."""
    kl_correction_level: Literal["token", "importance_sampling_level"] = "token"
    """Ratio for `use_bias_correction_kl` if `importance_sampling_level` is "sequence": the token ratio, or the sequence
    ratio as in TRL (biased). Not used at other levels. Not in TRL."""
    kl_placement: Literal["loss", "reward"] = "loss"
    """Whether the KL is added to the loss or subtracted from the advantages, as beta × the sum of log-ratios from a
    token to the end of its completion. The latter is exact for any μ with `importance_sampling_level="trajectory"`.
    Not in TRL."""
    sync_ref_model: bool = False
    """Whether to update the reference every `ref_model_sync_steps` steps (TR-DPO, arXiv 2404.09656)."""
    ref_model_sync_steps: Count = 512
    """Optimizer steps between two reference updates."""
    ref_model_mixup_alpha: Annotated[float, In("(0, 1]", "1 copies the policy; 0 would have no effect")] = 0.6
    """Weight α in ref ← α·policy + (1 − α)·ref. For adapters, the products A·B are mixed, and the reference stores the
    factors from its last 16 updates if α = 0.6 (6 if α = 0.9, 1 if α = 1)."""

    # Distillation.
    distillation_coef: NotNegative = 0.0
    """Weight of the divergence from the teacher in the loss. Not in TRL."""
    distillation_divergence: Literal["reverse_kl", "forward_kl", "jsd"] = "reverse_kl"
    """Divergence from the teacher; see `maths.supervised`. TRL sets it with `distillation_alpha` or `beta`."""
    distillation_alpha: Annotated[float, In("(0, 1)", "0.5 is usual; for 0 use forward_kl, for 1 reverse_kl")] = 0.5
    """Weight of the teacher in jsd, as in TRL's SDPO (`beta` in TRL's GKD)."""
    distillation_mode: Literal["full_logits", "topk_logits", "sampled_token"] = "full_logits"
    """Log-probs to compare: full distributions, k tokens and the total of the rest, or sampled tokens (TRL's SDPO)."""
    distillation_topk: Count | None = None
    """k, number of tokens with teacher log-probs at each position (TRL's SDPO: the policy's most likely tokens)."""

    # Optimizer, memory and devices.
    gradient_checkpointing: bool | None = setting(None, resume="rounding")
    """Whether to recompute activations in the backward pass, which makes updates 14% to 33% slower. None
    recomputes them only on GPUs and TPUs, if they do not fit in memory (TRL: True)."""

    # Evaluation, logging, checkpoints.
    num_generations_eval: Count | None = setting(None, resume="free")
    """Completions per prompt in evaluation. None uses `num_generations`, or 1 for greedy decoding."""
    temperature_eval: NotNegative | None = setting(None, resume="free")
    """Temperature in evaluation. 0 selects greedy decoding; None uses `temperature`. Not in TRL."""
    log_completions: bool = setting(False, resume="free")
    """Whether to print completions and their rewards at every logging step."""
    num_completions_to_print: Count | None = setting(None, resume="free")
    """Number of completions to print. None prints all."""

    def contradictions(self, invalid: set[str]) -> Iterator[str]:
        """Yield error messages about incompatible batch sizes and conflicting fields."""
        yield from self._batch_problems(invalid)
        yield from contradictions(self, invalid)

    @property
    def eval_temperature(self) -> float:
        """Temperature in evaluation. 0 selects greedy decoding."""
        return self.temperature if self.temperature_eval is None else self.temperature_eval

    @property
    def eval_generations(self) -> int:
        """Number of completions per prompt in evaluation."""
        return self.num_generations_eval or (1 if self.eval_temperature == 0 else self.num_generations)

    def sizes(self) -> Sizes:
        """Compute the batch sizes for the devices in `mesh`, or for one device without a mesh."""
        group, micro = self.num_generations, self.per_device_train_batch_size * self.data_shards()
        steps = self.steps_per_generation or self.gradient_accumulation_steps
        if self.generation_batch_size is not None:
            steps = self.generation_batch_size // micro
        minibatches = steps // self.gradient_accumulation_steps
        micro_completions = min(group, self.per_device_train_batch_size)
        return Sizes(
            prompts_per_iteration=micro * steps // group,
            completions=micro * steps,
            minibatches=minibatches,
            updates_per_iteration=self.num_iterations * minibatches,
            prompts_per_update=micro * self.gradient_accumulation_steps // group,
            micro_batches=self.gradient_accumulation_steps,
            micro_prompts=micro // micro_completions,
            micro_completions=micro_completions,
        )

    def max_prompts(self) -> int | None:
        """Return the largest number of prompts for `max_steps` steps and refills, or None if `max_steps` is −1."""
        if self.max_steps <= 0:
            return None
        sizes = self.sizes()
        iterations = math.ceil(self.max_steps / sizes.updates_per_iteration)
        return iterations * sizes.prompts_per_iteration * (1 + MAX_REFILLS if self.dynamic_sampling else 1)

    @property
    def on_policy(self) -> bool:
        """Whether each update starts from the policy that sampled its completions, in which case the ratio is 1."""
        return self.sizes().updates_per_iteration == 1 and not self.rollout_ahead

    def _batch_problems(self, invalid: Container[str]) -> Iterator[str]:
        """Yield error messages for batch sizes that cannot be split evenly, conflict, or are too small."""
        sizes = ("num_generations", "per_device_train_batch_size", "gradient_accumulation_steps")
        others = ("steps_per_generation", "generation_batch_size", "rollout_batch_size", "mesh")
        if any(name in invalid for name in (*sizes, *others)):
            return
        group, micro, accumulated = (getattr(self, name) for name in sizes)
        steps, batch, shards = self.steps_per_generation, self.generation_batch_size, self.data_shards()
        update = micro * accumulated * shards

        def whole_groups(size: int) -> bool:
            return (size % group == 0 or group % size == 0) and size * accumulated % group == 0

        if not whole_groups(micro):
            yield (
                f"{shown(self, 'per_device_train_batch_size')}: must be a multiple of num_generations = {group}, or a"
                f" divisor whose product with gradient_accumulation_steps = {accumulated} is a multiple of {group};"
                f" {nearest_sizes(micro, whole_groups)}"
            )
        elif batch is not None and batch % update:
            devices = f" × {shards} data shards" if shards > 1 else ""
            product = f"per_device_train_batch_size = {micro} × gradient_accumulation_steps = {accumulated}{devices}"
            yield (
                f"{shown(self, 'generation_batch_size')}: cannot be split into minibatches of {update}"
                f" completions ({product}); {nearest_sizes(batch, lambda size: size % update == 0)}"
            )
        if steps is not None and steps % accumulated:
            yield (
                f"{shown(self, 'steps_per_generation')}: must be a multiple of gradient_accumulation_steps ="
                f" {accumulated}; {nearest_sizes(steps, lambda size: size % accumulated == 0)}"
            )
        if steps is not None and batch is not None:
            yield (
                f"{shown(self, 'generation_batch_size')}: conflicts with steps_per_generation = {steps};"
                " set only one of them"
            )
        if self.rollout_batch_size is not None and self.rollout_batch_size < shards * group:
            yield (
                f"{shown(self, 'rollout_batch_size')}: must be at least {shards * group}, num_generations times"
                f" the number of data shards ({group} × {shards}); increase it, or use None"
            )
