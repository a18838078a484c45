"""Shard parameters by a table that maps their paths to mesh axes, and batches along the prompt axis.

A mesh has the axes "data" (shards prompts), "fsdp" (shards prompts, and parameters along one dimension) and "tensor"
(shards parameters along the other: heads, MLP channels or the vocabulary). XLA infers all other shardings from these.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from grpo_jax.types import Params

Tree = TypeVar("Tree")

AXES = ("data", "fsdp", "tensor")
"""Mesh axes, in order. Prompts are sharded over the first two."""

TABLE: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"(.*/)?embed_tokens(_per_layer)?/embedding", ("tensor", "fsdp")),
    (r"(.*/)?lm_head/kernel", ("fsdp", "tensor")),
    # Projections are sharded by heads or channels, so attention and the MLP need one all-reduce over "tensor" each.
    (r".*/(q|k|v|gate|up)_proj/kernel", ("fsdp", "tensor")),
    (r".*/(o|down)_proj/kernel", ("tensor", "fsdp")),
    (r".*/(q|k|v|gate|up)_proj/bias", ("tensor",)),
    # The projection to the per-layer embeddings is not sharded along its output, which concatenates all layers.
    (r".*/per_layer_input_gate/kernel", ("fsdp", "tensor")),
    (r".*/per_layer_projection/kernel", ("tensor", "fsdp")),
    (r"(.*/)?per_layer_model_projection/kernel", ("fsdp", None)),
    # The projections of recurrent layers are concatenated, so heads and channels are not sharded.
    (r".*/(linear_attn|conv)/in_proj\w*/kernel", ("fsdp", None)),
    (r".*/(linear_attn|conv)/out_proj/kernel", (None, "fsdp")),
    (r".*/experts/(gate|up)_proj", (None, "fsdp", "tensor")),
    (r".*/experts/down_proj", (None, "tensor", "fsdp")),
    (r".*/experts/(gate|up)_bias", (None, "tensor")),
    (r".*/sinks", ("tensor",)),
    (r"(.*/)?tower/.*kernel", ("fsdp", None)),  # of a trainable vision tower
)
"""Regular expressions for full parameter paths, and the mesh axis for each dimension. Other parameters are replicated.

An optimizer moment's path ends with its parameter's path, so both have the same sharding.
"""


def make_mesh(axes: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Create a mesh from the first devices in a list, using as many as the axis sizes require.

    Args:
      axes: sizes of "data", "fsdp" and "tensor". Missing axes have size 1.
      devices: devices to choose from. Defaults to `jax.devices()`.

    Returns:
      A mesh with all three axes, each of type Auto.

    Raises:
      ValueError: if an axis is unknown, a size is below 1, or the product of sizes exceeds the number of devices. With
        several processes, the product must equal the number of devices.

    Example:
      >>> dict(make_mesh({"fsdp": 1}).shape)
      {'data': 1, 'fsdp': 1, 'tensor': 1}
    """
    unknown = sorted(set(axes) - set(AXES))
    if unknown:
        raise ValueError(f"mesh axes must be data, fsdp or tensor; got {unknown[0]!r}")
    sizes = tuple(axes.get(name, 1) for name in AXES)
    devices = jax.devices() if devices is None else devices
    product, several = " × ".join(map(str, sizes)), jax.process_count() > 1
    if min(sizes) < 1 or math.prod(sizes) > len(devices) or (several and math.prod(sizes) < len(devices)):
        fit = f"exactly {len(devices)}, since all processes must take part" if several else f"at most {len(devices)}"
        raise ValueError(
            f"mesh = {dict(axes)} has {product} devices (available: {len(devices)}). Set positive sizes with a"
            f" product of {fit}"
        )
    return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * 3, devices=devices[: math.prod(sizes)])


