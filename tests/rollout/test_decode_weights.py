"""Programs for decoding: rounded kernels, collectives, and synchronization with the host."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import random_params, tiny_model

from grpo_jax.models.config import TransformerConfig
from grpo_jax.models.sharding import abstract, lower_call, make_mesh, place
from grpo_jax.models.transformer import Transformer, kernels_by_columns
from grpo_jax.rollout import decode_plan
from grpo_jax.rollout.decode_plan import BURST, decode_call, plan_decode
from grpo_jax.rollout.decode_weights import convert_weights, copies, variables_shape
from grpo_jax.rollout.draw import DecodeSettings
from grpo_jax.types import as_jit_argument


@functools.cache
def on_two_devices(**shape):
    """Return a bfloat16 model with float32 params, sharded over two devices as on an accelerator."""
    model, params = tiny_model(layers=1, **shape)
    mesh = make_mesh({"fsdp": 2}, jax.devices()[:2])
    return Transformer(dataclasses.replace(model.config, dtype="bfloat16", mesh=mesh)), place(params, mesh)


def test_rounded_kernels_give_identical_logits():
    sparse = {"num_experts": 4, "num_experts_per_token": 2, "expert_size": 16, "expert_layers": (True,)}
    model, params = on_two_devices(tie_word_embeddings=False, qkv_bias=True, **sparse)
    variables = convert_weights(model, params)
    matrices = [x for x in jax.tree.leaves(params) if x.ndim > 1]
    assert sum(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(variables)) == len(matrices) > 0
    assert all(
        x.sharding.is_equivalent_to(y.sharding, x.ndim)
        for x, y in zip(jax.tree.leaves(variables), jax.tree.leaves(params), strict=True)
        if x.dtype == jnp.bfloat16
    )
    tokens = jnp.array([[3, 4, 5, 6], [7, 8, 9, 3]])
    ours, plain = (jax.jit(model.apply)(x, tokens) for x in (variables, {"params": params}))
    np.testing.assert_array_equal(ours, plain)


def test_no_step_rounds_a_kernel():
    """The decode program converts no matrix; given the unrounded params, it would convert them in every step."""
    model, params = on_two_devices()
    sizes = {"num_generations": 2, "max_completion_length": 20}
    call = decode_call(model, params, 4, 5, **sizes, settings=DecodeSettings())

    def rounded(call):
        text = lower_call(call).as_text()
        of = {f"(tensor<{x.shape[0]}x{x.shape[1]}xf32>)" for x in jax.tree.leaves(params) if x.ndim == 2}
        return sum("stablehlo.convert" in line and any(f"{x} ->" in line for x in of) for line in text.splitlines())

    assert rounded(call) == 0
    argument, _, *rest = call.args
    assert rounded(functools.partial(call.func, argument, {"params": abstract(params)}, *rest, **call.keywords)) > 0


def test_kernels_by_columns_are_rounded_once():
    model, params = tiny_model(tie_word_embeddings=False)
    model = Transformer(dataclasses.replace(model.config, dtype="bfloat16"))
    variables = convert_weights(model, params)
    assert {x.dtype for x in jax.tree.leaves(variables["columns"])} == {jnp.dtype("bfloat16")}
    same = lambda x, y: (x.shape, x.dtype) == (y.shape, y.dtype)
    assert jax.tree.all(jax.tree.map(same, variables_shape(model, params), variables))
    unseen, given = (sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)) for tree in copies(model, params))
    assert unseen == 2 * given == 4 * sum(x.size for x in jax.tree.leaves(variables["columns"]))
    wide = kernels_by_columns(params, "float32")
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y.astype(x.dtype)), variables["columns"], wide)


@pytest.mark.quick
def test_params_in_the_compute_dtype_are_not_copied():
    model, params = tiny_model()
    assert convert_weights(model, params)["params"] is params
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), on_two_devices()[1])
    assert convert_weights(on_two_devices()[0], half)["params"] is half


def test_shapes_without_a_sharding_use_the_default_device(monkeypatch):
    """Shapes without a sharding use the default device's layouts; a run compiles its programs from such shapes."""
    model, params = tiny_model()
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)

    def chosen(of):
        return plan_decode(as_jit_argument(model), of, 5, 4, 2, 20, mesh=None)

    assert not chosen(shapes).all_steps
    monkeypatch.setattr(decode_plan, "platform_of", lambda: ("gpu", 9.0))
    assert chosen(shapes).all_steps
    assert not chosen(params).all_steps, "these params are on a CPU"


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
