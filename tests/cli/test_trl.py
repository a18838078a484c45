"""TRL's YAML as a RUN.yaml: it is read back as the run that it asked for, and what cannot be said is said."""

import pytest
import yaml
from cli_files import run

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
    more = "repetition_penalty: 1.1\nreward_model_name_or_path: me/judge\nload_in_4bit: true\n"
    script.write_text(SCRIPT.replace("think_format_reward", "accuracy_reward") + more)
    with pytest.raises(SystemExit) as ended:
        run("from-trl", script)
    assert ended.value.code == 1
    text, missing = translate(parse_yaml(script.read_text()))
    assert set(missing) == {
        "repetition_penalty",
        "reward_model_name_or_path",
        "load_in_4bit",
        "reward_funcs, accuracy_reward",
    }
    for name, note in missing.items():
        assert f"#   {name}: {note}" in text


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
