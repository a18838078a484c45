"""`GRPOConfig`: every setting of a run, its default stated once, wrong values refused before anything runs.

A field that TRL 1.16's `GRPOConfig` (or `transformers.TrainingArguments` under it) has keeps its name, meaning and
default here; the docs below say where not, and "ours" where there is none. A run's defaults live in this file only.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from grpo_jax.config import readers
from grpo_jax.config.contradictions import contradictions
from grpo_jax.config.fields import Count, In, LossType, NotNegative, Positive, setting
from grpo_jax.config.settings import Batches


@dataclasses.dataclass(frozen=True, kw_only=True)
class GRPOConfig(Batches):
    """Settings of a GRPO run, checked when they are made.

    All errors are found at once; what depends on the data or the devices is checked when a run begins.

    Raises:
      ValueError: with one line per error, each with the field, the value that came and what to do.

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
    num_generations: Annotated[int, In("[2, inf)", "a group of one has nothing to be compared with: use 2 or more")] = 8
    """G, completions of each prompt."""
    max_completion_length: Count = 512
    """T, tokens; a completion that reaches it without an EOS is truncated."""
    max_prompt_length: Count | None = None
    """Tokens; None: bounded by the model's context only. Ours."""
    on_long_prompt: Literal["error", "drop"] = "error"
    """A row whose prompt is longer than `max_prompt_length` is an error, or dropped and counted; never cut. Ours."""
    temperature: Annotated[float, In("(0, inf)", "sampling needs more than 0 (greedy is for evaluation)")] = 1.0
    """Logits are divided by it, in sampling and in every log-prob of the loss alike."""
    top_p: Annotated[float, In("(0, 1]", "use 1.0 to keep every token")] = 1.0
    """Probability mass of the most probable tokens that are kept."""
    top_k: Annotated[int, In("[0, inf)", "use 0 to keep every token")] = 0
    """How many of the most probable tokens are kept; 0: all."""
    min_p: Annotated[float, In("[0, 1]", "use None to keep every token")] | None = None
    """Tokens less probable than this share of the most probable one are dropped; None: off."""
    stop: Annotated[str | Sequence[str] | None, readers.stop] = None
    """Texts that end a turn, or a completion of one turn, such as ["</answer>"]; found over the borders of tokens. The
    tokens up to the one that completes a text are kept and learned from. None: only an EOS ends it. Ours."""
    stop_token_ids: Annotated[int | Sequence[int] | None, readers.token_ids] = None
    """Token ids that end it too, as an EOS does. Ours."""
    max_turn_length: Count | None = None
    """Tokens of one turn: it is then handed to the environment, and counted in the metric `turns/cut_short`; without
    tools and environments a completion is its one turn, and ends there as truncated. None: as many as there is room
    for. Ours."""
    chat_template_kwargs: Annotated[dict[str, Any] | None, readers.keywords] = setting(None, hash=False)
    """Further keywords of the tokenizer's `apply_chat_template`, for prompts that are lists of messages."""
    pad_to_multiple_of: Count | Literal["auto"] | None = "auto"
    """Tokens; prompts are padded to a multiple of it, so that few shapes are compiled; "auto": 32; None: the longest.

    TRL's "auto" pads on Trainium only, the one target that compiles per shape there; XLA does so everywhere."""

    # Batches (see `Sizes`).
    per_device_train_batch_size: Count = setting(8, resume="rounding")
    """Completions (not prompts) of one micro-batch on one device: whole groups, or a whole fraction of one."""
    gradient_accumulation_steps: Count = setting(1, resume="rounding")
    """Micro-batches of one optimizer step; how a batch is cut does not change the gradient."""
    steps_per_generation: Count | None = setting(None, resume="rounding")
    """Micro-batches that one generation batch is cut into; None: `gradient_accumulation_steps`, one update a pass."""
    generation_batch_size: Count | None = setting(None, resume="rounding")
    """Completions of one iteration over all devices: another way to say `steps_per_generation`; set one of the two."""
    num_iterations: Count = 1
    """μ, passes over the completions of one iteration."""
    rollout_batch_size: Count | None = setting(None, resume="rounding")
    """Completions decoded at a time, over all devices; further prompts wait for a free place; None: all. On a mesh so
    many whole groups on each device, one at least. Ours."""
    rollout_ahead: bool = False
    """Sample the next iteration's completions while the reward functions are at this one's, from the policy before this
    one's updates: what is learnt from is one iteration old, and the ratio corrects for it. A server samples beside the
    updates too (`run.beside`). Ours."""
    environment_timeout: Positive | None = 300.0
    """Seconds that a call of an environment or a tool may take; None: however long. Ours."""
    max_tool_calling_iterations: Count | None = None
    """Turns of a completion that may call tools; None: as many as there is room for."""
    on_environment_error: Literal["raise", "end"] = "raise"
    """An environment that fails ends the run, or "end" its episode, which is counted and keeps its reward. Ours."""
    max_steps: Annotated[int, In("[-1, inf)", "use -1 to train by num_train_epochs")] = setting(-1, resume="length")
    """Optimizer steps of the run; -1: what `num_train_epochs` comes to."""
    num_train_epochs: Positive = setting(3.0, resume="length")
    """Times the dataset is gone through, where `max_steps` is -1."""
    shuffle_dataset: bool = True
    """Shuffle the prompts, anew in every epoch."""
    dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal by groups of further prompts, in 4 further rollouts at most (DAPO,
    arXiv 2503.14476). Ours."""
    seed: Annotated[int, In("[0, 4294967295]", "use a whole number from 0 to 2**32 - 1")] = 42
    """Seed of every key of the run: of sampling and of shuffling."""

    # Rewards and advantages.
    reward_weights: Annotated[Sequence[float] | None, readers.weights] = None
    """One weight per reward function; None: 1.0 each."""
    on_reward_error: Literal["raise", "none"] = setting("raise", resume="to none")
    """When a reward function raises: stop the run, or take its scores as missing and count them. Ours."""
    advantage_estimator: Literal["grpo", "rloo", "maxrl", "opo", "reinforce_pp"] = "grpo"
    """Baseline and scale of advantages: see `compute_advantages`; all but "grpo" need scale_rewards="none". Ours."""
    scale_rewards: Annotated[Literal["group", "batch", "none"], readers.scale] = "group"
    """Standard deviation that advantages are divided by; True and False stand for "group" and "none"."""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """Sum the weighted rewards, then normalize; or each reward by itself first (GDPO, arXiv 2601.05242)."""
    turn_credit: Literal["episode", "to_go"] = "episode"
    """Which rewards of a completion a turn is credited with, see `turn_advantages`: all of them, or those from the turn
    on. Rewards of turns are lists that reward functions return, or what `respond` returns beside the text. Ours."""
    mask_truncated_completions: bool = False
    """Leave completions without an EOS out of the loss (DAPO, arXiv 2503.14476)."""
    # The policy loss.
    loss_type: LossType = "dapo"
    """Surrogate and reduction: a row of `LOSS_TYPES` in `maths.surrogates`."""
    importance_sampling_level: Literal["token", "sequence", "trajectory"] = "token"
    """Level of the ratio: the token's own, a completion's geometric mean (GSPO, arXiv 2507.18071) or product (ours)."""
    epsilon: Positive = 0.2
    """Lower clip: ratios below 1 − ε."""
    epsilon_high: Positive | None = None
    """Upper clip: ratios above 1 + ε_high; None: `epsilon` (DAPO: 0.28). In cispo the cap itself (ScaleRL: 5.0)."""
    delta: Annotated[float, In("(1, inf)", "at 1 it stops the on-policy gradient: use 1 + ε or more")] | None = None
    """Cap of the unclipped ratio where the advantage is negative; None: off (INTELLECT-2, arXiv 2505.07291)."""
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
    """ρ, share of the tokens with the highest entropy that the policy loss keeps (arXiv 2506.01939)."""
    off_policy_mask_threshold: Positive | None = None
    """Nats per token: A < 0 and a larger mean of l_sampling − l leave the loss (DeepSeek-V3.2); None: off."""
    sampler_correction: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] | None = (
        "sequence_mask"
    )
    """Form of the weights π_old / π_sampler where `train` is given a `sampler`; None: no weights. Ours."""
    sampler_correction_max: Positive | None = 3.0
    """Upper bound of those weights, see `maths.correction`; None: no bound. Ours."""
    sampler_correction_min: NotNegative | None = None
    """Lower bound of those weights. Ours."""
    router_aux_loss_coef: NotNegative | None = None
    """Factor on the load-balancing loss of a mixture of experts; None: the checkpoint's own (Qwen3: 0.001); 0: none.
    The loss is over the completion tokens of a micro-batch or packed sequence, see `models.experts.router_loss`."""
    # Entropy, KL and the reference.
    entropy_coef: NotNegative = 0.0
    """Weight of the mean token entropy (nats) that is subtracted from the loss; the first one if adaptive."""
    use_adaptive_entropy: bool = False
    """Move `entropy_coef` at every optimizer step towards `entropy_target` (Skywork-OR1, arXiv 2505.22312)."""
    entropy_coef_min: NotNegative = 0.0
    """Lowest adaptive coefficient."""
    entropy_coef_max: NotNegative = 1.0
    """Highest adaptive coefficient."""
    entropy_coef_delta: Positive = 0.005
    """Step of the adaptive coefficient."""
    entropy_target: NotNegative = 0.2
    """Nats per token; the bonus acts at and below it. Set it near the entropy of the first steps."""
    beta: Annotated[float, In("[0, inf)", "use 0 for no KL term (DeepSeek-R1: 0.001, DeepSeekMath: 0.04)")] = 0.0
    """Weight of the KL to the reference; 0: no reference is kept."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Per-token estimator of the KL in the loss, see `kl`. TRL has k3 only."""
    use_bias_correction_kl: bool = True
    """Multiply the estimator by the ratio, so that its gradient is, token by token, that of KL(π‖ref) at any μ
    (DeepSeek-V3.2). Without it the gradient of k3 is that of KL(ref‖π), at μ = 1 already, and is biased off-policy.

    Token by token means: each in a state that is given. For whole completions the effect of a token on the states after
    it is missing, on-policy too; exact is `kl_placement="reward"` with the trajectory level."""
    kl_correction_level: Literal["token", "importance_sampling_level"] = "token"
    """The ratio of that correction where `importance_sampling_level` is "sequence": the token's own, or the sequence's
    (TRL's value), with which the correction is biased. The other levels correct by their own ratio. Ours."""
    kl_placement: Literal["loss", "reward"] = "loss"
    """In the loss, or in the advantages as −beta × the log-ratios from here to the end of the completion; there, with
    `importance_sampling_level="trajectory"`, the gradient is that of the KL of whole completions at any μ. Ours."""
    sync_ref_model: bool = False
    """Sync the reference: move it towards the policy now and then (TR-DPO, arXiv 2404.09656)."""
    ref_model_sync_steps: Count = 512
    """Optimizer steps between two syncs."""
    ref_model_mixup_alpha: Annotated[float, In("(0, 1]", "1 copies the policy, 0 would never move the reference")] = 0.6
    """α of a sync: ref ← α·policy + (1 − α)·ref. Of adapters too it is the weights A·B that are mixed, and not the
    factors: the reference then holds those of the last 16 syncs (α = 0.6; 6 for 0.9, 1 for 1.0), side by side."""
    # A teacher.
    distillation_coef: NotNegative = 0.0
    """Weight of the divergence from the teacher, which is added to the policy loss. Ours."""
    distillation_divergence: Literal["reverse_kl", "forward_kl", "jsd"] = "reverse_kl"
    """Divergence from the teacher, see `maths.distillation`. Ours (TRL: by `distillation_alpha`, or `beta`)."""
    distillation_alpha: Annotated[float, In("(0, 1)", "0.5 is usual (0: forward_kl, 1: reverse_kl)")] = 0.5
    """Weight of the teacher in jsd. In TRL's SDPO; its GKD calls it `beta`."""
    distillation_mode: Literal["full_logits", "topk_logits", "sampled_token"] = "full_logits"
    """Compare all of a model's distribution, k tokens and the rest of a scorer's, or the drawn token (TRL's SDPO)."""
    distillation_topk: Count | None = None
    """k, tokens whose log-probs such a teacher tells at each place (in TRL's SDPO the policy's most probable)."""
    # Optimizer, memory and devices.
    learning_rate: NotNegative = 1e-6
    """Peak of the schedule, for AdamW."""
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = "linear"
    """Shape of the schedule over the run: down to 0 ("linear", "cosine"), or flat."""
    warmup_steps: NotNegative = 0
    """Optimizer steps of linear warm-up from 0; below 1: share of all steps."""
    weight_decay: NotNegative = 0.0
    """AdamW's, decoupled: of all parameters but norms and biases, as in transformers."""
    adam_beta1: Annotated[float, In("[0, 1)", "0.9 is usual")] = 0.9
    """Decay of the first moment."""
    adam_beta2: Annotated[float, In("[0, 1)", "0.999 is usual")] = 0.999
    """Decay of the second moment."""
    adam_epsilon: Positive = 1e-8
    """Added to the root of the second moment."""
    max_grad_norm: NotNegative = 1.0
    """Bound of the global gradient norm; 0: no clipping."""
    gradient_checkpointing: bool | None = setting(None, resume="rounding")
    """Recompute a layer's activations in the backward pass, a fifth slower; None: if they would not fit (TRL: True)."""
    compute_dtype: Annotated[Literal["auto", "float32", "bfloat16"], readers.compute_dtype] = "auto"
    """Dtype of the matrix products; softmax, norms, logits and log-probs are float32 always. "auto": bfloat16 on TPUs
    and on GPUs that have it (compute capability 8.0), float32 elsewhere. Ours (TRL: `bf16`)."""
    mesh: Annotated[dict[str, int] | None, readers.mesh] = setting(None, resume="rounding", hash=False)
    """Devices along "data", "fsdp" and "tensor", such as {"data": 2, "fsdp": 4}; None: one device. Ours."""

    # Evaluation, logging, checkpoints.
    eval_steps: Count | None = setting(None, resume="free")
    """Optimizer steps between two evaluations; None: before the first and after the last only."""
    per_device_eval_batch_size: Count = setting(8, resume="free")
    """Completions evaluated at a time on one device."""
    num_generations_eval: Count | None = setting(None, resume="free")
    """Completions of each prompt in evaluation; None: `num_generations`, or 1 if greedy."""
    temperature_eval: NotNegative | None = setting(None, resume="free")
    """Temperature in evaluation; 0: greedy; None: `temperature`. Ours."""
    logging_steps: Count = setting(10, resume="free")
    """Optimizer steps between two lines of metrics (the mean over them); TRL's ratios below 1 are not taken."""
    logging_first_step: bool = setting(True, resume="free")
    """Write a line after the first optimizer step too, so that a curve has a beginning (TRL: False)."""
    log_completions: bool = setting(False, resume="free")
    """Show completions with their rewards at every logging step."""
    num_completions_to_print: Count | None = setting(None, resume="free")
    """How many of them are shown; None: all."""
    save_steps: Count | None = setting(500, resume="free")
    """Optimizer steps between two checkpoints; None: at the end only. One at the end is always written."""
    save_minutes: Positive | None = setting(5.0, resume="free")
    """Minutes since the last checkpoint after which another is written even so, at the end of an optimizer step, so
    that a run that is killed loses no more; 20 times as long as the last one held the run up, if that is longer; None:
    never. Of several processes the first one's clock decides. Ours."""
    save_total_limit: Count | None = setting(None, resume="free")
    """Checkpoints kept, the newest ones of `save_steps` and the best; None: all of `save_steps`. One that a stop or
    `save_minutes` adds goes when the next is there."""
    max_skipped_updates: Count | None = setting(10, resume="free")
    """Updates in a row whose loss or gradient is not finite, and which are skipped, before the run stops; None: never.
    Ours."""
    metric_for_best_model: str | None = setting(None, resume="free")
    """Name as in `metrics.jsonl` ("reward", "eval/accuracy"; "eval/reward": `reward` of held-out prompts);
    the checkpoint with the best is kept beside the newest `save_total_limit`, of those of `save_steps` and the last.
    The last value logged counts, in an evaluation that of the very step; None: none is best."""
    greater_is_better: bool | None = setting(None, resume="free")
    """Whether the best of `metric_for_best_model` is the greatest; None: unless its name ends in "loss"."""
    load_best_model_at_end: bool = setting(False, resume="free")
    """Let `train` return the state of the checkpoint with the best `metric_for_best_model`, not of the last step."""
    # Trackers and the hub.
    report_to: Annotated[str | Sequence[str] | None, readers.trackers] = setting("none", resume="free")
    """Trackers that `train` opens and closes: "tensorboard", "wandb", "trackio", a list of them, "all" that are
    installed, or "none". The default is that of transformers 5; transformers 4 reported to all."""
    run_name: str | None = setting(None, resume="free")
    """Name of the run in the trackers; None: they choose one."""
    project: str = setting("huggingface", resume="free")
    """Project in trackio, and in Weights & Biases where the variable WANDB_PROJECT is not set."""
    push_to_hub: bool = setting(False, resume="free")
    """Push the policy to the Hugging Face hub at every checkpoint of `save_steps`, in the background, and at the end,
    waited for."""
    hub_model_id: str | None = setting(None, resume="free")
    """Repository, "name" or "owner/name"; None: the name of the run directory."""
    hub_private_repo: bool | None = setting(None, resume="free")
    """Whether a repository that is made is private; None: as its owner's settings say, which mostly is public."""
    hub_strategy: Literal["end", "every_save"] = setting("every_save", resume="free")
    """When to push; the checkpoints themselves, which TRL's "checkpoint" and "all_checkpoints" push, stay here."""
    hub_revision: str | None = setting(None, resume="free")
    """Branch to push to; None: the main one."""

    def contradictions(self, wrong: set[str]) -> Iterator[str]:
        """Yield the error lines of batch sizes that don't divide, and of fields that don't go together."""
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
