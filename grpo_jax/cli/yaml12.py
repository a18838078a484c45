"""YAML with YAML 1.2 scalars: `1e-6` is a number, and `no` and `off` are strings. `None` is also null."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from grpo_jax.cli.keys import FIELDS
from grpo_jax.config.fields import read
from grpo_jax.messages import show
from grpo_jax.types import Json


class _Loader(yaml.SafeLoader):
    """Loader for YAML 1.2 scalars that rejects duplicate keys, of which PyYAML would use the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        keys = [key.value for key, _ in node.value]
        if duplicates := sorted({str(key) for key in keys if keys.count(key) > 1}):
            raise ValueError(f"duplicate keys: {', '.join(duplicates)}; keep only one of each")
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|None|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+", list("-+0123456789")),
    ("float", r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan", list("-+.0123456789")),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value))  # YAML 1.1 reads 010 as octal


def dump_yaml(values: Json) -> str:
    """Serialize a mapping to YAML, with one line per key. The values are written as JSON, which is valid YAML 1.2."""
    text = "".join(f"{name}: {json.dumps(value, ensure_ascii=False)}\n" for name, value in values.items())
    # In YAML, unlike in JSON, these characters are line breaks or not allowed.
    return re.sub("[\x7f-\x9f\u2028\u2029\ufeff]", lambda match: f"\\u{ord(match[0]):04x}", text)


def parse_value(name: str, text: str) -> Any:
    """Parse the value of key `name` as YAML. Unquoted strings and values of string keys are returned unchanged."""
    if name == "prompt" and not text.startswith("["):  # a colon in a template does not start a mapping
        return text
    try:
        value = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError):
        return text
    unquoted = isinstance(value, str) and text[0] not in "\"'"
    if unquoted or (value is None and text not in ("", "~", "null", "Null", "NULL", "None")):
        return text
    if name not in FIELDS:  # a directory or a model may be named 2024
        return text if isinstance(value, int | float) and name != "lora" else value
    kind = FIELDS[name].type
    return text if read(kind, value)[1] and not read(kind, text)[1] else value


def read_file(path: Path) -> dict[str, Any]:
    """Read a YAML file. Raises FileNotFoundError if it does not exist, and ValueError if it is not a YAML mapping."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file; pass the path of a YAML file or, to evaluate, a run directory")
    try:
        values = yaml.load(path.read_text(encoding="utf-8-sig"), _Loader)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: invalid UTF-8 or duplicate keys
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must contain a mapping, such as model: Qwen/Qwen3-0.6B; got {show(values)}")
    return {str(name): value for name, value in values.items()}
