"""Sharding: parameters by one table from their paths to mesh axes, batches by their prompts.

The axes of a mesh are "data" (prompts), "fsdp" (prompts, and parameters cut along one side) and "tensor" (parameters
cut along the other, so that heads and MLP channels are spread). Modules know nothing of it: XLA's partitioner (GSPMD)
follows the arrays that it is given. A group stays on one device, since only the axis of prompts is cut.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "tensor")
"""The axes of a mesh, in this order; prompts are cut along the first two."""

TABLE: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"(.*/)?embed_tokens(_per_layer)?/embedding", ("tensor", "fsdp")),
    (r"(.*/)?lm_head/kernel", ("fsdp", "tensor")),
    # Into heads and channels, and out of them again: a block then needs one sum over "tensor" and no more.
    (r".*/(q|k|v|gate|up)_proj/kernel", ("fsdp", "tensor")),
    (r".*/(o|down)_proj/kernel", ("tensor", "fsdp")),
    (r".*/(q|k|v|gate|up)_proj/bias", ("tensor",)),
    # The per-layer embedding, into it and out of it; that of all layers is not cut among them.
    (r".*/per_layer_input_gate/kernel", ("fsdp", "tensor")),
    (r".*/per_layer_projection/kernel", ("tensor", "fsdp")),
    (r"(.*/)?per_layer_model_projection/kernel", ("fsdp", None)),
    # A recurrent layer's projections lie side by side: heads and channels are not cut.
    (r".*/(linear_attn|conv)/in_proj\w*/kernel", ("fsdp", None)),
    (r".*/(linear_attn|conv)/out_proj/kernel", (None, "fsdp")),
    (r".*/experts/(gate|up)_proj", (None, "fsdp", "tensor")),
    (r".*/experts/down_proj", (None, "tensor", "fsdp")),
    # Held by rows, and so the other way round.
    (r"(.*/)?(embed_tokens/embedding|lm_head/kernel)/(codes|scales)", ("tensor", "fsdp")),
    (r".*/(q|k|v|gate|up)_proj/kernel/(codes|scales)", ("tensor", "fsdp")),
    (r".*/(o|down)_proj/kernel/(codes|scales)", ("fsdp", "tensor")),
    (r".*/(linear_attn|conv)/in_proj\w*/kernel/(codes|scales)", (None, "fsdp")),
    (r".*/(linear_attn|conv)/out_proj/kernel/(codes|scales)", ("fsdp", None)),
    (r".*/per_layer_input_gate/kernel/(codes|scales)", ("tensor", "fsdp")),
    (r".*/per_layer_projection/kernel/(codes|scales)", ("fsdp", "tensor")),
    (r".*/experts/(gate|up)_proj/(codes|scales)", (None, "tensor", "fsdp")),
    (r".*/experts/down_proj/(codes|scales)", (None, "fsdp", "tensor")),
    (r".*/experts/(gate|up)_bias", (None, "tensor")),
    (r".*/sinks", ("tensor",)),
)
"""Regular expression of the whole path, and the mesh axis of each dimension. What nothing matches is replicated.

An optimizer's moments have the paths of their parameters at the end of their own, and are cut as they are."""


