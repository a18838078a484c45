"""A compiled function with the shapes that it will be called with: enough to compile it before there is anything to
compute."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import jax


class Lowerable(Protocol):
    """A jitted function."""

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered: ...


@dataclasses.dataclass(frozen=True)
class Program:
    """A call of a jitted function, of shapes in the place of arrays.

    Attributes:
      name: what it does and for which sizes, such as "decode 8×8, 64 slots".
      function: jitted.
      arguments: by position; arrays or their shapes.
      keywords: static.

    Example:
      >>> double = jax.jit(lambda x: 2 * x)
      >>> program = Program.of("double 3", double, jax.ShapeDtypeStruct((3,), "float32"))
      >>> program.name, program.lower().compile()(jax.numpy.ones(3)).tolist()
      ('double 3', [2.0, 2.0, 2.0])
    """

    name: str
    function: Lowerable
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]

    @classmethod
    def of(cls, name: str, function: Lowerable, *arguments: Any, **keywords: Any) -> Program:
        """The program of that call."""
        return cls(name, function, arguments, keywords)

    def lower(self) -> jax.stages.Lowered:
        """Trace it."""
        return self.function.lower(*self.arguments, **self.keywords)
