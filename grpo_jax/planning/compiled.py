"""Bytes, kernels and collectives of a compiled program, read off it."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from typing import NamedTuple, TypeVar

import jax

Tree = TypeVar("Tree")

# How TPUs' compilers say what a program that they refuse would have taken: by the version, beside its arguments or,
# whatever the words say, with them.
_BESIDE = re.compile(r"Used ([\d.]+)([KMGT]) of")
_IN_ALL = re.compile(r"HLO temporaries \(([\d.]+)([KMGT])\)")


class Memory(NamedTuple):
    """Bytes that a program takes on each device.

    Attributes:
      arguments: that it is given.
      temporaries: while it runs. Of a program that was refused, all that it takes beside its arguments.
      results: that stand in no argument's place.
      refused: whether a TPU's compiler has refused it, as it passes the memory: the rest is what it would have taken.
    """

    arguments: int
    temporaries: int
    results: int = 0
    refused: bool = False


class Compiled(NamedTuple):
    """A compiled program, as far as a plan looks at it.

    Attributes:
      memory: that it takes.
      text: in HLO; None where this jaxlib is older than the compiler, and does not understand what it wrote.
      seconds: that it took to compile.
    """

    memory: Memory
    text: str | None
    seconds: float


def last_error(stderr: str) -> str:
    """The line of a traceback that says what went wrong; a compiler's message goes on for many more.

    Example:
      >>> last_error("Traceback …\\n  File …\\nValueError: too long: 9 tokens\\n\\nSee https://…")
      'ValueError: too long: 9 tokens'
    """
    lines = stderr.strip().splitlines()
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit|Interrupt)\b", line)]
    return (errors or lines or ["it said nothing"])[-1]


def compile_program(lowered: jax.stages.Lowered, arguments: int = 0) -> Compiled:
    """Compile a program, or read what a TPU's compiler says of one that it refuses.

    Args:
      arguments: bytes on each device of those of its arguments that the caller counts elsewhere, such as the params.
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
        memory = Memory(0, size, refused=True) if beside else Memory(arguments, max(0, size - arguments), refused=True)
        return Compiled(memory, "", time.monotonic() - begin)
    seconds, stats = time.monotonic() - begin, compiled.memory_analysis()
    try:
        text = compiled.as_text()
    except jax.errors.JaxRuntimeError:
        text = None
    assert stats is not None, "the compilers of CPUs, GPUs and TPUs count memory"
    results = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return Compiled(Memory(stats.argument_size_in_bytes, stats.temp_size_in_bytes, results), text, seconds)


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
            total[kind] += _BYTES.get(dtype, 4) * math.prod(int(n or 1) for n in dims.split(","))
    return dict(total)


def kernels(text: str) -> dict[str, int]:
    """Custom calls of a compiled program, and how often each stands in it.

    Example:
      >>> kernels('custom_call_target="a" custom_call_target="b" custom_call_target="a"')
      {'a': 2, 'b': 1}
    """
    return dict(Counter(re.findall(r'custom_call_target="([^"]*)"', text)))


def placed(tree: Tree, shardings: object) -> Tree:
    """The shapes of a tree with their shardings."""
    return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), tree, shardings)


def bytes_on_device(tree: object) -> int:
    """Bytes of a tree on each device."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * _itemsize(x) for x in jax.tree.leaves(tree))


def _itemsize(x: jax.ShapeDtypeStruct) -> int:
    return 8 if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key) else x.dtype.itemsize