def make_mesh(axes: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Make a mesh of the first devices, as many as the product of the sizes.

    Args:
      axes: sizes of "data", "fsdp" and "tensor", as in `GRPOConfig.mesh`; the default of each is 1.
      devices: the devices to choose from; None for `jax.devices()`.

    Returns:
      A mesh with all three axes, of type Auto.

    Raises:
      ValueError: an unknown axis, too few devices, or in several processes a mesh that leaves out some of the devices.

    Example:
      >>> dict(make_mesh({"fsdp": 1}).shape)
      {'data': 1, 'fsdp': 1, 'tensor': 1}
    """
    unknown = sorted(set(axes) - set(AXES))
    if unknown:
        raise ValueError(f"mesh has the axis {unknown[0]!r}: the axes are {', '.join(AXES)}")
    sizes = tuple(axes.get(name, 1) for name in AXES)
    devices = jax.devices() if devices is None else devices
    product, several = " × ".join(map(str, sizes)), jax.process_count() > 1
    if math.prod(sizes) > len(devices) or (several and math.prod(sizes) < len(devices)):
        fit = f"exactly {len(devices)}, since every process takes part" if several else f"at most {len(devices)}"
        raise ValueError(
            f"mesh = {dict(axes)}: {product} devices are needed, and there are {len(devices)}; make the sizes multiply"
            f" to {fit}"
        )
    return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * 3, devices=devices[: math.prod(sizes)])


def check_fits(axes: Mapping[str, int], *, width: int, heads: int, channels: int) -> None:
    """Raise a `ValueError` if a mesh would leave the large matrices of a decoder whole where it is to cut them.

    "fsdp" cuts the width D, "tensor" the query heads and the channels of the MLP (or of one expert). Smaller dimensions
    that do not divide (a vocabulary, heads of keys and values, a batch) are whole on every device.
    """
    whole = {
        "fsdp": (width, f"the model's width of {width}"),
        "tensor": (math.gcd(heads, channels), f"the model's {heads} heads and {channels} MLP channels"),
    }
    lines = []
    for axis, (total, what) in whole.items():
        if total % axes.get(axis, 1):
            fitting = [str(size) for size in range(1, 2 * axes[axis]) if total % size == 0]
            lines.append(f"{axis} = {axes[axis]} does not divide {what}; {', '.join(fitting)} do")
    if lines:
        raise ValueError(f"mesh = {dict(axes)}: {'; '.join(lines)}")


def parameter_sharding(path: Sequence[str], shape: Sequence[int], mesh: Mesh) -> NamedSharding:
    """Return the sharding of one parameter by `TABLE`, from its names from the root to the leaf, and its shape.

    A dimension is whole on every device if the mesh lacks its axis, or the size of the axis does not divide it.
    """
    name = "/".join(path)
    axes = next((axes for pattern, axes in TABLE if re.fullmatch(pattern, name)), ())
    spec = [
        axis if axis in mesh.shape and size % mesh.shape[axis] == 0 else None
        for axis, size in zip(axes, shape, strict=False)
    ]
    return NamedSharding(mesh, PartitionSpec(*spec))


def parse_mesh(text: str) -> dict[str, int] | None:
    """Sizes of a mesh as a command line has them, data=2,fsdp=4; None for an empty text."""
    try:
        return {name: int(size) for name, size in (item.split("=") for item in text.split(",") if item)} or None
    except ValueError as error:
        raise ValueError(f"mesh is {text!r}: write axes and sizes as data=2,fsdp=4") from error


def tree_sharding(tree: Any, mesh: Mesh) -> Any:
    """The sharding of each leaf of a tree of parameters, or of a state that holds such trees."""

    def at(path: Any, leaf: Any) -> NamedSharding:
        return parameter_sharding(_name(path).split("/"), leaf.shape, mesh)

    return jax.tree_util.tree_map_with_path(at, tree)


def device_bytes(tree: object, mesh: Mesh | None) -> int:
    """Bytes of such a tree, or of its shapes, on each device of a mesh; None: on the one that there is."""
    leaves = jax.tree.leaves(tree)
    at = [None] * len(leaves) if mesh is None else jax.tree.leaves(tree_sharding(tree, mesh))
    shapes = [x.shape if here is None else here.shard_shape(x.shape) for x, here in zip(leaves, at, strict=True)]
    return sum(math.prod(shape) * x.dtype.itemsize for x, shape in zip(leaves, shapes, strict=True))


def _name(path: Any) -> str:
    """The names along a path of a pytree, as layers_0/self_attn/q_proj/kernel."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def place(tree: Any, mesh: Mesh | None) -> Any:
    """A tree of parameters, or a state, with each leaf where `TABLE` has it; as it is without a mesh."""
    return tree if mesh is None else jax.tree.map(_put, tree, tree_sharding(tree, mesh))


def committed(tree: Any) -> Any:
    """Arrays committed to the devices that they are on; those of a checkpoint are, and a program is made for either."""
    return jax.tree.map(lambda x: x if x.committed else jax.device_put(x, x.sharding), tree)


def _put(x: Any, sharding: NamedSharding) -> jax.Array:
    """An array with that sharding; with several processes each gives its part of what all of them hold."""
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


def fetch(tree: Any) -> Any:
    """Arrays as NumPy's, whole, wherever their parts are; all processes have to ask together."""

    def one(x: Any) -> np.ndarray:
        if not isinstance(x, jax.Array) or x.is_fully_addressable:
            return np.asarray(x)
        if x.is_fully_replicated:
            return np.asarray(x.addressable_data(0))
        return np.asarray(multihost_utils.process_allgather(x, tiled=True))

    return jax.tree.map(one, tree)


def gather_objects(own: Any) -> list[Any]:
    """Return what each process gives, as a list in their order; anything that JSON holds.

    Bytes are padded to a power of two, so that few gathers are compiled: 21 between 1 KiB and 1 GiB.
    """
    if jax.process_count() == 1:
        return [own]
    data = np.frombuffer(json.dumps(own).encode(), np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.array([data.size])))
    padded = np.zeros(max(1024, 1 << int(sizes.max() - 1).bit_length()), np.uint8)
    padded[: data.size] = data
    rows = np.asarray(multihost_utils.process_allgather(padded)).reshape(len(sizes.ravel()), -1)
    return [json.loads(bytes(row[:size])) for row, size in zip(rows, sizes.ravel(), strict=True)]


