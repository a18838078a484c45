"""The fields of `GRPOConfig` whose values are read by functions of their own."""

import json
from typing import Annotated, Literal

from grpo_jax.config.fields import Count, In, Read, read

NO_FLOAT16 = (
    "gradients below 6e-8 are 0 in float16, which needs a loss scaled against that, and there is none here; use"
    " bfloat16, which has the range of float32"
)
"""Why float16 is not taken."""


def compute_dtype(value: object) -> Read:
    """Return the name of a dtype to compute in."""
    if str(value) in ("float16", "fp16", "half"):
        return value, NO_FLOAT16
    return read(Literal["auto", "float32", "bfloat16"], value)


def scale(value: object) -> Read:
    """Return the name of a scale of advantages; True and False stand for "group" and "none"."""
    name = value if not isinstance(value, bool) else "group" if value else "none"
    return read(Literal["group", "batch", "none"], name)


def weights(value: object) -> Read:
    """Return reward weights as a tuple of floats."""
    if value is None:
        return None, ""
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        return value, "must be a list with one number per reward function; or None for 1.0 each"
    results = [read(float, weight) for weight in value]
    faults = [f"weight {i} {fault}" for i, (_, fault) in enumerate(results) if fault]
    return tuple(weight for weight, _ in results), "; ".join(faults)


def stop(value: object) -> Read:
    """Return stop strings as a tuple; None for none."""
    listed = (value,) if isinstance(value, str) else value
    if listed is None or (isinstance(listed, list | tuple) and not listed):
        return None, ""
    if not isinstance(listed, list | tuple) or not all(isinstance(text, str) and text for text in listed):
        return value, "must be a text or a list of texts, none of them empty; or None"
    return tuple(dict.fromkeys(listed)), ""


def token_ids(value: object) -> Read:
    """Return token ids as a tuple; None for none."""
    listed = (value,) if isinstance(value, int) else value
    if listed is None or (isinstance(listed, list | tuple) and not listed):
        return None, ""
    if not isinstance(listed, list | tuple):
        return value, "must be a list of token ids; or None"
    results = [read(Annotated[int, In("[0, inf)", "ids are counted from 0")], index) for index in listed]
    faults = [f"id {i} {fault}" for i, (_, fault) in enumerate(results) if fault]
    return tuple(dict.fromkeys(index for index, _ in results)), "; ".join(faults)


def keywords(value: object) -> Read:
    """Return a copy of a dict that JSON can hold."""
    if value is None:
        return None, ""
    fault = "must be a dict of keywords that JSON can hold, or None"
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        return value, fault
    try:
        return json.loads(json.dumps(value, allow_nan=False)), ""
    except (TypeError, ValueError):
        return value, fault


def mesh(value: object) -> Read:
    """Return mesh axes and their sizes."""
    if value is None:
        return None, ""
    names = {"data", "fsdp", "tensor"}
    if not isinstance(value, dict) or not value or not names.issuperset(value):
        return value, 'must be a dict of devices along "data", "fsdp" and "tensor", or None'
    results = {name: read(Count, size) for name, size in value.items()}
    faults = [f"{name} {fault}" for name, (_, fault) in results.items() if fault]
    return {name: size for name, (size, _) in results.items()}, "; ".join(faults)


def trackers(value: object) -> Read:
    """Return names of trackers: "none", "all" or one as text, several as a tuple."""
    names = ("tensorboard", "wandb", "trackio")
    listed = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list | tuple) else (value,)
    if listed in ((), (None,), ("none",)):
        return "none", ""
    if listed == ("all",) or all(name in names for name in listed):
        return listed[0] if len(listed) == 1 else listed, ""
    known = ", ".join(map(repr, names)).replace("'", '"')
    return value, f'must be of {known}, a list of them, "all" or "none"; for another pass callbacks to train'
