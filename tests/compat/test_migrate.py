"""Every TRL 1.16 field has a field or a note here, and `from_trl` does not drop a value silently."""

import dataclasses
import importlib
import itertools
import re
from pathlib import Path

import pytest
from tiny import tiny_policy

from grpo_jax import GRPOConfig
from grpo_jax.compat.migrate import from_trl, from_trl_script
from grpo_jax.compat.trl_fields import SHARED, TRL_ONLY
from grpo_jax.config.settings import OTHER_NAMES
from grpo_jax.models.transformer import projections

pytestmark = pytest.mark.quick

PAGE = Path(__file__).parents[2] / "docs" / "coming_from_trl.md"
OURS = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}
VLLM = "vllm_importance_sampling_"
STEPS = {"eval_strategy": "steps", "eval_steps": 4, "save_steps": 4}


def test_field_table_matches_the_installed_trl():
    trl = pytest.importorskip("trl", minversion="1.16", exc_type=ImportError)
    theirs = {
        field.name: field.default_factory() if field.default is dataclasses.MISSING else field.default
        for field in dataclasses.fields(trl.GRPOConfig)
    }
    assert set(SHARED) | set(TRL_ONLY) == set(theirs)
    assert {name: field.default for name, field in TRL_ONLY.items()} == {name: theirs[name] for name in TRL_ONLY}


def test_every_trl_field_is_ours_or_has_a_note():
    assert set(SHARED) <= set(OURS)
    assert not (set(TRL_ONLY) | set(OTHER_NAMES)) & set(OURS)
    assert len(SHARED) + len(TRL_ONLY) == 191  # the number of fields in TRL 1.16 with transformers 5.23
    for name, (default, kind, advice, _) in TRL_ONLY.items():
        if kind == "not needed":  # a field with a replacement must have another kind
            assert not re.search(r"^(use (?!mesh)|pass |set )|says it|switch|_FLAGS|JAX_", advice), name
        moved = from_trl({name: default})
        assert (moved.values, moved.translated, moved.left_out, moved.missing) == ({}, {}, {}, {}), name


