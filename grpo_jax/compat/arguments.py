"""TRL's `GRPOConfig`: read, changed and dumped as a script does it, and translated each time."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax

from grpo_jax.compat.migrate import VLLMServer, from_trl
from grpo_jax.compat.trl_fields import ELSEWHERE, SAME
from grpo_jax.config import config as _config
from grpo_jax.messages import nearest
from grpo_jax.types import Json

_OURS = {field.name for field in dataclasses.fields(_config.GRPOConfig)}


class GRPOConfig:
    """TRL's `GRPOConfig`: its fields and ours, by keyword, and as attributes that may be set until a trainer has it.

    A field that was not given has TRL's default. `to_dict()` is TRL's: what `from_trl` takes.

    Attributes:
      config: the `grpo_jax.GRPOConfig` that it comes to.
      sampler: the server of `use_vllm=True, vllm_mode="server"`; None: the built-in sampler.
      dtype: of the params, by `model_init_kwargs`; "auto": that of the checkpoint; None: float32.

    Raises:
      ValueError: a field that means something in TRL and cannot be had here, each with what to do; a wrong value.
      AttributeError: a name that is no field.

    Example:
      >>> args = GRPOConfig(output_dir="out", num_generations=4, per_device_train_batch_size=4, use_vllm=True)
      >>> args.beta = 0.04
      >>> args.config.beta, args.learning_rate, args.eval_strategy, args.to_dict()["output_dir"]
      (0.04, 1e-06, 'no', 'out')
      >>> GRPOConfig(cache_implementation="paged", trackio_space_id="me/space")
      Traceback (most recent call last):
      ValueError: GRPOConfig asks for what is not here:
        trackio_space_id: open it by trackers.trackio(space_id=...) and pass the tracker to train, in callbacks
    """

    config: _config.GRPOConfig
    dtype: str | None
    sampler: VLLMServer | None
    _values: Json  # as they were given, by their names

    def __init__(self, output_dir: str | None = None, **values: Any):
        self._take({"output_dir": output_dir, **values})

    @classmethod
    def of(cls, config: _config.GRPOConfig) -> GRPOConfig:
        """Return the arguments that come to a config of the library, whose `sampler_correction` is obeyed as it is."""
        args = cls(use_vllm=True)
        vars(args)["config"] = config
        return args

    def _take(self, values: Json) -> None:
        """Translate values, all of them or none."""
        moved = from_trl(values)
        if moved.missing:
            lines = [f"{name}: {advice}" for name, advice in moved.missing.items()]
            raise ValueError("\n  ".join(["GRPOConfig asks for what is not here:", *lines]))
        vars(self).update(config=moved.config(), dtype=moved.dtype, sampler=moved.sampler, _values=values)

    def __getattr__(self, name: str) -> Any:
        values = vars(self).get("_values", {})
        if name in values:
            return values[name]
        if name in ELSEWHERE:
            return ELSEWHERE[name].default
        if name in _OURS and "config" in vars(self):
            return getattr(self.config, name)
        raise AttributeError(_unknown(name))

    def __setattr__(self, name: str, value: object) -> None:
        if name not in _OURS | ELSEWHERE.keys():
            raise AttributeError(_unknown(name))
        self._take({**self._values, name: value})

    def to_dict(self) -> Json:
        """Return all of TRL's fields with their values."""
        return {name: getattr(self, name) for name in (*SAME, *ELSEWHERE)}

    def to_json_string(self) -> str:
        """Return all of TRL's fields as JSON."""
        return json.dumps(self.to_dict(), indent=2, default=str)

    @property
    def world_size(self) -> int:
        """Processes of the run."""
        return jax.process_count()

    @property
    def process_index(self) -> int:
        """Number of this process."""
        return jax.process_index()

    def __repr__(self) -> str:
        values = [f"{name}={value!r}" for name, value in self._values.items() if value is not None]
        return f"GRPOConfig({', '.join(values)})"


def _unknown(name: str) -> str:
    """The message of a name that is no field."""
    close = nearest(name, _OURS | ELSEWHERE.keys())
    mend = f"did you mean {close}?" if close else "docs/coming_from_trl.md lists every field"
    return f"GRPOConfig (of TRL or grpo_jax) has no {name}: {mend}"
