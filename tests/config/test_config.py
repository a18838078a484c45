"""Every default is what it should be, every bad value is refused with a message that helps, and sizes add up."""

import ast
import dataclasses
import inspect
import itertools
import json
import pathlib
import pickle
import re
import subprocess
import sys

import numpy as np
import pytest

from grpo_jax.config import config as config_module
from grpo_jax.config import contradictions as contradictions_module
from grpo_jax.config.checks import run_problems
from grpo_jax.config.config import GRPOConfig
from grpo_jax.config.sizes import Sizes

NUMBER = "must be a number, not"
WHOLE = "must be a whole number, not"
UP = "must be at least 1; use a whole number from 1 up"
ABOVE = "must be above 0; use a number above 0"
FROM_0 = "must be at least 0; use 0 or a number above it"
CAP = "in cispo it is the cap of the ratio itself, not 1 + ε_high"

# The fields that are set, and the error line. More than one line where one field is wrong in itself, and shown so.
BAD = [
    # Numbers out of range.
    (
        dict(num_generations=1),
        "num_generations = 1: must be at least 2; a group of one has nothing to be compared with: use 2 or more",
    ),
    (dict(max_completion_length=0), f"max_completion_length = 0: {UP}"),
    (dict(max_prompt_length=0), f"max_prompt_length = 0: {UP}"),
    (dict(max_turn_length=0), f"max_turn_length = 0: {UP}"),
    (dict(stop=["a", ""]), "stop = ['a', '']: must be a text or a list of texts, none of them empty; or None"),
    (dict(stop=1.0), "stop = 1.0: must be a text or a list of texts, none of them empty; or None"),
    (dict(stop_token_ids=[3, -1]), "stop_token_ids = [3, -1]: id 1 must be at least 0; ids are counted from 0"),
    (dict(stop_token_ids="</s>"), "stop_token_ids = '</s>': must be a list of token ids; or None"),
    (dict(temperature=0), "temperature = 0: must be above 0; sampling needs more than 0 (greedy is for evaluation)"),
    (
        dict(temperature=-1.0),
        "temperature = -1.0: must be above 0; sampling needs more than 0 (greedy is for evaluation)",
    ),
    (dict(top_p=0.0), "top_p = 0.0: must be above 0 and at most 1; use 1.0 to keep every token"),
    (dict(top_p=1.5), "top_p = 1.5: must be above 0 and at most 1; use 1.0 to keep every token"),
    (dict(top_k=-1), "top_k = -1: must be at least 0; use 0 to keep every token"),
    (dict(min_p=1.1), "min_p = 1.1: must be at least 0 and at most 1; use None to keep every token"),
    (dict(pad_to_multiple_of=0), f'pad_to_multiple_of = 0: {UP}; or must be "auto"'),
    (dict(per_device_train_batch_size=0), f"per_device_train_batch_size = 0: {UP}"),
    (dict(gradient_accumulation_steps=0), f"gradient_accumulation_steps = 0: {UP}"),
    (dict(steps_per_generation=0), f"steps_per_generation = 0: {UP}"),
    (dict(generation_batch_size=0), f"generation_batch_size = 0: {UP}"),
    (dict(num_iterations=0), f"num_iterations = 0: {UP}"),
    (dict(rollout_batch_size=0), f"rollout_batch_size = 0: {UP}"),
    (
        dict(rollout_batch_size=7),
        "rollout_batch_size = 7: must hold a group of num_generations completions; raise it or use None",
    ),
    (dict(max_steps=-2), "max_steps = -2: must be at least -1; use -1 to train by num_train_epochs"),
    (
        dict(max_steps=0),
        "max_steps = 0: nothing would be learnt; use a number of optimizer steps, or -1 to train by num_train_epochs",
    ),
    (dict(num_train_epochs=0), f"num_train_epochs = 0: {ABOVE}"),
    (
        dict(prompt_selection="beta", shuffle_dataset=False),
        'shuffle_dataset = False: prompt_selection = "beta" and "curriculum" choose rows in an order of their own;'
        " leave it True",
    ),
    (
        dict(prompt_success=1),
        'prompt_success = 1.0: nothing reads it; set prompt_selection = "beta" or "curriculum", or leave it at None',
    ),
    (
        dict(prompt_decay=0),
        "prompt_decay = 0: must be above 0 and at most 1; 1 never forgets, though the policy learns",
    ),
    (dict(prompt_groups=0), f"prompt_groups = 0: {UP}"),
    (
        dict(prompt_selection="curriculum"),
        'prompt_success = None: prompt_selection = "curriculum" admits the next level from this mean reward on; give'
        " one, such as 0.8",
    ),
    (
        dict(dynamic_sampling=True, advantage_estimator="remax", scale_rewards="none"),
        'dynamic_sampling = True: replaces groups of equal rewards, and by advantage_estimator = "remax" these have a'
        " signal too, against their greedy completion; leave it False",
    ),
    (
        dict(turn_credit="to_go", advantage_estimator="remax", scale_rewards="none"),
        "turn_credit = 'to_go': advantage_estimator = \"remax\" has a baseline for the whole completion; use another,"
        ' or turn_credit="episode"',
    ),
    (dict(seed=-1), "seed = -1: must be at least 0 and at most 4294967295; use a whole number from 0 to 2**32 - 1"),
    (
        dict(seed=2**32),
        "seed = 4294967296: must be at least 0 and at most 4294967295; use a whole number from 0 to 2**32 - 1",
    ),
    (dict(max_refills=0), f"max_refills = 0: {UP}"),
    (dict(epsilon=0), f"epsilon = 0: {ABOVE}"),
    (dict(epsilon=-0.2), f"epsilon = -0.2: {ABOVE}"),
    (dict(epsilon_high=0.0), f"epsilon_high = 0.0: {ABOVE}"),
    (dict(delta=1.0), "delta = 1.0: must be above 1; at 1 it stops the on-policy gradient: use 1 + ε or more"),
    (dict(sapo_temperature_neg=0), f"sapo_temperature_neg = 0: {ABOVE}"),
    (dict(sapo_temperature_pos=-1), f"sapo_temperature_pos = -1: {ABOVE}"),
    (dict(vespo_k_pos=-1), f"vespo_k_pos = -1: {FROM_0}"),
    (dict(vespo_lambda_pos=-1), f"vespo_lambda_pos = -1: {FROM_0}"),
    (dict(vespo_k_neg=-1), f"vespo_k_neg = -1: {FROM_0}"),
    (dict(vespo_lambda_neg=-1), f"vespo_lambda_neg = -1: {FROM_0}"),
    (
        dict(top_entropy_quantile=1.2),
        "top_entropy_quantile = 1.2: must be at least 0 and at most 1; use 1.0 to keep every token",
    ),
    (dict(off_policy_mask_threshold=0), f"off_policy_mask_threshold = 0: {ABOVE}"),
    (
        dict(sampler_correction="truncate"),
        'sampler_correction = \'truncate\': did you mean "token_truncate"? must be "token_truncate" or "token_mask" or'
        ' "sequence_truncate" or "sequence_mask"',
    ),
    (dict(max_tool_calling_iterations=0), f"max_tool_calling_iterations = 0: {UP}"),
    (dict(environment_timeout=0), f"environment_timeout = 0: {ABOVE}"),
    (dict(on_environment_error="none"), 'on_environment_error = \'none\': must be "raise" or "end"'),
    (dict(sampler_correction_max=0), f"sampler_correction_max = 0: {ABOVE}"),
    (dict(sampler_correction_min=-0.1), f"sampler_correction_min = -0.1: {FROM_0}"),
    (
        dict(sampler_correction_min=3.0),
        "sampler_correction_min = 3.0: must be below sampler_correction_max; lower the one or raise the other",
    ),
    (
        dict(sampler_correction="token_truncate", sampler_correction_max=None),
        "sampler_correction = 'token_truncate': truncates at a bound, and there is none; set sampler_correction_max, or"
        " sampler_correction_min",
    ),
    (dict(max_kl_old=0), f"max_kl_old = 0: {ABOVE}"),
    (dict(entropy_coef=-0.1), f"entropy_coef = -0.1: {FROM_0}"),
    (dict(entropy_coef_delta=0), f"entropy_coef_delta = 0: {ABOVE}"),
    (dict(entropy_target=-1), f"entropy_target = -1: {FROM_0}"),
    (dict(router_aux_loss_coef=-1), f"router_aux_loss_coef = -1: {FROM_0}"),
    (
        dict(beta=-0.04),
        "beta = -0.04: must be at least 0; use 0 for no KL term (DeepSeek-R1: 0.001, DeepSeekMath: 0.04)",
    ),
    (dict(ref_model_sync_steps=0), f"ref_model_sync_steps = 0: {UP}"),
    (
        dict(ref_model_mixup_alpha=0),
        "ref_model_mixup_alpha = 0: must be above 0 and at most 1;"
        " 1 copies the policy, 0 would never move the reference",
    ),
    (
        dict(ref_model_mixup_alpha=1.01),
        "ref_model_mixup_alpha = 1.01: must be above 0 and at most 1;"
        " 1 copies the policy, 0 would never move the reference",
    ),
    (dict(learning_rate=-1e-6), f"learning_rate = -1e-06: {FROM_0}"),
    (dict(warmup_steps=-1), f"warmup_steps = -1: {FROM_0}"),
    (dict(warmup_steps=2.5), "warmup_steps = 2.5: must be a whole number of steps, or a share of all steps below 1"),
    (dict(weight_decay=-0.1), f"weight_decay = -0.1: {FROM_0}"),
    (dict(adam_beta1=1.0), "adam_beta1 = 1.0: must be at least 0 and below 1; 0.9 is usual"),
    (dict(adam_beta2=-0.1), "adam_beta2 = -0.1: must be at least 0 and below 1; 0.999 is usual"),
    (dict(adam_epsilon=0), f"adam_epsilon = 0: {ABOVE}"),
    (dict(max_grad_norm=-1), f"max_grad_norm = -1: {FROM_0}"),
    (dict(eval_steps=0), f"eval_steps = 0: {UP}"),
    (dict(num_generations_eval=0), f"num_generations_eval = 0: {UP}"),
    (dict(temperature_eval=-1), f"temperature_eval = -1: {FROM_0}"),
    (dict(logging_steps=0.5), f"logging_steps = 0.5: {WHOLE} float"),
    (dict(num_completions_to_print=0), f"num_completions_to_print = 0: {UP}"),
    (dict(save_steps=0), f"save_steps = 0: {UP}"),
    (dict(save_total_limit=0), f"save_total_limit = 0: {UP}"),
    (dict(max_skipped_updates=0), f"max_skipped_updates = 0: {UP}"),
    (dict(save_minutes=0), f"save_minutes = 0: {ABOVE}"),
    (dict(profile_steps=0), f"profile_steps = 0: {UP}"),
    (dict(metric_for_best_model=1), "metric_for_best_model = 1: must be text"),
    (
        dict(load_best_model_at_end=True),
        'load_best_model_at_end = True: what is best? set metric_for_best_model, such as "eval/<function>" or "reward",'
        ' in SFT "eval/loss"',
    ),
    (
        dict(load_best_model_at_end=True, metric_for_best_model="reward", save_steps=None),
        "load_best_model_at_end = True: there is one checkpoint, at the end, and nothing to choose from (those of"
        " save_minutes are not chosen among); set save_steps",
    ),
    (
        dict(load_best_model_at_end=True, metric_for_best_model="reward", save_steps=None, save_minutes=1),
        "load_best_model_at_end = True: there is one checkpoint, at the end, and nothing to choose from (those of"
        " save_minutes are not chosen among); set save_steps",
    ),
    (
        dict(report_to="mlflow"),
        'report_to = \'mlflow\': must be of "tensorboard", "wandb", "trackio", a list of them, "all" or "none"; for'
        " another pass callbacks to train",
    ),
    (
        dict(report_to=["wandb", "all"]),
        'report_to = [\'wandb\', \'all\']: must be of "tensorboard", "wandb", "trackio", a list of them, "all" or'
        ' "none"; for another pass callbacks to train',
    ),
    (dict(run_name=1), "run_name = 1: must be text"),
    (dict(project=None), "project = None: must be text"),
    (dict(hub_model_id=1), "hub_model_id = 1: must be text"),
    (dict(hub_private_repo="yes"), "hub_private_repo = 'yes': must be True or False"),
    (dict(hub_strategy="checkpoint"), 'hub_strategy = \'checkpoint\': must be "end" or "every_save"'),
    (dict(hub_revision=1), "hub_revision = 1: must be text"),
    (
        dict(metric_for_best_model="eval/right", eval_steps=3, save_steps=4),
        "metric_for_best_model = 'eval/right': is not measured at every checkpoint; make save_steps a multiple of"
        " eval_steps",
    ),
    (
        dict(greater_is_better=True),
        "greater_is_better = True: there is nothing that could be better; set metric_for_best_model, or leave it at"
        " None",
    ),
    # Wrong types, and numbers that are none.
    (dict(num_generations=True), f"num_generations = True: {WHOLE} bool"),
    (dict(num_generations="8"), f"num_generations = '8': {WHOLE} str"),
    (dict(num_generations=8.0), f"num_generations = 8.0: {WHOLE} float: write 8"),
    (dict(num_generations=8.5), f"num_generations = 8.5: {WHOLE} float"),
    (dict(num_generations=None), f"num_generations = None: {WHOLE} NoneType"),
    (dict(learning_rate="1e-6"), f"learning_rate = '1e-6': {NUMBER} str"),
    (dict(beta=True), f"beta = True: {NUMBER} bool"),
    (dict(beta=1j), f"beta = 1j: {NUMBER} complex"),
    (dict(beta=float("nan")), "beta = nan: must be a number, and finite"),
    (dict(delta=float("inf")), "delta = inf: must be a number, and finite"),
    (dict(learning_rate=10**400), f"learning_rate = 1{'0' * 99}…: must be a number, and finite"),
    (dict(sync_ref_model=1), "sync_ref_model = 1: must be True or False"),
    (dict(shuffle_dataset="yes"), "shuffle_dataset = 'yes': must be True or False"),
    (
        dict(reward_weights="1, 2"),
        "reward_weights = '1, 2': must be a list with one number per reward function; or None for 1.0 each",
    ),
    (dict(reward_weights=[1, "a"]), f"reward_weights = [1, 'a']: weight 1 {NUMBER} str"),
    (
        dict(reward_weights=[float("nan"), True]),
        f"reward_weights = [nan, True]: weight 0 must be a number, and finite; weight 1 {NUMBER} bool",
    ),
    (
        dict(chat_template_kwargs="x"),
        "chat_template_kwargs = 'x': must be a dict of keywords that JSON can hold, or None",
    ),
    (
        dict(chat_template_kwargs={"tools": {1, 2}}),
        "chat_template_kwargs = {'tools': {1, 2}}: must be a dict of keywords that JSON can hold, or None",
    ),
    (
        dict(chat_template_kwargs={"p": float("inf")}),
        "chat_template_kwargs = {'p': inf}: must be a dict of keywords that JSON can hold, or None",
    ),
    (
        dict(mesh={"model": 2}),
        'mesh = {\'model\': 2}: must be a dict of devices along "data", "fsdp" and "tensor", or None',
    ),
    (dict(mesh=4), 'mesh = 4: must be a dict of devices along "data", "fsdp" and "tensor", or None'),
    (dict(mesh={"data": 0}), f"mesh = {{'data': 0}}: data {UP}"),
    # Unknown names of variants.
    (
        dict(loss_type="dapoo"),
        'loss_type = \'dapoo\': did you mean "dapo"? must be "grpo" or "bnpo" or "dr_grpo" or "dapo" or "luspo" or'
        ' "cispo" or "sapo" or "vespo" or "gmpo" or "dppo_tv" or "dppo_kl" or "clip_cov" or "kl_cov"',
    ),
    (
        dict(loss_type="GRPO"),
        'loss_type = \'GRPO\': did you mean "grpo"? must be "grpo" or "bnpo" or "dr_grpo" or "dapo" or "luspo" or'
        ' "cispo" or "sapo" or "vespo" or "gmpo" or "dppo_tv" or "dppo_kl" or "clip_cov" or "kl_cov"',
    ),
    (
        dict(importance_sampling_level="sequences"),
        'importance_sampling_level = \'sequences\': did you mean "sequence"? must be "token" or "sequence" or'
        ' "trajectory"',
    ),
    (dict(kl_estimator="k4"), 'kl_estimator = \'k4\': did you mean "k3"? must be "k1" or "k2" or "k3"'),
    (dict(kl_estimator=3), 'kl_estimator = 3: did you mean "k3"? must be "k1" or "k2" or "k3"'),
    (
        dict(kl_correction_level="sequence"),
        'kl_correction_level = \'sequence\': must be "token" or "importance_sampling_level"',
    ),
    (dict(kl_placement="rewards"), 'kl_placement = \'rewards\': did you mean "reward"? must be "loss" or "reward"'),
    (dict(on_long_prompt="cut"), 'on_long_prompt = \'cut\': must be "error" or "drop"'),
    (dict(on_reward_error="skip"), 'on_reward_error = \'skip\': must be "raise" or "none"'),
    (
        dict(scale_rewards="grop"),
        'scale_rewards = \'grop\': did you mean "group"? must be "group" or "batch" or "none"',
    ),
    (dict(scale_rewards=None), 'scale_rewards = None: did you mean "none"? must be "group" or "batch" or "none"'),
    (
        dict(multi_objective_aggregation="normalise_then_sum"),
        "multi_objective_aggregation = 'normalise_then_sum': did you mean \"normalize_then_sum\"?"
        ' must be "sum_then_normalize" or "normalize_then_sum"',
    ),
    (
        dict(lr_scheduler_type="cosin"),
        "lr_scheduler_type = 'cosin': did you mean \"cosine\"?"
        ' must be "linear" or "cosine" or "constant" or "constant_with_warmup"',
    ),
    (
        dict(gradient_checkpointing_policy="dots"),
        'gradient_checkpointing_policy = \'dots\': must be "nothing_saveable" or "dots_with_no_batch_dims_saveable" or'
        ' "dots_saveable"',
    ),
    (
        dict(compute_dtype="float16"),
        "compute_dtype = 'float16': gradients below 6e-8 are 0 in float16, which needs a loss scaled against that, and"
        " there is none here; use bfloat16, which has the range of float32",
    ),
    (
        dict(compute_dtype="bf16"),
        'compute_dtype = \'bf16\': did you mean "bfloat16"? must be "auto" or "float32" or "bfloat16"',
    ),
    (
        dict(pad_to_multiple_of="atuo"),
        f'pad_to_multiple_of = \'atuo\': {WHOLE} str; or did you mean "auto"? must be "auto"',
    ),
    # Fields that contradict each other.
    (
        dict(loss_type="cispo"),
        f"epsilon_high = None: {CAP}; unset, epsilon would scale every gradient down to 0.2;"
        " set it (ScaleRL, arXiv 2510.13786: 5.0)",
    ),
    (
        dict(loss_type="cispo", epsilon_high=0.28),
        f"epsilon_high = 0.28: {CAP}; below 1 it scales every gradient down;"
        " use 1 or more (ScaleRL, arXiv 2510.13786: 5.0)",
    ),
    (
        dict(loss_type="cispo", epsilon_high=5.0, delta=2.0),
        "delta = 2.0: cispo, sapo, vespo, gmpo, dppo and kl_cov have no such cap; leave it at None",
    ),
    (
        dict(loss_type="sapo", delta=2.0),
        "delta = 2.0: cispo, sapo, vespo, gmpo, dppo and kl_cov have no such cap; leave it at None",
    ),
    (
        dict(loss_type="vespo", delta=2.0),
        "delta = 2.0: cispo, sapo, vespo, gmpo, dppo and kl_cov have no such cap; leave it at None",
    ),
    (
        dict(loss_type="vespo", epsilon_high=0.28),
        "epsilon_high = 0.28: sapo and vespo weigh ratios smoothly and do not clip; leave it at None",
    ),
    (
        dict(loss_type="kl_cov", num_iterations=2, epsilon_high=0.28),
        'epsilon_high = 0.28: loss_type = "kl_cov" does not clip; leave it at None',
    ),
    (
        dict(loss_type="kl_cov", steps_per_generation=1),
        "loss_type = 'kl_cov': pulls back towards the policy that sampled, and every update begins with it: nothing"
        " would be pulled; set num_iterations, or a steps_per_generation above gradient_accumulation_steps, or use"
        " another loss_type",
    ),
    (dict(clip_cov_lb=5.0), "clip_cov_lb = 5.0: must be below clip_cov_ub; lower the one or raise the other"),
    (dict(clip_cov_ub="high"), "clip_cov_ub = 'high': must be a number, not str"),
    (dict(ppo_kl_coef=-1), f"ppo_kl_coef = -1: {FROM_0}"),
    (dict(clip_cov_ratio=0.0), "clip_cov_ratio = 0.0: must be above 0 and at most 1; the paper has 0.0002"),
    (dict(kl_cov_ratio=2.0), "kl_cov_ratio = 2.0: must be above 0 and at most 1; the paper has 0.0002 to 0.002"),
    (
        dict(loss_type="gmpo", importance_sampling_level="sequence"),
        "importance_sampling_level = 'sequence': loss_type = \"gmpo\" takes the geometric mean itself; leave"
        ' importance_sampling_level at "token"',
    ),
    (
        dict(loss_type="gmpo", top_entropy_quantile=0.2),
        'top_entropy_quantile = 0.2: loss_type = "gmpo" weighs whole completions, and no token can be left out;'
        " use 1.0",
    ),
    (
        dict(advantage_estimator="maxrl"),
        "scale_rewards = 'group': only advantage_estimator = \"grpo\" is divided by it, the others have a scale of"
        ' their own; use "none"',
    ),
    (
        dict(advantage_estimator="rloo", scale_rewards="none", multi_objective_aggregation="normalize_then_sum"),
        "multi_objective_aggregation = 'normalize_then_sum': only advantage_estimator = \"grpo\" normalizes reward by"
        ' reward; use "sum_then_normalize"',
    ),
    (dict(turn_credit="togo"), 'turn_credit = \'togo\': did you mean "to_go"? must be "episode" or "to_go"'),
    (
        dict(turn_gamma=0.9),
        'turn_gamma = 0.9: discounts what is to go from a turn; set turn_credit="to_go", or leave it at 1.0',
    ),
    (
        dict(turn_baseline="all"),
        "turn_baseline = 'all': is the baseline of what is to go from a turn; set turn_credit=\"to_go\", or leave it at"
        ' "turn"',
    ),
    (
        dict(turn_credit="to_go", advantage_estimator="opo", scale_rewards="none"),
        "turn_credit = 'to_go': advantage_estimator = \"opo\" weighs whole completions by their length; use another, or"
        ' turn_credit="episode"',
    ),
    (
        dict(turn_credit="to_go", loss_type="gmpo"),
        "turn_credit = 'to_go': loss_type = \"gmpo\" takes one advantage for the whole completion; use another, or"
        ' turn_credit="episode"',
    ),
    (
        dict(loss_type="luspo"),
        "importance_sampling_level = 'token': loss_type = \"luspo\" weighs whole completions;"
        ' use importance_sampling_level="sequence"',
    ),
    (
        dict(loss_type="luspo", importance_sampling_level="trajectory"),
        "importance_sampling_level = 'trajectory': loss_type = \"luspo\" weighs whole completions;"
        ' use importance_sampling_level="sequence"',
    ),
    (dict(distillation_coef=-1.0), f"distillation_coef = -1.0: {FROM_0}"),
    (
        dict(distillation_coef=1.0, top_p=0.9),
        "distillation_coef = 1.0: distributions that top_k, top_p or min_p have cut are at no finite distance from a"
        " teacher's; sample from the whole one (top_k=0, top_p=1.0, min_p=None)",
    ),
    (
        dict(distillation_divergence="revers_kl"),
        "distillation_divergence = 'revers_kl': did you mean \"reverse_kl\"?"
        ' must be "reverse_kl" or "forward_kl" or "jsd"',
    ),
    (
        dict(distillation_divergence="jsd", distillation_alpha=1.0),
        "distillation_alpha = 1.0: must be above 0 and below 1; 0.5 is usual (0: forward_kl, 1: reverse_kl)",
    ),
    (
        dict(distillation_mode="top_k"),
        "distillation_mode = 'top_k': did you mean \"topk_logits\"?"
        ' must be "full_logits" or "topk_logits" or "sampled_token"',
    ),
    (
        dict(distillation_topk=20),
        'distillation_topk = 20: goes with distillation_mode = "topk_logits", and only with it; set both or neither',
    ),
    (
        dict(distillation_mode="topk_logits"),
        'distillation_topk = None: goes with distillation_mode = "topk_logits", and only with it; set both or neither',
    ),
    (
        dict(reward_weights=[0, 0.0]),
        "reward_weights = (0.0, 0.0): no reward would count; give at least one weight that is not 0",
    ),
    (
        dict(sync_ref_model=True),
        "sync_ref_model = True: with beta = 0 there is no reference to sync; set beta above 0, or sync_ref_model=False",
    ),
    (
        dict(entropy_coef_min=0.5, entropy_coef_max=0.1),
        "entropy_coef_min = 0.5: must not be above entropy_coef_max; lower the one or raise the other",
    ),
    (
        dict(use_adaptive_entropy=True, entropy_coef=0.5, entropy_coef_max=0.1),
        "entropy_coef = 0.5: with use_adaptive_entropy it starts between entropy_coef_min and entropy_coef_max;"
        " move one of the three",
    ),
    (
        dict(max_steps=10, warmup_steps=20),
        "warmup_steps = 20.0: the run ends (max_steps) before the learning rate has risen;"
        " shorten the one or lengthen the other",
    ),
    (
        dict(lr_scheduler_type="constant", warmup_steps=0.1),
        'warmup_steps = 0.1: a constant schedule has no warm-up; use lr_scheduler_type="constant_with_warmup"',
    ),
    (
        dict(temperature_eval=0, num_generations_eval=4),
        "num_generations_eval = 4: greedy completions of one prompt (temperature_eval = 0) are all the same;"
        " use 1 or None",
    ),
    # Batches that don't divide.
    (
        dict(per_device_train_batch_size=12),
        "per_device_train_batch_size = 12: times gradient_accumulation_steps = 1 it makes 12 completions per device and"
        " update, which cannot be cut into whole groups of num_generations = 8; the nearest that fit: 8 and 16",
    ),
    (
        dict(per_device_train_batch_size=3, gradient_accumulation_steps=8),
        "per_device_train_batch_size = 3: times gradient_accumulation_steps = 8 it makes 24 completions per device and"
        " update, which cannot be cut into whole groups of num_generations = 8; the nearest that fit: 2 and 4",
    ),
    (
        dict(num_generations=16),
        "per_device_train_batch_size = 8: times gradient_accumulation_steps = 1 it makes 8 completions per device and"
        " update, which cannot be cut into whole groups of num_generations = 16; the nearest that fits: 16",
    ),
    (
        dict(gradient_accumulation_steps=2, steps_per_generation=3),
        "steps_per_generation = 3: is not a multiple of gradient_accumulation_steps = 2; the nearest that fit: 2 and 4",
    ),
    (
        dict(generation_batch_size=20),
        "generation_batch_size = 20: does not split into minibatches of 8 completions"
        " (per_device_train_batch_size = 8 × gradient_accumulation_steps = 1); the nearest that fit: 16 and 24",
    ),
    (
        dict(generation_batch_size=16, steps_per_generation=2),
        "generation_batch_size = 16: steps_per_generation = 2 says the same in another way; set one of the two",
    ),
    # Names that no field has.
    (dict(num_generation=4), "num_generation: no such field; did you mean num_generations?"),
    (dict(Beta=0.1), "Beta: no such field; did you mean beta?"),
    (dict(max_new_tokens=4), "max_new_tokens: no such field; use max_completion_length"),
    (dict(deepspeed="zero3"), "deepspeed: no such field; leave it out: mesh says how params are cut"),
    (dict(kl_coef=0.1), "kl_coef: no such field; use beta"),
    (dict(output_dir="runs"), "output_dir: no such field; pass run_dir to train"),
    (dict(bf16=True), 'bf16: no such field; use compute_dtype="bfloat16"'),
    (
        dict(use_vllm=True),
        "use_vllm: no such field; leave it out: the sampler is built in; a running vLLM server is"
        ' sampler=engines.vllm(base_url), in a TRL script vllm_mode="server"',
    ),
    (dict(tokenizer=None), "tokenizer: no such field; leave it out"),
    (dict(zzz=1), "zzz: no such field; leave it out"),
]