def field_table() -> str:
    """Return the expected table of all fields in docs/coming_from_trl.md."""
    plain = ", ".join(f"`{name}`" for name, note in SHARED.items() if not note)
    rows = [(f"`{name}`", "same", note) for name, note in SHARED.items() if note]
    for (kind, advice), group in itertools.groupby(TRL_ONLY.items(), lambda item: item[1][1:3]):
        rows.append((", ".join(f"`{name}`" for name, _ in group), kind, advice))
    lines = [f"Same name and meaning, nothing to note: {plain}.", "", "| TRL's field | here | |", "|---|---|---|"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def test_docs_contain_the_field_table_and_existing_functions():
    assert field_table() in PAGE.read_text(encoding="utf-8")
    (table,) = re.findall(r"^\| TRL's function \|.*\n\|---\|---\|---\|\n((?:\|.*\n)+)", PAGE.read_text(), flags=re.M)
    rows = [line.split("|")[2] for line in table.splitlines()]
    assert len(rows) > 15
    for name in (name for ours in rows for name in re.findall(r"`([\w.]+)`", ours)):
        module, _, function = f"grpo_jax.{name}".rpartition(".")
        if name not in OURS:
            assert callable(getattr(importlib.import_module(module), function)), name


@pytest.mark.parametrize(("theirs", "ours"), [
    ({"bf16": True, "use_vllm": True, "optim": "adamw_torch"}, {"compute_dtype": "bfloat16"}),
    ({"activation_checkpointing": True}, {"gradient_checkpointing": True}),
    ({"save_strategy": "no"}, {"save_steps": None}),
    ({"eval_strategy": "steps"}, {"eval_steps": 10}),
    ({"eval_strategy": "steps", "logging_steps": 3}, {"eval_steps": 3, "logging_steps": 3}),
    ({"eval_strategy": "no", "eval_steps": 3}, {"eval_steps": None}),
    ({VLLM + "clip_max": 2.0}, {"sampler_correction_max": 2.0}),
    ({VLLM + "correction": False, VLLM + "mode": "token_mask"}, {"sampler_correction": None}),
    ({VLLM + "clip_min": 0.0}, {"sampler_correction_min": 0.0}),
], ids=str)  # fmt: skip
def test_fields_are_translated(theirs, ours):
    moved = from_trl(theirs)
    assert (moved.values, moved.missing) == (ours, {})
    assert moved.config() == GRPOConfig.from_dict(ours)


def test_metric_for_best_model():
    named = {"eval_reward": "reward", "reward": "reward", "eval_rewards/right/mean": "right"}
    named |= {"eval_hard_reward": "hard/reward", "eval_hard_rewards/right/mean": "hard/right"}
    for theirs, ours in {**named, "eval_completions/mean_length": "mean_length"}.items():
        assert from_trl({"metric_for_best_model": theirs, **STEPS}).config().metric_for_best_model == f"eval/{ours}"
    assert from_trl({"metric_for_best_model": "kl", **STEPS}).values["metric_for_best_model"] == "kl"
    unset = {"metric_for_best_model": "loss", "greater_is_better": False}  # as in a dumped config that sets neither
    for given in ({}, unset):
        config = from_trl({"load_best_model_at_end": True, **given, **STEPS}).config()
        assert (config.metric_for_best_model, config.greater_is_better) == ("eval/reward", None)


@pytest.mark.parametrize(("values", "advice"), [
    ({"hub_token": "hf_secret"}, "HF_TOKEN"),
    ({"optim": "adafactor"}, "'adafactor': pass an optax transformation to train"),
    ({"eval_strategy": "epoch"}, "'epoch': only \"steps\" is supported; set eval_steps"),
    ({"logging_strategy": "no"}, "logging cannot be disabled"),
    ({"trackio_space_id": "me/space"}, "trackio.init(space_id=...)"),
    ({"generation_kwargs": {"num_beams": 2}}, "set stop, stop_token_ids"),
    ({"model_init_kwargs": {"revision": "v2", "attn_implementation": "sdpa"}}, "revision: only dtype is supported"),
    ({"model_init_kwargs": {"dtype": "int8"}}, "'int8': use float32, bfloat16 or auto"),
    ({"metric_for_best_model": "eval_loss"}, "'eval_loss' is not logged here; use eval_reward or"),
], ids=str)  # fmt: skip
def test_unsupported_fields_are_reported_with_advice(values, advice):
    moved = from_trl(values)
    (name,) = moved.missing
    assert name in values
    assert advice in moved.missing[name]
    assert f"  {name}: {moved.missing[name]}" in moved.notes()[moved.notes().index("NOT SUPPORTED:") :]


@pytest.mark.parametrize(("kwargs", "dtype", "values"), [
    ({"dtype": "bfloat16", "attn_implementation": "flash_attention_2"}, "bfloat16", {"compute_dtype": "bfloat16"}),
    ({"torch_dtype": "torch.float16", "device_map": "auto"}, "bfloat16", {}),
    ({"dtype": "float32", "trust_remote_code": False}, "float32", {}),
    ({"dtype": "auto", "torch_dtype": None}, "auto", {}),
    ('{"dtype": "float32"}', "float32", {}),
], ids=str)  # fmt: skip
def test_model_dtype(kwargs, dtype, values):
    moved = from_trl({"model_init_kwargs": kwargs, "bf16": False})
    assert (moved.dtype, moved.values, moved.missing) == (dtype, values, {})


def test_vllm_server_becomes_a_sampler():
    server = {"use_vllm": True, "vllm_mode": "server"}
    moved = from_trl({**server, "vllm_server_base_url": "http://a:1/v1", "vllm_server_timeout": 30})
    assert moved.sampler == {"base_url": "http://a:1/v1", "patience": 30.0}
    assert moved.translated == {"use_vllm": "sampler=engines.vllm('http://a:1/v1', patience=30) in train"}
    assert from_trl(server).sampler == {"base_url": "http://127.0.0.1:8000", "patience": 240.0}
    moved = from_trl({"use_vllm": True, "vllm_server_base_url": "http://a:1"})
    assert (moved.sampler, list(moved.left_out)) == (None, ["use_vllm"])


def test_dump_of_a_whole_config_is_converted():
    """A dump by TRL's `to_dict` is converted despite derived values: both batch settings, unused steps, bf16."""
    dump = {**{name: OURS[name] for name in SHARED}, **{name: field.default for name, field in TRL_ONLY.items()}}
    dump |= {"output_dir": "out", "bf16": True, "hub_token": "<HUB_TOKEN>", "report_to": [], "fsdp_config": {}}
    dump |= {"generation_batch_size": 8, "steps_per_generation": 1, "pad_to_multiple_of": None, "eval_steps": 500}
    moved = from_trl(dump)
    assert (moved.run_dir, moved.missing) == ("out", {})
    assert moved.config() == GRPOConfig(steps_per_generation=1, pad_to_multiple_of=None, compute_dtype="bfloat16")
    assert from_trl({"warmup_ratio": 0.1}).config() == GRPOConfig(warmup_steps=0.1)


def test_unknown_names_are_rejected_with_a_hint():
    hints = "did you mean num_generations.*use temperature, .*use max_prompt_length.*use num_train_epochs.*zzz: no such"
    with pytest.raises(ValueError, match=f"(?s){hints}"):
        from_trl(dict.fromkeys(("num_generation", "vllm_sampling_params", "max_seq_length", "epochs", "zzz"), 1))


# YAML files for TRL's scripts


def test_converted_script_evaluates_if_trl_does():
    cases = [({"eval_strategy": "steps"}, "test"), ({"eval_strategy": "no"}, None), ({"eval_strategy": False}, None)]
    cases += [({"eval_strategy": "steps", "dataset_test_split": "held_out"}, "held_out")]
    cases += [({"dataset_test_split": "test"}, None)]
    for given, evaluated in cases:
        run, moved = from_trl_script({"dataset_name": "me/sums", **given})
        assert run.get("eval_data", {}).get("split") == evaluated, given
        assert not moved.missing


def test_adapters_have_pefts_targets_and_may_have_a_quantized_base():
    adapters = {"use_peft": True, "lora_target_modules": "all-linear"}
    for bits, kind in (("load_in_4bit", "nf4"), ("load_in_8bit", "int8")):
        run, moved = from_trl_script({bits: True, "use_bnb_nested_quant": True, **adapters})
        assert (run["quantize"], moved.missing) == (kind, {})
        assert set(from_trl_script({bits: True})[1].missing) == {bits}, "a quantized model needs adapters"
    run, moved = from_trl_script({"use_peft": True, "lora_target_modules": ["self_attn.q_proj", "down_proj"]})
    paths = ["/".join(path) for path, _ in projections(tiny_policy(layers=1).params)]
    found = {path for path in paths if re.fullmatch(run["lora"]["targets"], path)}
    assert (found, moved.missing) == ({"layers_0/self_attn/q_proj", "layers_0/mlp/down_proj"}, {})
    run, moved = from_trl_script({"use_peft": True, "lora_target_modules": r".*\.(q|v)_proj"})
    assert "targets" not in run["lora"]
    assert "is a regular expression" in moved.missing["lora_target_modules"]


def test_values_server_and_rewards_in_a_script():
    server = {"use_vllm": True, "vllm_mode": "server", "vllm_server_host": "b", "vllm_server_port": 81}
    run, moved = from_trl_script(
        {"reward_weights": (1.0,), "reward_funcs": "get_soft_overlong_punishment", "bf16": None, **server}
    )
    punishment = {"get_soft_overlong_punishment": {"max_completion_len": 1280, "soft_punish_cache": 256}}
    sampler = {"vllm": {"base_url": "http://b:81", "patience": 240.0}}
    assert run == {"reward_weights": [1.0], "rewards": [punishment], "sampler": sampler}
    assert not moved.missing


def test_yes_and_no_in_a_script_are_bools():
    """PyYAML parses them as bools; this package's YAML reader keeps them as strings."""
    given = dict.fromkeys(("bf16", "use_peft", "load_in_4bit", "use_vllm", "save_strategy"), "no")
    run, moved = from_trl_script(given | {"env": {"TRANSFORMERS_OFFLINE": "1"}})
    assert (run, [*moved.left_out], moved.missing) == ({"save_steps": None}, ["env"], {})
    run, _ = from_trl_script({"use_peft": "Yes", "load_in_4bit": "on", "lora_target_modules": "all-linear"})
    assert run["quantize"] == "nf4"
