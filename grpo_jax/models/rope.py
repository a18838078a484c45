"""Rotary position embeddings, with the context-extension methods ("scalings") found in checkpoints."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Settings = dict[str, Any]
"""Settings for a scaling, keyed by their names in Hugging Face's `rope_parameters`."""


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary position embedding with frequencies theta^(−2i/r) for r rotated channels, optionally scaled."""

    theta: float = 10000.0
    kind: str = "default"  # a key of `ROPE_KINDS`; Hugging Face's `rope_type`
    scaling: tuple[tuple[str, Any], ...] = ()  # settings for the scaling, as hashable (name, value) pairs
    fraction: float = 1.0  # fraction of a head's channels to rotate, starting at the first channel
    pairs: bool = False  # whether to rotate channels 2i and 2i + 1 together, not i and i + r/2, for r rotated channels
    growth: tuple[float, int] = (0.0, 1)  # (β, n): queries at position p are multiplied by 1 + β log(1 + ⌊p/n⌋)
    sections: tuple[int, ...] = ()  # numbers of frequencies for time, height and width (Qwen2.5-VL)


def _dynamic(inverse: np.ndarray, n: Settings, rope: Rope, length: int) -> tuple[np.ndarray, float]:
    """Increase the base once the sequence exceeds the model's original context length (dynamic NTK-aware scaling)."""
    longest, d = n["max_position_embeddings"], 2 * len(inverse)
    growth = n["factor"] * max(length, longest) / longest - (n["factor"] - 1)
    return inverse * (growth ** (d / (d - 2))) ** -(np.arange(0, d, 2) / d), 1.0


def _llama3(inverse: np.ndarray, n: Settings, rope: Rope, length: int) -> tuple[np.ndarray, float]:
    """Interpolate long wavelengths and keep short wavelengths, with a linear transition (Llama 3)."""
    turns = n["original_max_position_embeddings"] * inverse / (2 * math.pi)
    kept = np.clip((turns - n["low_freq_factor"]) / (n["high_freq_factor"] - n["low_freq_factor"]), 0, 1)
    return inverse * (kept + (1 - kept) / n["factor"]), 1.0


