"""Values of settings, read and checked before an object of a settings class is made."""

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from grpo_jax.config.checks import batch_problems, contradictions
from grpo_jax.config.fields import (
    read,
    read_compute_dtype,
    read_json,
    read_mesh,
    read_scale,
    read_trackers,
    read_weights,
    unknown_field,
)
from grpo_jax.config.trl_fields import ELSEWHERE, OTHER_NAMES
from grpo_jax.messages import raise_all, show

# What people write who come from elsewhere, and what it is here.
MENDS = OTHER_NAMES | {name: field.advice for name, field in ELSEWHERE.items()}

_OWN_READERS: dict[str, Callable[[Any], tuple[Any, str]]] = {
    "compute_dtype": read_compute_dtype,
    "scale_rewards": read_scale,
    "reward_weights": read_weights,
    "chat_template_kwargs": read_json,
    "mesh": read_mesh,
    "report_to": read_trackers,
}

_Config = TypeVar("_Config")


class ReadFirst(type):
    """The type of a settings class whose values are read and checked before an object of it is made.

    The dataclass below it stays a plain one: its `__init__` gets values that are right, and sets each of them once.
    """

    def __call__(cls: type[_Config], *args: Any, **values: Any) -> _Config:
        """Make an object of the class, or raise one `ValueError` with a line for each unknown field and bad value."""
        if args:
            raise ValueError(
                f"{cls.__name__} takes its fields by keyword; for a dict use {cls.__name__}.from_dict(...)"
            )
        settings: Any = cls
        fields = {field.name: field for field in dataclasses.fields(settings)}
        problems = [unknown_field(name, set(fields), MENDS) for name in values if name not in fields]
        defaults = {name: field.default for name, field in fields.items() if field.default is not dataclasses.MISSING}
        values, bad = read_values(cls, defaults | {name: value for name, value in values.items() if name in fields})
        raise_all(cls.__name__, problems + bad)
        return type.__call__(cls, **values)

    @property
    def __signature__(cls) -> inspect.Signature:
        """The fields, for `help` and editors: `inspect` would show the `**values` of `__call__`."""
        settings: Any = cls
        return inspect.signature(functools.partial(settings.__init__, None))


@functools.cache
def _readers(cls: type) -> dict[str, Callable[[Any], tuple[Any, str]]]:
    """A reader for each field of the settings class under `cls`; what a subclass adds is kept as it is."""
    first: Any = next(base for base in reversed(cls.__mro__) if dataclasses.is_dataclass(base))
    return {field.name: functools.partial(read, field.type) for field in dataclasses.fields(first)} | _OWN_READERS


def read_values(cls: type, values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the values of fields as their plain Python types, and the error lines."""
    plain, problems, wrong = dict(values), [], set()
    for name, reader in _readers(cls).items():
        plain[name], fault = reader(values[name])
        if fault:
            wrong.add(name)
            problems.append(f"{name} = {show(values[name])}: {fault}")
    settings = types.SimpleNamespace(**plain)
    return plain, [*problems, *batch_problems(settings, wrong), *contradictions(settings, wrong)]
