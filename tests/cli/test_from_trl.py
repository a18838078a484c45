"""`grpo-jax from-trl`: TRL's YAML as a RUN.yaml that is read back; `compat/test_scripts.py` has the fields."""

import pytest
from cli_files import run

from grpo_jax.cli.runfile import read_run

SCRIPT = """
model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct
dataset_name: openai/gsm8k
reward_funcs: [think_format_reward, my_project.rewards.short]
learning_rate: 1.0e-5
num_generations: 16
per_device_train_batch_size: 16
use_vllm: true
"""


@pytest.mark.quick
def test_a_script_becomes_a_run_and_what_is_missing_is_the_exit_status(tmp_path):
    script, out = tmp_path / "grpo.yaml", tmp_path / "run.yaml"
    script.write_text(SCRIPT)
    text = run("from-trl", script)
    assert "#   use_vllm: the sampler is built in" in text
    assert "NOT HERE" not in text
    assert run("from-trl", script, "--out", out) == ""
    assert out.read_text() == text
    found = read_run(out)
    assert (found.config.num_generations, found.config.learning_rate, found.model) == (
        16,
        1e-5,
        "Qwen/Qwen2.5-0.5B-Instruct",
    )
    assert found.values["rewards"][1] == "my_project.rewards:short"
    script.write_text(SCRIPT + "repetition_penalty: 1.1\n")
    with pytest.raises(SystemExit) as ended:
        run("from-trl", script, "--out", out)
    assert ended.value.code == 1
    lines = out.read_text().splitlines()
    assert lines[lines.index("# NOT HERE:") + 1].startswith("#   repetition_penalty: ")
    script.write_text("learning_rat: 1\nbeta: 0.1\nsystem_prompt: hi\n")
    with pytest.raises(
        SystemExit, match=r"2 errors:\n  learning_rat: no such field; .*learning_rate\?\n  system_prompt: "
    ):
        run("from-trl", script)
