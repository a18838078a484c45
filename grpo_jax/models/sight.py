"""Visibility in a fused attention: marks of tokens, and the tiles in which there is something to see.

```
                     keys of the prompts │ own keys, in the order of the queries
                        p0   p1   p2     │  c0   c1   c2   c3
    queries of p0, c0   ■    ·    ·      │  ■    ·    ·    ·       ■ a tile with something to see
               p0, c1   ■    ·    ·      │  ■    ■    ·    ·       · one that is left out
               p2, c3   ·    ·    ■      │  ·    ·    ·    ■
```

A query sees of its own segment the keys at or before its position, and the keys of its prompt. `Marks` say so, and not
a mask [queries, keys], so no prompt is copied for its completions and nothing grows with the square of the length.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from grpo_jax.models.platform import platform_of

NOBODY = -1
"""The number of what no token sees and what sees nothing: padding."""


def implementation(name: str, devices: Sequence[jax.Device] = ()) -> str:
    """Return the implementation of attention to whole sequences: the one named, or the fastest on the devices.

    "auto" is "triton" on NVIDIA GPUs from Ampere on (compute capability 8.0), "tiles" on older ones and on TPUs, and
    "einsum" on CPUs, where that is fastest. `devices` are of one kind; none stands for the default device.
    """
    if name != "auto":
        return name
    platform, capability = platform_of(devices)
    if platform == "cpu":
        return "einsum"
    return "triton" if platform in ("gpu", "cuda") and capability >= 8 and _has_triton() else "tiles"


@functools.cache
def _has_triton() -> bool:
    """Whether this jax has Pallas's way to Triton, which jax 0.11 announces to remove."""
    return importlib.util.find_spec("jax.experimental.pallas.triton") is not None


def compiler_params(implementation: str, *, warps: int, stages: int) -> pl.CompilerParams | None:
    """Return Triton's settings of a kernel; None where kernels are interpreted, as on a machine without Triton."""
    if implementation == "interpreted":
        return None
    from jax.experimental.pallas import triton

    return triton.CompilerParams(num_warps=warps, num_stages=stages)


class Marks(flax.struct.PyTreeNode):
    """Segment, prompt and position of each of N tokens.

    Attributes:
      number: [A, N] int32: of an own token its segment, of a prompt's −2 − the prompt's number; or `NOBODY`.
      prompt: [A, N] int32: of an own token −2 − the number of its prompt; not looked at in keys.
      position: [A, N] int32, counted from the first token of the prompt.
      index: [A, N] int32: an own token's place among the own tokens; −1 in a prompt.
    """

    number: jax.Array
    prompt: jax.Array
    position: jax.Array
    index: jax.Array


class Tiles(flax.struct.PyTreeNode):
    """Which tiles of keys a tile of queries goes through, and the other way round.

    Attributes:
      keys: [A, X, Y] int32, for each tile of queries the tiles of keys, those that it may see first.
      key_count: [A, X] int32, how many those are.
      queries: [A, Y, X] int32, for each tile of keys the tiles of queries, those that may see it first.
      query_count: [A, Y] int32.
    """

    keys: jax.Array
    key_count: jax.Array
    queries: jax.Array
    query_count: jax.Array


class Sight(flax.struct.PyTreeNode):
    """Marks of a forward pass's tokens, and the tiles that its queries see, the same in all layers of one window.

    Attributes:
      queries: [A, N].
      keys: [A, S], those of the prompts first.
      tiles: of each window that some layer has.
    """

    queries: Marks
    keys: Marks
    tiles: dict[str, Tiles]


class Kernel(NamedTuple):
    """Static part of a fused attention: the implementation, its tiles, and the scale, window and cap of scores.

    Attributes:
      implementation: "tiles", "triton", or "interpreted": the kernels of "triton", step by step on any platform.
      rows: queries of a tile; the R heads that share a key head are R queries.
      columns: keys of a tile.
      scale, window, soft_cap: as in `attention.group_attention`.
      shared: keys of the prompts, which come first, in the sight that it is for.
    """

    implementation: str
    rows: int
    columns: int
    scale: float = 1.0
    window: int | None = None
    soft_cap: float | None = None
    shared: int = 0

    @classmethod
    def of(cls, implementation: str, head_dim: int, dtype: str = "float32") -> Kernel:
        """Return it with tiles that the implementation can hold: on a GPU, in a program's own memory."""
        if implementation == "tiles":
            return cls(implementation, 1024, 512)
        if jnp.dtype(dtype).itemsize > 2:  # without tensor cores, term by term: larger tiles take long to compile
            return cls(implementation, *((64, 32) if head_dim <= 64 else (32, 32) if head_dim <= 128 else (32, 16)))
        return cls(implementation, *((128, 64) if head_dim <= 128 else (64, 32) if head_dim <= 256 else (32, 16)))


def find_tiles(queries: Marks, keys: Marks, kernel: Kernel, window: int | None) -> Tiles:
    """Return the tiles in which some query may see some key; a tile too many costs time and changes nothing."""
    rows, columns = kernel.rows, kernel.columns
    far = jnp.iinfo(jnp.int32).max

    def ends(x: jax.Array, where: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
        """The least and the largest x of each tile."""
        tiles = (x.shape[0], -1, size)
        low = jnp.where(where, x, far).reshape(tiles).min(axis=-1)
        return low, jnp.where(where, x, -far).reshape(tiles).max(axis=-1)

    def meet(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> jax.Array:
        return (a[0][:, :, None] <= b[1][:, None]) & (b[0][:, None] <= a[1][:, :, None])

    there, own, shared = queries.number != NOBODY, keys.number >= 0, keys.number < NOBODY
    at, slots = ends(queries.index, there, rows), ends(keys.index, own, columns)
    same_segment = meet(ends(queries.number, there, rows), ends(keys.number, own, columns))
    same_segment &= slots[0][:, None] <= at[1][:, :, None]
    same_prompt = meet(ends(queries.prompt, there, rows), ends(keys.number, shared, columns))
    if window is not None:
        first = ends(queries.position, there, rows)[0][:, :, None] - window
        same_segment &= ends(keys.position, own, columns)[1][:, None] > first
        same_prompt &= ends(keys.position, shared, columns)[1][:, None] > first

    def in_order(seen: jax.Array) -> tuple[jax.Array, jax.Array]:
        order = jnp.argsort(~seen, axis=-1, stable=True).astype(jnp.int32)
        return order, seen.sum(axis=-1, dtype=jnp.int32)

    seen = same_segment | same_prompt
    turned = seen.swapaxes(1, 2)
    return Tiles(*in_order(seen), *in_order(turned))


def repeated(marks: Marks, group: int) -> Marks:
    """Return each token's marks R times, for its R query heads."""
    return jax.tree.map(lambda x: jnp.repeat(x, group, axis=1), marks)


def padded(marks: Marks, size: int) -> Marks:
    """Return marks of a whole number of tiles, padded by tokens that nobody sees and that see nobody."""

    def pad(x: jax.Array, value: int) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, -x.shape[1] % size)), constant_values=value)

    number, prompt = pad(marks.number, NOBODY), pad(marks.prompt, NOBODY)
    return Marks(number, prompt, pad(marks.position, 0), pad(marks.index, -1))
