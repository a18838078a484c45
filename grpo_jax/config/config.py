"""`GRPOConfig`: the settings of a GRPO run.

Fields of TRL 1.16's `GRPOConfig` or of `transformers.TrainingArguments`, its base class, have the same names, meanings
and defaults here. Differences are documented at the field, and "ours" marks fields that TRL does not have.
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
from grpo_jax.messages import raise_all


@dataclasses.dataclass(frozen=True, kw_only=True)
class GRPOConfig(Settings):
    """Settings of a GRPO run. Fields shared with SFT are in `Settings`.

    The constructor validates all fields. Settings that depend on the data or the devices are checked when a run starts.

    Raises:
      ValueError: with one line per error: the field, its value, and the fix.

    Example:
      >>> config = GRPOConfig(num_generations=4, per_device_train_batch_size=16)
      >>> config.sizes().prompts
      4
      >>> GRPOConfig(num_generation=4)
      Traceback (most recent call last):
      ValueError: GRPOConfig has 1 error:
        num_generation: no such field; did you mean num_generations?
    """

    # Sampling.
    num_generations: Annotated[int, In("[2, inf)", "a group of one completion has no baseline: use 2 or more")] = 8
    """G, completions of each prompt."""
    max_completion_length: Count = 512
    """T, tokens; a completion that reaches it without an EOS is truncated."""
    max_prompt_length: Count | None = None
    """Tokens; None: the model's context is the only limit. Ours."""
    on_long_prompt: Literal["error", "drop"] = "error"
    """Raise for a row with a longer prompt than `max_prompt_length`, or drop and count it. Ours."""
    temperature: Annotated[float, In("(0, inf)", "sampling needs more than 0 (greedy is for evaluation)")] = 1.0
    """Divides the logits in sampling and in all log-probs of the loss."""
    top_p: Annotated[float, In("(0, 1]", "use 1.0 to keep every token")] = 1.0
    """Keep the most probable tokens up to this probability mass; 1.0: all."""
    top_k: Annotated[int, In("[0, inf)", "use 0 to keep every token")] = 0
    """Keep this many of the most probable tokens; 0: all."""
    min_p: Annotated[float, In("[0, 1]", "use None to keep every token")] | None = None
    """Drop tokens less probable than this fraction of the most probable one; None: off."""
    stop: Annotated[str | Sequence[str] | None, read_stop] = None
    """Strings that end a turn or a single-turn completion, such as ["</answer>"], matched across token boundaries. The
    tokens up to the end of the string are trained on. None: only an EOS ends a turn. Ours."""
    stop_token_ids: Annotated[int | Sequence[int] | None, read_token_ids] = None
    """Further token ids that end a turn, as an EOS does. Ours."""
    max_turn_length: Count | None = None
    """Largest number of tokens of one turn; None: `max_completion_length`. A turn that reaches it is passed to the
    environment and counted in `turns/cut_short`; without tools or environments the completion is truncated. Ours."""

    # Batches (see `Sizes`).
    steps_per_generation: Count | None = setting(None, resume="rounding")
    """Micro-batches of one generation batch; None: `gradient_accumulation_steps`, one update per pass."""
    generation_batch_size: Count | None = setting(None, resume="rounding")
    """Completions of one iteration over all devices, instead of `steps_per_generation`; set one of the two."""
    num_iterations: Count = 1
    """μ, passes over the completions of one iteration."""
    rollout_batch_size: Count | None = setting(None, resume="rounding")
    """Completions decoded at a time over all devices, with new prompts in free slots; None: all. Each device of a mesh
    has the same number of whole groups. Ours."""
    rollout_ahead: bool = False
    """Sample the next iteration's completions while the reward functions run, before this iteration's updates. Training
    data is then one iteration old, and the ratio corrects for it. A server also samples during the updates. Ours."""
    environment_timeout: Positive | None = 300.0
    """Seconds that one call of an environment or a tool may take; None: no limit. Ours."""
    max_tool_calling_iterations: Count | None = None
    """Largest number of turns with tool calls in a completion; None: no limit."""
    on_environment_error: Literal["raise", "end"] = "raise"
    """Whether a failing environment stops the run or ends its episode, which is counted and keeps its reward. Ours."""
    shuffle_dataset: bool = True
    """Shuffle the prompts in each epoch."""
    dynamic_sampling: bool = False
    """Replace zero-signal groups by new prompts in at most 4 further rollouts (DAPO, arXiv 2503.14476). Ours."""

    # Rewards and advantages.
    reward_weights: Annotated[Sequence[float] | None, read_weights] = None
    """One weight per reward function; None: 1.0 each."""
    on_reward_error: Literal["raise", "none"] = setting("raise", resume="to none")
    """If a reward function raises, stop the run or treat its scores as missing and count them. Ours."""
    advantage_estimator: Literal["grpo", "rloo", "maxrl", "opo", "reinforce_pp"] = "grpo"
    """Baseline and scale of advantages, see `compute_advantages`; all but "grpo" need scale_rewards="none". Ours."""
    scale_rewards: Annotated[Literal["group", "batch", "none"], read_scale] = "group"
    """Standard deviation that divides advantages; True and False mean "group" and "none"."""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """Sum the weighted rewards, then normalize; or normalize each reward first (GDPO, arXiv 2601.05242)."""
    turn_credit: Literal["episode", "to_go"] = "episode"
    """Whether a turn is credited with all rewards of its completion or those from the turn on, see `turn_advantages`.
    Reward functions return rewards of turns as lists, and environments return them from `respond`. Ours."""
    mask_truncated_completions: bool = False
    """Leave completions without an EOS out of the loss (DAPO, arXiv 2503.14476)."""

    # The policy loss.
    loss_type: LossType = "dapo"
    """Surrogate and reduction, see `maths.surrogates.LOSS_TYPES`."""
    importance_sampling_level: Literal["token", "sequence", "trajectory"] = "token"
    """Level of the ratio: the token's own, a completion's geometric mean (GSPO, arXiv 2507.18071) or product (ours)."""
    epsilon: Positive = 0.2
    """Lower clip: ratios below 1 − ε."""
    epsilon_high: Positive | None = None
    """Upper clip: ratios above 1 + ε_high; None: `epsilon` (DAPO: 0.28). In cispo the cap itself (ScaleRL: 5.0)."""
    delta: Annotated[float, In("(1, inf)", "at 1 it stops the on-policy gradient: use 1 + ε or more")] | None = None
    """Cap of the unclipped ratio for negative advantages; None: off (INTELLECT-2, arXiv 2505.07291)."""
    sapo_temperature_neg: Positive = 1.05
    """τ of sapo where A ≤ 0 (arXiv 2511.20347)."""
    sapo_temperature_pos: Positive = 1.0
    """τ of sapo where A > 0."""
    vespo_k_pos: NotNegative = 2.0
    """Exponent of vespo's weight where A ≥ 0 (arXiv 2602.10693)."""
    vespo_lambda_pos: NotNegative = 3.0
    """Decay of vespo's weight where A ≥ 0."""
    vespo_k_neg: NotNegative = 3.0
    """Exponent of vespo's weight where A < 0."""
    vespo_lambda_neg: NotNegative = 2.0
    """Decay of vespo's weight where A < 0."""
    top_entropy_quantile: Annotated[float, In("[0, 1]", "use 1.0 to keep every token")] = 1.0
    """ρ, fraction of the tokens with the highest entropy that the policy loss keeps (arXiv 2506.01939)."""
    off_policy_mask_threshold: Positive | None = None
    """Mask out completions with A < 0 and mean l_sampling − l above this, in nats (DeepSeek-V3.2); None: off."""
    sampler_correction: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] | None = (
        "sequence_mask"
    )
    """Importance weights π_old / π_sampler of an external `sampler`, see `sampler_weights`; None: off. Ours."""
    sampler_correction_max: Positive | None = 3.0
    """Upper bound of the weights; None: no bound. Ours."""
    sampler_correction_min: NotNegative | None = None
    """Lower bound of the weights; None: no bound. Ours."""

    # Entropy, KL and the reference.
    entropy_coef: NotNegative = 0.0
    """Weight of the entropy bonus, the mean token entropy in nats; the initial weight if adaptive."""
    use_adaptive_entropy: bool = False
    """Adapt `entropy_coef` at each optimizer step to reach `entropy_target` (Skywork-OR1, arXiv 2505.22312)."""
    entropy_coef_min: NotNegative = 0.0
    """Lowest adaptive coefficient."""
    entropy_coef_max: NotNegative = 1.0
    """Highest adaptive coefficient."""
    entropy_coef_delta: Positive = 0.005
    """Step of the adaptive coefficient."""
    entropy_target: NotNegative = 0.2
    """Nats per token; the bonus acts at and below it. Use a value near the entropy of the first steps."""
    beta: Annotated[float, In("[0, inf)", "use 0 for no KL term (DeepSeek-R1: 0.001, DeepSeekMath: 0.04)")] = 0.0
    """Weight of the KL to the reference; 0: no reference is kept."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Per-token estimator of the KL in the loss, see `kl_divergence`. TRL has k3 only."""
    use_bias_correction_kl: bool = True
    """Multiply the estimator by the ratio, so that its gradient is ∇KL(π‖ref) per token, in a given state, at any μ
    (DeepSeek-V3.2). Without it, k3 has the gradient ∇KL(ref‖π) on-policy and is biased off-policy. Only
    `kl_placement="reward"` with `importance_sampling_level="trajectory"` is exact for whole completions."""
    kl_correction_level: Literal["token", "importance_sampling_level"] = "token"
    """Ratio in this correction if `importance_sampling_level` is "sequence": the token's own, or the sequence's (TRL;
    biased). Other levels use their own ratio. Ours."""
    kl_placement: Literal["loss", "reward"] = "loss"
    """Add the KL to the loss, or subtract beta × the sum of log-ratios from a token to the end of its completion from
    the advantages, which with `importance_sampling_level="trajectory"` is exact at any μ. Ours."""
    sync_ref_model: bool = False
    """Move the reference towards the policy every `ref_model_sync_steps` (TR-DPO, arXiv 2404.09656)."""
    ref_model_sync_steps: Count = 512
    """Optimizer steps between two syncs."""
    ref_model_mixup_alpha: Annotated[float, In("(0, 1]", "1 copies the policy, 0 would never move the reference")] = 0.6
    """α of a sync: ref ← α·policy + (1 − α)·ref. Of adapters the products A·B are mixed: the reference holds the
    factors of the last 16 syncs (α = 0.6; 6 for 0.9, 1 for 1.0)."""

    # A teacher.
    distillation_coef: NotNegative = 0.0
    """Weight of the divergence from the teacher in the loss. Ours."""
    distillation_divergence: Literal["reverse_kl", "forward_kl", "jsd"] = "reverse_kl"
    """Divergence from the teacher, see `maths.supervised`. Ours (TRL: by `distillation_alpha`, or `beta`)."""
    distillation_alpha: Annotated[float, In("(0, 1)", "0.5 is usual (0: forward_kl, 1: reverse_kl)")] = 0.5
    """Weight of the teacher in jsd (in TRL's SDPO; TRL's GKD calls it `beta`)."""
    distillation_mode: Literal["full_logits", "topk_logits", "sampled_token"] = "full_logits"
    """Compare whole distributions, k tokens and the rest, or the sampled token (TRL's SDPO)."""
    distillation_topk: Count | None = None
    """k, tokens with log-probs from the scorer at each position (in TRL's SDPO the policy's most probable)."""

    # Optimizer, memory and devices.
    gradient_checkpointing: bool | None = setting(None, resume="rounding")
    """Recompute activations in the backward pass, about a fifth slower; None: if they do not fit (TRL: True)."""

    # Evaluation, logging, checkpoints.
    num_generations_eval: Count | None = setting(None, resume="free")
    """Completions of each prompt in evaluation; None: `num_generations`, or 1 if greedy."""
    temperature_eval: NotNegative | None = setting(None, resume="free")
    """Temperature in evaluation; 0: greedy; None: `temperature`. Ours."""
    log_completions: bool = setting(False, resume="free")
    """Show completions with their rewards at every logging step."""
    num_completions_to_print: Count | None = setting(None, resume="free")
    """Number of completions shown; None: all."""

    def contradictions(self, wrong: set[str]) -> Iterator[str]:
        """Yield the error lines of batch sizes that do not divide and of fields that contradict each other."""
        yield from self.batch_problems(wrong)
        yield from contradictions(self, wrong)

    @property
    def eval_temperature(self) -> float:
        """Temperature of evaluation; 0 is greedy."""
        return self.temperature if self.temperature_eval is None else self.temperature_eval

    @property
    def eval_generations(self) -> int:
        """Completions of each prompt in evaluation."""
        return self.num_generations_eval or (1 if self.eval_temperature == 0 else self.num_generations)

    def sizes(self, num_devices: int | None = None) -> Sizes:
        """Return the batch sizes on `num_devices` devices (None: the size of `mesh`, or 1)."""
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
        """Return the largest number of prompts that `max_steps` may need, with refills; None without `max_steps`."""
        if self.max_steps <= 0:
            return None
        sizes = self.sizes(num_devices)
        iterations = math.ceil(self.max_steps / sizes.updates)
        return iterations * sizes.prompts * (1 + MAX_REFILLS if self.dynamic_sampling else 1)

    @property
    def on_policy(self) -> bool:
        """Whether the policy of each update is the one that sampled its completions, so that the ratio is 1."""
        return self.sizes().updates == 1 and not self.rollout_ahead

    def batch_problems(self, wrong: Container[str]) -> Iterator[str]:
        """Yield the error lines of batch sizes that do not fit together on any number of devices."""
        sizes = ("num_generations", "per_device_train_batch_size", "gradient_accumulation_steps")
        if any(name in wrong for name in (*sizes, "steps_per_generation", "generation_batch_size")):
            return
        group, micro, accumulated = (getattr(self, name) for name in sizes)

        def whole_groups(size: int) -> bool:
            return (size % group == 0 or group % size == 0) and size * accumulated % group == 0

        if not whole_groups(micro):
            yield (
                f"{shown(self, 'per_device_train_batch_size')}: with gradient_accumulation_steps = {accumulated}"
                f" there are {micro * accumulated} completions per device and update, which are not whole groups of"
                f" num_generations = {group}; {nearest_sizes(micro, whole_groups)}"
            )
        steps = self.steps_per_generation
        if steps is not None and steps % accumulated:
            yield (
                f"{shown(self, 'steps_per_generation')}: is not a multiple of gradient_accumulation_steps ="
                f" {accumulated}; {nearest_sizes(steps, lambda size: size % accumulated == 0)}"
            )
        if steps is not None and self.generation_batch_size is not None:
            yield (
                f"{shown(self, 'generation_batch_size')}: steps_per_generation = {steps} sets the same size;"
                " set one of the two"
            )
        elif whole_groups(micro):
            yield from self.split_problems(shards=1)

    def split_problems(self, shards: int) -> Iterator[str]:
        """Yield the error line of a `generation_batch_size` that does not split into minibatches over the shards."""
        micro, accumulated = self.per_device_train_batch_size, self.gradient_accumulation_steps
        update, batch = micro * accumulated * shards, self.generation_batch_size
        if batch is not None and batch % update:
            devices = f" × {shards} devices" if shards > 1 else ""
            product = f"per_device_train_batch_size = {micro} × gradient_accumulation_steps = {accumulated}{devices}"
            yield (
                f"{shown(self, 'generation_batch_size')}: does not split into minibatches of {update}"
                f" completions ({product}); {nearest_sizes(batch, lambda size: size % update == 0)}"
            )

    def device_problems(self, num_devices: int) -> Iterator[str]:
        """Yield the error lines of batches and of a mesh that do not fit the number of devices."""
        shards, group = self.data_shards(num_devices), self.num_generations
        yield from self.split_problems(shards)
        if shards > 1 and self.rollout_batch_size is not None and self.rollout_batch_size < shards * group:
            yield (
                f"{shown(self, 'rollout_batch_size')}: does not hold a group of num_generations = {group} on each of"
                f" the {shards} devices that prompts are split over; use {shards * group} or more, or None for all"
            )
        yield from super().device_problems(num_devices)