def _yarn(inverse: np.ndarray, n: Settings, rope: Rope, length: int) -> tuple[np.ndarray, float]:
    """Scale frequencies along a ramp over dimensions, and compute a temperature (YaRN; Peng et al. 2023, eq. 22–25)."""
    d, original = 2 * len(inverse), n["original_max_position_embeddings"]
    factor = n["factor"] or n["max_position_embeddings"] / original

    def dimension(turns: float) -> float:
        return d * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    low, high = dimension(n["beta_fast"]), dimension(n["beta_slow"])
    if n["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    interpolated = np.clip((np.arange(d // 2) - low) / (high - low if high != low else 0.001), 0, 1)
    attention = n["attention_factor"]
    if attention is None and n["mscale"] and n["mscale_all_dim"]:
        attention = temperature(n["mscale"]) / temperature(n["mscale_all_dim"])
    elif attention is None:
        attention = temperature(1.0)
    return inverse * (1 - interpolated + interpolated / factor), attention


def _longrope(inverse: np.ndarray, n: Settings, rope: Rope, length: int) -> tuple[np.ndarray, float]:
    """Divide frequencies by factors from one of two lists, chosen by the length (LongRoPE; Ding et al. 2024)."""
    original = n["original_max_position_embeddings"]
    factor = n["factor"] or n["max_position_embeddings"] / original
    attention = n["attention_factor"]
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return inverse / np.asarray(n["long_factor" if length > original else "short_factor"]), attention


def _proportional(inverse: np.ndarray, n: Settings, rope: Rope, length: int) -> tuple[np.ndarray, float]:
    """Divide frequencies by `factor`, and set all but the first fraction `partial_rotary_factor` to 0."""
    turning = int(n["partial_rotary_factor"] * 2 * len(inverse) // 2)
    return np.where(np.arange(len(inverse)) < turning, inverse, 0.0) / n["factor"], 1.0


ROPE_KINDS: dict[str, Callable[[np.ndarray, Settings, Rope, int], tuple[np.ndarray, float]]] = {
    "default": lambda inverse, *_: (inverse, 1.0),
    "linear": lambda inverse, n, *_: (inverse / n["factor"], 1.0),  # position interpolation
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}
"""Functions that map (frequencies, settings, `Rope`, sequence length) to scaled frequencies and an attention factor."""


ROPE_LIMITS = {"dynamic": "max_position_embeddings", "longrope": "original_max_position_embeddings"}
"""Length-dependent scalings, and the name of the setting that holds the length beyond which frequencies change."""


def rope_frequencies(rope: Rope, head_dim: int, length: int = 0) -> tuple[np.ndarray, float]:
    """Compute float32 angular frequencies [r/2] for r rotated channels, and the factor for cosines and sines.

    Only the kinds "dynamic" and "longrope" depend on the sequence length `length`.
    """
    if rope.kind not in ROPE_KINDS:
        raise ValueError(f"rope.kind must be one of {list(ROPE_KINDS)}; got {rope.kind!r}.")
    rotated = int(head_dim * rope.fraction)
    inverse = rope.theta ** -(np.arange(0, rotated, 2, dtype=np.float64) / rotated)
    frequencies, factor = ROPE_KINDS[rope.kind](inverse, dict(rope.scaling), rope, length)
    return frequencies.astype(np.float32), factor


def rope_table(positions: jax.Array, rope: Rope, head_dim: int, length: int = 0) -> tuple[jax.Array, jax.Array]:
    """Compute the float32 factors cos and ±sin for `rotate`, each [B, G or 1, T, 2, r/2], with −sin in the first half.

    Positions are [B, T] if they are the same for all completions of a prompt, [B, G, T] if they differ, or
    [B, G or 1, T, r/2] if they come from `positions_by_channel`.
    """
    frequencies, factor = rope_frequencies(rope, head_dim, length)
    positions = positions[:, None] if positions.ndim == 2 else positions
    positions = positions if positions.ndim == 4 else positions[..., None]
    angles = positions.astype(jnp.float32) * frequencies.reshape(1, 1, 1, -1)
    cos, sin = jnp.cos(angles) * factor, jnp.sin(angles) * factor
    return jnp.stack([cos, cos], axis=-2), jnp.stack([-sin, sin], axis=-2)


def positions_by_channel(positions: jax.Array, rope: Rope) -> jax.Array:
    """Select the position in time, height or width for each channel pair: [B, 3, T] → [B, 1, T, r/2]."""
    return positions[:, np.repeat(np.arange(3), rope.sections)].swapaxes(1, 2)[:, None]


def query_factors(positions: jax.Array, rope: Rope) -> jax.Array | None:
    """Compute query factors from `Rope.growth` as [B, G or 1, T, 1, 1], or None if β is 0."""
    beta, size = rope.growth
    positions = positions[:, None] if positions.ndim == 2 else positions
    return (1 + beta * jnp.log1p(positions // size))[..., None, None] if beta else None


def check_rope_length(rope: Rope, length: int) -> None:
    """Raise ValueError if frequencies change within a sequence of this length, in which case keys cannot be cached."""
    limit = dict(rope.scaling).get(ROPE_LIMITS.get(rope.kind, ""))
    if limit is not None and length > limit:
        raise ValueError(
            f"prompts and completions have up to {length} tokens in total, but beyond {limit} tokens the "
            f"rotation of rope_type {rope.kind!r} changes for all tokens, so keys cannot be cached. Limit the lengths"
            f" of prompts and completions to {limit} tokens in total"
        )


def rotate(x: jax.Array, table: tuple[jax.Array, jax.Array], *, pairs: bool = False) -> jax.Array:
    """Rotate x [B, G, T, heads, d] by a `rope_table`. Channel pairs span both halves, or are neighbors if `pairs`."""
    cos, sin = (t[:, :, :, None] for t in table)
    half = cos.shape[-1]
    halves, rest = x[..., : 2 * half].astype(jnp.float32), x[..., 2 * half :]

    def swap_axes(x: jax.Array) -> jax.Array:
        return x.swapaxes(-1, -2) if pairs else x

    halves = swap_axes(halves.reshape((*x.shape[:-1], *((half, 2) if pairs else (2, half)))))
    # Swap the halves with `rev`, since a concatenation takes three times as long on XLA's CPU backend.
    rotated = halves * cos + jax.lax.rev(halves, (halves.ndim - 2,)) * sin
    rotated = swap_axes(rotated).reshape((*x.shape[:-1], 2 * half)).astype(x.dtype)
    return jnp.concatenate([rotated, rest], axis=-1) if rest.shape[-1] else rotated
