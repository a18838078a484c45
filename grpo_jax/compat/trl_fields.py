"""Every field of TRL 1.16's `GRPOConfig`, with what to do about those that are not fields here; TRL's names of metrics.

One table serves the error messages of `GRPOConfig`, `compat.from_trl` and the page `docs/coming_from_trl.md`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, NamedTuple

TRL_VERSION = "1.16"

Kind = Literal["other name", "set outside", "not needed", "not here"]


class Elsewhere(NamedTuple):
    """A field of TRL that is not a field here.

    Attributes:
      default: TRL's default, which needs no translation.
      kind: "other name": another argument replaces it. "set outside": it is set by the environment, JAX or Python.
        "not needed", "not here": nothing has to, or can, replace it.
      advice: what to do, or why there is nothing to do.
      field: the field of `GRPOConfig` that takes the same values.
    """

    default: object
    kind: Kind
    advice: str
    field: str | None = None


def _other(default: object, advice: str) -> Elsewhere:
    return Elsewhere(default, "other name", advice)


def _renamed(default: object, field: str, more: str = "") -> Elsewhere:
    return Elsewhere(default, "other name", f"use {field}{more}", field)


def _outside(default: object, what: str) -> Elsewhere:
    return Elsewhere(default, "set outside", f"leave it out: {what}")


def _needless(default: object, why: str) -> Elsewhere:
    return Elsewhere(default, "not needed", f"leave it out: {why}")


def _absent(default: object, advice: str) -> Elsewhere:
    return Elsewhere(default, "not here", advice)


def _group(make: Callable[[object, str], Elsewhere], advice: str, **defaults: object) -> dict[str, Elsewhere]:
    return {name: make(default, advice) for name, default in defaults.items()}


_PYTORCH = "it is a setting of PyTorch"
_LOADER = "prompts are found by counting, without a data loader"
_SERVER = 'with use_vllm=True and vllm_mode="server": sampler=engines.vllm(base_url)'
_VLLM = "whoever starts `vllm serve` gives it there"
_ENGINE = ", which counts where a sampler of your own is given to train"
_MESH = "use mesh: there is one process per host, and XLA talks between the devices"
_CUT = "leave it out: mesh says how params are cut"
_HUB = "completions.jsonl holds them; huggingface_hub's upload_folder publishes a directory"
_TRACKIO = "call trackio.init(space_id=...) and pass its log to train, in callbacks"
_EVAL_ONCE = "evaluation generates and scores; there are no logits to gather"

_UNNOTED = (
    "num_generations max_completion_length max_tool_calling_iterations temperature top_p top_k min_p "
    "chat_template_kwargs gradient_accumulation_steps steps_per_generation generation_batch_size num_iterations "
    "max_steps shuffle_dataset reward_weights multi_objective_aggregation mask_truncated_completions epsilon "
    "sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg "
    "top_entropy_quantile off_policy_mask_threshold entropy_coef use_adaptive_entropy entropy_coef_min "
    "entropy_coef_max entropy_coef_delta entropy_target ref_model_sync_steps learning_rate warmup_steps "
    "adam_beta1 adam_beta2 adam_epsilon max_grad_norm per_device_eval_batch_size log_completions "
    "num_completions_to_print loss_type save_total_limit greater_is_better run_name hub_model_id hub_private_repo "
    "hub_revision"
)

SAME: dict[str, str] = dict.fromkeys(_UNNOTED.split(), "") | {
    "pad_to_multiple_of": '"auto" is 32 here, since XLA compiles for every shape; in TRL it pads on Trainium only',
    "per_device_train_batch_size": "completions, as in TRL; a micro-batch may be a part of a group",
    "num_train_epochs": "batches run on over the end of an epoch, so that no row is left out",
    "seed": "other streams: the same seed draws other samples than in TRL",
    "scale_rewards": "True and False are taken too",
    "importance_sampling_level": '"trajectory" is ours',
    "epsilon_high": 'with `loss_type="cispo"` it has to be given: unset, TRL scales on-policy gradients by 0.2',
    "delta": "caps the first term of the min only, as in TRL",
    "router_aux_loss_coef": "over the completions' tokens; TRL counts a prompt's tokens too, once for each completion",
    "beta": "at 0 no reference is kept, as in TRL",
    "use_bias_correction_kl": "as in TRL, but at the sequence level by the token's ratio, which leaves no bias; TRL's "
    'value: `kl_correction_level="importance_sampling_level"`. That, `kl_estimator` and `kl_placement` are ours',
    "sync_ref_model": "refused with `beta = 0`; the mixed reference is in the checkpoints",
    "ref_model_mixup_alpha": "of adapters the weights A·B are mixed",
    "lr_scheduler_type": "linear, cosine, constant, constant_with_warmup; for others pass `optimizer` to `train`",
    "weight_decay": "norms and biases do not decay, embeddings and LoRA's factors do",
    "gradient_checkpointing": "TRL's default is True; here None, on where activations would not fit into memory",
    "eval_steps": "a whole number or None; there is always an evaluation before the first step and after the last",
    "num_generations_eval": "1 where evaluation is greedy (`temperature_eval`, ours)",
    "logging_steps": "a whole number; no ratio below 1",
    "save_steps": "a whole number or None; one checkpoint at the end is always written",
    "logging_first_step": "True unless it is set: a curve has a beginning",
    "metric_for_best_model": "`eval_reward` is `eval/reward`, `eval_rewards/<function>/mean` is `eval/<function>`; "
    "metrics of training count too; no loss is evaluated",
    "load_best_model_at_end": "where no `metric_for_best_model` is named, the trainer of `compat` takes `eval/reward`; "
    "the checkpoints keep the last policy too",
    "report_to": "tensorboard, wandb, trackio; the default is that of transformers 5; transformers 4 reported to all",
    "project": "wandb's too, unless WANDB_PROJECT is set",
    "push_to_hub": "pushed from the directory `hub` of the run directory, with a model card made from the run",
    "hub_strategy": "checkpoints themselves are not pushed",
}
"""TRL's fields that are fields here, with the same meaning and default, and what to know of them."""

