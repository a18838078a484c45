"""The keys of a RUN.yaml: all fields of the config, by the groups and with the docs of its source."""

import inspect
import re

import pytest

from grpo_jax import GRPOConfig
from grpo_jax.cli.keys import ELSEWHERE, FIELDS, GROUPS, OWN, choices, explain
from grpo_jax.messages import Faults, problems_of


@pytest.mark.quick
def test_the_groups_are_those_of_the_source():
    group, found = "", {}
    for line in inspect.getsource(GRPOConfig).splitlines():
        if title := re.fullmatch(r"    # ([A-Z][^(]*?)( \(.*\))?\.", line):
            group = title[1]
        elif field := re.match(r"    (\w+): ", line):
            found[field[1]] = group
    assert {name: found[name] for name in FIELDS} == {name: GROUPS[name] for name in FIELDS}
    assert list(GROUPS) == [*OWN, *FIELDS]


@pytest.mark.quick
def test_every_key_is_explained():
    for name, field in FIELDS.items():
        head, doc = explain(name).split("\n", 1)
        assert head.startswith(f"{name} (default {field.default!r}")
        assert doc.startswith("  ")
        assert doc[2].strip()
    assert explain("num_generations") == "num_generations (default 8)\n  G, completions of each prompt."
    assert explain("top_entropy_quantile").endswith("keeps (arXiv 2506.01939).")
    lines = explain("use_bias_correction_kl").splitlines()
    assert lines[0] == "use_bias_correction_kl (default True, one of true, false)"
    assert "  Token by token means: each in a state that is given." in "\n".join(lines)
    assert all(not line or re.match(r"  \S", line) for line in lines[1:])
    assert explain("run_dir").startswith("run_dir\n  where the run is written")


@pytest.mark.quick
def test_own_keys_are_no_fields_and_have_no_other_names():
    assert not OWN.keys() & FIELDS.keys()
    assert not ELSEWHERE.keys() & GROUPS.keys()


@pytest.mark.quick
def test_choices_are_values_that_the_config_takes():
    for name, field in FIELDS.items():
        for choice in choices(field.type):
            value = {"true": True, "false": False}.get(choice, choice)
            faults = Faults()
            faults.of(GRPOConfig, **{name: value})
            lines = [line for error in faults for line in problems_of(error)]
            assert not [line for line in lines if line.startswith(f"{name} = ") and "must be" in line]
