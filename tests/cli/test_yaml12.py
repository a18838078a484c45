"""YAML 1.2: scalars, errors that name the file, and command-line values."""

import dataclasses

import pytest
import yaml

from grpo_jax import GRPOConfig
from grpo_jax.cli.yaml12 import _Loader, dump_yaml, parse_value, read_file

pytestmark = pytest.mark.quick

TEXTS = ["1_000", "no", "off", "2026-01-01", "1:30"]
SCALARS = {"1e-6": 1e-6, "-2.5E+3": -2500.0, ".5": 0.5, "7": 7, "010": 10, "08": 8, "true": True, "False": False}
SCALARS |= {"null": None, "None": None, "~": None, "'1e-6'": "1e-6", "[1, 0.2]": [1, 0.2], "{fsdp: 8}": {"fsdp": 8}}
parsed = lambda text: yaml.load(text, _Loader)


@pytest.mark.parametrize(("text", "value"), [*SCALARS.items(), *((text, text) for text in TEXTS)])
def test_scalars_follow_yaml_1_2(text, value):
    found = parsed(f"x: {text}")["x"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(("text", "message"), [
    ("a: [", "is not valid YAML"),
    ("- a", r"must contain a mapping, such as model: .*; got \['a'\]"),
    ("", "must contain a mapping, .*; got None"),
    ("a: 1\nb: {c: 2, d: 3, c: 4}", "is not valid YAML: duplicate keys: c; keep only one of each"),
], ids=["syntax", "list", "empty", "duplicate"])  # fmt: skip
def test_errors_name_the_file(text, message, tmp_path):
    path = tmp_path / "my_run.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"my_run.yaml {message}"):
        read_file(path)
    with pytest.raises(FileNotFoundError, match="my_path is not a file; pass the path of a YAML file"):
        read_file(tmp_path / "my_path")


def test_command_line_values_are_yaml_except_for_text_fields():
    messages = [{"role": "user", "content": "hi"}]
    cases = [("run_name", "7", "7"), ("run_name", "null", None), ("metric_for_best_model", "eval/early", "eval/early")]
    cases += [("max_steps", "7", 7), ("max_steps", "x", "x"), ("reward_weights", "[1, 0.5]", [1, 0.5])]
    cases += [("mesh", "{data: 2, fsdp: 4}", {"data": 2, "fsdp": 4}), ("scale_rewards", "false", False)]
    cases += [("prompt", "{question", "{question"), ("prompt", "Q: {question}", "Q: {question}")]
    cases += [("prompt", "[{role: user, content: hi}]", messages), ("pad_to_multiple_of", "auto", "auto")]
    cases += [(name, x, x) for name, x in [("run_dir", "runs/a #1"), ("run_dir", "2024"), ("model", "007")]]
    cases += [("stop", text, text) for text in ("\n", "#", "---", "foo # bar", " END", "END\n", "5")]
    cases += [("stop", "'\\n'", "\\n"), ("stop", '"\\n"', "\n"), ("stop", "[a, b]", ["a", "b"]), ("lora", "8", 8)]
    for field in dataclasses.fields(GRPOConfig):
        cases.append((field.name, yaml.safe_dump(field.default).removesuffix("...\n").strip(), field.default))
    for name, text, value in cases:
        assert parse_value(name, text) == value, (name, text)


def test_dump_yaml_round_trips():
    texts = ["1e-6", "7", "None", "null", "true", *TEXTS, "a: b", "[", "{x}", "", "é\n😀\x7f\x85\u2028"]
    values = {"texts": texts, "numbers": [1e-6, 7, 0.5, 1e22], "others": [None, True, {"fsdp": 8}]}
    assert parsed(dump_yaml(values)) == values
