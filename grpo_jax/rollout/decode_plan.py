"""The plan of a rollout: how many completions are decoded together (the shape), and with how many cache slots.

Each shape needs a separate compilation, which takes half a minute on a TPU, so there are few shapes. They are derived
from the rollout's size. The sampled completions determine only when it moves to a smaller shape, and to which one:

```
64 completions   64 slots ─► 128 slots ─► 255 slots        the cache grows with the completions
                        └────────┤            │
32                           128 slots ─► 255 slots        as some end, the others move to smaller shapes
                                     └────────┤
16                                        255 slots
                                              │
8                                         255 slots
```

A move may skip shapes, for example from 64 to 8 completions.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from grpo_jax.models.attention_tiles import attention_implementation
from grpo_jax.models.config import StepCost
from grpo_jax.models.devices import platform_of
from grpo_jax.models.fused_step import has_step_kernel
from grpo_jax.models.layers import Quantized
from grpo_jax.models.sharding import abstract, constrained_sharding, mesh_of, shape_structs, shard_count
from grpo_jax.models.threads import count_threads, devices_of
from grpo_jax.rollout.decode import DecodeState, decode, place_state, prefill
from grpo_jax.rollout.decode_weights import variables_shape
from grpo_jax.rollout.draw import DecodeSettings, completion_keys
from grpo_jax.types import BuiltinModel, Model, Params, Prompts, as_jit_argument, is_builtin

BURST = 16
"""Maximum number of decode steps per call. After each call, the host checks which completions have ended."""

MIN_SLOTS = 64
"""Minimum initial number of slots in a cache that grows."""

SLOT_MULTIPLE = 64
"""Divisor of cache sizes on accelerators and with several turns. A GPU would pad caches of other sizes at each step."""

MIN_COMPLETIONS = 8
"""Minimum number of completions in later shapes. On a CPU, a matrix product with fewer rows takes just as long."""

MAX_SMALLER = 3
"""Maximum number of shapes that are smaller than the first."""

MIN_PER_THREAD = 16
"""Minimum number of completions per thread, if several threads are used. Smaller matrix products are inefficient."""

MAX_STEP_COST_RATIO = 0.8
"""Maximum relative cost of a step with the next shape. A move copies the cache and may require a compilation."""


Selection = tuple[np.ndarray, np.ndarray]
"""Indices of the groups to keep [B''], and of the completions to keep in each of these groups [B'', G'']."""


def num_cache_slots(length: int, *, round_up: bool) -> int:
    """Return the number of slots for all but the last of `length` tokens. `round_up` rounds it to `SLOT_MULTIPLE`."""
    slots = max(1, length - 1)
    return -(-slots // SLOT_MULTIPLE) * SLOT_MULTIPLE if round_up else slots


@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """The array shapes that a rollout can use, in decreasing order of size, and its cache sizes."""

    shapes: tuple[tuple[int, int], ...]  # (groups, completions per group); the first holds all completions
    cache_sizes: tuple[int, ...]  # slots, in increasing order; the n-th shape uses only the n-th and later sizes
    burst_steps: int  # number of steps per burst
    all_steps: bool  # whether bursts run all steps, because a data-dependent loop would wait for the host
    step: StepCost  # cost of a decode step with the largest cache
    shards: int = 1  # number of devices over which groups are sharded; groups do not change devices

    @classmethod
    def of(
        cls,
        groups: int,
        width: int,
        length: int,
        step: StepCost,
        *,
        shards: int = 1,
        multi_turn: bool = False,
        all_steps: bool = False,
        grows: bool = True,
    ) -> DecodePlan:
        """Compute the plan for [groups, width] completions of at most `length` tokens.

        `multi_turn` is True if completions have several turns, each with any number of bursts. If `grows`, the cache
        starts small, which is faster if steps also read empty slots.
        """
        max_slots, tokens = num_cache_slots(length, round_up=all_steps), max(1, length - 1)
        # Bursts end where the cache grows. A short rollout is divided into bursts of equal length, so that few steps
        # run after all completions have ended.
        steps = BURST if tokens > MIN_SLOTS else -(-tokens // -(-tokens // BURST))
        slots = [max_slots]
        if grows:
            first = max(MIN_SLOTS, -(-length // 4))
            first = -(-first // SLOT_MULTIPLE) * SLOT_MULTIPLE if all_steps else first
            slots = [*(n for n in (first, 2 * first) if n < max_slots), max_slots]
        shapes = [(groups, width)]
        # Completions move at most once between bursts.
        bursts = -(-tokens // steps)
        max_smaller = MAX_SMALLER if multi_turn else min(MAX_SMALLER, bursts - 1)
        for _ in range(max_smaller):
            smaller = _next_shape(shapes[-1], groups * width, step, shards)
            if smaller is None:
                break
            shapes.append(smaller)
        return cls(tuple(shapes), tuple(slots), steps, all_steps, step, shards)

    def smaller(self, index: int, slots: int, active: np.ndarray) -> tuple[int, int, Selection] | None:
        """Return the cheapest smaller shape that holds all active completions, or None if no move saves enough.

        The result is the shape's index, the new cache size and the result of `select`. `slots` is the old cache size.
        """
        max_cost = MAX_STEP_COST_RATIO * self._cost(index, slots)
        moves = []
        for target in range(index + 1, len(self.shapes)):
            new_slots = next(n for n in self.cache_sizes[min(target, len(self.cache_sizes) - 1) :] if n >= slots)
            cost, selected = self._cost(target, new_slots), self.select(target, active)
            if cost <= max_cost and selected is not None:
                moves.append((cost, target, new_slots, selected))
        return min(moves, key=operator.itemgetter(0))[1:] if moves else None

    def _cost(self, index: int, slots: int) -> float:
        """Return the cost of a decode step on each device."""
        groups, width = self.shapes[index]
        step = dataclasses.replace(self.step, own=self.step.own * slots / self.cache_sizes[-1])
        return step.cost(groups // self.shards, width)

    def select(self, index: int, active: np.ndarray) -> Selection | None:
        """Return the completions to keep in a smaller shape, or None if not all active completions fit.

        `active` [B', G'] is False for completions that have ended, which fill unused positions.
        """
        groups, width = self.shapes[index]
        if width > 1 or self.shards > 1:
            counts = active.sum(axis=1)
            if counts.max() > width or (counts > 0).sum() > groups:
                return None
            kept = np.sort(np.argsort(counts == 0, kind="stable")[:groups])
            return kept, np.argsort(~active[kept], axis=1, kind="stable")[:, :width]
        if active.sum() > groups:
            return None
        flat = np.argsort(~active.reshape(-1), kind="stable")[:groups]
        return flat // active.shape[1], (flat % active.shape[1])[:, None]


def _next_shape(current: tuple[int, int], completions: int, step: StepCost, shards: int) -> tuple[int, int] | None:
    """Return (groups, width) for the shape after `current`, or None if no shape is sufficiently cheaper.

    The first choice is as many groups of half the width, if they cost at most 75% as much as the same number of
    completions in groups of one. (A group reads its prompt's keys and values only once.) On several shards, it is the
    only choice, and the 75% limit does not apply. The next choice is groups of one, whose numbers form a geometric
    series that ends at `MIN_COMPLETIONS`. The last choice is half as many groups of half the width.
    """
    groups, width = current

    def cost(shape: tuple[int, int]) -> float:
        return step.cost(shape[0] // shards, shape[1])

    def is_cheaper(shape: tuple[int, int]) -> bool:
        is_smaller = MIN_COMPLETIONS <= shape[0] * shape[1] < groups * width
        return is_smaller and cost(shape) <= MAX_STEP_COST_RATIO * cost(current)

    narrow, fewer = (groups, -(-width // 2)), (-(-groups // 2), -(-width // 2))
    if shards > 1:
        return narrow if is_cheaper(narrow) else None
    if is_cheaper(narrow) and cost(narrow) <= 0.75 * cost((narrow[0] * narrow[1], 1)):
        return narrow
    stride = 1 << max(1, math.ceil(math.log2(max(2, completions / MIN_COMPLETIONS)) / MAX_SMALLER))
    singles = ((MIN_COMPLETIONS * stride**i, 1) for i in reversed(range(MAX_SMALLER)))
    return next(filter(is_cheaper, (*singles, fewer)), None)


def decode_step_cost(model: BuiltinModel, params: Params, prompt_length: int, slots: int, *, cpu: bool) -> StepCost:
    """Estimate a decode step's cost.

    A CPU performs about 8 multiplications in the time it takes to read a byte, and an accelerator about 100.
    """
    arrays = jax.tree.leaves((model, params))
    weights = jax.tree.leaves((model, params), is_leaf=lambda x: isinstance(x, Quantized))  # NF4: two per byte
    size = sum(x.size * x.dtype.itemsize for x in arrays)
    return StepCost.of(
        model.config,
        prompt_length=prompt_length,
        completion_length=slots,
        itemsize=jnp.dtype(model.config.dtype).itemsize,
        weight_itemsize=size / sum(math.prod(x.shape) for x in weights),
        bytes_per_operation=0.13 if cpu else 0.01,
    )


def decode_threads(params: Params, groups: int, width: int, *, threads_per_core: int = 1) -> int:
    """Return the number of threads that decode [groups, width] completions. It divides `groups`.

    `threads_per_core` is a maximum. It is larger with several turns, because some threads wait for observations.
    """
    limit = max(1, min(groups, groups * width // MIN_PER_THREAD, threads_per_core * count_threads(params, groups)))
    return max(n for n in range(1, limit + 1) if groups % n == 0)


def groups_at_once(groups: int, num_generations: int, batch_size: int | None, shards: int) -> int:
    """Return the number of groups to decode together, a multiple of `shards`.

    The groups contain at most `batch_size` completions; if `batch_size` is None, there is no limit.
    """
    limit = groups if batch_size is None else min(groups, batch_size // num_generations // shards * shards)
    return -(-limit // shards) * shards


def plan_decode(
    model: BuiltinModel, params: Params, prompt_length: int, groups: int, width: int, length: int, *, mesh: Mesh | None
) -> DecodePlan:
    """Return the plan for [groups, width] single-turn completions. `params` may contain `ShapeDtypeStruct`s."""
    cpu, shards = on_cpu(params, mesh), shard_count(mesh)
    slots = num_cache_slots(length, round_up=not cpu)
    step = decode_step_cost(model, params, prompt_length, slots, cpu=cpu)
    grows = not _skips_empty_slots(model, groups * width, (slots, prompt_length), 1 if mesh is None else mesh.size)
    return DecodePlan.of(groups, width, length, step, shards=shards, all_steps=not cpu, grows=grows)


def _skips_empty_slots(model: BuiltinModel, completions: int, keys: tuple[int, int], devices: int) -> bool:
    """Return whether decode steps do not read empty slots, because all attention layers use the decode kernel."""
    shape = model.config
    heads = {shape.heads_of(kind) for kind in shape.layer_kinds if kind.mixer == "attention"}
    kernel = attention_implementation(shape.attention)
    return bool(heads) and all(
        has_step_kernel(kernel, head_dim=width, keys=keys, programs=completions * count // devices)
        for count, width in heads
    )


def on_cpu(params: Params, mesh: Mesh | None) -> bool:
    """Return whether decoding runs on a single CPU, where a data-dependent loop condition costs nothing.

    Abstract arrays without a sharding are assumed to be on the default device.
    """
    platforms = {device.platform for device in devices_of(params)}
    return mesh is None and (platforms or {platform_of()[0]}) <= {"cpu"}


def decode_call(
    model: Model,
    params: Params,
    groups: int,
    prompt_length: int,
    *,
    num_generations: int,
    max_completion_length: int,
    batch_size: int | None = None,
    settings: DecodeSettings,
) -> functools.partial[Any] | None:
    """Return `decode` with abstract arguments, for the largest number of completions and the largest cache.

    `generate` documents the arguments. Returns None for a model without a cache.
    """
    if not is_builtin(model):
        return None
    argument, shapes = abstract((as_jit_argument(model), params))
    variables, mesh = variables_shape(model, params), mesh_of(params)
    if "columns" in variables:
        variables["columns"] = shape_structs(variables["columns"], placed_like=(shapes, argument))
    at_once = groups_at_once(groups, num_generations, batch_size, shard_count(mesh))
    plan = plan_decode(argument, shapes, prompt_length, at_once, num_generations, max_completion_length, mesh=mesh)
    settings = settings._replace(mesh=mesh)

    def prefilled(model: BuiltinModel, params: Params) -> DecodeState:
        indices, tokens = jnp.arange(at_once), jnp.zeros((at_once, prompt_length), jnp.int32)
        prompts, keys = Prompts(tokens, indices), completion_keys(jax.random.key(0), indices, num_generations)
        return prefill(model, params, prompts, keys, settings=settings, slots=plan.cache_sizes[-1])[0]

    state: DecodeState = jax.eval_shape(prefilled, argument, shapes)
    if mesh is None:
        state = shape_structs(state, placed_like=(shapes, argument))
    else:
        state = place_state(state, mesh, _constrained_shape)
    burst = functools.partial(decode, settings=settings, steps=plan.burst_steps, all_steps=plan.all_steps)
    return functools.partial(burst, argument, variables, state, 0, 0)


def _constrained_shape(x: jax.ShapeDtypeStruct, mesh: Mesh, *axes: str) -> jax.ShapeDtypeStruct:
    """Return a `ShapeDtypeStruct` with the sharding that `constrain` would apply."""
    sharding = constrained_sharding(x.shape, mesh, *axes)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):  # the spec of typed keys must list all dimensions
        spec = [*sharding.spec, *[None] * (len(x.shape) - len(sharding.spec))]
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