ELSEWHERE: dict[str, Elsewhere] = {
    # Model and numbers.
    "model_init_kwargs": _other(None, "pass dtype to from_pretrained"),
    "trust_remote_code": _absent(False, "the families of checkpoints are implemented here; no code is fetched"),
    "disable_dropout": _needless(False, "no model here has dropout; GRPOTrainer then leaves that of adapters out too"),
    "cast_lm_head_to_fp32": _needless(False, "logits are float32 always"),
    "bf16": _other(None, 'use compute_dtype="bfloat16"'),
    "fp16": _other(False, 'use compute_dtype="auto": there is no float16 with loss scaling'),
    "tf32": _outside(None, "JAX_DEFAULT_MATMUL_PRECISION is JAX's switch"),
    **_group(
        _needless, "evaluation computes in compute_dtype, as training does", bf16_full_eval=False, fp16_full_eval=False
    ),
    # Sampling.
    "generation_kwargs": _other(
        None,
        "its stop_strings (vLLM: stop) and stop_token_ids are stop and stop_token_ids; the sampler takes temperature,"
        " top_k, top_p and min_p beside them",
    ),
    "repetition_penalty": _absent(
        1.0,
        "leave it out: the sampler has no such penalty, which the log-probs of the loss would need too (TRL's lack it);"
        " there is get_repetition_penalty_reward",
    ),
    "cache_implementation": _needless(None, "the cache is built in"),
    **_group(_needless, "ended completions leave the decode by themselves", use_transformers_continuous_batching=False),
    **_group(
        _needless, "ended completions leave the decode by themselves", transformers_continuous_batching_config=None
    ),
    **_group(_needless, "ended completions leave the decode by themselves", use_transformers_paged=False),
    "ds3_gather_for_generation": _needless(True, "there is no DeepSpeed"),
    "use_vllm": _needless(
        False,
        "the sampler is built in; a running vLLM server is sampler=engines.vllm(base_url), in a TRL script"
        ' vllm_mode="server"',
    ),
    "vllm_mode": _other("colocate", _SERVER + "; in one process with the trainer there is the built-in sampler"),
    **_group(_needless, _VLLM, vllm_model_impl="vllm", vllm_gpu_memory_utilization=0.3, vllm_max_model_length=None),
    **_group(_needless, _VLLM, vllm_tensor_parallel_size=1),
    "vllm_enable_sleep_mode": _needless(False, "no vLLM shares the trainer's devices"),
    "vllm_structured_outputs_regex": _absent(None, "the sampler knows no grammars; reward the format instead"),
    **_group(_other, _SERVER, vllm_server_base_url=None, vllm_server_host="0.0.0.0", vllm_server_port=8000),
    "vllm_server_timeout": _other(240.0, _SERVER + ", its patience"),
    "vllm_group_port": _needless(51216, "weights go to the server by files that both sides see"),
    "vllm_importance_sampling_correction": _other(True, "use sampler_correction, None for False" + _ENGINE),
    "vllm_importance_sampling_mode": _renamed("sequence_mask", "sampler_correction", _ENGINE),
    "vllm_importance_sampling_clip_max": _renamed(3.0, "sampler_correction_max", _ENGINE),
    "vllm_importance_sampling_clip_min": _renamed(None, "sampler_correction_min", _ENGINE),
    "vllm_importance_sampling_cap": _renamed(None, "sampler_correction_max", _ENGINE),
    # Optimizer.
    "lr_scheduler_kwargs": _absent(
        None, "pass optimizer to train, an optax transformation with a schedule of your own"
    ),
    "optim": _other("adamw_torch_fused", "leave it out: it is AdamW; for another, pass optimizer to train"),
    "optim_args": _absent(None, "pass optimizer to train, an optax transformation"),
    "optim_target_modules": _absent(None, "pass optimizer to train, with optax.masked"),
    "average_tokens_across_devices": _needless(True, "the loss does not depend on how a batch is cut"),
    "label_smoothing_factor": _absent(0.0, "no loss here has labels"),
    "neftune_noise_alpha": _absent(None, "no noise is added to embeddings"),
    "auto_find_batch_size": _absent(False, "halving a batch would cut groups: lower per_device_train_batch_size"),
    # Speed and memory.
    "activation_checkpointing": _renamed(None, "gradient_checkpointing"),
    "activation_checkpointing_kwargs": _needless(None, "a layer is recomputed as a whole"),
    "gradient_checkpointing_kwargs": _needless(None, "a layer is recomputed as a whole"),
    **_group(
        _needless, "everything is compiled", torch_compile=False, torch_compile_backend=None, torch_compile_mode=None
    ),
    **_group(_needless, "logits exist for 1,024 tokens at a time", use_liger_kernel=False, liger_kernel_config=None),
    "use_cache": _needless(False, "the sampler keeps its own cache, training none"),
    "torch_empty_cache_steps": _needless(None, _PYTORCH),
    # Logging.
    "output_dir": _other(None, "pass run_dir to train"),
    "logging_strategy": _other("steps", "leave it out: logging_steps says it"),
    "log_on_each_node": _needless(True, "one process writes"),
    "logging_nan_inf_filter": _needless(True, "what is not finite is left out of means and counted where it arises"),
    "include_num_input_tokens_seen": _needless("no", "num_tokens and num_prompts are logged always"),
    "log_level": _outside("passive", "use the levels of logging and the filters of warnings"),
    "log_level_replica": _needless("warning", "one process writes"),
    "disable_tqdm": _needless(None, "progress is shown on a terminal and kept from files"),
    **_group(_absent, _TRACKIO, trackio_space_id=None, trackio_bucket_id=None, trackio_static_space_id=None),
    "log_multimodal": _absent(True, "prompts are text"),
    "log_unique_prompts": _needless(False, "completions.jsonl holds them all, and report.html filters them"),
    "log_completions_hub_repo": _absent(None, _HUB),
    # Evaluation.
    "eval_strategy": _other("no", "leave it out: eval_steps says it"),
    "do_eval": _needless(False, "there is an evaluation where there is an eval_dataset"),
    "eval_delay": _absent(0, "there is one before the first step, every eval_steps and after the last"),
    "eval_on_start": _needless(False, "there is an evaluation before the first step always"),
    **_group(_needless, _EVAL_ONCE, prediction_loss_only=False, eval_do_concat_batches=True),
    **_group(_needless, _EVAL_ONCE, eval_use_gather_object=False, eval_accumulation_steps=None),
    **_group(_needless, _EVAL_ONCE, include_for_metrics=[], batch_eval_metrics=False),
    "do_predict": _needless(False, "it is a script's own flag, which no trainer reads; call evaluate"),
    # Checkpoints.
    "save_strategy": _other("steps", "leave it out: save_steps says it (None: at the end only)"),
    "save_only_model": _absent(
        False, "a checkpoint holds all that a run needs to go on; save_pretrained writes the model"
    ),
    "save_on_each_node": _absent(False, "all processes write one checkpoint, to one place that all of them see"),
    "enable_jit_checkpoint": _needless(False, "SIGTERM saves a checkpoint always"),
    "restore_callback_states_from_checkpoint": _absent(False, "callbacks are functions without a state of the run's"),
    "resume_from_checkpoint": _other(None, "call train again with the same run_dir: it goes on where it stopped"),
    "ignore_data_skip": _needless(False, "a resumed run goes on with the next prompt, at no cost"),
    "hub_token": _absent(None, "log in by `hf auth login` or set HF_TOKEN: a config is written into the run directory"),
    "hub_always_push": _absent(
        False, "a push that is due while one is under way is left out; that of the end never is"
    ),
    # Data.
    "data_seed": _other(None, "use seed: it decides the order of the prompts too"),
    "full_determinism": _outside(
        False, "on a CPU the same seed gives the same run; for a GPU set XLA_FLAGS=--xla_gpu_deterministic_ops=true"
    ),
    **_group(_needless, _LOADER, dataloader_drop_last=False, dataloader_num_workers=0, dataloader_pin_memory=True),
    **_group(_needless, _LOADER, dataloader_persistent_workers=False, dataloader_prefetch_factor=None),
    **_group(_needless, _LOADER, dataloader_multiprocessing_context=None, dataloader_in_order=True),
    **_group(_needless, _LOADER, length_column_name="length"),
    "remove_unused_columns": _needless(False, "reward functions get the columns that they name"),
    "label_names": _needless(None, "no loss here has labels"),
    "train_sampling_strategy": _other("random", "use shuffle_dataset"),
    # Devices.
    "use_cpu": _outside(False, "JAX_PLATFORMS=cpu says it"),
    **_group(_needless, _MESH, accelerator_config=None, ddp_find_unused_parameters=None, ddp_bucket_cap_mb=None),
    **_group(_needless, _MESH, ddp_broadcast_buffers=None, ddp_static_graph=None, ddp_backend=None, ddp_timeout=1800),
    **_group(_needless, _MESH, local_rank=-1),
    "parallelism_config": _other(None, _MESH),
    **_group(_other, _CUT, fsdp=None, fsdp_config=None, deepspeed=None),
    # Debugging.
    "debug": _needless("", "an update that is not finite is always skipped and counted, and its cause is named"),
    "skip_memory_metrics": _needless(True, "`rehearse` prints what a run takes"),
    "do_train": _needless(False, "it is a script's own flag, which no trainer reads; call train"),
}
"""TRL's fields that are none here, in the order of the page."""

