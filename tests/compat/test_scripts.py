"""The YAML of TRL's script as a run: the data, rewards, adapters and base that it asks for."""

import dataclasses
import inspect
from pathlib import Path

import pytest

from grpo_jax.cli.named import reward_function
from grpo_jax.cli.runfile import read_run
from grpo_jax.cli.yaml12 import dump_yaml
from grpo_jax.compat.scripts import from_trl_script


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
    run, moved = from_trl_script(given)
    eval_data = None if evaluated is None else {"name": "me/sums", "split": evaluated}
    assert run.get("eval_data") == eval_data
    assert ("dataset_test_split" in moved.left_out) == (split is not None and evaluated is None)
    assert not moved.missing


@pytest.mark.quick
def test_a_quantized_base_is_held_so_under_adapters(tmp_path):
    adapters = {"use_peft": True, "lora_target_modules": "all-linear"}
    for bits, held in (("load_in_4bit", "nf4"), ("load_in_8bit", "int8")):
        run, moved = from_trl_script({bits: True, "use_bnb_nested_quant": True, **adapters})
        assert run["quantize"] == held
        assert not moved.missing
        (tmp_path / "run.yaml").write_text(dump_yaml(run))
        assert read_run(tmp_path / "run.yaml").quantize == held
        assert set(from_trl_script({bits: True})[1].missing) == {bits}, (
            "a run without adapters would train what cannot be trained"
        )


@pytest.mark.quick
def test_the_overlong_punishment_has_the_values_of_trls_script():
    trl_script = pytest.importorskip("trl.scripts.grpo", reason="TRL is not installed")
    run, moved = from_trl_script({"reward_funcs": ["get_soft_overlong_punishment"]})
    ((name, values),) = (entry for (entry,) in (one.items() for one in run["rewards"]))
    said = ", ".join(f"{key}={value}" for key, value in values.items())
    assert f"`{name}` (used values are `{said.replace(', ', '`, `')}`)" in inspect.getsource(trl_script)
    assert not moved.missing
    ours = reward_function({name: values}, Path())
    assert ours(completion_ids=[[0] * n for n in (1024, 1152, 1280)]) == [0.0, -0.5, -1.0]


@pytest.mark.quick
def test_every_argument_of_trls_script_is_known():
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    for kind in (trl.ScriptArguments, trl.ModelConfig):
        for field in dataclasses.fields(kind):
            from_trl_script({field.name: None})


@pytest.mark.quick
def test_the_config_of_a_dump_is_taken_whole():
    run, moved = from_trl_script({"beta": 0.04, "reward_weights": (1.0, 0.5)})
    assert run == {"beta": 0.04, "reward_weights": [1.0, 0.5]}
    assert not moved.missing
