"""The keys of a RUN.yaml: all fields of the config, with the docs of its source."""

import dataclasses

import pytest

from grpo_jax import GRPOConfig
from grpo_jax.cli import keys
from grpo_jax.messages import Faults, problems_of


@pytest.mark.quick
def test_every_field_is_a_key_with_its_group_doc_and_default():
    fields = {field.name: field for field in dataclasses.fields(GRPOConfig)}
    assert list(keys.fields()) == list(fields)
    for name, field in keys.fields().items():
        assert field.default == fields[name].default
        assert field.doc
        assert field.group[0].isupper()
    assert keys.fields()["num_generations"].group == "Sampling"
    assert keys.fields()["num_generations"].doc == "G, completions of each prompt."
    assert keys.fields()["per_device_train_batch_size"].group == "Batches"
    assert keys.fields()["hub_revision"].group == "Trackers and the hub"


@pytest.mark.quick
def test_own_keys_are_no_fields_and_have_no_other_names():
    assert not keys.OWN.keys() & keys.fields().keys()
    assert not keys.ELSEWHERE.keys() & {*keys.OWN, *keys.fields()}


@pytest.mark.quick
def test_choices_are_values_that_the_config_takes():
    for name, field in keys.fields().items():
        for choice in field.choices:
            value = {"true": True, "false": False}.get(choice, choice)
            faults = Faults()
            faults.of(GRPOConfig, **{name: value})
            lines = [line for error in faults for line in problems_of(error)]
            assert not [line for line in lines if line.startswith(f"{name} = ") and "must be" in line]