def check_fits(axes: Mapping[str, int], *, width: int, heads: int, channels: int) -> None:
    """Raise ValueError if the large matrices of a decoder cannot be sharded over a mesh.

    The size of "fsdp" must divide the width D, and the size of "tensor" must divide the numbers of query heads and MLP
    (or expert) channels. Other dimensions that are not divisible, such as the vocabulary, are replicated.
    """
    whole = math.gcd(heads, channels), f"the model's {heads} heads and {channels} MLP channels"
    for axis, (total, what) in {"fsdp": (width, f"the model's width of {width}"), "tensor": whole}.items():
        if total % axes.get(axis, 1):
            fit = ", ".join(str(size) for size in range(1, 2 * axes[axis]) if total % size == 0)
            raise ValueError(f"mesh = {dict(axes)}: {axis} = {axes[axis]} does not divide {what}. Valid sizes: {fit}")


def parameter_sharding(path: Sequence[str], shape: Sequence[int], mesh: Mesh) -> NamedSharding:
    """Return a parameter's sharding according to `TABLE`, given its path and shape.

    A dimension is replicated if the mesh does not have its axis, or if the axis size does not divide it.
    """
    quantized = path[-1] in ("codes", "scales")
    name = "/".join(path[:-1] if quantized else path)
    axes = next((axes for pattern, axes in TABLE if re.fullmatch(pattern, name)), ())
    axes = (*axes[:-2], *axes[:-3:-1]) if quantized else axes  # quantized matrices are stored transposed
    sizes = zip(axes, shape, strict=False)
    spec = [axis if axis in mesh.shape and size % mesh.shape[axis] == 0 else None for axis, size in sizes]
    return NamedSharding(mesh, PartitionSpec(*spec))


def parse_mesh(text: str) -> dict[str, int] | None:
    """Parse mesh sizes from the command line, such as data=2,fsdp=4. Returns None for an empty string."""
    try:
        return {name: int(size) for name, size in (item.split("=") for item in text.split(",") if item)} or None
    except ValueError as error:
        raise ValueError(f"mesh must be a list of axes and sizes such as data=2,fsdp=4; got {text!r}") from error


def tree_sharding(tree: Params, mesh: Mesh) -> Params:
    """Return the sharding for each leaf in params, or in a state that contains params."""

    def sharding_of(path: tuple[object, ...], leaf: jax.Array) -> NamedSharding:
        return parameter_sharding(_name(path).split("/"), leaf.shape, mesh)

    return jax.tree_util.tree_map_with_path(sharding_of, tree)


def device_bytes(tree: Params) -> int:
    """Return the number of bytes that concrete or abstract arrays occupy on each device, given their shardings."""

    def size(x: jax.Array) -> int:
        sharding = getattr(x, "sharding", None)
        shape = x.shape if sharding is None else sharding.shard_shape(x.shape)
        return math.prod(shape) * x.dtype.itemsize

    return sum(map(size, jax.tree.leaves(tree)))


def _name(path: tuple[object, ...]) -> str:
    """Format a pytree path as a string, such as layers_0/self_attn/q_proj/kernel."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def place(tree: Tree, mesh: Mesh | None) -> Tree:
    """Put params on the devices of a mesh according to `TABLE`. No-op without a mesh."""
    return tree if mesh is None else jax.tree.map(_put, tree, tree_sharding(tree, mesh))


def commit_to_devices(tree: Tree) -> Tree:
    """Commit arrays to their devices, so that they use the same compiled programs as arrays from a checkpoint."""
    return jax.tree.map(lambda x: x if x.committed else jax.device_put(x, x.sharding), tree)


def _put(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Place an array with `sharding`. Every process must pass the full array, unless it already spans processes."""
    if jax.process_count() == 1:
        return jax.device_put(x, sharding)
    if not getattr(x, "is_fully_addressable", True):
        return x if x.sharding == sharding else jax.jit(lambda x: x, out_shardings=sharding)(x)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = np.asarray(jax.random.key_data(x))
        whole = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec, *(None,) * (data.ndim - len(sharding.spec))))
        return jax.random.wrap_key_data(jax.make_array_from_callback(data.shape, whole, lambda index: data[index]))
    data = np.asarray(x)
    return jax.make_array_from_callback(data.shape, sharding, lambda index: data[index])


