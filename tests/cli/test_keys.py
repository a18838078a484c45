"""The keys of a RUN.yaml: all fields of the config, with the groups and documentation of its source."""

import re

import pytest

from grpo_jax import GRPOConfig
from grpo_jax.cli.keys import ELSEWHERE, FIELDS, GROUPS, OWN, choices, explain
from grpo_jax.messages import Faults, problems_of


@pytest.mark.quick
def test_every_key_has_a_group_and_an_explanation():
    assert list(GROUPS) == [*OWN, *FIELDS]
    assert not OWN.keys() & FIELDS.keys()
    assert not ELSEWHERE.keys() & GROUPS.keys()
    groups = {
        "model": "The run",
        "num_generations": "Sampling",
        "seed": "Batches",
        "beta": "Entropy, KL and the reference",
    }
    assert groups.items() <= GROUPS.items()
    for name, field in FIELDS.items():
        head, *lines = explain(name).splitlines()
        assert head.startswith(f"{name} (default {field.default!r}")
        assert lines[0].strip()
        assert all(not line or re.match(r"  \S", line) for line in lines)
    assert explain("num_generations") == "num_generations (default 8)\n  G, completions of each prompt."
    lines = explain("use_bias_correction_kl").splitlines()
    assert lines[0] == "use_bias_correction_kl (default True, one of true, false)"
    assert explain("run_dir").startswith("run_dir\n  the directory of the run")


@pytest.mark.quick
def test_choices_are_values_that_the_config_takes():
    for name, field in FIELDS.items():
        for choice in choices(field.type):
            faults = Faults()
            faults.of(GRPOConfig, **{name: {"true": True, "false": False}.get(choice, choice)})
            lines = [line for error in faults for line in problems_of(error)]
            assert not [line for line in lines if line.startswith(f"{name} = ") and "must be" in line]
