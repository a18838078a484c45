"""Configs: defaults compared with TRL's, messages for invalid values, and the sizes of batches."""

import ast
import dataclasses
import inspect
import json
import pickle

import numpy as np
import pytest

from grpo_jax.config import contradictions as contradictions_module
from grpo_jax.config.config import GRPOConfig
from grpo_jax.config.settings import Sizes

pytestmark = pytest.mark.quick

WHOLE = "must be an integer, not"
INF, NAN = float("inf"), float("nan")

# (settings, beginning of the only error line).
BAD = [
    # Numbers out of range, with one case per kind of bound.
    (dict(sampler_correction="token_truncate", sampler_correction_max=None),
     "sampler_correction = 'token_truncate': needs a bound; set sampler_correction_max"),
    (dict(warmup_steps=2.5), "warmup_steps = 2.5: must be an integer, or below 1 for a fraction"),
    (dict(num_generations=1), "num_generations = 1: must be at least 2; a group of one completion has no"),
    (dict(max_completion_length=0), "max_completion_length = 0: must be at least 1; use a positive integer"),
    (dict(max_steps=10**20), f"max_steps = {10**20}: must be at most 2147483647"),
    (dict(top_p=1.5), "top_p = 1.5: must be above 0 and at most 1; use 1.0 to keep every token"),
    (dict(seed=2**32), "seed = 4294967296: must be at least 0 and at most 4294967295"),
    (dict(epsilon=0), "epsilon = 0: must be above 0; use a positive number"),
    (dict(adam_beta1=1.0), "adam_beta1 = 1.0: must be at least 0 and below 1; 0.9 is usual"),
    (dict(pad_to_multiple_of=0),
     'pad_to_multiple_of = 0: must be at least 1; use a positive integer; or must be "a'),
    # Wrong types and non-finite numbers.
    (dict(num_generations=True), f"num_generations = True: {WHOLE} bool"),
    (dict(num_generations=8.0), f"num_generations = 8.0: {WHOLE} float; use 8"),
    (dict(learning_rate="1e-6"), "learning_rate = '1e-6': must be a number, not str"),
    (dict(beta=NAN), "beta = nan: must be a finite number"),
    (dict(learning_rate=10**400), f"learning_rate = 1{'0' * 99}…: must be a finite number"),
    (dict(sync_ref_model=1), "sync_ref_model = 1: must be True or False"),
    (dict(reward_weights=[NAN, True]), "reward_weights = [nan, True]: weight 0 must be a finite number; weight 1"),
    (dict(reward_weights={0.5}), "reward_weights = {0.5}: must be a list with one number per reward function"),
    (dict(reward_weights=[0, 0.0]), "reward_weights = (0.0, 0.0): all weights are 0"),
    (dict(chat_template_kwargs={"p": INF}), "chat_template_kwargs = {'p': inf}: must be a dict with string keys and"),
    (dict(mesh={"model": 2}), 'mesh = {\'model\': 2}: must be a dict with the number of devices for any of'),
    (dict(stop=["a", ""]), "stop = ['a', '']: must be a non-empty string, a list of such strings, or None"),
    (dict(stop_token_ids=[3, -1]), "stop_token_ids = [3, -1]: the id at index 1 must be at least 0; token ids start"),
    (dict(report_to=["wandb", "all"]), "report_to = ['wandb', 'all']: must be \"tensorboard\", \"wandb\""),
    # Unknown choices.
    (dict(loss_type="GRPO"), 'loss_type = \'GRPO\': must be "grpo" or "bnpo"'),
    (dict(kl_estimator=3), 'kl_estimator = 3: must be "k1" or "k2" or "k3"; did you mean "k3"?'),
    (dict(scale_rewards="grop"), 'scale_rewards = \'grop\': must be "group" or "batch"'),
    (dict(compute_dtype="float16"), "compute_dtype = 'float16': gradients below 6e-8 are 0 in float16"),
    # Contradictory fields.
    (dict(loss_type="cispo"), "epsilon_high = None: in cispo, the cap on the ratio is epsilon_high itself, not 1 +"),
    (dict(loss_type="cispo", epsilon_high=0.28), "epsilon_high = 0.28: in cispo, the cap on the ratio is"),
    (dict(loss_type="cispo", epsilon_high=5.0, delta=2.0), "delta = 2.0: cispo, sapo and vespo do not"),
    (dict(loss_type="vespo", epsilon_high=0.28), "epsilon_high = 0.28: sapo and vespo weight ratios smoothly"),
    (dict(loss_type="luspo"), "importance_sampling_level = 'token': loss_type = \"luspo\" weights whole completions"),
    (dict(advantage_estimator="maxrl"), "scale_rewards = 'group': only supported with advantage_estimator = \"grpo\""),
    (dict(advantage_estimator="rloo", scale_rewards="none", multi_objective_aggregation="normalize_then_sum"),
     "multi_objective_aggregation = 'normalize_then_sum': only supported with advantage_estimator = \"grpo\""),
    (dict(turn_credit="to_go", advantage_estimator="opo", scale_rewards="none"),
     "turn_credit = 'to_go': advantage_estimator = \"opo\" weights whole completions by length"),
    (dict(sampler_correction_min=3.0), "sampler_correction_min = 3.0: must be below sampler_correction_max"),
    (dict(distillation_coef=1.0, top_p=0.9), "distillation_coef = 1.0: with top_k, top_p or min_p"),
    (dict(distillation_topk=20), 'distillation_topk = 20: must be set if and only if distillation_mode = "topk'),
    (dict(rollout_batch_size=7), "rollout_batch_size = 7: must be at least 8, num_generations times"),
    (dict(sync_ref_model=True), "sync_ref_model = True: a run with beta = 0 does not have a reference"),
    (dict(use_adaptive_entropy=True, entropy_coef=0.5, entropy_coef_max=0.1),
     "entropy_coef = 0.5: with use_adaptive_entropy, must be between entropy_coef_min and entropy_coef_max"),
    (dict(max_steps=0), "max_steps = 0: the run would not train; use at least 1 optimizer step, or -1"),
    (dict(max_steps=10, warmup_steps=20), "warmup_steps = 20.0: the run ends before the warm-up does; decrease"),
    (dict(lr_scheduler_type="constant", warmup_steps=0.1), "warmup_steps = 0.1: a constant schedule has no"),
    (dict(temperature_eval=0, num_generations_eval=4), "num_generations_eval = 4: greedy completions (temperature"),
    (dict(metric_for_best_model="eval/right", eval_steps=3, save_steps=4),
     "metric_for_best_model = 'eval/right': not evaluated at every checkpoint; set eval_steps, and set save_steps"),
    (dict(load_best_model_at_end=True), "load_best_model_at_end = True: needs metric_for_best_model"),
    (dict(load_best_model_at_end=True, metric_for_best_model="reward", save_steps=None),
     "load_best_model_at_end = True: without save_steps, only the checkpoint at the end"),
    # Batch sizes that are not divisible.
    (dict(num_generations=16),
     "per_device_train_batch_size = 8: must be a multiple of num_generations = 16, or a divisor whose product with"
     " gradient_accumulation_steps = 1 is a multiple of 16; nearest valid value: 16"),
    (dict(gradient_accumulation_steps=2, steps_per_generation=3),
     "steps_per_generation = 3: must be a multiple of gradient_accumulation_steps = 2; nearest valid values: 2 and 4"),
    (dict(generation_batch_size=24, mesh={"data": 2}),
     "generation_batch_size = 24: cannot be split into minibatches of 16 completions (per_device"),
    (dict(generation_batch_size=16, steps_per_generation=2), "generation_batch_size = 16: conflicts with steps_per"),
    # Unknown fields.
    (dict(num_generation=4), "num_generation: no such field; did you mean num_generations?"),
    (dict(max_new_tokens=4), "max_new_tokens: no such field; use max_completion_length"),
    (dict(deepspeed="zero3"), "deepspeed: no such field; mesh determines how params are sharded"),
    (dict(output_dir="runs"), "output_dir: no such field; pass run_dir to train"),
]  # fmt: skip


