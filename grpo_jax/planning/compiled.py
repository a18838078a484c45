"""What a compiled program takes, calls and sends, read off it."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from typing import Any, NamedTuple

import jax

# How TPUs' compilers say what a program that they refuse would have taken: by the version, beside its arguments or,
# whatever the words say, with them.
_BESIDE = re.compile(r"Used ([\d.]+)([KMGT]) of")
_IN_ALL = re.compile(r"HLO temporaries \(([\d.]+)([KMGT])\)")


class Compiled(NamedTuple):
    """What is looked at of a compiled program."""

    memory: Any
    text: str | None  # None: this jaxlib is older than the compiler, and does not understand what it wrote
    seconds: float


class Refused(NamedTuple):
    """The memory of a program that a TPU's compiler has refused: what it would have taken, as far as it says so.

    Of its arguments those that were named beforehand; what it takes beside them all counts as temporary.
    """

    temp_size_in_bytes: int
    argument_size_in_bytes: int = 0
    output_size_in_bytes: int = 0
    alias_size_in_bytes: int = 0


def last_error(stderr: str) -> str:
    """The line of a traceback that says what went wrong; a compiler's message goes on for many more.

    Example:
      >>> last_error("Traceback …\\n  File …\\nValueError: too long: 9 tokens\\n\\nSee https://…")
      'ValueError: too long: 9 tokens'
    """
    lines = stderr.strip().splitlines()
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit|Interrupt)\b", line)]
    return (errors or lines or ["it said nothing"])[-1]


def compile_program(lowered: Any, given: int = 0) -> Compiled:
    """The program of what was lowered, or what a TPU's compiler says of one that passes its memory.

    `given`: bytes on each device of arguments that the caller counts elsewhere, such as the params.
    """
    begin = time.monotonic()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        beside, in_all = (pattern.search(str(error)) for pattern in (_BESIDE, _IN_ALL))
        taken = beside or in_all
        if "RESOURCE_EXHAUSTED" not in str(error) or taken is None:
            raise
        size = int(float(taken[1]) * 1024 ** ("KMGT".index(taken[2]) + 1))
        refused = Refused(size) if beside else Refused(max(0, size - given), given)
        return Compiled(refused, "", time.monotonic() - begin)
    seconds = time.monotonic() - begin
    try:
        text = compiled.as_text()
    except jax.errors.JaxRuntimeError:
        text = None
    return Compiled(compiled.memory_analysis(), text, seconds)


_BYTES = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "s8": 1, "u8": 1, "pred": 1, "s64": 8, "u64": 8, "f64": 8}
_COLLECTIVE = re.compile(
    r"= (\(?[^=]*?\)?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


def collectives(text: str) -> dict[str, int]:
    """Bytes of the results of each kind of collective of a compiled program; in a loop, of one turn.

    Example:
      >>> collectives("x = bf16[8,16]{1,0} all-gather(y), z = (f32[4]{0}, f32[]) all-reduce(a, b)")
      {'all-gather': 256, 'all-reduce': 20}
    """
    total: Counter[str] = Counter()
    for shapes, kind in _COLLECTIVE.findall(text):
        for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", shapes):
            size = _BYTES.get(dtype, 4)
            for n in dims.split(","):
                size *= int(n or 1)
            total[kind] += size
    return dict(total)


def kernels(text: str) -> dict[str, int]:
    """Custom calls of a compiled program, and how often each stands in it.

    Example:
      >>> kernels('custom_call_target="a" custom_call_target="b" custom_call_target="a"')
      {'a': 2, 'b': 1}
    """
    return dict(Counter(re.findall(r'custom_call_target="([^"]*)"', text)))


def placed(tree: Any, shardings: Any) -> Any:
    """Abstract arrays with their shardings."""
    return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), tree, shardings)


def bytes_on_device(tree: Any) -> int:
    """Bytes of a tree on each device."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * (8 if _is_key(x) else x.dtype.itemsize)
        for x in jax.tree.leaves(tree)
    )


def _is_key(x: Any) -> bool:
    return jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)