def own_part(count: int) -> range:
    """Which of `count` rows are this process's own: to play, and to score."""
    n, process = jax.process_count(), jax.process_index()
    return range(count * process // n, count * (process + 1) // n)


def keep_placed(tree: Any, mesh: Mesh | None) -> Any:
    """`place` inside a compiled function: its results are where its arguments were."""
    return tree if mesh is None else jax.lax.with_sharding_constraint(tree, tree_sharding(tree, mesh))


def for_lookup(tree: Any, mesh: Mesh | None) -> Any:
    """A model or its parameters, inside a compiled function, with rows of the embedding whole on each device.

    Tokens are cut over "fsdp", and so are the rows that they look up: without this, the partitioner reads the prompts
    of all devices on each. For rollouts only: in an update it would keep the activations of all devices on each.
    """
    if mesh is None:
        return tree

    def at(path: Any, leaf: Any) -> Any:
        name = _name(path)
        if not re.fullmatch(r"(.*/)?embed_tokens/embedding", name):
            return leaf
        vocabulary, _ = parameter_sharding(name.split("/"), leaf.shape, mesh).spec
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, PartitionSpec(vocabulary)))

    return jax.tree_util.tree_map_with_path(at, tree)


def for_head(tree: Any, mesh: Mesh | None, axes: Sequence[str]) -> Any:
    """A model or its parameters, inside a compiled function, with the output head cut along the vocabulary by `axes`.

    Cut along the other side, as it is stored, each logit would be a sum over devices, for every token.
    """
    if mesh is None:
        return tree

    def at(path: Any, leaf: Any) -> Any:
        name = _name(path)
        if re.fullmatch(r"(.*/)?embed_tokens/embedding", name):
            spec = PartitionSpec(tuple(axes))
        elif re.fullmatch(r"(.*/)?lm_head/kernel", name):
            spec = PartitionSpec(None, tuple(axes))
        else:
            return leaf
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec))

    return jax.tree_util.tree_map_with_path(at, tree)


def _prompts(mesh: Mesh) -> tuple[str, ...]:
    return tuple(name for name in ("data", "fsdp") if name in mesh.shape)


def shard_count(mesh: Mesh | None) -> int:
    """Return the number of devices over which prompts are split."""
    return 1 if mesh is None else math.prod(mesh.shape[name] for name in _prompts(mesh))


