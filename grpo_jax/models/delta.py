"""The gated delta rule: a memory of fixed size in place of keys and values.

A head's memory S [d_k, d_v] is read by queries and written by keys. Each token lets it fade, and replaces what it says
about the key by a part β of what the value says (Yang et al. 2024, Gated Delta Networks, eq. 10):

S_t = α_t (I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ,   o_t = S_tᵀ q_t

Token by token that is `delta_step`. Read as a whole, tokens are cut into chunks. Inside a chunk all tokens are matrix
products at once, and only the memories between chunks come one after another:

```
tokens     │ c0  c1  c2  c3 │ c4  c5  c6  c7 │ …
memory     S ─────────────► S ─────────────► S
```
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

CHUNK = 64
"""Tokens of a chunk at most, a power of two: products of this size fill an accelerator's matrix units, and the work
per token grows with it."""


def delta_step(
    q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, beta: jax.Array, memory: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One token of the gated delta rule.

    Args:
      q, k: [..., d_k] float32.
      v: [..., d_v] float32.
      decay: [...] float32, log α ≤ 0.
      beta: [...] float32, in 0..1; 0 with a decay of 0 leaves the memory alone.
      memory: [..., d_k, d_v] float32.

    Returns:
      What the query reads [..., d_v], and the new memory.
    """
    fade = jnp.exp(decay)[..., None]
    # Both reads in one pass over the memory, which is most of what a step costs.
    both = jnp.einsum("...xk,...kv->...xv", jnp.stack([k, q], axis=-2), memory)
    known, asked = both[..., 0, :] * fade, both[..., 1, :] * fade
    new = (v - known) * beta[..., None]
    memory = memory * fade[..., None] + k[..., :, None] * new[..., None, :]
    return asked + jnp.sum(q * k, axis=-1, keepdims=True) * new, memory


def delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    decay: jax.Array,
    beta: jax.Array,
    memory: jax.Array,
    *,
    position: jax.Array | None = None,
    begins: jax.Array | None = None,
    chunk: int = CHUNK,
    precision: str | None = "highest",
) -> tuple[jax.Array, jax.Array]:
    """`delta_step` of N tokens, one after another, chunk by chunk.

    Args:
      q, k: [..., N, d_k] float32.
      v: [..., N, d_v] float32.
      decay, beta: [..., N] float32, as in `delta_step`.
      memory: [..., d_k, d_v] float32, before the first token.
      position: [..., N] int32 of each token in its segment, its leading axes broadcast; None: all are one segment that
        goes on from `memory`.
      begins: [..., N / chunk, d_k, d_v] float32, the memory with which a segment begins whose first token stands in
        that chunk; for a `position`, with which N is a multiple of the chunk.
      chunk: tokens of a chunk, a power of two.
      precision: of the products.

    Returns:
      What the queries read [..., N, d_v], and the memory after the last token.

    References:
      Yang et al. 2024, Gated Delta Networks, section 3.3. Decays inside a chunk are sums and never differences of sums,
      so that a token that forgets everything costs those after it no digits.
    """
    *rows, n, _ = k.shape
    chunk = min(chunk, 1 << max(0, n - 1).bit_length())
    pad = -n % chunk

    def cut(x: jax.Array, axes: int) -> jax.Array:
        x = jnp.pad(x, [(0, 0)] * len(rows) + [(0, pad)] + [(0, 0)] * axes)
        return x.reshape(*x.shape[: len(rows)], -1, chunk, *x.shape[len(rows) + 1 :])

    q, k, v, decay, beta = cut(q, 1), cut(k, 1), cut(v, 1), cut(decay, 0), cut(beta, 0)
    index = jnp.arange(chunk).reshape(*[1] * (len(rows) + 1), chunk)
    i, j = index[..., :, None], index[..., None, :]
    seen, first = i >= j, None
    if position is not None:
        first = index - cut(position, 0)  # where in the chunk a token's segment begins; below 0 in an earlier one
        seen = seen & (j >= first[..., None])
    product = functools.partial(jnp.einsum, precision=precision)
    # D[i, j]: how far what token j wrote has faded when token i reads; and the memory before the chunk or the segment.
    fading = jnp.where(i > j, decay[..., None], 0.0)
    d = jnp.where(seen, jnp.exp(jnp.cumsum(fading, axis=-2)), 0.0)
    inward = jnp.exp(jnp.sum(jnp.where(seen, decay[..., None, :], 0.0), axis=-1))[..., None]
    among = jnp.where(i > j, product("...id,...jd->...ij", k, k) * d * beta[..., None], 0.0)
    solve = inverse_of_unit_lower(among, precision)
    new = product("...ij,...jd->...id", solve, v * beta[..., None])
    known = product("...ij,...jd->...id", solve, k * beta[..., None] * inward)
    scores, asked = product("...id,...jd->...ij", q, k) * d, q * inward
    write, keep = k * d[..., -1, :, None], inward[..., -1:, :]
    read = added = None
    if first is not None:
        assert begins is not None
        own = (first >= 0)[..., None]
        new = new - product("...ik,...kv->...iv", jnp.where(own, known, 0.0), begins)
        read = product("...ik,...kv->...iv", jnp.where(own, asked, 0.0), begins)
        known, asked = jnp.where(own, 0.0, known), jnp.where(own, 0.0, asked)
        added, keep = jnp.where(own[..., -1:, :], keep * begins, 0.0), jnp.where(own[..., -1:, :], 0.0, keep)

    def one(memory, of_chunk):
        new, known, asked, write, keep, added = of_chunk
        new = new - product("...ik,...kv->...iv", known, memory)
        read = product("...ik,...kv->...iv", asked, memory)
        memory = memory * keep + product("...ik,...iv->...kv", write, new)
        return memory if added is None else memory + added, (new, read)

    along = len(rows)
    chunks = jax.tree.map(lambda x: jnp.moveaxis(x, along, 0), (new, known, asked, write, keep, added))
    memory, after = jax.lax.scan(one, memory, chunks)
    new, carried = (jnp.moveaxis(x, 0, along) for x in after)
    out = carried + product("...ij,...jd->...id", scores, new)
    out = out if read is None else out + read
    return out.reshape(*rows, n + pad, -1)[..., :n, :], memory


def inverse_of_unit_lower(x: jax.Array, precision: str | None = "highest") -> jax.Array:
    """(I + L)⁻¹ for strictly lower triangular L [..., n, n], n a power of two.

    Of blocks twice as large at each turn, [[A, 0], [B, C]]⁻¹ = [[A⁻¹, 0], [−C⁻¹ B A⁻¹, C⁻¹]]: as exact as substitution,
    in log n batched products, which every backend has and every partitioner can cut.
    """
    *rows, n, _ = x.shape
    inverse, size = jnp.ones((*rows, n, 1, 1), x.dtype), 1
    while size < n:
        pairs = n // (2 * size)
        blocks = x.reshape(*rows, pairs, 2 * size, pairs, 2 * size)
        of_pairs = jnp.moveaxis(jnp.diagonal(blocks, axis1=-4, axis2=-2), -1, -3)
        below, both = of_pairs[..., size:, :size], inverse.reshape(*rows, pairs, 2, size, size)
        a, c = both[..., 0, :, :], both[..., 1, :, :]
        low = -jnp.einsum("...ij,...jk,...kl->...il", c, below, a, precision=precision)
        upper = jnp.concatenate([a, jnp.zeros_like(a)], axis=-1)
        inverse = jnp.concatenate([upper, jnp.concatenate([low, c], axis=-1)], axis=-2)
        size *= 2
    return inverse[..., 0, :, :]