HINTS = {name: field.advice for name, field in ELSEWHERE.items()}
"""Name → what to do, for the message of `GRPOConfig` that it has no such field."""


def trl_names(
    metrics: Mapping[str, float | None], reward_names: Iterable[str], parts: Iterable[str] = ()
) -> dict[str, float]:
    """Return the numbers of a line of metrics, except its step, by TRL's names; `parts`: of several eval_datasets.

    Example:
      >>> trl_names({"eval/right": 1.0, "eval/mean_length": 3.0, "eval/reward": 1.0}, ["right"])
      {'eval_rewards/right/mean': 1.0, 'eval_completions/mean_length': 3.0, 'eval_reward': 1.0}
      >>> trl_names({"step": 3, "loss": 0.5, "eval/hard/right": 0.0}, ["right"], ["hard"])
      {'loss': 0.5, 'eval_hard_rewards/right/mean': 0.0}
    """
    scored, named = set(reward_names), {}
    for name, number in metrics.items():
        value = math.nan if number is None else number  # JSON has no NaN
        if not name.startswith("eval/"):
            named[name] = value
            continue
        metric, start = name.removeprefix("eval/"), "eval_"
        for part in parts:
            if part and metric.startswith(f"{part}/"):
                metric, start = metric.removeprefix(f"{part}/"), f"eval_{part}_"
        if metric in scored:
            named[f"{start}rewards/{metric}/mean"] = value
        else:
            named[f"{start}{'completions/' * (metric in ('mean_length', 'clipped_ratio'))}{metric}"] = value
    return {name: value for name, value in named.items() if name != "step"}
