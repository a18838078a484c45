"""A large program on one CPU in pieces: a layer is compiled once, and called for each of its kind.

XLA compiles a program as a whole, and its CPU backend would copy the weights of every turn of a loop. So thirty equal
layers are thirty times the work for its compiler, and thirty times the code in memory. Here the host calls them:

```
jaxpr of the program     a b │ layer │ c │ layer │ d e │ layer' │ f │ layer' │ f g      layer' goes back through it
programs                (a b)  layer  (c)  layer  (d e)  layer'  (f)  layer'  (f g)     each of them once
```

What depends on arguments of the program alone is computed right before the piece that needs it first, and all else as
soon as it can be: the gradient of a layer is added to its sum before there is one of the next layer.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

from grpo_jax.devices.platform import platform_of
from grpo_jax.devices.program import Lowerable
from grpo_jax.devices.streams import CACHED
from grpo_jax.types import Params

CALLED = "apply_layer"
"""Name of the jitted function whose calls become pieces."""

Shape = jax.ShapeDtypeStruct
Result = TypeVar("Result")


class Piece(NamedTuple):
    """A program that the host calls. Its arrays are known by numbers, which are those of a run of all pieces.

    Attributes:
      function: jitted.
      arguments: the numbers of its arguments.
      results: those of its results.
      last: those that no later piece needs.
      called: whether it is a call of `CALLED`.
    """

    function: Lowerable
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    last: frozenset[int]
    called: bool


class Pieces(NamedTuple):
    """A program in pieces.

    Attributes:
      pieces: in the order in which they are called.
      constants: arrays by their numbers.
      arguments: the numbers of the program's arguments.
      results: those of its results.
      shapes: of all arrays.
    """

    pieces: list[Piece]
    constants: dict[int, jax.Array]
    arguments: list[int]
    results: list[int]
    shapes: list[Shape]

    def run(self, arguments: Sequence[jax.Array]) -> list[jax.Array]:
        """Call them all."""
        arrays = {**self.constants, **dict(zip(self.arguments, arguments, strict=True))}
        before: list[jax.Array] = []
        for function, numbers, results, last, called in self.pieces:
            found = function(*(arrays[i] for i in numbers))
            arrays.update(zip(results, found, strict=True))
            for i in last:
                arrays.pop(i, None)
            if called:
                # XLA's CPU backend gives a program its memory when it is dispatched: so not to all of them at once.
                jax.block_until_ready([x for x in before if not x.is_deleted()])
                before = found
        return [arrays[i] for i in self.results]

    def compile(self) -> None:
        """Compile what is not compiled yet."""
        for piece in {piece.function: piece for piece in self.pieces}.values():
            piece.function.lower(*(self.shapes[i] for i in piece.arguments)).compile()


class in_pieces:
    """A jitted function, called in pieces where its weights are on one CPU, and large.

    Small ones, of which several run side by side, keep their program: the host would be at work between the pieces.
    Threads that call it are let in one after another, as by `streams.shared`.

    Args:
      function: whose calls of a jitted function named `CALLED` become pieces.
      weights: its positional arguments → the weights.
      static: as `static_argnames` of `jax.jit`.
      donate: how many of the first positional arguments are consumed.

    Example:
      >>> @functools.partial(in_pieces, weights=lambda x: x, static=("n",))
      ... def power(x, *, n):
      ...     return x**n
      >>> power(jnp.arange(3), n=2).tolist()
      [0, 1, 4]
    """

    def __init__(
        self,
        function: Callable[..., object],
        *,
        weights: Callable[..., Params],
        static: Sequence[str] = (),
        donate: int = 0,
    ):
        self._weights, self._static, self._donate, self._lock = weights, static, donate, threading.Lock()
        self._jitted = jax.jit(function, static_argnames=tuple(static), donate_argnums=tuple(range(donate)))
        self._known: dict[ClosedJaxpr, Pieces] = {}
        functools.update_wrapper(self, function)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        with self._lock:
            if not is_large_on_cpu(self._weights(*args)):
                return _called(self._jitted, args, kwargs)
            pieces, leaves, result = self._cut(args, kwargs)
            return jax.tree.unflatten(result, pieces.run(leaves))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._jitted, name)  # `lower`: the whole program, of which XLA can say what it holds

    def compile(self, *args: object, **kwargs: object) -> None:
        """Compile what a call would, for arguments of these shapes."""
        if is_large_on_cpu(self._weights(*args)):
            self._cut(args, kwargs)[0].compile()
        else:
            _called(self._jitted.lower, args, kwargs).compile()

    def _cut(
        self, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[Pieces, list[jax.Array], jax.tree_util.PyTreeDef]:
        """The pieces for such arguments, these one by one, and the structure of the result."""
        traced = _called(self._jitted.trace, args, kwargs)
        leaves = jax.tree.leaves((args, {name: x for name, x in kwargs.items() if name not in self._static}))
        if traced.jaxpr not in self._known:
            place = next((x.sharding for x in leaves if isinstance(x, jax.Array | Shape)), None)
            self._known[traced.jaxpr] = cut_at_calls(traced.jaxpr, len(jax.tree.leaves(args[: self._donate])), place)
        return self._known[traced.jaxpr], leaves, jax.tree.structure(traced.out_info)


def _called(function: Callable[..., Result], args: tuple[object, ...], kwargs: dict[str, object]) -> Result:
    return function(*args, **kwargs)


def is_large_on_cpu(weights: Params) -> bool:
    """Whether weights, or their shapes with their places, are on one CPU, and more than its cache may hold."""
    leaves = [x for x in jax.tree.leaves(weights) if isinstance(x, jax.Array | Shape)]
    if any(isinstance(x, jax.core.Tracer) for x in leaves):
        return False
    devices = {device for x in leaves if x.sharding is not None for device in x.sharding.device_set}
    if len(devices) > 1 or platform_of([*devices])[0] != "cpu":
        return False
    return sum(x.size * x.dtype.itemsize for x in leaves) > CACHED


class _Draft(NamedTuple):
    """A piece before it is known what may be let go after it."""

    jaxpr: ClosedJaxpr
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    called: bool


class _Arrays:
    """The arrays of a program by numbers."""

    def __init__(self, place: jax.sharding.Sharding | None):
        self.numbers: dict[Var, int] = {}
        self.shapes: list[Shape] = []
        self.constants: dict[int, jax.Array] = {}
        self._place = place

    def new(self, x: Var | Literal) -> int:
        """The number of a new array."""
        number, like = len(self.shapes), jax.typeof(x.val) if isinstance(x, Literal) else cast(ShapedArray, x.aval)
        weak = getattr(like, "weak_type", False)  # those of keys have none
        self.shapes.append(Shape(like.shape, like.dtype, sharding=self._place, weak_type=weak))
        if isinstance(x, Literal):
            self.constants[number] = jnp.asarray(x.val)
        else:
            self.numbers[x] = number
        return number

    def of(self, x: Var | Literal) -> int:
        """The number of an array; a literal gets one."""
        return self.new(x) if isinstance(x, Literal) else self.numbers[x]


def cut_at_calls(program: ClosedJaxpr, consumed: int, place: jax.sharding.Sharding | None = None) -> Pieces:
    """The pieces of a program.

    Args:
      program: whose calls of `CALLED` become pieces.
      consumed: how many of its first arguments are donated.
      place: where its arrays are; None: where JAX puts them.
    """
    jaxpr, _ = dce_jaxpr(program.jaxpr, [True] * len(program.jaxpr.outvars), instantiate=True)
    arrays = _Arrays(place)
    arrays.constants |= {arrays.new(x): value for x, value in zip(jaxpr.constvars, program.consts, strict=True)}
    arguments = [arrays.new(x) for x in jaxpr.invars]
    drafts = [
        _call(steps[0], arrays) if _is_call(steps[0]) else _between(steps, jaxpr, arrays) for steps in _stages(jaxpr)
    ]
    results = [arrays.of(x) for x in jaxpr.outvars]
    owned = {*arguments[:consumed], *(i for draft in drafts for i in draft.results)}
    return Pieces(_finished(drafts, results, owned, arrays.shapes), arrays.constants, arguments, results, arrays.shapes)


def _is_call(step: JaxprEqn) -> bool:
    return step.params.get("name") == CALLED


def _stages(jaxpr: Jaxpr) -> list[list[JaxprEqn]]:
    """The steps of a jaxpr by their pieces: each call alone, the others together before, between and after calls."""
    ready: dict[Var, int] = {}  # the stage that an array is there from; calls have odd stages
    at: dict[int, int] = {}  # the stages of steps that depend on a call
    calls = 0
    for i, step in enumerate(jaxpr.eqns):
        there = [ready[x] for x in step.invars if isinstance(x, Var) and x in ready]
        if _is_call(step):
            at[i], calls = 2 * calls + 1, calls + 1
            ready |= dict.fromkeys(step.outvars, 2 * calls)
        elif there:
            at[i] = max(there)
            ready |= dict.fromkeys(step.outvars, max(there))
    needed = {x: 2 * calls for x in jaxpr.outvars if isinstance(x, Var)}
    for i, step in reversed([*enumerate(jaxpr.eqns)]):
        if i not in at:  # the others come right before the call that needs them first
            at[i] = min((needed[x] for x in step.outvars if x in needed), default=0) // 2 * 2
        for x in step.invars:
            if isinstance(x, Var):
                needed[x] = min(at[i], needed.get(x, at[i]))
    stages: dict[int, list[JaxprEqn]] = {}
    for i, step in enumerate(jaxpr.eqns):
        stages.setdefault(at[i], []).append(step)
    return [stages[stage] for stage in sorted(stages)]


def _call(step: JaxprEqn, arrays: _Arrays) -> _Draft:
    """The piece of a call. A result that is one of its arguments, or another result, is no array of its own."""
    jaxpr, own, same = _own_results(step.params["jaxpr"])
    arguments = tuple(map(arrays.of, step.invars))
    results = tuple(arrays.new(step.outvars[i]) for i in own)
    for i, j in same.items():
        arrays.numbers[step.outvars[i]] = (arguments + results)[j]
    return _Draft(jaxpr, arguments, results, called=True)


@functools.lru_cache(maxsize=256)
def _own_results(called: ClosedJaxpr) -> tuple[ClosedJaxpr, list[int], dict[int, int]]:
    """A jaxpr with the results that are new; which these are, and which of its arguments and of them each other is."""
    jaxpr, own, same = merged(called.jaxpr), list[int](), dict[int, int]()
    places = {x: i for i, x in enumerate(jaxpr.invars)}
    for i, x in enumerate(jaxpr.outvars):
        if isinstance(x, Var) and x in places:
            same[i] = places[x]
            continue
        if isinstance(x, Var):
            places[x] = len(jaxpr.invars) + len(own)
        own.append(i)
    return ClosedJaxpr(_nameless(jaxpr.replace(outvars=[jaxpr.outvars[i] for i in own])), called.consts), own, same


def _nameless(jaxpr: Jaxpr) -> Jaxpr:
    """A jaxpr without the names of its arguments and results, where these are others now."""
    return jaxpr.replace(debug_info=jaxpr.debug_info._replace(arg_names=None, result_paths=None))


def merged(jaxpr: Jaxpr) -> Jaxpr:
    """A jaxpr in which nothing is computed twice.

    As XLA would have it; but results of a program are arrays each, and projections of one input all keep it for the way
    back.
    """
    same: dict[Var, Var] = {}
    known: dict[Hashable, list[Var]] = {}
    steps = []
    for step in jaxpr.eqns:
        arguments = [x if isinstance(x, Literal) else same.get(x, x) for x in step.invars]
        before = known.setdefault(_key(step, [x if isinstance(x, Var) else _value(x) for x in arguments]), step.outvars)
        if before is step.outvars or step.effects:
            steps.append(step.replace(invars=arguments))
        else:
            same |= dict(zip(step.outvars, before, strict=True))
    outvars = [x if isinstance(x, Literal) else same.get(x, x) for x in jaxpr.outvars]
    return _nameless(jaxpr.replace(outvars=outvars, eqns=steps))


def _between(steps: list[JaxprEqn], jaxpr: Jaxpr, arrays: _Arrays) -> _Draft:
    """The piece of steps before, between or after calls."""
    inside = {id(step) for step in steps}
    made = {x for step in steps for x in step.outvars}
    wanted = {x for step in jaxpr.eqns if id(step) not in inside for x in step.invars if isinstance(x, Var)}
    wanted |= {x for x in jaxpr.outvars if isinstance(x, Var)}
    arguments = dict.fromkeys(x for step in steps for x in step.invars if isinstance(x, Var) and x not in made)
    results = [x for step in steps for x in step.outvars if x in wanted]
    piece = _same_piece(_nameless(jaxpr.replace(constvars=[], invars=[*arguments], outvars=results, eqns=steps)))
    return _Draft(piece, tuple(map(arrays.of, arguments)), tuple(map(arrays.new, results)), called=False)


_pieces: dict[Hashable, ClosedJaxpr] = {}


def _same_piece(jaxpr: Jaxpr) -> ClosedJaxpr:
    """The jaxpr, or one of before that does the same: such as adding the gradient of another layer."""
    names: dict[Var, int] = {}

    def name(x: Var | Literal) -> Hashable:
        return _value(x) if isinstance(x, Literal) else names.setdefault(x, len(names))

    key: list[Hashable] = [(str(x.aval), getattr(x.aval, "weak_type", False), name(x)) for x in jaxpr.invars]
    key += [_key(step, [*map(name, step.invars), *map(name, step.outvars)]) for step in jaxpr.eqns]
    return _pieces.setdefault((*key, *map(name, jaxpr.outvars)), ClosedJaxpr(jaxpr, ()))


def _value(x: Literal) -> Hashable:
    return repr(x.val), str(x.aval), getattr(x.aval, "weak_type", False)


def _key(step: JaxprEqn, names: list[Hashable]) -> Hashable:
    """One key for steps that compute the same of arrays with the same names; of its own where that has no hash."""
    key = (step.primitive, tuple(sorted(step.params.items(), key=lambda item: item[0])), *names)
    try:
        hash(key)
    except TypeError:
        return object()
    return key


def _finished(drafts: list[_Draft], results: list[int], owned: set[int], shapes: list[Shape]) -> list[Piece]:
    """The pieces, and what is let go after each. Between calls, results take the memory of arguments that are let go.

    In calls they do not: the first and the last of a kind let go of others than the rest, and would be more programs.
    """
    needed, pieces = set(results), list[Piece]()
    for jaxpr, arguments, made, called in reversed(drafts):
        last = frozenset({*arguments, *made} - needed)
        # Those of the program first, whose numbers are lower: somebody else may still know them, and what no piece
        # consumes would stay.
        free = [] if called else sorted(i for i in {*arguments} if i in last and i in owned)
        reused = list[int]()
        for i in made:
            like = (shapes[i].shape, shapes[i].dtype)
            reused += [j for j in free if j not in reused and (shapes[j].shape, shapes[j].dtype) == like][:1]
        donated = tuple(k for k, i in enumerate(arguments) if i in reused)
        pieces.append(
            Piece(_jitted(jaxpr, donated, "layer_piece" if called else "other_piece"), arguments, made, last, called)
        )
        needed |= {*arguments}
    return pieces[::-1]


@functools.lru_cache(maxsize=1024)
def _jitted(jaxpr: ClosedJaxpr, donated: tuple[int, ...], name: str) -> Lowerable:
    def piece(*arguments: jax.Array) -> list[jax.Array]:
        return jaxpr_as_fun(jaxpr)(*arguments)

    piece.__name__ = name
    return jax.jit(piece, donate_argnums=donated)
