"""`grpo-jax from-trl`: TRL's YAML as a RUN.yaml that is read back as the run that it asked for."""

import pytest
from cli_files import run

from grpo_jax.cli.runfile import read_run
from grpo_jax.cli.yaml12 import parse_yaml

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
def test_what_is_not_here_is_said_and_is_the_exit_status(script, tmp_path):
    more = (
        "repetition_penalty: 1.1\nreward_model_name_or_path: me/judge\nbnb_4bit_quant_type: fp4\nload_in_4bit: true\n"
    )
    script.write_text(SCRIPT.replace("think_format_reward", "accuracy_reward") + more)
    with pytest.raises(SystemExit) as ended:
        run("from-trl", script, "--out", tmp_path / "run.yaml")
    assert ended.value.code == 1
    lines = (tmp_path / "run.yaml").read_text().splitlines()
    missing = [line for line in lines[lines.index("# NOT HERE:") + 1 :] if line.startswith("#   ")]
    assert [line.removeprefix("#   ").split(": ")[0] for line in missing] == [
        "repetition_penalty",
        "reward_model_name_or_path",
        "reward_funcs, accuracy_reward",
        "bnb_4bit_quant_type",
    ]


@pytest.mark.quick
def test_all_unknown_names_are_reported_at_once(script):
    script.write_text("learning_rat: 1\nbeta: 0.1\nsystem_prompt: hi\ncosine_max_len: 9\n")
    with pytest.raises(
        SystemExit, match=r"3 errors:\n  learning_rat: no such field; did you mean learning_rate\?"
    ) as ended:
        run("from-trl", script)
    assert all(f"  {name}: no such field; " in str(ended.value) for name in ("system_prompt", "cosine_max_len"))
