"""Memory and FLOPs of a run before there are weights or devices, by the compiler of the devices.

The programs are lowered for abstract arrays, so no weight is read. For devices that are not here (`models.devices`), a
process of its own compiles them.
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
from collections.abc import Callable, Sequence
from typing import Any

import jax

from grpo_jax.config.config import GRPOConfig
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
from grpo_jax.run.run import BaseRun
from grpo_jax.run.sft import derive_sft
from grpo_jax.text.examples import Examples
from grpo_jax.text.prompts import EncodedPrompts
from grpo_jax.types import Batch, Json, Params
from grpo_jax.update.programs import update_calls
from grpo_jax.update.state import TrainState
from grpo_jax.watch.summary import short_number


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
        lines = [
            f"{self.devices} × {self.device}, activations {'recomputed' if self.recomputes else 'kept'}",
            "held on each device: " + " · ".join(f"{name} {size(x)}" for name, x in self.held.items()),
            row("program", "arguments", "temporaries", "results", "peak", "FLOP a call", "compiled"),
        ]
        for name, x in self.programs.items():
            flops = "?" if math.isnan(x.flops) else short_number(x.flops, "")
            held = size(x.arguments), size(x.temporaries), size(x.results), size(x.peak)
            lines.append(row(name, *held, flops, f"{x.seconds:.0f} s"))
        for name, x in self.programs.items():
            if x.collectives:
                sent = " · ".join(f"{kind} {size(n)}" for kind, n in x.collectives.items())
                lines.append(f"between devices, {name}: {sent}")
            if x.kernels:
                lines.append(f"kernels, {name}: " + " · ".join(f"{kind} × {n}" for kind, n in x.kernels.items()))
        if self.memory is not None:
            lines.append(f"{'fits' if self.fits else 'does not fit'} in {size(self.memory)} a device")
        return "\n".join([self.note, *lines] if self.note else lines)


def programs(
    model: ModelName,
    config: Config,
    *,
    prompt_length: int | None = None,
    devices: Sequence[jax.Device],
    param_dtype: str = "float32",
) -> dict[str, jax.stages.Lowered]:
    """Lower the largest program of each phase that `train` or `sft` would run on some devices.

    The devices may be absent (`models.devices`, `jax.experimental.topologies`): `compile()` then returns that machine's
    program, with its memory (`memory_analysis`) and its kernels (`as_text`). No weight is read.

    Args:
      model: name of a model on the hub, a directory, a config.json, or its content.
      config: of `train` or of `sft`; its mesh takes the first devices, as many as it needs.
      prompt_length: P, tokens that prompts are padded to; not used by `sft`, whose examples have `max_length` tokens.
      devices: of one platform.
      param_dtype: "float32" or "bfloat16", of the loaded params.

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
      >>> found["update"].compile().memory_analysis().temp_size_in_bytes > 0
      True
    """
    return AbstractRun.of(devices, read_model(model), config, prompt_length, Loading(param_dtype)).lowered()


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
      model: as in `planning.programs`.
      config: of `train` or of `sft`.
      prompt_length: P, tokens.
      device: "H100", "H100-8", "v5e-8", … (`models.devices`), by a compiler that needs no hardware; None: the devices
        of this machine.
      memory: bytes of one device, by which the plan says whether the run fits; None: the device's own.
      param_dtype: "float32" or "bfloat16".
      lora: rank of adapters, or `rank` and `targets`; None trains all params.
      quantize: of the base under adapters: "nf4", "int8" or None.
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
        memory = memory_of(jax.devices()[0]) if memory is None else memory
        run = AbstractRun.of(jax.devices(), raw, config, prompt_length, loading, memory)
        return run.plan(jax.devices()[0].device_kind, donate=donate)
    target = Target.read(device)
    if needed > target.count:
        raise ValueError(f"device is {device!r}, and config.mesh = {config.mesh} takes {needed} of them")
    if target.missing:
        raise ValueError(f"device is {device!r}: its compiler is not installed; pip install {target.missing}")
    request: dict[str, Any] = {
        "device": device,
        "model": raw,
        "config": config.to_dict(),
        "prompt_length": prompt_length,
    }
    request |= {"loading": dataclasses.astuple(loading), "memory": memory, "donate": donate}
    code = "import sys; from grpo_jax import planning; print(planning.answer(sys.stdin.read()))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(request),
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        ended = f", ended by signal {-done.returncode}" if done.returncode < 0 else ""
        raise ValueError(f"the run could not be planned{ended}: {_last_error(done.stderr)}")
    fields = json.loads(done.stdout.splitlines()[-1])
    fields["programs"] = {phase: ProgramCost(*values) for phase, values in fields["programs"].items()}
    return Plan(**fields)


def answer(request: str) -> str:
    """Return a plan for absent devices, in a process that compiles for them; request and plan are JSON."""
    fields = json.loads(request)
    target, config = Target.read(fields["device"]), config_class(fields["config"]).from_dict(fields["config"])
    memory = target.memory if fields["memory"] is None else fields["memory"]
    loading, length = Loading(*fields["loading"]), fields["prompt_length"]
    run = AbstractRun.of(target.devices(), fields["model"], config, length, loading, memory)
    return json.dumps(vars(run.plan(target.kind, donate=fields["donate"])))


def _last_error(stderr: str) -> str:
    """Return the line of a traceback that names the error; a compiler's message has many more lines."""
    lines = stderr.strip().splitlines() or ["no message on standard error"]
    return ([line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit|Interrupt)\b", line)] or lines)[-1]


def _check(raw: Json, config: Config, loading: Loading) -> None:
    """Raise a `ValueError` for a model or settings that `train` would refuse on the devices of the mesh."""
    raise_all("this plan", list(config.device_problems(math.prod((config.mesh or {}).values()))))
    loading.check(raw)


@dataclasses.dataclass(frozen=True)
class AbstractRun:
    """A run of `train` or `sft` by the shapes of its arrays, each with its sharding on the mesh.

    `memory` is in bytes of a device, None if unknown; `base` are the frozen params under adapters; `batch` is an
    update's; `rollout` is the largest call of the decode, None for `sft`.
    """

    run: BaseRun
    mesh: jax.sharding.Mesh
    memory: float | None
    state: TrainState
    base: Params | None
    batch: Batch
    rollout: functools.partial[object] | None

    @classmethod
    def of(
        cls,
        devices: Sequence[jax.Device],
        raw: Json,
        config: Config,
        prompt_length: int | None,
        loading: Loading,
        memory: float | None = None,
    ) -> AbstractRun:
        """Derive the run of a config.json and a config on the first of some devices."""
        _check(raw, config, loading)
        mesh = make_mesh(config.mesh or {}, devices)
        on = list(mesh.devices.flat)
        config = dataclasses.replace(config, compute_dtype=compute_dtype(config.compute_dtype, on))
        decoder = Transformer(read_config(without_quantization(raw), dtype=config.compute_dtype))
        params, base = loading.params(decoder.config)
        params, base = placed_shapes((params, base), tree_sharding((params, base), mesh))
        model = with_settings(decoder if base is None else LoraModel(base, decoder), config, on, mesh)
        run, rollout = _DERIVE[type(config)](Policy(model, params, config=raw), config, mesh, prompt_length, memory)
        state, batch = abstract_arrays(run)
        return cls(run, mesh, memory, state, base, batch, rollout)

    def lowered(self) -> dict[str, jax.stages.Lowered]:
        """Lower the largest program of each phase."""
        calls = update_calls(self.run.updater, self.state, self.batch)
        reference = calls.score if self.run.config.beta else None
        found = {"rollout": self.rollout, "update": calls.update, "reference": reference}
        return {phase: lower_call(call) for phase, call in found.items() if call is not None}

    def plan(self, device: str, *, donate: bool) -> Plan:
        """Compile the programs; `device` is the name of their kind."""
        config, held, costs = self.run.config, self.held(donate=donate), dict[str, ProgramCost]()
        own = device_bytes((self.state.params, self.base), self.mesh)
        for phase, lowered in self.lowered().items():
            cost = compile_program(lowered, own)
            costs[phase] = cost._replace(peak=sum(held.values()) + self.added(phase, cost))
        note = (
            f"distillation_coef = {config.distillation_coef}: the teacher's params and forward passes are not counted"
        )
        recomputes = bool(config.gradient_checkpointing)
        note = note if config.distillation_coef else ""
        return Plan(device, self.mesh.size, self.memory, held, costs, recomputes, note)

    def held(self, *, donate: bool) -> dict[str, int]:
        """Return the bytes that stay on each device, by part."""
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
        """Return the bytes that a phase adds on each device to those that stay."""
        if phase == "reference":
            return cost.temporaries
        if phase == "update":
            return added_bytes(self.run, self.state, self.batch, cost)
        # The decode is given rounded copies of some params, which stay.
        own = device_bytes((self.state.params, self.base), self.mesh)
        kept, given = (_shard_bytes(tree) for tree in copies(self.run.policy.model, self.state.params))
        return max(given, cost.arguments - own + kept) + cost.temporaries


def _shard_bytes(tree: Params) -> int:
    """Return the bytes of some shapes on each device, by their own shardings."""
    shapes = [(x.sharding.shard_shape(x.shape) if x.sharding else x.shape, x) for x in jax.tree.leaves(tree)]
    return sum(math.prod(shape) * x.dtype.itemsize for shape, x in shapes)


def _grpo_run(
    policy: Policy, config: GRPOConfig, mesh: jax.sharding.Mesh, prompt_length: int | None, memory: float | None
) -> tuple[BaseRun, functools.partial[object] | None]:
    if prompt_length is None:
        raise ValueError("prompt_length is missing: give the tokens that prompts are padded to.")
    rows = EncodedPrompts(rows=[{}], token_ids=[[]], dropped=[])
    run = decide_checkpointing(derive_run(policy, config, rows, prompt_length=prompt_length, mesh=mesh), memory)
    return run, rollout_call(run, policy.params)


def _sft_run(policy: Policy, config: SFTConfig, mesh: jax.sharding.Mesh, *_: object) -> tuple[BaseRun, None]:
    if config.max_length is None:
        raise ValueError("max_length = None: give the tokens of the longest example, by which the run is planned.")
    examples = Examples(rows=[{}], token_ids=[[0, 0]], dropped=[], masks=[[False, True]], blocks=[[0]])
    context = policy.model.config.max_position_embeddings
    return derive_sft(policy, config, examples, mesh=mesh, longest=config.max_length, context=context), None


_DERIVE: dict[type, Callable[..., tuple[BaseRun, functools.partial[object] | None]]] = {
    GRPOConfig: _grpo_run,
    SFTConfig: _sft_run,
}
