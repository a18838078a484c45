"""Compiled decode programs: memory, copies, collectives and synchronization with the host."""

import re

import pytest
from tiny import random_params

from grpo_jax.models.config import TransformerConfig
from grpo_jax.models.sharding import lower_call, make_mesh, place
from grpo_jax.models.transformer import Transformer
from grpo_jax.rollout.draw import DecodeSettings
from grpo_jax.rollout.layouts import BURST
from grpo_jax.rollout.programs import decode_call

V = 4096
COLLECTIVE = re.compile(r"= \(?([^=]*?)\)? (?:all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)\(")


def dimensions(shapes):
    """Parse the dimensions of each array in a collective from its HLO shapes."""
    return [[int(n) for n in dims.split(",") if n] for dims in re.findall(r"\w+\[([\d,]*)\]", shapes)]


CUBE = {"data": 2, "fsdp": 2, "tensor": 2}


@pytest.mark.parametrize(("axes", "tied"), [({"fsdp": 8}, True), (CUBE, False)])
def test_devices_exchange_neither_logits_nor_predicates(axes, tied):
    """In a decode step, devices exchange sums and one block of the vocabulary per completion, not all logits."""
    width, mesh = 48, make_mesh(axes)
    model = Transformer(TransformerConfig(V, width, 96, 1, 4, 2, 16, tie_word_embeddings=tied, mesh=mesh))
    sizes = {"num_generations": 4, "max_completion_length": 17}
    call = decode_call(model, place(random_params(model), mesh), 16, 8, **sizes, settings=DecodeSettings())
    text = lower_call(call).compile().as_text()
    collectives = COLLECTIVE.findall(text)
    assert collectives
    assert not any("pred" in shapes for shapes in collectives), "a step must not exchange predicates"
    of_the_head = {width // n for n in (1, 2, 4, 8)}
    for dims in (dims for shapes in collectives for dims in dimensions(shapes)):
        large = max(dims, default=0) >= V // 8
        assert not large or of_the_head & set(dims), f"{dims}: only the head's weights may be moved, once per burst"
    assert f'"known_trip_count":{{"n":"{BURST}"}}' in text, "the number of steps must be static"