def errors_of(values):
    with pytest.raises(ValueError, match="GRPOConfig has") as caught:
        GRPOConfig(**values)
    head, *lines = str(caught.value).split("\n  ")
    assert head == f"GRPOConfig has {len(lines)} error{'s' * (len(lines) > 1)}:"
    return lines


@pytest.mark.quick
@pytest.mark.parametrize(("values", "line"), BAD, ids=[line.split(":")[0][:60] for _, line in BAD])
def test_a_bad_value_is_refused_with_one_helpful_line(values, line):
    assert errors_of(values) == [line]


@pytest.mark.quick
def test_the_table_of_bad_values_touches_every_field_that_can_be_wrong():
    shown = {line.split(" = ")[0] for _, line in BAD}
    plain = {
        "mask_truncated_completions",
        "advantage_estimator",
        "rollout_ahead",
        "use_adaptive_entropy",
        "use_bias_correction_kl",
        "gradient_checkpointing",
        "keep_programs",
        "master_params",
        "log_completions",
        "logging_first_step",
        "push_to_hub",
        "per_device_eval_batch_size",
        "entropy_coef_max",
        "prompt_selection",
    }
    assert {field.name for field in dataclasses.fields(GRPOConfig)} - shown == plain
    for name in plain:
        assert errors_of({name: "no"})[0].startswith(f"{name} = 'no': must be ")


