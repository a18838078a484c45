"""The YAML of TRL's script as a run: its data and its quantized base; tests/cli/test_from_trl.py has a whole one."""

import pytest

from grpo_jax.compat.migrate import from_trl_script

pytestmark = pytest.mark.quick


def test_a_run_evaluates_if_trl_does():
    cases = [({"eval_strategy": "steps"}, "test"), ({"eval_strategy": "no"}, None), ({"eval_strategy": False}, None)]
    cases += [({"eval_strategy": "steps", "dataset_test_split": "held_out"}, "held_out")]
    cases += [({"dataset_test_split": "test"}, None)]
    for given, evaluated in cases:
        run, moved = from_trl_script({"dataset_name": "me/sums", **given})
        assert run.get("eval_data", {}).get("split") == evaluated, given
        assert ("dataset_test_split" in moved.left_out) == ("dataset_test_split" in given and evaluated is None)
        assert not moved.missing


def test_the_base_under_adapters_is_quantized():
    adapters = {"use_peft": True, "lora_target_modules": "all-linear"}
    for bits, kind in (("load_in_4bit", "nf4"), ("load_in_8bit", "int8")):
        run, moved = from_trl_script({bits: True, "use_bnb_nested_quant": True, **adapters})
        assert (run["quantize"], moved.missing) == (kind, {})
        assert set(from_trl_script({bits: True})[1].missing) == {bits}, "without adapters nothing could be trained"


def test_values_server_and_rewards_of_a_script():
    server = {"use_vllm": True, "vllm_mode": "server", "vllm_server_host": "b", "vllm_server_port": 81}
    run, moved = from_trl_script(
        {"reward_weights": (1.0,), "reward_funcs": "get_soft_overlong_punishment", "bf16": None, **server}
    )
    punishment = {"get_soft_overlong_punishment": {"max_completion_len": 1280, "soft_punish_cache": 256}}
    sampler = {"vllm": {"base_url": "http://b:81", "patience": 240.0}}
    assert run == {"reward_weights": [1.0], "rewards": [punishment], "sampler": sampler}
    assert not moved.missing
