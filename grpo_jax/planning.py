"""The programs of a run before there are weights or devices: their memory and FLOPs, by the compiler of the devices.

They are lowered for abstract shapes: no weight is read. Absent devices have a process of their own (`models.devices`).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import jax

from grpo_jax.config.sft import Config, SFTConfig, config_class
from grpo_jax.hub.families import read_config
from grpo_jax.hub.huggingface import ModelName, read_model
from grpo_jax.hub.quantize import without_quantization
from grpo_jax.hub.weights import Loading
from grpo_jax.messages import raise_all
from grpo_jax.models.devices import ENVIRONMENT, ProgramCost, Target, compile_program, compute_dtype, memory_of
from grpo_jax.models.lora import LoraModel
from grpo_jax.models.sharding import device_bytes, lower_call, make_mesh, placed_shapes, tree_sharding
from grpo_jax.models.transformer import Transformer
from grpo_jax.policy import Policy
from grpo_jax.rollout.programs import copies
from grpo_jax.run.memory import abstract_arrays, added_bytes, decide_checkpointing, rollout_call
from grpo_jax.run.placement import with_settings
from grpo_jax.run.prepare import derive_run
from grpo_jax.run.run import BaseRun, Run
from grpo_jax.run.sft import derive_sft
from grpo_jax.text.examples import Examples
from grpo_jax.text.prompts import EncodedPrompts
from grpo_jax.types import Batch, Json, Params
from grpo_jax.update.optimizer import make_optimizer
from grpo_jax.update.programs import update_calls
from grpo_jax.update.state import TrainState
from grpo_jax.watch.summary import short_number

_NO_ROWS = EncodedPrompts(rows=[{}], token_ids=[[]], dropped=[])
_NO_EXAMPLES = Examples(rows=[{}], token_ids=[[0, 0]], dropped=[], masks=[[False, True]], blocks=[[0]])


@dataclasses.dataclass(frozen=True)
class Plan:
    """Memory and FLOPs of a run's programs.

    Attributes:
      device: kind of the devices.
      devices: how many the mesh has.
      memory: bytes of one device; None if unknown.
      held: bytes on each device that stay during the whole run, by part: "base" (frozen, under adapters), "params",
        "master params", "optimizer", "reference", "old params", "initial params", and "policy" (the caller's params,
        unless they are donated).
      programs: the largest program of each phase: "rollout", a burst of the decode; "reference"; "update", one packed
        sequence.
      recomputes: whether the backward pass recomputes activations (`gradient_checkpointing`).
      note: what the plan does not count.
    """

    device: str
    devices: int
    memory: float | None
    held: dict[str, int]
    programs: dict[str, ProgramCost]
    recomputes: bool
    note: str = ""

    @property
    def peak(self) -> int:
        """Bytes on each device at the peak of the run."""
        return max(program.peak for program in self.programs.values())

    @property
    def fits(self) -> bool | None:
        """Whether the peak stays within the memory of a device; None if that is unknown."""
        return None if self.memory is None else self.peak <= self.memory

    def __str__(self) -> str:
        row = "{:<10} {:>10} {:>12} {:>10} {:>10} {:>12} {:>9}".format
        size = functools.partial(short_number, unit="B")
        held = " · ".join(f"{name} {size(x)}" for name, x in self.held.items())
        lines = [
            f"{self.devices} × {self.device}, activations {'recomputed' if self.recomputes else 'kept'}",
            f"held on each device: {held}",
            row("program", "arguments", "temporaries", "results", "peak", "FLOP a call", "compiled"),
        ]
        for name, x in self.programs.items():
            flops = "?" if math.isnan(x.flops) else short_number(x.flops, "")
            sizes = map(size, (x.arguments, x.temporaries, x.results, x.peak))
            lines.append(row(name, *sizes, flops, f"{x.seconds:.0f} s"))
        for name, x in self.programs.items():
            if x.collectives:
                told = " · ".join(f"{kind} {size(n)}" for kind, n in x.collectives.items())
                lines.append(f"between devices, {name}: {told}")
            if x.kernels:
                lines.append(f"kernels, {name}: " + " · ".join(f"{kind} × {n}" for kind, n in x.kernels.items()))
        if self.memory is not None:
            lines.append(f"{'fits' if self.fits else 'does not fit'} in {size(self.memory)} a device")
        return "\n".join([*([self.note] if self.note else []), *lines])


def programs(
    model: ModelName,
    config: Config,
    *,
    prompt_length: int | None = None,
    devices: Sequence[jax.Device],
    param_dtype: str = "float32",
    lora: int | Json | None = None,
    quantize: str | None = None,
) -> dict[str, jax.stages.Lowered]:
    """Lower the largest program of each phase that `train` would run on some devices.

    Devices without hardware will do (`models.devices`, `jax.experimental.topologies`): `compile()` then gives that
    machine's program, with its memory (`memory_analysis`) and its kernels (`as_text`). No weight is read.

    Args:
      model: name of a model on the hub, a directory, a config.json, or its content.
      config: of `train` or of `sft`; its mesh takes the first devices, as many as it needs.
      prompt_length: P, tokens that prompts are padded to; not used by `sft`, whose examples have `max_length` tokens.
      devices: of one platform.
      param_dtype: "float32" or "bfloat16", of the loaded params.
      lora: as in `hub.weights.Loading`; None trains all params.
      quantize: of the base, or None.

    Returns:
      "rollout", a burst of the decode (not of `sft`); "update", one packed sequence; with `beta` also "reference". All
      for completions that are T long.

    Raises:
      ValueError: a model or settings that make no sense, or too few devices.

    Example:
      >>> from grpo_jax import GRPOConfig
      >>> tiny = {"architectures": ["Qwen2ForCausalLM"], "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32,
      ...         "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
      >>> found = programs(tiny, GRPOConfig(max_completion_length=8), prompt_length=8, devices=jax.devices("cpu"))
      >>> sorted(found)
      ['rollout', 'update']
      >>> found["update"].compile().memory_analysis().temp_size_in_bytes > 0
      True
    """
    loading = Loading(param_dtype, lora, quantize)
    return AbstractRun.of(read_model(model), config, prompt_length, loading, devices).lowered()


def plan(
    model: ModelName,
    config: Config,
    *,
    prompt_length: int | None = None,
    device: str | None = None,
    memory: float | None = None,
    param_dtype: str = "float32",
    lora: int | Json | None = None,
    quantize: str | None = None,
    donate: bool = False,
) -> Plan:
    """Compile a run's programs and return the memory and FLOPs that they take.

    Args:
      model: as in `planning.programs`, as all arguments but the next three.
      config: of `train` or of `sft`.
      prompt_length: P, tokens.
      device: "H100", "H100-8", "v5e-8", … (`models.devices`), by a compiler that needs no hardware; None: the devices
        of this machine.
      memory: bytes of one device, by which the plan says whether the run fits; None: the device's own.
      param_dtype: "float32" or "bfloat16".
      lora: rank of adapters, or `rank` and `targets`; None trains all params.
      quantize: "nf4", "int8" or None.
      donate: as in `train`, which then does not hold the caller's params. `grpo-jax train` donates.

    Returns:
      A `Plan`, whose text is a table.

    Raises:
      ValueError: a model or settings that make no sense, too few devices, or a compiler that is not installed.

    Example:
      >>> from grpo_jax import GRPOConfig
      >>> model = {"architectures": ["Qwen2ForCausalLM"], "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32,
      ...          "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
      >>> sorted(plan(model, GRPOConfig(max_completion_length=8), prompt_length=8).programs)
      ['rollout', 'update']
    """
    raw, loading = read_model(model), Loading(param_dtype, lora, quantize)
    _check(raw, config, loading)
    needed = math.prod((config.mesh or {}).values())
    if device is None:
        if needed > jax.device_count():
            raise ValueError(
                f"config.mesh = {config.mesh} takes {needed} devices and {jax.device_count()} are here: name others"
                " with device, such as 'H100-8' or 'v5e-8'"
            )
        return _plan_on(jax.devices(), raw, config, prompt_length, loading, memory, donate=donate)
    target = Target.read(device)
    if needed > target.count:
        raise ValueError(f"device is {device!r}, and config.mesh = {config.mesh} takes {needed} of them")
    if target.missing:
        raise ValueError(f"device is {device!r}: its compiler is not installed; pip install {target.missing}")
    request: Json = {"model": raw, "config": config.to_dict(), "prompt_length": prompt_length, "device": device}
    request = {**request, "loading": dataclasses.asdict(loading), "memory": memory, "donate": donate}
    command, env = [sys.executable, "-m", "grpo_jax.planning"], os.environ | ENVIRONMENT
    done = subprocess.run(command, input=json.dumps(request), env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        ended = f", ended by signal {-done.returncode}" if done.returncode < 0 else ""
        raise ValueError(f"the run could not be planned{ended}: {_last_error(done.stderr)}")
    fields = json.loads(done.stdout.splitlines()[-1])
    fields["programs"] = {phase: ProgramCost(*values) for phase, values in fields["programs"].items()}
    return Plan(**fields)


def _answer(text: str) -> str:
    """The plan that a request of `plan` asks for, both as JSON."""
    fields = json.loads(text)
    target, config = Target.read(fields["device"]), config_class(fields["config"]).from_dict(fields["config"])
    found = _plan_on(
        target.devices(),
        fields["model"],
        config,
        fields["prompt_length"],
        Loading(**fields["loading"]),
        target.memory if fields["memory"] is None else fields["memory"],
        donate=fields["donate"],
        kind=target.kind,
    )
    return json.dumps({**vars(found), "programs": {phase: [*cost] for phase, cost in found.programs.items()}})


def _last_error(stderr: str) -> str:
    """The line of a traceback that says what went wrong; a compiler's message has many more lines."""
    lines = stderr.strip().splitlines() or ["no message on standard error"]
    return ([line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit|Interrupt)\b", line)] or lines)[-1]


def _check(raw: Json, config: Config, loading: Loading) -> None:
    """Raise a `ValueError` for a model or settings that `train` would refuse on the devices of the mesh."""
    devices = math.prod((config.mesh or {}).values())
    raise_all("this plan", list(config.device_problems(devices)))
    loading.check(raw)


@dataclasses.dataclass(frozen=True)
class AbstractRun:
    """A run by the shapes of its arrays, each with its sharding on the mesh.

    Attributes:
      run: as `prepare` derives it, or `prepare_sft`.
      mesh: of one device or several.
      state: at the first step.
      base: frozen params under adapters; None where all params are trained.
      batch: of one update.
    """

    run: BaseRun
    mesh: jax.sharding.Mesh
    state: TrainState
    base: Params | None
    batch: Batch

    @classmethod
    def of(
        cls,
        raw: Json,
        config: Config,
        prompt_length: int | None,
        loading: Loading,
        devices: Sequence[jax.Device],
        memory: float | None = None,
    ) -> AbstractRun:
        """The run of a config.json and a config on the first of some devices.

        Args:
          memory: bytes of a device, which decide about `gradient_checkpointing=None`; None: activations are recomputed.
        """
        _check(raw, config, loading)
        mesh = make_mesh(config.mesh or {}, devices)
        on = list(mesh.devices.flat)
        config = dataclasses.replace(config, compute_dtype=compute_dtype(config.compute_dtype, on))
        decoder = Transformer(read_config(without_quantization(raw), dtype=config.compute_dtype))
        params, base = loading.params(decoder.config)
        params, base = placed_shapes((params, base), tree_sharding((params, base), mesh))
        model = with_settings(decoder if base is None else LoraModel(base, decoder), config, on, mesh)
        policy, optimizer = Policy(model, params, config=raw), make_optimizer(config, 1000)
        run: BaseRun
        if isinstance(config, SFTConfig):
            if config.max_length is None:
                raise ValueError(
                    "max_length = None: give the tokens of the longest example, by which the run is planned."
                )
            context = decoder.config.max_position_embeddings
            run = derive_sft(
                *(policy, config, _NO_EXAMPLES),
                mesh=mesh,
                longest=config.max_length,
                context=context,
                optimizer=optimizer,
            )
        elif prompt_length is None:
            raise ValueError("prompt_length is missing: give the tokens that prompts are padded to.")
        else:
            made = derive_run(*(policy, config, _NO_ROWS), prompt_length=prompt_length, mesh=mesh, optimizer=optimizer)
            run = decide_checkpointing(made, memory)

        state, batch = abstract_arrays(run)
        return cls(run, mesh, state, base, batch)

    def lowered(self) -> dict[str, jax.stages.Lowered]:
        """The largest program of each phase."""
        calls = update_calls(self.run.updater, self.state, self.batch)
        rollout = rollout_call(self.run, self.state.params) if isinstance(self.run, Run) else None
        found = {"rollout": rollout, "update": calls.update, "reference": calls.score if self.run.config.beta else None}
        return {phase: lower_call(call) for phase, call in found.items() if call is not None}

    def held(self, *, donate: bool) -> dict[str, int]:
        """Bytes that stay on each device, by part."""
        state = self.state
        parts = {
            "base": self.base,
            "params": state.params,
            "master params": state.master_params,
            "optimizer": state.opt_state,
            "reference": state.ref_params,
            "old params": state.old_params,
            "initial params": state.initial_params,
            "policy": None if donate else state.params,
        }
        return {name: size for name, tree in parts.items() if (size := device_bytes(tree, self.mesh))}

    def added(self, phase: str, cost: ProgramCost) -> int:
        """Bytes that a phase adds on each device to those that stay."""
        own = device_bytes((self.state.params, self.base), self.mesh)
        if phase == "reference":
            return cost.temporaries
        if phase == "rollout":  # the decode is given rounded copies of some params, which stay
            kept, given = (_bytes(tree) for tree in copies(self.run.policy.model, self.state.params))
            return max(given, cost.arguments - own + kept) + cost.temporaries
        return added_bytes(self.run, self.state, self.batch, cost)


def _bytes(tree: Any) -> int:
    """Bytes on each device of shapes, by their shardings."""
    shapes = [(x.sharding.shard_shape(x.shape) if x.sharding else x.shape, x) for x in jax.tree.leaves(tree)]
    return sum(math.prod(shape) * x.dtype.itemsize for shape, x in shapes)


def _plan_on(
    devices: Sequence[jax.Device],
    raw: Json,
    config: Config,
    prompt_length: int | None,
    loading: Loading,
    memory: float | None,
    *,
    donate: bool,
    kind: str | None = None,
) -> Plan:
    """The plan of a run on devices for which this process can compile."""
    memory = memory_of(devices[0]) if memory is None else memory
    run = AbstractRun.of(raw, config, prompt_length, loading, devices, memory)
    held, found = run.held(donate=donate), {}
    own = device_bytes((run.state.params, run.base), run.mesh)
    for phase, lowered in run.lowered().items():
        cost = compile_program(lowered, own)
        found[phase] = cost._replace(peak=sum(held.values()) + run.added(phase, cost))
    coef = run.run.config.distillation_coef
    note = (
        "" if not coef else (f"distillation_coef = {coef}: the teacher's params and its forward passes are not counted")
    )
    recomputes = bool(run.run.config.gradient_checkpointing)
    return Plan(kind or devices[0].device_kind, run.mesh.size, memory, held, found, recomputes, note)


if __name__ == "__main__":
    print(_answer(sys.stdin.read()))