@pytest.mark.quick
def test_all_errors_come_at_once():
    lines = errors_of(dict(num_generations=1, beta="x", loss_typ="grpo", sync_ref_model=True, epsilon=0, seed=1.5))
    assert [line.split(" = ")[0].split(":")[0] for line in lines] == [
        "loss_typ",
        "num_generations",
        "seed",
        "epsilon",
        "beta",
    ]


@pytest.mark.quick
def test_a_field_that_is_wrong_in_itself_is_not_reported_again_by_the_checks_that_read_it():
    assert errors_of(dict(beta=-1, sync_ref_model=True)) == [
        "beta = -1: must be at least 0; use 0 for no KL term (DeepSeek-R1: 0.001, DeepSeekMath: 0.04)"
    ]
    assert len(errors_of(dict(num_generations="3", per_device_train_batch_size=7))) == 1
    assert len(errors_of(dict(per_device_train_batch_size=12, generation_batch_size=20))) == 1
    assert len(errors_of(dict(entropy_coef_min=2.0, use_adaptive_entropy=True))) == 2  # both are wrong


@pytest.mark.quick
def test_fields_go_by_keyword():
    with pytest.raises(ValueError, match=r"takes its fields by keyword; for a dict use GRPOConfig.from_dict\(...\)"):
        GRPOConfig({"beta": 0.1})
    with pytest.raises(ValueError, match=r"from_dict takes a dict of fields, not \[1, 2\]"):
        GRPOConfig.from_dict([1, 2])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wider(GRPOConfig):
    beta: float = 0.5
    note: str
    names: list = dataclasses.field(default_factory=list, hash=False)


