"""What of a TRL GRPO config carries over: printed, with the config that is left.

    python -m experiments.from_trl CONFIG.json

CONFIG.json holds one object: fields and values as in a script's `GRPOConfig(...)`, or the dict of a whole config, as
`json.dump(args.to_dict(), file)` writes it. Time: seconds. Standard output ends in the fields for `grpo_jax.GRPOConfig`
as one line of JSON; the exit status is 1 where something is not here.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from grpo_jax.compat.migrate import Migration, from_trl


def main(argv: Sequence[str] | None = None) -> Migration:
    """Read the file, print what becomes of it, and return that."""
    parser = argparse.ArgumentParser(prog="python -m experiments.from_trl", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("config", type=Path, help="JSON file with one object")
    path = parser.parse_args(argv).config
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError(f"it holds a {type(values).__name__}, and not an object")
        moved = from_trl(values)
        config = moved.config()
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path}: {error}") from error
    print(moved)
    print(json.dumps({name: getattr(config, name) for name in moved.values}))
    return moved


if __name__ == "__main__":
    raise SystemExit(1 if main().missing else 0)