def errors_of(values):
    with pytest.raises(ValueError, match="GRPOConfig has") as caught:
        GRPOConfig(**values)
    head, *lines = str(caught.value).split("\n  ")
    assert head == f"GRPOConfig has {len(lines)} error{'s' * (len(lines) > 1)}:"
    return lines


@pytest.mark.parametrize(("values", "beginning"), BAD, ids=[line.split(":")[0][:60] for _, line in BAD])
def test_invalid_value_is_refused_with_one_line(values, beginning):
    (line,) = errors_of(values)
    assert line.startswith(beginning)


def test_every_field_is_checked_and_every_contradiction_has_a_case():
    for field in dataclasses.fields(GRPOConfig):
        assert errors_of({field.name: 1j})[0].startswith(f"{field.name} = 1j: "), field.name
    named = {line.split(" = ")[0] for _, line in BAD}
    assert {names.split()[0] for names, _, _ in contradictions_module._CONTRADICTIONS} <= named


def test_all_errors_are_reported_at_once_and_each_field_once():
    lines = errors_of(dict(num_generations=1, beta="x", loss_typ="grpo", sync_ref_model=True, epsilon=0, seed=1.5))
    names = [line.split(" = ")[0].split(":")[0] for line in lines]
    assert names == ["loss_typ", "seed", "num_generations", "epsilon", "beta"]
    assert len(errors_of(dict(beta=-1, sync_ref_model=True))) == 1
    assert len(errors_of(dict(num_generations="3", per_device_train_batch_size=7))) == 1
    assert len(errors_of(dict(per_device_train_batch_size=12, generation_batch_size=20))) == 1