@pytest.mark.quick
def test_a_subclass_is_read_and_checked_too():
    wider = Wider(note="mine", scale_rewards=True)
    assert (wider.beta, wider.note, wider.names, wider.scale_rewards) == (0.5, "mine", [], "group")
    assert pickle.loads(pickle.dumps(wider)) == wider == Wider.from_dict(wider.to_dict())
    assert inspect.signature(Wider).parameters["note"].default is inspect.Parameter.empty
    with pytest.raises(ValueError, match=r"Wider has 2 errors:\n  notes: .*did you mean note\?\n  beta = -1: "):
        Wider(notes="mine", beta=-1)
    with pytest.raises(TypeError, match="note"):
        Wider()


GOOD = [
    {},
    dict(loss_type="cispo", epsilon_high=5.0),
    dict(loss_type="cispo", epsilon_high=1),
    dict(loss_type="luspo", importance_sampling_level="sequence"),
    dict(loss_type="dr_grpo", scale_rewards=False),
    dict(loss_type="sapo", importance_sampling_level="sequence"),
    dict(loss_type="vespo"),
    dict(loss_type="grpo", delta=4.0, epsilon_high=0.28),
    dict(beta=0.04, sync_ref_model=True, ref_model_mixup_alpha=1, ref_model_sync_steps=1),
    dict(beta=0.04, kl_placement="reward", importance_sampling_level="trajectory", num_iterations=4),
    dict(num_generations=2, per_device_train_batch_size=2),
    dict(per_device_train_batch_size=1, gradient_accumulation_steps=8),
    dict(per_device_train_batch_size=4, gradient_accumulation_steps=4, steps_per_generation=8),
    dict(warmup_steps=0.1),
    dict(warmup_steps=1.0),
    dict(max_steps=10, warmup_steps=10),
    dict(lr_scheduler_type="constant_with_warmup", warmup_steps=5),
    dict(use_adaptive_entropy=True, entropy_coef=0.1, entropy_coef_max=0.1, entropy_target=1.5),
    dict(top_entropy_quantile=0.0, min_p=0.0, top_k=5, top_p=0.5, temperature=1e-3),
    dict(reward_weights=[1, 0.5]),
    dict(chat_template_kwargs={"enable_thinking": False, "tools": [{"name": "f"}]}),
    dict(mesh={"data": 2, "fsdp": 2, "tensor": 2}),
    dict(pad_to_multiple_of=None),
    dict(save_steps=None, eval_steps=5, temperature_eval=0, num_generations_eval=1),
    dict(report_to=["wandb", "tensorboard"], run_name="sums", push_to_hub=True, hub_model_id="me/sums"),
    dict(report_to="all", load_best_model_at_end=True, metric_for_best_model="reward", save_steps=3),
]