def fetch(tree: Params) -> Params:
    """Copy full arrays to NumPy arrays. If arrays span several processes, all processes must call this function."""

    def fetch_array(x: jax.Array | np.ndarray) -> np.ndarray:
        if not isinstance(x, jax.Array) or x.is_fully_addressable:
            return np.asarray(x)
        if x.is_fully_replicated:
            return np.asarray(x.addressable_data(0))
        return np.asarray(multihost_utils.process_allgather(x, tiled=True))

    return jax.tree.map(fetch_array, tree)


def gather_objects(local: Any) -> list[Any]:
    """Gather a JSON-serializable object from each process, in process order."""
    if jax.process_count() == 1:
        return [local]
    data = np.frombuffer(json.dumps(local).encode(), np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.array([data.size])))
    # Pad to a power of two, so that at most 21 gathers are compiled for sizes up to 1 GiB.
    padded = np.zeros(max(1024, 1 << int(sizes.max() - 1).bit_length()), np.uint8)
    padded[: data.size] = data
    rows = np.asarray(multihost_utils.process_allgather(padded)).reshape(len(sizes.ravel()), -1)
    return [json.loads(bytes(row[:size])) for row, size in zip(rows, sizes.ravel(), strict=True)]


def local_range(count: int) -> range:
    """Return the range of rows, among `count` dataset rows, for which this process computes episodes and rewards."""
    n, process = jax.process_count(), jax.process_index()
    return range(count * process // n, count * (process + 1) // n)


def constrain_params(tree: Tree, mesh: Mesh | None) -> Tree:
    """Constrain params to the same shardings as `place`, inside a compiled function."""
    return tree if mesh is None else jax.lax.with_sharding_constraint(tree, tree_sharding(tree, mesh))


def reshard_embedding(tree: Tree, mesh: Mesh | None) -> Tree:
    """Replicate the embedding over "fsdp" for a rollout, inside a compiled function.

    Otherwise, each device would process all devices' prompts, since tokens are also sharded over "fsdp".
    """

    def spec(name: str, sharding: NamedSharding) -> PartitionSpec | None:
        return PartitionSpec(sharding.spec[0]) if re.fullmatch(r"(.*/)?embed_tokens/embedding", name) else None

    return _constrain_by_name(tree, mesh, spec)


def reshard_head(tree: Tree, mesh: Mesh | None, axes: Sequence[str]) -> Tree:
    """Shard the output head over `axes` along the vocabulary, inside a compiled function.

    The head is stored sharded along D, so each logit would otherwise be a sum over devices.
    """

    def spec(name: str, sharding: NamedSharding) -> PartitionSpec | None:
        if re.fullmatch(r"(.*/)?embed_tokens/embedding", name):
            return PartitionSpec(tuple(axes))
        return PartitionSpec(None, tuple(axes)) if re.fullmatch(r"(.*/)?lm_head/kernel", name) else None

    return _constrain_by_name(tree, mesh, spec)


def _constrain_by_name(
    tree: Tree, mesh: Mesh | None, spec: Callable[[str, NamedSharding], PartitionSpec | None]
) -> Tree:
    """Constrain params to `spec(path, sharding from TABLE)`, unless the result is None."""

    def constrain_leaf(path: tuple[object, ...], x: jax.Array, sharding: NamedSharding) -> jax.Array:
        new = spec(_name(path), sharding)
        return x if new is None else jax.lax.with_sharding_constraint(x, NamedSharding(sharding.mesh, new))

    return tree if mesh is None else jax.tree_util.tree_map_with_path(constrain_leaf, tree, tree_sharding(tree, mesh))


def _prompt_axes(mesh: Mesh) -> tuple[str, ...]:
    return tuple(name for name in ("data", "fsdp") if name in mesh.shape)


def shard_count(mesh: Mesh | None) -> int:
    """Return the number of shards into which a batch of prompts is divided."""
    return 1 if mesh is None else math.prod(mesh.shape[name] for name in _prompt_axes(mesh))


def dividing_axes(size: int, mesh: Mesh, *names: str) -> tuple[str, ...]:
    """Return the named axes with more than one device, or () if their device count does not divide `size`."""
    names = tuple(name for name in names if mesh.shape.get(name, 1) > 1)
    return names if size % math.prod(mesh.shape[name] for name in names) == 0 else ()


def shard(tree: Params, mesh: Mesh | None) -> Params:
    """Put arrays [B, ...] on the devices, sharded along B, or replicated if B is not divisible by `shard_count`."""
    return jax.tree.map(jnp.asarray, tree) if mesh is None else jax.tree.map(_put, tree, batch_sharding(tree, mesh))


def batch_sharding(tree: Params, mesh: Mesh) -> Params:
    """Return the sharding that `shard` applies to each array in a tree."""

    def sharding_of(x: jax.Array) -> NamedSharding:
        divisible = x.ndim > 0 and x.shape[0] % shard_count(mesh) == 0
        return NamedSharding(mesh, PartitionSpec(_prompt_axes(mesh)) if divisible else PartitionSpec())

    return jax.tree.map(sharding_of, tree)


def constrain(x: jax.Array, mesh: Mesh | None, *axes: str | None) -> jax.Array:
    """Shard an array [B, ...] along B, and its other dimensions over `axes`, inside a compiled function.

    An axis is ignored if its size does not divide the dimension. No-op without a mesh.
    """
    return x if mesh is None else jax.lax.with_sharding_constraint(x, constrained_sharding(x.shape, mesh, *axes))


def constrained_sharding(shape: Sequence[int], mesh: Mesh, *axes: str | None) -> NamedSharding:
    """Return the sharding that `constrain` applies to an array of this shape, as XLA's partitioner normalizes it."""
    others = (axis and dividing_axes(size, mesh, axis) for size, axis in zip(shape[1:], axes, strict=False))
    spec = [dividing_axes(shape[0], mesh, "data", "fsdp"), *others]
    while spec and not spec[-1]:
        spec.pop()
    return NamedSharding(mesh, PartitionSpec(*spec))


def abstract(tree: Params) -> Params:
    """Convert arrays to `ShapeDtypeStruct`s for compilation. Shardings are kept only for committed arrays."""

    def shape_of(x: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        committed = not isinstance(x, jax.Array) or x.committed
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None) if committed else None)

    return jax.tree.map(shape_of, tree)