def test_creating_and_changing_a_config():
    with pytest.raises(ValueError, match=r"takes keyword arguments only; to pass a dict, use GRPOConfig\.from_dict"):
        GRPOConfig({"beta": 0.1})
    with pytest.raises(ValueError, match="beta = -1"):
        dataclasses.replace(GRPOConfig(), beta=-1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        GRPOConfig().beta = 0.1
    assert [*inspect.signature(GRPOConfig).parameters] == [field.name for field in dataclasses.fields(GRPOConfig)]


GOOD = [
    {},
    dict(loss_type="cispo", epsilon_high=1),
    dict(loss_type="luspo", importance_sampling_level="sequence"),
    dict(loss_type="dr_grpo", scale_rewards=False),
    dict(beta=0.04, sync_ref_model=True, ref_model_mixup_alpha=1, ref_model_sync_steps=1),
    dict(per_device_train_batch_size=1, gradient_accumulation_steps=8),
    dict(warmup_steps=0.1, max_steps=10),
    dict(use_adaptive_entropy=True, entropy_coef=0.1, entropy_coef_max=0.1, entropy_target=1.5),
    dict(top_entropy_quantile=0.0, min_p=0.0, top_k=5, top_p=0.5, temperature=1e-3, reward_weights=[1, 0.5]),
    dict(chat_template_kwargs={"enable_thinking": False, "tools": [{"name": "f"}]}, pad_to_multiple_of=None),
    dict(mesh={"data": 2, "fsdp": 2, "tensor": 2}, save_steps=None, eval_steps=5, temperature_eval=0),
    dict(report_to=["wandb", "tensorboard"], load_best_model_at_end=True, metric_for_best_model="reward"),
]


@pytest.mark.parametrize("values", GOOD, ids=str)
def test_valid_config_survives_json(values):
    config = GRPOConfig(**values)
    again = GRPOConfig.from_dict(json.loads(json.dumps(config.to_dict(), allow_nan=False)))
    assert again == config
    assert hash(again) == hash(config)
    assert pickle.loads(pickle.dumps(config)) == config
    assert dataclasses.replace(config, seed=7) != config


def test_values_are_stored_as_copies_with_plain_python_types():
    template, weights = {"tools": [1]}, [np.float32(0.5), 1]
    numbers = dict(num_generations=np.int64(4), per_device_train_batch_size=4, beta=np.float64(0.5), temperature=2)
    config = GRPOConfig(**numbers, scale_rewards=True, reward_weights=weights, chat_template_kwargs=template)
    template["tools"].append(2)
    weights.append(3)
    assert [type(value) for value in (config.num_generations, config.beta, config.temperature)] == [int, float, float]
    assert config.scale_rewards == "group"
    assert config.reward_weights == (0.5, 1.0)
    assert config.chat_template_kwargs == {"tools": [1]}
    assert [GRPOConfig(stop_token_ids=x).stop_token_ids for x in (np.int64(3), np.array([3]))] == [(3,)] * 2
    assert GRPOConfig(scale_rewards=False).scale_rewards == "none"


# Defaults in TRL 1.16.0 (with transformers 5.23), from its source. Of these fields, only pad_to_multiple_of has another
# meaning here. Fields in OURS do not exist in TRL.
TRL = dict(
    max_tool_calling_iterations=None, num_generations=8, max_completion_length=512, temperature=1.0, top_p=1.0,
    top_k=0, min_p=None, chat_template_kwargs=None, pad_to_multiple_of="auto", per_device_train_batch_size=8,
    gradient_accumulation_steps=1, steps_per_generation=None, generation_batch_size=None, num_iterations=1,
    max_steps=-1, num_train_epochs=3.0, shuffle_dataset=True, seed=42, reward_weights=None, scale_rewards="group",
    multi_objective_aggregation="sum_then_normalize", mask_truncated_completions=False, loss_type="dapo",
    importance_sampling_level="token", epsilon=0.2, epsilon_high=None, delta=None, sapo_temperature_neg=1.05,
    sapo_temperature_pos=1.0, vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0,
    top_entropy_quantile=1.0, off_policy_mask_threshold=None, entropy_coef=0.0, use_adaptive_entropy=False,
    entropy_coef_min=0.0, entropy_coef_max=1.0, entropy_coef_delta=0.005, entropy_target=0.2,
    router_aux_loss_coef=None, beta=0.0, use_bias_correction_kl=True, sync_ref_model=False,
    ref_model_sync_steps=512, ref_model_mixup_alpha=0.6, learning_rate=1e-6, lr_scheduler_type="linear",
    warmup_steps=0, weight_decay=0.0, adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-8, max_grad_norm=1.0,
    eval_steps=None, per_device_eval_batch_size=8, num_generations_eval=None, logging_steps=10,
    log_completions=False, num_completions_to_print=None, save_steps=500, save_total_limit=None,
    metric_for_best_model=None, greater_is_better=None, load_best_model_at_end=False, report_to="none",
    run_name=None, project="huggingface", push_to_hub=False, hub_model_id=None, hub_private_repo=None,
    hub_strategy="every_save", hub_revision=None,
)  # fmt: skip
OTHER = {"gradient_checkpointing": (None, True), "logging_first_step": (True, False)}
"""TRL fields with another default here: {name: (our default, TRL's default)}."""
OURS = dict(
    environment_timeout=300.0, on_environment_error="raise", max_prompt_length=None, stop=None, stop_token_ids=None,
    max_turn_length=None, on_long_prompt="error", on_reward_error="raise", advantage_estimator="grpo",
    turn_credit="episode", dynamic_sampling=False, rollout_batch_size=None, rollout_ahead=False,
    sampler_correction="sequence_mask", sampler_correction_max=3.0, sampler_correction_min=None, kl_estimator="k3",
    kl_correction_level="token", kl_placement="loss", distillation_coef=0.0, distillation_divergence="reverse_kl",
    distillation_alpha=0.5, distillation_mode="full_logits", distillation_topk=None,
    compute_dtype="auto", mesh=None, freeze_vision=True,
    temperature_eval=None, max_skipped_updates=10, save_minutes=5.0,
)  # fmt: skip


def test_defaults():
    assert GRPOConfig().to_dict() == TRL | OURS | {name: ours for name, (ours, _) in OTHER.items()}


def test_defaults_equal_the_installed_trl():
    trl = pytest.importorskip("trl", minversion="1.16", exc_type=ImportError)
    theirs = {field.name: field.default for field in dataclasses.fields(trl.GRPOConfig)}
    assert {name: theirs[name] for name in TRL} == TRL
    assert {name: theirs[name] for name in OTHER} == {name: default for name, (_, default) in OTHER.items()}
    assert not set(OURS).intersection(theirs)


# Computed by hand.
BATCH = dict(num_generations=4, per_device_train_batch_size=16, gradient_accumulation_steps=2, num_iterations=2)
SIZES = [
    (dict(mesh={"data": 4}), Sizes(4, 32, 1, 1, 4, 1, 4, 8)),  # 8 completions per device are one group; one update
    # Two micro-batches of 64 make one update of 128 completions = 32 prompts; two passes.
    (BATCH | dict(per_device_train_batch_size=64), Sizes(32, 128, 1, 2, 32, 2, 16, 4)),
    # Six micro-batches of 16, two per update: three minibatches of 32 completions = 8 prompts; two passes.
    (BATCH | dict(steps_per_generation=6), Sizes(24, 96, 3, 6, 8, 2, 4, 4)),
    (BATCH | dict(generation_batch_size=96), Sizes(24, 96, 3, 6, 8, 2, 4, 4)),
    # On three devices the generation batch is the same, but there is only one minibatch.
    (BATCH | dict(generation_batch_size=96, mesh={"data": 3}), Sizes(24, 96, 1, 2, 24, 2, 12, 4)),
    # A micro-batch of 2 is a quarter of a group: four make an update of one prompt per device.
    (dict(per_device_train_batch_size=2, gradient_accumulation_steps=4, mesh={"fsdp": 2}),
     Sizes(2, 16, 1, 1, 2, 4, 2, 2)),
    # Devices along the tensor axis have the same prompts: eight devices, four shards.
    (dict(mesh={"data": 2, "fsdp": 2, "tensor": 2}), Sizes(4, 32, 1, 1, 4, 1, 4, 8)),
]  # fmt: skip


@pytest.mark.parametrize(("values", "sizes"), SIZES, ids=str)
def test_sizes_by_hand(values, sizes):
    config = GRPOConfig(**values)
    assert config.sizes() == sizes
    assert sizes.prompts_per_iteration * config.num_generations == sizes.completions
    assert sizes.prompts_per_update * sizes.minibatches == sizes.prompts_per_iteration
    assert sizes.micro_batches * sizes.micro_prompts * sizes.micro_completions == (
        sizes.prompts_per_update * config.num_generations
    )


def test_steps_and_other_properties_derived_from_fields():
    config = GRPOConfig(per_device_train_batch_size=32, num_iterations=2, num_train_epochs=1.5)  # B = 4
    assert config.total_steps(num_rows=10) == 8  # 15 prompts are 4 batches, with two updates each
    assert dataclasses.replace(config, mesh={"data": 2}).total_steps(num_rows=10) == 4
    assert GRPOConfig(num_train_epochs=0.07).total_steps(num_rows=100) == 7  # 0.07 × 100 is a little over 7 in floats
    assert GRPOConfig(max_steps=7).total_steps(num_rows=10) == 7
    assert GRPOConfig(warmup_steps=5).total_warmup_steps(100) == 5
    assert GRPOConfig(warmup_steps=0.05).total_warmup_steps(101) == 6
    assert GRPOConfig(warmup_steps=1.0).total_warmup_steps(100) == 1
    assert GRPOConfig().total_warmup_steps(100) == 0
    evaluated = lambda **settings: (GRPOConfig(**settings).eval_temperature, GRPOConfig(**settings).eval_generations)
    assert evaluated() == (1.0, 8)
    assert evaluated(temperature_eval=0) == (0.0, 1)
    assert evaluated(temperature=0.7, num_generations_eval=3) == (0.7, 3)
    better = lambda **settings: GRPOConfig(**settings).best_is_greatest
    assert better(metric_for_best_model="reward")
    assert not better(metric_for_best_model="loss")
    assert better(metric_for_best_model="loss", greater_is_better=True)
    for nothing in (None, "none", [], ["none"], ()):
        assert GRPOConfig(report_to=nothing).report_to == "none"
    assert GRPOConfig(report_to=["wandb"]).report_to == "wandb"
    logged = lambda **settings: [step for step in range(1, 13) if GRPOConfig(**settings).logs_at(step)]
    assert logged(logging_steps=5) == [1, 5, 10]
    assert logged(logging_steps=5, logging_first_step=False) == [5, 10]
    assert [GRPOConfig(pad_to_multiple_of=value).padded(33) for value in ("auto", None, 7)] == [48, 33, 35]


def test_contradictions_read_exactly_the_fields_they_name():
    """A contradiction reads exactly the fields it names, because it is skipped only if one of these is invalid."""
    tree = ast.parse(inspect.getsource(contradictions_module))
    (table,) = (node.value for node in tree.body if isinstance(node, ast.AnnAssign))
    fields = {field.name for field in dataclasses.fields(GRPOConfig)}
    assert len(table.elts) == len(contradictions_module._CONTRADICTIONS) > 20
    for names, rule, _ in (row.elts for row in table.elts):
        read = {
            node.attr for node in ast.walk(rule) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "c"
        }
        assert read == {*names.value.split()} <= fields, names.value