@pytest.mark.quick
@pytest.mark.parametrize("values", GOOD, ids=str)
def test_a_good_config_comes_back_equal_from_json(values):
    config = GRPOConfig(**values)
    config.validate()
    again = GRPOConfig.from_dict(json.loads(json.dumps(config.to_dict(), allow_nan=False)))
    assert again == config
    assert hash(again) == hash(config)
    assert pickle.loads(pickle.dumps(config)) == config
    assert dataclasses.replace(config, seed=7) != config


@pytest.mark.quick
def test_replace_checks_again():
    with pytest.raises(ValueError, match="beta = -1"):
        dataclasses.replace(GRPOConfig(), beta=-1)
    with pytest.raises(ValueError, match="did you mean epsilon"):
        dataclasses.replace(GRPOConfig(), epsilo=0.1)


@pytest.mark.quick
def test_values_are_kept_as_plain_python_types_and_as_copies():
    template, weights = {"tools": [1]}, [np.float32(0.5), 1]
    config = GRPOConfig(
        num_generations=np.int64(4),
        per_device_train_batch_size=4,
        beta=np.float64(0.5),
        temperature=2,
        scale_rewards=True,
        reward_weights=weights,
        chat_template_kwargs=template,
    )
    template["tools"].append(2)
    weights.append(3)
    assert [type(value) for value in (config.num_generations, config.beta, config.temperature)] == [int, float, float]
    assert config.scale_rewards == "group"
    assert config.reward_weights == (0.5, 1.0)
    assert config.chat_template_kwargs == {"tools": [1]}
    assert GRPOConfig(scale_rewards=False).scale_rewards == "none"


