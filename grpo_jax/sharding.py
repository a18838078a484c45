"""Where parameters live on a mesh: one table from a parameter's path to mesh axes.

The axes of a mesh are "data" (prompts), "fsdp" (prompts, and parameters cut along one side) and "tensor" (parameters
cut along the other, so that heads and MLP channels are spread). Modules know nothing of it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from jax.sharding import Mesh, NamedSharding, PartitionSpec

__all__ = ["TABLE", "parameter_sharding"]

TABLE: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"embed_tokens/embedding", ("tensor", "fsdp")),
    (r"lm_head/kernel", ("fsdp", "tensor")),
    # Into heads and channels, and out of them again: a block then needs one sum over "tensor" and no more.
    (r".*/(q|k|v|gate|up)_proj/kernel", ("fsdp", "tensor")),
    (r".*/(o|down)_proj/kernel", ("tensor", "fsdp")),
    (r".*/(q|k|v|gate|up)_proj/bias", ("tensor",)),
    (r".*/experts/(gate|up)_proj", (None, "fsdp", "tensor")),
    (r".*/experts/down_proj", (None, "tensor", "fsdp")),
)
"""Regular expression of the whole path, and the mesh axis of each dimension. What nothing matches is replicated."""


def parameter_sharding(path: Sequence[str], shape: Sequence[int], mesh: Mesh) -> NamedSharding:
    """The sharding of one parameter by `TABLE`.

    Args:
      path: names from the root to the leaf, such as ("layers_0", "self_attn", "q_proj", "kernel").
      shape: of the parameter.
      mesh: with any of the axes "data", "fsdp" and "tensor". An axis that it lacks cuts nothing, and neither does one
        whose size does not divide the dimension: that dimension is whole on every device.

    Returns:
      A `NamedSharding` on `mesh`.

    Example:
      >>> import jax
      >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("fsdp",))
      >>> parameter_sharding(("layers_0", "mlp", "down_proj", "kernel"), (8, 4), mesh).spec[1]
      'fsdp'
    """
    name = "/".join(path)
    axes = next((axes for pattern, axes in TABLE if re.fullmatch(pattern, name)), ())
    spec = [
        axis if axis in mesh.shape and size % mesh.shape[axis] == 0 else None
        for axis, size in zip(axes, shape, strict=False)
    ]
    return NamedSharding(mesh, PartitionSpec(*spec))
