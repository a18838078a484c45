"""YAML: its numbers are numbers, and the command line's values are read as the file's."""

import dataclasses

import pytest
import yaml

from grpo_jax import GRPOConfig
from grpo_jax.cli.yaml12 import dump_yaml, parse_value, parse_yaml


@pytest.mark.quick
@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("-2.5E+3", -2500.0),
        (".5", 0.5),
        ("7", 7),
        ("007", 7),
        ("1_000", "1_000"),
        ("true", True),
        ("False", False),
        ("no", "no"),
        ("off", "off"),
        ("null", None),
        ("None", None),
        ("~", None),
        ("2026-01-01", "2026-01-01"),
        ("1:30", "1:30"),
        ("'1e-6'", "1e-6"),
        ("[1, 0.2]", [1, 0.2]),
        ("{fsdp: 8}", {"fsdp": 8}),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text, value):
    found = parse_yaml(f"x: {text}")["x"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.quick
def test_a_key_that_stands_there_twice_is_an_error():
    with pytest.raises(yaml.YAMLError, match="beta stands there twice"):
        parse_yaml("beta: 1\nbeta: 2")


@pytest.mark.quick
def test_values_of_the_command_line_are_yaml_unless_only_text_is_meant():
    assert parse_value("run_name", "7") == "7"
    assert parse_value("run_name", "null") is None
    assert parse_value("metric_for_best_model", "eval/early") == "eval/early"
    assert parse_value("max_steps", "7") == 7
    assert parse_value("max_steps", "x") == "x"
    assert parse_value("reward_weights", "[1, 0.5]") == [1, 0.5]
    assert parse_value("mesh", "data=2,fsdp=4") == parse_value("mesh", "{data: 2, fsdp: 4}") == {"data": 2, "fsdp": 4}
    assert parse_value("pad_to_multiple_of", "auto") == "auto"
    assert parse_value("scale_rewards", "false") is False
    assert parse_value("prompt", "{question") == "{question"
    assert parse_value("prompt", "Q: {question}") == "Q: {question}"
    assert parse_value("prompt", "[{role: user, content: hi}]") == [{"role": "user", "content": "hi"}]


@pytest.mark.quick
def test_every_default_goes_through_the_command_line_and_back():
    for field in dataclasses.fields(GRPOConfig):
        text = yaml.safe_dump(field.default, default_flow_style=True).removesuffix("...\n").strip()
        assert parse_value(field.name, text) == field.default, field.name


@pytest.mark.quick
def test_what_is_written_is_read_back_as_it_was():
    texts = ["1e-6", "7", "None", "null", "true", "off", "no", "2026-01-01", "1:30", "a: b", "[", "{x}", "", "é\n"]
    values = {"texts": texts, "numbers": [1e-6, 7, 0.5, 1e22], "others": [None, True, {"fsdp": 8}]}
    assert parse_yaml(dump_yaml(values)) == values
