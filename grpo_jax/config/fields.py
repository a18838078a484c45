"""Conversion and validation of config fields based on their annotations.

An annotation is a built-in type, `Literal[...]`, `Annotated[float, In("(0, 1]", fix)]`, a union of these, or
`Annotated[..., reader]`, where `reader` is a function that converts and validates the value.
"""

import dataclasses
import json
import math
import numbers
from collections.abc import Callable, Mapping, Set
from types import NoneType, UnionType
from typing import Annotated, Literal, TypeVar, Union, get_args, get_origin

from grpo_jax.messages import nearest

_Default = TypeVar("_Default")


@dataclasses.dataclass(frozen=True)
class In:
    """Interval of allowed values, such as `"(0, 1]"`, and the fix to suggest for values outside it."""

    interval: str
    fix: str

    def error(self, value: float) -> str:
        """Return an error message if the value is outside the interval, otherwise ""."""
        low, high = (float(end) for end in self.interval[1:-1].split(","))
        with_low, with_high = self.interval[0] == "[", self.interval[-1] == "]"
        if (low < value or (with_low and value == low)) and (value < high or (with_high and value == high)):
            return ""
        bounds = [f"{'at least' if with_low else 'above'} {low:.12g}"]
        bounds += [f"{'at most' if with_high else 'below'} {high:.12g}"] * math.isfinite(high)
        return f"must be {' and '.join(bounds)}; {self.fix}"


Count = Annotated[int, In("[1, inf)", "use a positive integer")]
Positive = Annotated[float, In("(0, inf)", "use a positive number")]
NotNegative = Annotated[float, In("[0, inf)", "use 0 or a positive number")]
# Keys of `maths.surrogates.LOSS_TYPES`, repeated here because importing that module would import jax.
LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"]

Resume = Literal["free", "rounding", "length", "to none"]
"""How a setting may change when a run resumes. "free": to any value, since params do not depend on it. "rounding": if
iterations and updates keep their sizes, since batches are then only split differently. "length": if the number of steps
is unchanged or does not affect learning rates. "to none": only to "none", which would not have changed past steps."""


def setting(default: _Default, *, resume: Resume | None = None, hash: bool | None = None) -> _Default:
    """Return a dataclass field with a rule for changing it on resume. A `resume` of None forbids changes."""
    return dataclasses.field(default=default, hash=hash, metadata={"resume": resume})


def unknown_field(name: str, known: set[str], foreign: dict[str, str]) -> str:
    """Return the error message for an unknown field. `foreign` maps names from other libraries to advice."""
    close = nearest(name, known)
    fix = foreign.get(name) or (f"did you mean {close}?" if close else "leave it out")
    return f"{name}: no such field; {fix}"


def nearest_sizes(value: int, fits: Callable[[int], bool]) -> str:
    """Format the nearest smaller and larger valid sizes for an error message."""
    below = next((size for size in range(value - 1, 0, -1) if fits(size)), None)
    above = next((size for size in range(value + 1, 100 * value + 1000) if fits(size)), None)
    sizes = [str(size) for size in (below, above) if size is not None]
    return f"nearest valid value{'s' * (len(sizes) > 1)}: {' and '.join(sizes)}"


Read = tuple[object, str]
"""A value and an error message. If the value is valid, it has a built-in type, and the message is ""."""


def read(kind: object, value: object) -> Read:
    """Convert a value to the type given by an annotation. Returns the value, and an error message or ""."""
    if get_origin(kind) in (Union, UnionType):
        options = get_args(kind)
        results: list[Read] = [(None, "")] if value is None and NoneType in options else []
        results += [read(option, value) for option in options if option is not NoneType]
        errors = "; or ".join(error for _, error in results)
        return next((result for result in results if not result[1]), (value, errors))
    if get_origin(kind) is Literal:
        return _read_name(get_args(kind), value)
    if kind is bool:
        return value, "" if isinstance(value, bool) else "must be True or False"
    if kind is str:
        return value, "" if isinstance(value, str) else "must be a string"
    if get_origin(kind) is not Annotated:
        return _read_number(kind is int, None, value)
    kind, rule = get_args(kind)
    return _read_number(kind is int, rule, value) if isinstance(rule, In) else rule(value)


def _read_name(names: tuple[str, ...], value: object) -> Read:
    """Validate a value that must be one of `names`. The error message lists them and suggests the closest."""
    if isinstance(value, str) and value in names:
        return value, ""
    close = nearest(str(value).lower(), names, cutoff=0.5)
    hint = f"; did you mean '{close}'?" if close else ""
    return value, f"must be {' or '.join(map(repr, names))}{hint}".replace("'", '"')