@pytest.mark.quick
def test_a_config_does_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        GRPOConfig().beta = 0.1


# TRL 1.16.0 (and transformers 5.23 under it), read from its source. Ours differ by intent only in pad_to_multiple_of's
# meaning; what is not here is ours alone.
TRL = dict(
    max_tool_calling_iterations=None,
    num_generations=8,
    max_completion_length=512,
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    min_p=None,
    chat_template_kwargs=None,
    pad_to_multiple_of="auto",
    per_device_train_batch_size=8,
    gradient_accumulation_steps=1,
    steps_per_generation=None,
    generation_batch_size=None,
    num_iterations=1,
    max_steps=-1,
    num_train_epochs=3.0,
    shuffle_dataset=True,
    seed=42,
    reward_weights=None,
    scale_rewards="group",
    multi_objective_aggregation="sum_then_normalize",
    mask_truncated_completions=False,
    loss_type="dapo",
    importance_sampling_level="token",
    epsilon=0.2,
    epsilon_high=None,
    delta=None,
    sapo_temperature_neg=1.05,
    sapo_temperature_pos=1.0,
    vespo_k_pos=2.0,
    vespo_lambda_pos=3.0,
    vespo_k_neg=3.0,
    vespo_lambda_neg=2.0,
    top_entropy_quantile=1.0,
    off_policy_mask_threshold=None,
    entropy_coef=0.0,
    use_adaptive_entropy=False,
    entropy_coef_min=0.0,
    entropy_coef_max=1.0,
    entropy_coef_delta=0.005,
    entropy_target=0.2,
    router_aux_loss_coef=None,
    beta=0.0,
    use_bias_correction_kl=True,
    sync_ref_model=False,
    ref_model_sync_steps=512,
    ref_model_mixup_alpha=0.6,
    learning_rate=1e-6,
    lr_scheduler_type="linear",
    warmup_steps=0,
    weight_decay=0.0,
    adam_beta1=0.9,
    adam_beta2=0.999,
    adam_epsilon=1e-8,
    max_grad_norm=1.0,
    eval_steps=None,
    per_device_eval_batch_size=8,
    num_generations_eval=None,
    logging_steps=10,
    log_completions=False,
    num_completions_to_print=None,
    save_steps=500,
    save_total_limit=None,
    metric_for_best_model=None,
    greater_is_better=None,
    load_best_model_at_end=False,
    report_to="none",
    run_name=None,
    project="huggingface",
    push_to_hub=False,
    hub_model_id=None,
    hub_private_repo=None,
    hub_strategy="every_save",
    hub_revision=None,
)
OTHER = {"gradient_checkpointing": (None, True), "logging_first_step": (True, False)}
"""Field of TRL whose default is another here: ours, and TRL's."""
OURS = dict(
    keep_programs=True,
    environment_timeout=300.0,
    on_environment_error="raise",
    max_prompt_length=None,
    stop=None,
    stop_token_ids=None,
    max_turn_length=None,
    on_long_prompt="error",
    on_reward_error="raise",
    advantage_estimator="grpo",
    turn_credit="episode",
    turn_gamma=1.0,
    turn_baseline="turn",
    prompt_selection="uniform",
    prompt_success=None,
    prompt_decay=0.5,
    prompt_groups=32,
    clip_cov_ratio=0.0002,
    clip_cov_lb=1.0,
    clip_cov_ub=5.0,
    kl_cov_ratio=0.0002,
    ppo_kl_coef=1.0,
    dynamic_sampling=False,
    max_refills=4,
    rollout_batch_size=None,
    rollout_ahead=False,
    sampler_correction="sequence_mask",
    sampler_correction_max=3.0,
    sampler_correction_min=None,
    max_kl_old=None,
    kl_estimator="k3",
    kl_correction_level="token",
    kl_placement="loss",
    distillation_coef=0.0,
    distillation_divergence="reverse_kl",
    distillation_alpha=0.5,
    distillation_mode="full_logits",
    distillation_topk=None,
    gradient_checkpointing_policy="nothing_saveable",
    compute_dtype="auto",
    master_params=True,
    mesh=None,
    temperature_eval=None,
    max_skipped_updates=10,
    save_minutes=5.0,
    profile_steps=None,
)


