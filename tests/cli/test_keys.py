"""The keys of a RUN.yaml: all fields of the config, with the groups and documentation of its source."""

import pytest

from grpo_jax import GRPOConfig
from grpo_jax.cli.keys import ELSEWHERE, FIELDS, GROUPS, OWN, choices, explain
from grpo_jax.messages import Faults, problems_of

pytestmark = pytest.mark.quick


def test_every_key_has_a_group_and_an_explanation():
    assert list(GROUPS)[: len(OWN)] == [*OWN]
    assert GROUPS.keys() == OWN.keys() | FIELDS.keys()
    assert not ELSEWHERE.keys() & GROUPS.keys()
    groups = {"model": "The run", "num_generations": "Sampling", "seed": "Batches"}
    assert groups.items() <= GROUPS.items()
    for name, field in FIELDS.items():
        head, doc, *_ = explain(name).splitlines()
        assert head.startswith(f"{name} (default {field.default!r}")
        assert doc.strip()
    assert explain("num_generations") == "num_generations (default 8)\n  G, completions of each prompt."
    assert explain("use_bias_correction_kl").startswith("use_bias_correction_kl (default True, one of true, false)\n")


def test_choices_are_values_that_the_config_takes():
    for name, field in FIELDS.items():
        for choice in choices(field.type):
            faults = Faults()
            faults.of(GRPOConfig, **{name: {"true": True, "false": False}.get(choice, choice)})
            lines = [line for error in faults for line in problems_of(error)]
            assert not [line for line in lines if line.startswith(f"{name} = ") and "must be" in line]