def _read_number(is_integer: bool, bounds: In | None, value: object) -> Read:
    """Convert a number, which may be a NumPy scalar, to a Python int or float."""
    noun, with_article = ("integer", "an integer") if is_integer else ("number", "a number")
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return value, f"must be {with_article}, not {type(value).__name__}"
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        return value, f"must be a finite {noun}"
    error = bounds.error(number) if bounds else ""
    if not is_integer:
        return number, error
    if not isinstance(value, numbers.Integral):
        return value, "must be an integer, not float" + (f"; use {number:.0f}" if number == int(number) else "")
    if not error and number > 2**31 - 1 and (bounds is None or "inf" in bounds.interval):  # steps are counted in int32
        return value, "must be at most 2147483647"
    return int(value), error


NO_FLOAT16 = (
    "gradients below 6e-8 are 0 in float16, and loss scaling is not implemented; use bfloat16, which has the range"
    " of float32"
)


def read_dtype(value: object) -> Read:
    """Validate the name of a compute dtype."""
    if str(value) in ("float16", "fp16", "half"):
        return value, NO_FLOAT16
    return read(Literal["auto", "float32", "bfloat16"], value)


def read_scale(value: object) -> Read:
    """Convert `scale_rewards` to a name. True and False mean "group" and "none"."""
    name = value if not isinstance(value, bool) else "group" if value else "none"
    return read(Literal["group", "batch", "none"], name)


def read_weights(value: object) -> Read:
    """Convert reward weights to a tuple of floats."""
    if value is None:
        return None, ""
    if isinstance(value, str | Set | Mapping) or not hasattr(value, "__iter__"):
        return value, "must be a list with one number per reward function, or None for 1.0 each"
    results = [read(float, weight) for weight in value]
    errors = [f"weight {i} {error}" for i, (_, error) in enumerate(results) if error]
    return tuple(weight for weight, _ in results), "; ".join(errors)


def read_stop(value: object) -> Read:
    """Convert stop strings to a tuple, or to None if there are none."""
    listed = (value,) if isinstance(value, str) else value
    if listed is None or (isinstance(listed, list | tuple) and not listed):
        return None, ""
    if not isinstance(listed, list | tuple) or not all(isinstance(text, str) and text for text in listed):
        return value, "must be a non-empty string, a list of such strings, or None"
    return tuple(dict.fromkeys(listed)), ""


def read_token_ids(value: object) -> Read:
    """Convert token ids to a tuple, or to None if there are none."""
    value = value.tolist() if hasattr(value, "tolist") else value  # NumPy
    listed = (value,) if isinstance(value, int) else value
    if listed is None or (isinstance(listed, list | tuple) and not listed):
        return None, ""
    if not isinstance(listed, list | tuple):
        return value, "must be a list of token ids, or None"
    results = [read(Annotated[int, In("[0, inf)", "token ids start at 0")], index) for index in listed]
    errors = [f"the id at index {i} {error}" for i, (_, error) in enumerate(results) if error]
    return tuple(dict.fromkeys(index for index, _ in results)), "; ".join(errors)


def read_keywords(value: object) -> Read:
    """Return a copy of a JSON-serializable dict."""
    if value is None:
        return None, ""
    error = "must be a dict with string keys and JSON values, or None"
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        return value, error
    try:
        return json.loads(json.dumps(value, allow_nan=False)), ""
    except (TypeError, ValueError):
        return value, error


def read_mesh(value: object) -> Read:
    """Validate mesh axes and their sizes."""
    if value is None:
        return None, ""
    if not isinstance(value, dict) or not value or not {"data", "fsdp", "tensor"}.issuperset(value):
        return value, 'must be a dict with the number of devices for any of "data", "fsdp" and "tensor", or None'
    results = {name: read(Count, size) for name, size in value.items()}
    errors = [f"{name} {error}" for name, (_, error) in results.items() if error]
    return {name: size for name, (size, _) in results.items()}, "; ".join(errors)


def read_trackers(value: object) -> Read:
    """Validate tracker names. Returns "none", "all" or one name as a string, and several names as a tuple."""
    names = ("tensorboard", "wandb", "trackio")
    listed = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list | tuple) else (value,)
    if listed in ((), (None,), ("none",)):
        return "none", ""
    if listed == ("all",) or all(name in names for name in listed):
        return listed[0] if len(listed) == 1 else listed, ""
    known = ", ".join(map(repr, names)).replace("'", '"')
    return value, f'must be {known}, a list of these, "all" or "none"; use callbacks for other trackers'