@pytest.mark.quick
def test_defaults():
    assert GRPOConfig().to_dict() == TRL | OURS | {name: ours for name, (ours, _) in OTHER.items()}


@pytest.mark.quick
def test_defaults_are_those_of_the_trl_that_is_installed():
    trl = pytest.importorskip("trl", minversion="1.16", exc_type=ImportError)
    theirs = {field.name: field.default for field in dataclasses.fields(trl.GRPOConfig)}
    assert {name: theirs[name] for name in TRL} == TRL
    assert {name: theirs[name] for name in OTHER} == {name: default for name, (_, default) in OTHER.items()}
    assert not set(OURS).intersection(theirs)


@pytest.mark.quick
def test_every_field_has_a_doc_and_every_default_stands_once():
    source = pathlib.Path(config_module.__file__).read_text(encoding="utf-8")
    body = next(node.body for node in ast.parse(source).body if getattr(node, "name", "") == "GRPOConfig")
    documented = {
        node.target.id: after.value.value
        for node, after in itertools.pairwise(body)
        if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    }
    assert set(documented) == {field.name for field in dataclasses.fields(GRPOConfig)}
    for name in OURS:
        assert "ours" in documented[name].lower() or "TRL" in documented[name], name


@pytest.mark.quick
def test_editors_and_help_see_the_fields():
    signature = inspect.signature(GRPOConfig)
    assert list(signature.parameters) == [field.name for field in dataclasses.fields(GRPOConfig)]
    assert signature.parameters["beta"].default == 0.0


