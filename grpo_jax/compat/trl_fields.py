"""All fields of TRL 1.16's `GRPOConfig`, with advice on fields that do not exist here, and TRL's metric names.

The tables are used in error messages of `GRPOConfig`, by `compat.from_trl`, and on the page `docs/coming_from_trl.md`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from grpo_jax.config.config import GRPOConfig

TRL_VERSION = "1.16"

Kind = Literal["other name", "set outside", "not needed", "not here"]


class TRLField(NamedTuple):
    """A field that only TRL's `GRPOConfig` has.

    Attributes:
      default: TRL's default.
      kind: "other name" if a different argument replaces it, "set outside" if it is set in the environment, JAX or
        Python, "not needed" if it would have no effect, or "not here" if it is not supported.
      advice: what to use instead, or why it is not needed.
      field: field of `GRPOConfig` that replaces it and accepts the same values, or None if there is none.
    """

    default: object
    kind: Kind
    advice: str
    field: str | None = None


def _fields(kind: Kind, advice: str, field: str | None = None, **defaults: object) -> dict[str, TRLField]:
    return {name: TRLField(default, kind, advice, field) for name, default in defaults.items()}


_renamed = functools.partial(_fields, "other name")
_external = functools.partial(_fields, "set outside")
_unneeded = functools.partial(_fields, "not needed")
_missing = functools.partial(_fields, "not here")

_SERVER = 'with use_vllm=True and vllm_mode="server": sampler=engines.vllm(base_url)'
_ENGINE = "; it has an effect only if a sampler is passed to train"
_OPTIMIZER = "pass an optax transformation to train as optimizer"
_TORCH = "it affects only PyTorch"
_DECODED = "decoding stops for completions that have ended"
_VLLM = "it is a `vllm serve` option"
_TRACKIO = "call trackio.init(space_id=...) and pass train a callback that calls trackio.log(metrics, step=step)"
_EVALUATION = "evaluation generates completions and computes rewards; logits are not gathered"
_LOADER = "there is no data loader; prompts are read by index"
_LABELS = "there are no labels"
_SCRIPTS = "it is an option for scripts and is ignored by trainers; call train and evaluate"
_MESH = "use mesh: there is one process per host, and XLA handles communication between devices"
_SHARDED = "mesh determines how params are sharded"

_NOT_IN_TRL = (
    "max_prompt_length on_long_prompt stop stop_token_ids max_turn_length rollout_batch_size rollout_ahead "
    "environment_timeout on_environment_error dynamic_sampling on_reward_error advantage_estimator turn_credit "
    "sampler_correction sampler_correction_max sampler_correction_min kl_estimator kl_correction_level kl_placement "
    "distillation_coef distillation_divergence distillation_alpha distillation_mode distillation_topk temperature_eval "
    "compute_dtype freeze_vision mesh save_minutes max_skipped_updates"
)

SHARED: dict[str, str] = {
    field.name: "" for field in dataclasses.fields(GRPOConfig) if field.name not in _NOT_IN_TRL.split()
} | {
    "pad_to_multiple_of": '"auto" is 16, since XLA compiles a program for every shape; in TRL it pads only on Trainium',
    "num_train_epochs": "a batch may contain the end of one epoch and the start of the next, so no row is dropped",
    "seed": "the same seed gives different samples than in TRL",
    "scale_rewards": "True and False are also accepted",
    "epsilon_high": 'required with `loss_type="cispo"`; if it is unset, TRL scales on-policy gradients by 0.2',
    "router_aux_loss_coef": "averaged over completion tokens; TRL also includes prompt tokens, once per completion",
    "use_bias_correction_kl": "at the sequence level, the token's ratio is used, which is unbiased; "
    '`kl_correction_level="importance_sampling_level"` gives TRL\'s value',
    "sync_ref_model": "rejected with `beta = 0`; checkpoints contain the updated reference",
    "ref_model_mixup_alpha": "for adapters, the products A·B are interpolated",
    "lr_scheduler_type": "linear, cosine, constant or constant_with_warmup; for others, pass `optimizer` to `train`",
    "weight_decay": "applied to embeddings and LoRA factors, not to norms and biases",
    "gradient_checkpointing": "TRL's default is True; here None enables it on GPUs and TPUs if activations do not fit",
    "eval_steps": "an integer or None; evaluations also run before the first step and after the last step",
    "num_generations_eval": "must be 1 if evaluation is greedy (`temperature_eval`, not in TRL)",
    "logging_steps": "an integer; ratios below 1 are not supported",
    "save_steps": "an integer or None; a checkpoint is always written after the last step",
    "logging_first_step": "the default is True",
    "metric_for_best_model": "`eval_reward` is `eval/reward`, `eval_rewards/<function>/mean` is `eval/<function>`; "
    "training metrics are also accepted; there is no evaluation loss",
    "load_best_model_at_end": "without `metric_for_best_model`, `compat.GRPOTrainer` uses `eval/reward`; checkpoints "
    "also contain the last policy",
    "report_to": "tensorboard, wandb, trackio; the default is the same as in transformers 5 (in transformers 4, all)",
    "push_to_hub": "pushes the run directory's subdirectory `hub`, with a model card",
    "hub_strategy": "checkpoints are not pushed",
}
"""TRL fields with the same name here, each mapped to a note on differences, or to "" if there are none."""

TRL_ONLY: dict[str, TRLField] = {
    # Model and numerics.
    **_renamed("pass dtype to from_pretrained", model_init_kwargs=None),
    **_missing("model architectures are implemented in this library; no code is downloaded", trust_remote_code=False),
    **_missing("set lora_dropout=0 in peft_config; models do not have other dropout", disable_dropout=False),
    **_unneeded("logits are always float32", cast_lm_head_to_fp32=False),
    **_renamed('use compute_dtype="bfloat16"', bf16=None),
    **_renamed('use compute_dtype="auto"; float16 and loss scaling are not supported', fp16=False),
    **_external("set JAX_DEFAULT_MATMUL_PRECISION", tf32=None),
    **_unneeded("evaluation uses compute_dtype, as training does", bf16_full_eval=False, fp16_full_eval=False),
    # Sampling.
    **_renamed("set stop, stop_token_ids, temperature, top_k, top_p and min_p as fields", generation_kwargs=None),
    **_missing("log-probs in the loss would also depend on it; TRL ignores this", repetition_penalty=1.0),
    **_unneeded("sampling always uses a cache; training does not need one", cache_implementation=None, use_cache=False),
    **_unneeded(_DECODED, use_transformers_continuous_batching=False, transformers_continuous_batching_config=None),
    **_unneeded(_DECODED, use_transformers_paged=False),
    **_unneeded("DeepSpeed is not used", ds3_gather_for_generation=True),
    **_unneeded("the sampler is built in; for a vLLM server, pass sampler=engines.vllm(base_url)", use_vllm=False),
    **_renamed(_SERVER + "; the built-in sampler replaces vLLM in the trainer's process", vllm_mode="colocate"),
    **_unneeded(_VLLM, vllm_model_impl="vllm", vllm_gpu_memory_utilization=0.3, vllm_max_model_length=None),
    **_unneeded(_VLLM, vllm_tensor_parallel_size=1),
    **_unneeded("vLLM does not share the trainer's devices", vllm_enable_sleep_mode=False),
    **_missing("grammars are not supported; use a format reward instead", vllm_structured_outputs_regex=None),
    **_renamed(_SERVER, vllm_server_base_url=None, vllm_server_host="0.0.0.0", vllm_server_port=8000),
    **_renamed(_SERVER + ", with the argument patience", vllm_server_timeout=240.0),
    **_unneeded("the server reads weights from files on a shared file system", vllm_group_port=51216),
    **_renamed("use sampler_correction, with None for False" + _ENGINE, vllm_importance_sampling_correction=True),
    **_renamed("use sampler_correction" + _ENGINE, "sampler_correction", vllm_importance_sampling_mode="sequence_mask"),
    **_renamed("use sampler_correction_max" + _ENGINE, "sampler_correction_max", vllm_importance_sampling_clip_max=3.0),
    **_renamed(
        "use sampler_correction_min" + _ENGINE, "sampler_correction_min", vllm_importance_sampling_clip_min=None
    ),
    **_renamed("use sampler_correction_max" + _ENGINE, "sampler_correction_max", vllm_importance_sampling_cap=None),
    # Optimizer.
    **_renamed("AdamW is the default; for other optimizers, " + _OPTIMIZER, optim="adamw_torch_fused"),
    **_missing(_OPTIMIZER, lr_scheduler_kwargs=None, optim_args=None, optim_target_modules=None),
    **_unneeded("the loss does not depend on how a batch is split", average_tokens_across_devices=True),
    **_missing(_LABELS, label_smoothing_factor=0.0),
    **_missing("embedding noise is not supported", neftune_noise_alpha=None),
    **_missing("halving a batch could split groups; lower per_device_train_batch_size", auto_find_batch_size=False),
    # Speed and memory.
    **_renamed("use gradient_checkpointing", "gradient_checkpointing", activation_checkpointing=None),
    **_unneeded("layers are recomputed", activation_checkpointing_kwargs=None, gradient_checkpointing_kwargs=None),
    **_unneeded(_TORCH, torch_compile=False, torch_compile_backend=None, torch_compile_mode=None),
    **_unneeded(_TORCH, torch_empty_cache_steps=None),
    **_unneeded("logits are computed for 1,024 tokens at a time", use_liger_kernel=False, liger_kernel_config=None),
    # Logging.
    **_renamed("pass run_dir to train", output_dir=None),
    **_renamed("use logging_steps", logging_strategy="steps"),
    **_unneeded("only process 0 logs", log_on_each_node=True, log_level_replica="warning"),
    **_unneeded("values that are not finite are excluded from means", logging_nan_inf_filter=True),
    **_unneeded("num_tokens and num_prompts are always logged", include_num_input_tokens_seen="no"),
    **_external("set levels with the logging module and filters with the warnings module", log_level="passive"),
    **_unneeded("the progress bar is shown only in a terminal", disable_tqdm=None),
    **_missing(_TRACKIO, trackio_space_id=None, trackio_bucket_id=None, trackio_static_space_id=None),
    **_unneeded("completions.jsonl contains all prompts and images", log_multimodal=True, log_unique_prompts=False),
    **_missing("publish completions.jsonl with huggingface_hub's upload_folder", log_completions_hub_repo=None),
    # Evaluation.
    **_renamed("use eval_steps", eval_strategy="no"),
    **_unneeded("with eval_dataset, evaluations also run before the first step", do_eval=False, eval_on_start=False),
    **_missing("evaluations run before the first step, every eval_steps and after the last step", eval_delay=0),
    **_unneeded(_EVALUATION, prediction_loss_only=False, eval_do_concat_batches=True, eval_use_gather_object=False),
    **_unneeded(_EVALUATION, eval_accumulation_steps=None, include_for_metrics=[], batch_eval_metrics=False),
    # Checkpoints.
    **_renamed("use save_steps; None saves only at the end", save_strategy="steps"),
    **_missing("checkpoints contain the whole state; save_pretrained writes only the model", save_only_model=False),
    **_missing("all processes write to the same checkpoint on a shared file system", save_on_each_node=False),
    **_unneeded("SIGTERM always saves a checkpoint", enable_jit_checkpoint=False),
    **_missing("the state of callbacks is not saved", restore_callback_states_from_checkpoint=False),
    **_renamed("call train again with the same run_dir to resume", resume_from_checkpoint=None),
    **_unneeded("a resumed run continues with the next prompt, without reading skipped rows", ignore_data_skip=False),
    **_missing(
        "log in with `hf auth login` or set HF_TOKEN; the config is stored in the run directory", hub_token=None
    ),
    **_unneeded("training waits for each push", hub_always_push=False),
    # Data.
    **_renamed("use seed, which also determines the order of the prompts", data_seed=None),
    **_external("on GPUs, set XLA_FLAGS=--xla_gpu_deterministic_ops=true", full_determinism=False),
    **_unneeded(_LOADER, dataloader_drop_last=False, dataloader_num_workers=0, dataloader_pin_memory=True),
    **_unneeded(_LOADER, dataloader_persistent_workers=False, dataloader_prefetch_factor=None),
    **_unneeded(_LOADER, dataloader_multiprocessing_context=None, dataloader_in_order=True),
    **_unneeded(_LOADER, length_column_name="length"),
    **_unneeded("reward functions receive the columns that match their argument names", remove_unused_columns=False),
    **_unneeded(_LABELS, label_names=None),
    **_renamed("use shuffle_dataset", train_sampling_strategy="random"),
    # Devices.
    **_external("set JAX_PLATFORMS=cpu", use_cpu=False),
    **_unneeded(_MESH, accelerator_config=None, ddp_find_unused_parameters=None, ddp_bucket_cap_mb=None),
    **_unneeded(_MESH, ddp_broadcast_buffers=None, ddp_static_graph=None, ddp_backend=None, ddp_timeout=1800),
    **_unneeded(_MESH, local_rank=-1),
    **_renamed(_SHARDED, parallelism_config=None, fsdp=None, fsdp_config=None, deepspeed=None),
    # Debugging and scripts.
    **_unneeded("updates that are not finite are always skipped, counted and reported", debug=""),
    **_unneeded("`rehearse` prints a run's memory use", skip_memory_metrics=True),
    **_unneeded(_SCRIPTS, do_train=False, do_predict=False),
}
"""TRL fields that do not exist here, in the order in which `docs/coming_from_trl.md` lists them."""

HINTS = {
    name: {"set outside": "remove it, and ", "not needed": "remove it: "}.get(field.kind, "") + field.advice
    for name, field in TRL_ONLY.items()
}
"""Advice on each field in `TRL_ONLY`, for error messages of `GRPOConfig`."""


def trl_names(metrics: Mapping[str, float | None], reward_names: Iterable[str]) -> dict[str, float]:
    """Rename a logged line's metrics to TRL's names, and drop "step".

    Example:
      >>> trl_names({"step": 3, "loss": 0.5, "eval/exact": 1.0, "eval/reward": 0.0}, ["exact"])
      {'loss': 0.5, 'eval_rewards/exact/mean': 1.0, 'eval_reward': 0.0}
    """
    rewards, renamed = set(reward_names), {}
    for name, value in metrics.items():
        metric = name.removeprefix("eval/")
        if metric != name:
            if metric in rewards:
                metric = f"rewards/{metric}/mean"
            elif metric in ("mean_length", "clipped_ratio"):
                metric = f"completions/{metric}"
            metric = f"eval_{metric}"
        if metric != "step":
            renamed[metric] = math.nan if value is None else value  # JSON has no NaN
    return renamed
