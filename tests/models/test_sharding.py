"""The sharding table covers every parameter of a decoder, and checkpoints are loaded into these shards."""

import functools
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from tiny import tiny_model, tiny_policy

from grpo_jax import from_pretrained, save_pretrained
from grpo_jax.models import sharding
from grpo_jax.models.sharding import gather_objects, lower_call, parameter_sharding

pytestmark = pytest.mark.quick
mesh_of = lambda **axes: jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def test_axes_of_parameters_are_sharded_as_specified():
    mesh = mesh_of(fsdp=2, tensor=2)
    at = lambda *path: parameter_sharding(path, (8, 8), mesh).spec
    assert at("layers_3", "self_attn", "q_proj", "kernel") == P("fsdp", "tensor")
    assert at("layers_3", "self_attn", "o_proj", "kernel") == P("tensor", "fsdp")
    assert at("layers_0", "mlp", "up_proj", "kernel") == P("fsdp", "tensor")
    assert at("layers_0", "mlp", "down_proj", "kernel") == P("tensor", "fsdp")
    assert at("layers_0", "conv", "out_proj", "kernel") == P(None, "fsdp")
    assert at("layers_0", "linear_attn", "in_proj_qkv", "kernel") == P("fsdp", None)
    # Quantized matrices are stored transposed.
    assert at("layers_0", "linear_attn", "in_proj_qkv", "kernel", "codes") == P(None, "fsdp")
    assert at("layers_0", "mlp", "up_proj", "kernel", "scales") == P("tensor", "fsdp")
    assert at("embed_tokens", "embedding") == P("tensor", "fsdp")
    assert at("norm", "scale") == P()
    assert parameter_sharding(("layers_0", "self_attn", "k_proj", "bias"), (8,), mesh).spec == P("tensor")
    path = ("layers_0", "mlp", "experts", "up_proj")
    assert parameter_sharding(path, (3, 8, 8), mesh).spec == P(None, "fsdp", "tensor")
    # A mesh axis that is missing or does not divide the size is not used.
    path = ("embed_tokens", "embedding")
    assert parameter_sharding(path, (8, 8), mesh_of(data=4)).spec == P(None, None)
    assert parameter_sharding(path, (7, 8), mesh).spec == P(None, "fsdp")
    _, params = tiny_model(qkv_bias=True, tie_word_embeddings=False, qk_norm="head")
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        names = tuple(key.key for key in path)
        used = {axis for axis in parameter_sharding(names, leaf.shape, mesh).spec if axis is not None}
        assert used == ({"fsdp", "tensor"} if leaf.ndim == 2 else used), names


def test_checkpoint_is_loaded_into_its_shards(tmp_path):
    policy = tiny_policy()
    save_pretrained(tmp_path / "model", policy)
    mesh = mesh_of(fsdp=2, tensor=2)
    loaded = from_pretrained(tmp_path / "model", mesh=mesh)
    kernel = loaded.params["layers_0"]["mlp"]["up_proj"]["kernel"]
    assert [shard.data.shape for shard in kernel.addressable_shards] == [(8, 16)] * 4
    np.testing.assert_array_equal(kernel, policy.params["layers_0"]["mlp"]["up_proj"]["kernel"])
    tokens = np.arange(12).reshape(2, 6)
    apply = jax.jit(lambda params: loaded.model.apply({"params": params}, tokens))
    np.testing.assert_allclose(apply(loaded.params), apply(policy.params), atol=1e-5)


@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="AbstractDevice has other arguments")
def test_kernels_are_lowered_for_an_absent_gpu(monkeypatch):
    """Programs for an absent GPU are lowered in an abstract mesh, where Pallas finds its name (from jax 0.11)."""
    monkeypatch.setattr(jax, "__version_info__", (0, 12, 0))

    class Program:
        def __call__(self): ...

        def lower(self, *given):
            return jax.sharding.get_abstract_mesh().abstract_device

    on = lambda *devices: functools.partial(Program(), SimpleNamespace(sharding=SimpleNamespace(device_set=devices)))
    gpus = [SimpleNamespace(platform="gpu", device_kind="NVIDIA H100", id=i) for i in range(2)]
    assert lower_call(on(*gpus)).device_kind == "NVIDIA H100"
    assert lower_call(on(jax.devices()[0])) is None


def test_objects_of_many_sizes_are_gathered_in_few_shapes(monkeypatch):
    """Objects are gathered in few array shapes, whatever their size; test_two_processes gathers different objects."""
    shapes = set()

    def allgather(own):
        shapes.add(own.shape)
        return np.stack([own, own])

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(sharding.multihost_utils, "process_allgather", allgather)
    for size in [*range(40), 1021, 1022, 1023, 1024, *range(1025, 200_000, 997)]:
        own = ["é" + "x" * size, None]
        assert gather_objects(own) == [own, own]
    assert sorted(shapes - {(1,)}) == [(1024 << i,) for i in range(9)], "200 kB are padded to 256 KiB"