def split(tree: Any, mesh: Mesh | None) -> Any:
    """Arrays [B, ...] on the devices, cut along B; whole on each where B does not divide, on one without a mesh."""
    return jax.tree.map(jnp.asarray, tree) if mesh is None else jax.tree.map(_put, tree, split_sharding(tree, mesh))


def split_sharding(tree: Any, mesh: Mesh) -> Any:
    """The sharding that `split` gives each array of a tree."""

    def at(x: Any) -> NamedSharding:
        cut = x.ndim > 0 and x.shape[0] % shard_count(mesh) == 0
        return NamedSharding(mesh, PartitionSpec(_prompts(mesh)) if cut else PartitionSpec())

    return jax.tree.map(at, tree)


def constrain(x: jax.Array, mesh: Mesh | None, *axes: str | None) -> jax.Array:
    """Constrain, inside a compiled function, the sharding of an array [B, ...] and by `axes` of its further dimensions.

    An axis that does not divide its dimension cuts nothing; without a mesh all is left to the partitioner.
    """
    return x if mesh is None else jax.lax.with_sharding_constraint(x, constrained_sharding(x.shape, mesh, *axes))


def constrained_sharding(shape: Sequence[int], mesh: Mesh, *axes: str | None) -> NamedSharding:
    """Return the sharding that `constrain` gives an array of that shape, as XLA's partitioner writes it."""

    def fits(size: int, axis: str | None) -> bool:
        return axis is not None and mesh.shape.get(axis, 1) > 1 and size % mesh.shape[axis] == 0

    prompts = tuple(name for name in _prompts(mesh) if mesh.shape[name] > 1)
    if shape[0] % shard_count(mesh):
        prompts = ()
    first = prompts if len(prompts) > 1 else prompts[0] if prompts else None
    spec = [first, *(axis if fits(size, axis) else None for size, axis in zip(shape[1:], axes, strict=False))]
    while spec and spec[-1] is None:
        spec.pop()
    return NamedSharding(mesh, PartitionSpec(*spec))


def abstract(tree: Any) -> Any:
    """The shapes of a tree's arrays, each with its place if it was put there by name: programs are made for places."""

    def one(x: Any) -> jax.ShapeDtypeStruct:
        named = not isinstance(x, jax.Array) or x.committed
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None) if named else None)

    return jax.tree.map(one, tree)


def placed_shapes(tree: Any, shardings: Any) -> Any:
    """The shapes of a tree with their shardings."""
    return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), tree, shardings)


def lower_call(call: functools.partial[Any]) -> jax.stages.Lowered:
    """Lower a call of a jitted function, whose arguments may be shapes and their devices absent (`models.devices`)."""
    function: Any = call.func
    with _lowering_for(place_of((call.args, call.keywords))):
        return function.lower(*call.args, **call.keywords)


def _lowering_for(at: jax.sharding.Sharding | None) -> contextlib.AbstractContextManager[Any]:
    """Name a GPU that is absent as the target: from jax 0.11 on, Pallas lowers its kernels for a GPU that it knows."""
    device: Any = None if at is None else next(iter(at.device_set))
    if device is None or device.platform != "gpu" or jax.default_backend() == "gpu" or jax.__version_info__ < (0, 11):
        return contextlib.nullcontext()
    target = jax.sharding.AbstractDevice(device.device_kind, None, device.platform)
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=target))


def place_of(tree: Any) -> Any:
    """The sharding of the first of some shapes that has one; so has then what is computed from them on one device."""
    at = next((at for x in jax.tree.leaves(tree) if (at := getattr(x, "sharding", None)) is not None), None)
    return NamedSharding(at.mesh, PartitionSpec()) if isinstance(at, NamedSharding) else at


def mesh_of(tree: Any) -> Mesh | None:
    """The mesh of several devices that a tree lives on, or is to live on; None for one device, and for tracers."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.core.Tracer):
            continue
        mesh = getattr(getattr(leaf, "sharding", None), "mesh", None)
        if isinstance(mesh, Mesh) and mesh.size > 1:
            return mesh
    return None