@pytest.mark.quick
def test_importing_the_config_imports_neither_jax_nor_what_lies_above_it():
    code = "import sys, types; sys.modules['grpo_jax'] = m = types.ModuleType('grpo_jax'); m.__path__ = ['grpo_jax']; "
    code += "import grpo_jax.config.config; print({'jax', 'grpo_jax.compat'} & {*sys.modules})"
    root = pathlib.Path(config_module.__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# Worked by hand: G, completions a micro-batch and device, accumulation, steps per generation, μ; on how many devices.
SIZES = [
    # 8 completions are one group; one update.
    ({}, 1, Sizes(1, 8, 1, 1, 1, 1, 1, 8)),
    ({}, 4, Sizes(4, 32, 1, 1, 4, 1, 4, 8)),
    # 64 a micro-batch, two make an update: 128 completions, 16 prompts; three passes.
    (
        dict(per_device_train_batch_size=64, gradient_accumulation_steps=2, num_iterations=3),
        1,
        Sizes(16, 128, 1, 3, 16, 2, 8, 8),
    ),
    # Six micro-batches of 16 completions, two per update: three minibatches of 32 = 8 prompts of G = 4; two passes.
    (
        dict(
            num_generations=4,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=2,
            steps_per_generation=6,
            num_iterations=2,
        ),
        1,
        Sizes(24, 96, 3, 6, 8, 2, 4, 4),
    ),
    # The same said by the generation batch.
    (
        dict(
            num_generations=4,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=2,
            generation_batch_size=96,
            num_iterations=2,
        ),
        1,
        Sizes(24, 96, 3, 6, 8, 2, 4, 4),
    ),
    # ... on three devices the generation batch stays and the minibatches become one.
    (
        dict(
            num_generations=4,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=2,
            generation_batch_size=96,
            num_iterations=2,
        ),
        3,
        Sizes(24, 96, 1, 2, 24, 2, 12, 4),
    ),
    # A micro-batch of 2 is a quarter of a group: four make one update of one prompt a device.
    (dict(per_device_train_batch_size=2, gradient_accumulation_steps=4), 2, Sizes(2, 16, 1, 1, 2, 4, 2, 2)),
    # The tensor axis holds the same prompts: eight devices, four shards.
    (dict(mesh={"data": 2, "fsdp": 2, "tensor": 2}), 8, Sizes(4, 32, 1, 1, 4, 1, 4, 8)),
    (dict(mesh={"data": 2, "fsdp": 2, "tensor": 2}), None, Sizes(4, 32, 1, 1, 4, 1, 4, 8)),
]


@pytest.mark.quick
@pytest.mark.parametrize(("values", "devices", "sizes"), SIZES, ids=str)
def test_sizes_by_hand(values, devices, sizes):
    config = GRPOConfig(**values)
    assert config.sizes(devices) == sizes
    assert sizes.prompts * config.num_generations == sizes.completions
    assert sizes.prompts_per_update * sizes.minibatches == sizes.prompts
    assert sizes.micro_batches * sizes.micro_prompts * sizes.micro_completions == (
        sizes.prompts_per_update * config.num_generations
    )


@pytest.mark.quick
def test_sizes_refuse_a_generation_batch_that_the_devices_cannot_share():
    line = (
        r"generation_batch_size = 48: does not split into minibatches of 32 completions"
        r" \(per_device_train_batch_size = 8 × gradient_accumulation_steps = 1 × 4 devices\);"
        r" the nearest that fit: 32 and 64"
    )
    config = GRPOConfig(generation_batch_size=48)
    assert config.sizes(2).minibatches == 3
    with pytest.raises(ValueError, match=line):
        config.sizes(4)
    (found,) = run_problems(config, num_devices=4, num_rows=10, num_reward_fns=1)
    assert re.fullmatch(line, found)


@pytest.mark.quick
def test_total_steps_and_warm_up():
    config = GRPOConfig(per_device_train_batch_size=32, num_iterations=2, num_train_epochs=1.5)  # B = 4
    assert config.total_steps(num_rows=10) == 8  # 15 prompts are 4 batches
    assert config.total_steps(num_rows=10, num_devices=2) == 4
    assert GRPOConfig(num_train_epochs=0.07).total_steps(num_rows=100) == 7  # 0.07 × 100 is a little above 7 in floats
    assert GRPOConfig(max_steps=7).total_steps(num_rows=10) == 7
    assert GRPOConfig(warmup_steps=5).total_warmup_steps(100) == 5
    assert GRPOConfig(warmup_steps=0.05).total_warmup_steps(101) == 6
    assert GRPOConfig(warmup_steps=1.0).total_warmup_steps(100) == 1
    assert GRPOConfig().total_warmup_steps(100) == 0


@pytest.mark.quick
def test_evaluation_is_greedy_with_one_completion_or_as_in_training():
    assert (GRPOConfig().eval_temperature, GRPOConfig().eval_generations) == (1.0, 8)
    greedy = GRPOConfig(temperature_eval=0)
    assert (greedy.eval_temperature, greedy.eval_generations) == (0.0, 1)
    sampled = GRPOConfig(temperature=0.7, num_generations_eval=3)
    assert (sampled.eval_temperature, sampled.eval_generations) == (0.7, 3)


@pytest.mark.quick
def test_what_is_better():
    better = lambda **settings: GRPOConfig(**settings).best_is_greatest
    assert better(metric_for_best_model="reward")
    assert not better(metric_for_best_model="loss")
    assert better(metric_for_best_model="loss", greater_is_better=True)
    assert not better(metric_for_best_model="completions/mean_length", greater_is_better=False)


@pytest.mark.quick
def test_which_trackers_are_asked_for():
    for nothing in (None, "none", [], ["none"], ()):
        assert GRPOConfig(report_to=nothing).report_to == "none"
    assert GRPOConfig(report_to=["wandb"]).report_to == "wandb"
    assert GRPOConfig(report_to=["wandb", "trackio"]).report_to == ("wandb", "trackio")


@pytest.mark.quick
def test_when_there_is_a_line_of_metrics():
    steps = range(1, 13)
    assert [step for step in steps if GRPOConfig(logging_steps=5).logs_at(step)] == [1, 5, 10]
    assert [step for step in steps if GRPOConfig(logging_steps=5, logging_first_step=False).logs_at(step)] == [5, 10]


@pytest.mark.quick
def test_padding():
    assert [GRPOConfig(pad_to_multiple_of=value).padding for value in ("auto", None, 7)] == [32, 1, 7]


RUN = dict(num_devices=1, num_rows=10, num_reward_fns=2)
BAD_RUNS = [
    (
        {},
        dict(num_rows=0),
        "dataset: there is no row to train on; look at the rows, and at max_prompt_length if it drops",
    ),
    ({}, dict(num_reward_fns=0), "reward_fns: there is no reward function; give at least one"),
    (
        dict(reward_weights=[1.0]),
        {},
        "reward_weights = (1.0,): 1 weights for 2 reward functions; give one weight per function, or None for 1.0 each",
    ),
    ({}, dict(num_eval_rows=0), "eval_dataset: there is no row to evaluate on; give rows, or leave the argument out"),
    (
        dict(num_generations_eval=3),
        dict(num_eval_rows=5),
        "per_device_eval_batch_size = 8: does not hold whole groups of 3 completions (num_generations_eval);"
        " the nearest that fit: 6 and 9",
    ),
    (dict(eval_steps=5), {}, "eval_steps = 5: there is nothing to evaluate on; pass eval_dataset to train"),
    (
        dict(metric_for_best_model="eval/right", save_steps=None),
        {},
        "metric_for_best_model = 'eval/right': there is nothing to evaluate on; pass eval_dataset to train",
    ),
    (
        dict(max_completion_length=1000),
        dict(context_length=1024, longest_prompt=25),
        "max_completion_length = 1000: with prompts of up to 25 tokens this passes the 1024 positions of the model;"
        " use 999 or less, or shorter prompts",
    ),
    (
        dict(max_completion_length=1000, max_prompt_length=30),
        dict(context_length=1024),
        "max_completion_length = 1000: with prompts of up to 30 tokens this passes the 1024 positions of the model;"
        " use 994 or less, or shorter prompts",
    ),
    (
        dict(router_aux_loss_coef=0.01),
        dict(num_experts=0),
        "router_aux_loss_coef = 0.01: the model is no mixture of experts, so there is no router to balance; leave it at"
        " None",
    ),
    (
        dict(mesh={"data": 2, "tensor": 2}),
        dict(num_devices=8),
        "mesh = {'data': 2, 'tensor': 2}: 2 × 2 devices, and this run has 8; make the sizes multiply to that, or leave"
        " mesh at None for one device",
    ),
]


@pytest.mark.quick
@pytest.mark.parametrize(("values", "run", "line"), BAD_RUNS, ids=[line[:40] for *_, line in BAD_RUNS])
def test_a_run_that_does_not_fit_its_config_is_refused(values, run, line):
    assert run_problems(GRPOConfig(**values), **RUN | run) == [line]


@pytest.mark.quick
def test_a_run_that_fits_is_not_refused():
    assert not run_problems(GRPOConfig(reward_weights=[1, 2]), **RUN)
    assert not run_problems(GRPOConfig(eval_steps=5), **RUN, num_eval_rows=3, longest_prompt=512, context_length=1024)
    assert not run_problems(GRPOConfig(mesh={"data": 2, "tensor": 2}), **RUN | dict(num_devices=4))
    assert not run_problems(GRPOConfig(router_aux_loss_coef=0.01), **RUN, num_experts=4)
    assert not run_problems(GRPOConfig(router_aux_loss_coef=0), **RUN, num_experts=0)


@pytest.mark.quick
def test_all_errors_of_a_run_come_at_once():
    assert len(run_problems(GRPOConfig(eval_steps=1), num_devices=1, num_rows=0, num_reward_fns=0)) == 3


@pytest.mark.quick
def test_a_contradiction_reads_the_fields_that_it_names():
    """They are held back from it where one of them is wrong in itself, and no type checker knows them."""
    tree = ast.parse(inspect.getsource(contradictions_module))
    (table,) = (node.value for node in tree.body if isinstance(node, ast.AnnAssign))
    fields = {field.name for field in dataclasses.fields(GRPOConfig)}
    assert len(table.elts) == len(contradictions_module._CONTRADICTIONS) > 30
    for names, rule, _ in (row.elts for row in table.elts):
        read = {
            node.attr for node in ast.walk(rule) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "c"
        }
        assert read == {*names.value.split()} <= fields, names.value
