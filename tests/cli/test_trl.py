"""TRL's YAML as a RUN.yaml: it is read back as the run that it asked for, and what cannot be said is said."""

import inspect
from pathlib import Path

import pytest
import yaml
from cli_files import run

from grpo_jax.cli.named import reward_function
from grpo_jax.cli.runfile import parse_yaml, read_run
from grpo_jax.cli.trl import translate

SCRIPT = """
model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct
dtype: bfloat16
attn_implementation: flash_attention_2
use_peft: true
lora_r: 32
lora_alpha: 16
lora_target_modules: [q_proj, v_proj]
dataset_name: openai/gsm8k
dataset_config: main
dataset_test_split: test
reward_funcs: [think_format_reward, my_project.rewards.short]
output_dir: out
learning_rate: 1.0e-5
num_generations: 16
per_device_train_batch_size: 16
bf16: true
use_vllm: true
eval_strategy: steps
eval_steps: 25
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "grpo.yaml").write_text(SCRIPT)
    return tmp_path / "grpo.yaml"


@pytest.mark.quick
def test_a_script_becomes_a_run(script, tmp_path):
    text = run("from-trl", script)
    assert "#   use_vllm: the sampler is built in" in text
    assert "#   attn_implementation: attention is chosen by the device" in text
    assert "NOT HERE" not in text
    assert parse_yaml(text) == {
        "model": "Qwen/Qwen2.5-0.5B-Instruct",
        "data": {"name": "openai/gsm8k", "config": "main", "split": "train"},
        "eval_data": {"name": "openai/gsm8k", "config": "main", "split": "test"},
        "rewards": [{"format_reward": r"<think>(?!.*<think>).*?</think>.*"}, "my_project.rewards:short"],
        "lora": {"rank": 32, "alpha": 16.0, "dropout": 0.05, "targets": r"layers_\d+/\w+/(q_proj|v_proj)"},
        "param_dtype": "bfloat16",
        "run_dir": "out",
        "learning_rate": 1e-5,
        "num_generations": 16,
        "per_device_train_batch_size": 16,
        "compute_dtype": "bfloat16",
        "eval_steps": 25,
    }
    assert run("from-trl", script, "--out", tmp_path / "run.yaml") == ""
    assert read_run(tmp_path / "run.yaml").config.num_generations == 16


@pytest.mark.quick
def test_what_is_not_here_is_said_and_is_the_exit_status(script, capsys):
    more = (
        "repetition_penalty: 1.1\nreward_model_name_or_path: me/judge\nbnb_4bit_quant_type: fp4\nload_in_4bit: true\n"
    )
    script.write_text(SCRIPT.replace("think_format_reward", "accuracy_reward") + more)
    with pytest.raises(SystemExit) as ended:
        run("from-trl", script)
    assert ended.value.code == 1
    text, missing = translate(parse_yaml(script.read_text()))
    assert set(missing) == {
        "repetition_penalty",
        "reward_model_name_or_path",
        "bnb_4bit_quant_type",
        "reward_funcs, accuracy_reward",
    }
    for name, note in missing.items():
        assert f"#   {name}: {note}" in text


@pytest.mark.quick
@pytest.mark.parametrize(
    ("strategy", "split", "evaluated"),
    [
        (None, "test", None),
        ("steps", None, "test"),
        ("steps", "held_out", "held_out"),
        ("no", "test", None),
        (False, None, None),
    ],
)
def test_a_run_evaluates_where_trl_does(strategy, split, evaluated):
    given = {"eval_strategy": strategy, "dataset_test_split": split}
    given = {"dataset_name": "me/sums"} | {name: value for name, value in given.items() if value is not None}
    text, missing = translate(given)
    eval_data = None if evaluated is None else {"name": "me/sums", "split": evaluated}
    assert yaml.safe_load(text).get("eval_data") == eval_data
    assert ("#   dataset_test_split: eval_strategy is 'no'" in text) == (split is not None and evaluated is None)
    assert not missing


@pytest.mark.quick
def test_a_quantized_base_is_held_so_under_adapters(tmp_path):
    adapters = {"use_peft": True, "lora_target_modules": "all-linear"}
    for bits, held in (("load_in_4bit", "nf4"), ("load_in_8bit", "int8")):
        text, missing = translate({bits: True, "use_bnb_nested_quant": True, **adapters})
        assert yaml.safe_load(text)["quantize"] == held
        assert not missing
        (tmp_path / "run.yaml").write_text(text)
        assert read_run(tmp_path / "run.yaml").quantize == held
        assert set(translate({bits: True})[1]) == {bits}, "a run without adapters would train what cannot be trained"


@pytest.mark.quick
def test_the_overlong_punishment_has_the_values_of_trls_script():
    trl_script = pytest.importorskip("trl.scripts.grpo", reason="TRL is not installed")
    text, missing = translate({"reward_funcs": ["get_soft_overlong_punishment"]})
    ((name, values),) = (entry for (entry,) in (one.items() for one in yaml.safe_load(text)["rewards"]))
    said = ", ".join(f"{key}={value}" for key, value in values.items())
    assert f"`{name}` (used values are `{said.replace(', ', '`, `')}`)" in inspect.getsource(trl_script)
    assert not missing
    ours = reward_function({name: values}, Path())
    assert ours(completion_ids=[[0] * n for n in (1024, 1152, 1280)]) == [0.0, -0.5, -1.0]


@pytest.mark.quick
def test_all_names_of_neither_are_said_at_once(script):
    script.write_text("learning_rat: 1\nbeta: 0.1\nsystem_prompt: hi\ncosine_max_len: 9\n")
    with pytest.raises(SystemExit, match="3 errors") as ended:
        run("from-trl", script)
    assert all(f"{name} is no field of GRPOConfig" in str(ended.value) for name in ("learning_rat", "system_prompt"))
    assert "cosine_max_len is no field" in str(ended.value)


@pytest.mark.quick
def test_a_name_of_neither_is_an_error(script):
    script.write_text("learning_rat: 1\n")
    with pytest.raises(SystemExit, match=r"learning_rat is no field of GRPOConfig, of TRL .*did you mean learning_ra"):
        run("from-trl", script)


@pytest.mark.quick
def test_every_argument_of_trls_script_is_known():
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    import dataclasses

    for kind in (trl.ScriptArguments, trl.ModelConfig):
        for field in dataclasses.fields(kind):
            translate({field.name: None})


@pytest.mark.quick
def test_the_config_of_a_dump_is_taken_whole():
    text, missing = translate({"beta": 0.04, "reward_weights": (1.0, 0.5)})
    assert yaml.safe_load(text) == {"beta": 0.04, "reward_weights": [1.0, 0.5]}
    assert not missing
