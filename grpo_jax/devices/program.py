"""A call of a compiled function: with arrays, to make it; with their shapes, to compile it before there are any."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import jax

Result = TypeVar("Result")


class Lowerable(Protocol):
    """A jitted function."""

    def __call__(self, *args: object, **kwargs: object) -> Any: ...

    def lower(self, *args: object, **kwargs: object) -> jax.stages.Lowered: ...


@dataclasses.dataclass(frozen=True)
class Program:
    """A call of a jitted function, of arrays or of their shapes.

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
      >>> Program.of("double 1", double, jax.numpy.ones(1))().tolist()
      [2.0]
    """

    name: str
    function: Lowerable
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]

    @classmethod
    def of(cls, name: str, function: Lowerable, *arguments: Any, **keywords: Any) -> Program:
        """The program of that call."""
        return cls(name, function, arguments, keywords)

    def __call__(self) -> Any:
        """Make the call; all arguments are arrays."""
        return self._given_to(self.function)

    def lower(self) -> jax.stages.Lowered:
        """Trace it."""
        return self._given_to(self.function.lower)

    def compile(self) -> None:
        """Compile what the call needs, which may be several programs (`pieces.in_pieces`)."""
        several = getattr(self.function, "compile", None)
        if several is None:
            self.lower().compile()
        else:
            self._given_to(several)

    def _given_to(self, function: Callable[..., Result]) -> Result:
        return function(*self.arguments, **self.keywords)