def placed_shapes(tree: Tree, shardings: Params) -> Tree:
    """Convert arrays to `ShapeDtypeStruct`s with the given shardings."""
    return jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree, shardings)


def lower_call(call: functools.partial[Any]) -> jax.stages.Lowered:
    """Lower a jitted function with bound arguments, which may be abstract or on absent devices (`models.devices`)."""
    function: Any = call.func
    context: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    sharding = place_of((call.args, call.keywords))
    device: Any = None if sharding is None else next(iter(sharding.device_set))
    absent_gpu = device is not None and device.platform == "gpu" and jax.default_backend() != "gpu"
    if absent_gpu and jax.__version_info__ >= (0, 11):  # Pallas needs the GPU model to lower its kernels
        target = jax.sharding.AbstractDevice(device.device_kind, None, device.platform)
        context = jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=target))
    with context:
        return function.lower(*call.args, **call.keywords)


def place_of(tree: Params) -> jax.sharding.Sharding | None:
    """Return the sharding of arrays computed from a tree (replicated if it has a mesh), or None if it is unknown."""
    shardings = (getattr(x, "sharding", None) for x in jax.tree.leaves(tree))
    first = next((sharding for sharding in shardings if sharding is not None), None)
    return NamedSharding(first.mesh, PartitionSpec()) if isinstance(first, NamedSharding) else first


def shape_structs(tree: Tree, *, placed_like: object) -> Tree:
    """Convert arrays to `ShapeDtypeStruct`s with the sharding of results computed from `placed_like` (`place_of`)."""
    sharding = place_of(placed_like)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def mesh_of(tree: Params) -> Mesh | None:
    """Return the mesh that concrete or abstract arrays in a tree use, or None for one device and for tracers."""
    for leaf in jax.tree.leaves(tree):
        mesh = getattr(getattr(leaf, "sharding", None), "mesh", None)
        if isinstance(mesh, Mesh) and mesh.size > 1 and not isinstance(leaf, jax.core.Tracer):
            return mesh
    return None
