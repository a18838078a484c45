"""The compiler's estimates of a run's memory and FLOPs, which require neither weights nor devices.

For devices that are not available on this machine (`models.devices`), programs are compiled in a separate process.
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

import jax

from grpo_jax.config.config import GRPOConfig
from grpo_jax.config.sft import GRPOOrSFTConfig, SFTConfig, config_class
from grpo_jax.hub.families import read_config
from grpo_jax.hub.huggingface import ModelName, read_model
from grpo_jax.hub.quantize import without_quantization
from grpo_jax.hub.vision import ARCHITECTURES
from grpo_jax.hub.weights import Loading
from grpo_jax.models.devices import ENVIRONMENT, ProgramCost, Target, compile_program, compute_dtype, memory_of
from grpo_jax.models.lora import LoraModel
from grpo_jax.models.sharding import device_bytes, lower_call, make_mesh, placed_shapes, tree_sharding
from grpo_jax.models.transformer import Transformer
from grpo_jax.policy import Policy
from grpo_jax.rollout.decode_weights import copies
from grpo_jax.run.memory import abstract_arrays, added_bytes, decide_checkpointing, rollout_call, update_calls
from grpo_jax.run.placement import with_settings
from grpo_jax.run.prepare import derive_run
from grpo_jax.run.run import BaseRun, Run
from grpo_jax.run.sft import derive_sft
from grpo_jax.text.examples import Examples
from grpo_jax.text.prompts import EncodedPrompts
from grpo_jax.types import Batch, Json
from grpo_jax.update.state import TrainState
from grpo_jax.watch.summary import short_number


@dataclasses.dataclass(frozen=True)
class Plan:
    """Memory and FLOPs for a run's programs.

    Attributes:
      device: device kind.
      devices: number of devices in the mesh.
      memory: memory of one device in bytes, or None if unknown.
      held: number of bytes per device in use during the whole run, keyed by part: "base" (the adapters' frozen
        base model), "params", "master params", "optimizer", "reference", "old params", "initial params" and "policy"
        (the caller's params, unless donated).
      programs: cost of each phase's largest program: "rollout" (one decoding call), "reference", and "update" (one
        packed sequence).
      recomputes: whether the backward pass recomputes activations (`gradient_checkpointing`).
      note: text that lists what the plan does not include, or an empty string.
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
        """Peak memory of the run per device, in bytes."""
        return max(program.peak for program in self.programs.values())

    @property
    def fits(self) -> bool | None:
        """Whether the peak fits in a device's memory, or None if the memory is unknown."""
        return None if self.memory is None else self.peak <= self.memory

    def __str__(self) -> str:
        row = "{:<10} {:>10} {:>12} {:>10} {:>10} {:>12} {:>9}".format
        size = functools.partial(short_number, unit="B")
        lines = [
            f"{self.devices} × {self.device}, activations {'recomputed' if self.recomputes else 'kept'}",
            "held per device: " + " · ".join(f"{name} {size(x)}" for name, x in self.held.items()),
            row("program", "arguments", "temporaries", "results", "peak", "FLOPs/call", "compiled"),
        ]
        for name, x in self.programs.items():
            flops = "?" if math.isnan(x.flops) else short_number(x.flops, "")
            sizes = size(x.arguments), size(x.temporaries), size(x.results), size(x.peak)
            lines.append(row(name, *sizes, flops, f"{x.seconds:.0f} s"))
        if self.memory is not None:
            lines.append(f"{'fits' if self.fits else 'does not fit'} in {size(self.memory)} per device")
        return "\n".join([self.note, *lines] if self.note else lines)


def programs(
    model: ModelName,
    config: GRPOOrSFTConfig,
    *,
    prompt_length: int | None = None,
    devices: Sequence[jax.Device],
    param_dtype: str = "float32",
) -> dict[str, jax.stages.Lowered]:
    """Lower the largest program of each phase that `train` or `sft` would run on the given devices.

    The devices may be absent (`models.devices`, `jax.experimental.topologies`). `compile()` then returns the program
    for that hardware, with its memory (`memory_analysis`) and its kernels (`as_text`). No weights are read.

    Args:
      model: name of a model on the Hub, path of a directory or config.json, or the content of a config.json.
      config: config for `train` or `sft`. Its mesh uses as many of the first devices as it needs.
      prompt_length: P, length of padded prompts in tokens. Not used for `sft`, whose examples have `max_length` tokens.
      devices: devices, all on one platform.
      param_dtype: dtype of the loaded params, "float32" or "bfloat16".

    Returns:
      Lowered programs, keyed by phase: "update" (one packed sequence), for `train` also "rollout" (one call of the
      decoding program), and if `beta` > 0 also "reference". All completions have the full length T.

    Raises:
      ValueError: if the model or the settings are invalid, or if there are too few devices.

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
    config: GRPOOrSFTConfig,
    *,
    prompt_length: int | None = None,
    device: str | None = None,
    memory: float | None = None,
    param_dtype: str = "float32",
    lora: int | Json | None = None,
    quantize: str | None = None,
    donate: bool = False,
) -> Plan:
    """Compile a run's programs for prompts without images, and report the memory and FLOPs that they need.

    Args:
      model: model, as in `planning.programs`.
      config: config for `train` or `sft`.
      prompt_length: P, length of padded prompts in tokens.
      device: device type to compile for, which need not be available, such as "H100", "H100-8" or "v5e-8"
        (`models.devices`). If None, this machine's devices are used.
      memory: memory of one device in bytes, used to decide whether the run fits. If None, the device's memory is used.
      param_dtype: dtype of the loaded params, "float32" or "bfloat16".
      lora: adapter rank, or a dict with `rank` and `targets`. If None, all params are trained.
      quantize: quantization of the adapters' base model: "nf4", "int8" or None.
      donate: whether the caller's params are donated, as in `train`. `grpo-jax train` always donates them.

    Returns:
      A `Plan`, which prints as a table.

    Raises:
      ValueError: if the model or settings are invalid, there are too few devices, or the compiler is not installed.

    Example:
      >>> from grpo_jax import GRPOConfig
      >>> model = {"architectures": ["Qwen2ForCausalLM"], "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32,
      ...          "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
      >>> sorted(plan(model, GRPOConfig(max_completion_length=8), prompt_length=8).programs)
      ['rollout', 'update']
    """
    raw, loading = read_model(model), Loading(param_dtype, lora, quantize)
    loading.check(raw)
    needed = math.prod((config.mesh or {}).values())
    if device is None:
        if needed > jax.device_count():
            raise ValueError(
                f"config.mesh = {config.mesh} needs {needed} devices, but this machine has {jax.device_count()}; set"
                " device to plan for other hardware, such as 'H100-8' or 'v5e-8'"
            )
        memory = memory_of(jax.devices()[0]) if memory is None else memory
        run = AbstractRun.of(jax.devices(), raw, config, prompt_length, loading, memory)
        return run.plan(jax.devices()[0].device_kind, donate=donate)
    target = Target.read(device)
    if needed > target.count:
        raise ValueError(
            f"config.mesh = {config.mesh} needs {needed} devices; got device = {device!r}. Use '{target.kind}-{needed}'"
        )
    if target.missing:
        raise ValueError(f"device = {device!r}: the compiler is not installed; run pip install {target.missing}")
    memory = target.memory if memory is None else memory
    request = device, raw, config.to_dict(), prompt_length, dataclasses.astuple(loading), memory, donate
    code = "import sys; from grpo_jax import planning; print(planning.answer(sys.stdin.read()))"
    command, environment = [sys.executable, "-c", code], os.environ | ENVIRONMENT
    done = subprocess.run(
        command, input=json.dumps(request), env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        signal = f" (signal {-done.returncode} ended the process)" if done.returncode < 0 else ""
        raise ValueError(f"device = {device!r}: the run could not be planned{signal}: {_last_error(done.stderr)}")
    fields = json.loads(done.stdout.splitlines()[-1])
    fields["programs"] = {phase: ProgramCost(*values) for phase, values in fields["programs"].items()}
    return Plan(**fields)


def answer(request: str) -> str:
    """Compute a plan for absent devices from a JSON request and return it as JSON. Called in a separate process."""
    device, raw, fields, prompt_length, loading, memory, donate = json.loads(request)
    target, config = Target.read(device), config_class(fields).from_dict(fields)
    run = AbstractRun.of(target.devices(), raw, config, prompt_length, Loading(*loading), memory)
    return json.dumps(vars(run.plan(target.kind, donate=donate)))


def _last_error(stderr: str) -> str:
    """Return the exception line from a traceback. Full compiler messages can be very long."""
    lines = stderr.strip().splitlines() or ["no message on standard error"]
    return ([line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit|Interrupt)\b", line)] or lines)[-1]


@dataclasses.dataclass(frozen=True)
class AbstractRun:
    """A run of `train` or `sft` with abstract arrays, which have shapes and shardings but no values."""

    run: BaseRun
    memory: float | None  # memory of a device in bytes, or None if unknown
    state: TrainState
    batch: Batch  # an update's batch
    rollout: functools.partial[object] | None  # largest decode program, or None for `sft`

    @classmethod
    def of(
        cls,
        devices: Sequence[jax.Device],
        raw: Json,
        config: GRPOOrSFTConfig,
        prompt_length: int | None,
        loading: Loading,
        memory: float | None = None,
    ) -> AbstractRun:
        """Build the run from the parsed config.json `raw`, on as many of the devices as `config.mesh` requires."""
        loading.check(raw)
        mesh = make_mesh(config.mesh or {}, devices)
        used = list(mesh.devices.flat)
        config = dataclasses.replace(config, compute_dtype=compute_dtype(config.compute_dtype, used))
        decoder = Transformer(read_config(without_quantization(raw), dtype=config.compute_dtype))
        params, base = loading.params(decoder.config)
        params, base = placed_shapes((params, base), tree_sharding((params, base), mesh))
        model = with_settings(decoder if base is None else LoraModel(base, decoder), config, used, mesh)
        policy = Policy(model, params, config=raw)
        run: BaseRun
        if isinstance(config, GRPOConfig):
            run = decide_checkpointing(_derive_run(policy, config, mesh, prompt_length), memory)
            rollout = rollout_call(run, params)
        else:
            run, rollout = _derive_sft(policy, config, mesh), None
        state, batch = abstract_arrays(run)
        return cls(run, memory, state, batch, rollout)

    def lowered(self) -> dict[str, jax.stages.Lowered]:
        """Lower the largest program of each phase."""
        calls = update_calls(self.run.updater, self.state, self.batch)
        reference = calls.score if self.run.config.beta else None
        phases = {"rollout": self.rollout, "update": calls.update, "reference": reference}
        return {phase: lower_call(call) for phase, call in phases.items() if call is not None}

    def plan(self, device: str, *, donate: bool) -> Plan:
        """Compile the programs and build the plan. `device` is the device kind that the plan reports."""
        config, mesh, held, costs = self.run.config, self.run.mesh, self.held(donate=donate), dict[str, ProgramCost]()
        for phase, lowered in self.lowered().items():
            cost = compile_program(lowered, self.run.param_bytes(self.state.params))
            costs[phase] = cost._replace(peak=sum(held.values()) + self.added(phase, cost))
        notes = ["the teacher's params and forward passes"] if config.distillation_coef else []
        if ARCHITECTURES.keys() & set(self.run.policy.config.get("architectures") or ()):
            notes.append("for prompts with images, the vision tower and the image features")
        note, recomputes = f"not included: {'; '.join(notes)}" if notes else "", bool(config.gradient_checkpointing)
        return Plan(device, mesh.size if mesh else 1, self.memory, held, costs, recomputes, note)

    def held(self, *, donate: bool) -> dict[str, int]:
        """Return the number of bytes per device in use during the whole run, keyed by part."""
        state = self.state
        parts = {
            "base": getattr(self.run.policy.model, "base", None),
            "params": state.params,
            "master params": state.master_params,
            "optimizer": state.opt_state,
            "reference": state.ref_params,
            "old params": state.old_params,
            "initial params": state.initial_params,
            "policy": None if donate else state.params,
        }
        return {name: size for name, tree in parts.items() if (size := device_bytes(tree))}

    def added(self, phase: str, cost: ProgramCost) -> int:
        """Return the number of bytes per device that a phase needs in addition to `held`."""
        if phase == "reference":
            return cost.temporaries
        if phase == "update":
            return added_bytes(self.run, self.state, self.batch, cost)
        # Decoding reads rounded copies of some params, while the params themselves remain in memory.
        originals, rounded = (device_bytes(tree) for tree in copies(self.run.policy.model, self.state.params))
        return max(rounded, cost.arguments - self.run.param_bytes(self.state.params) + originals) + cost.temporaries


def _derive_run(policy: Policy, config: GRPOConfig, mesh: jax.sharding.Mesh, prompt_length: int | None) -> Run:
    if prompt_length is None or prompt_length < 1:
        raise ValueError(
            f"prompt_length must be a positive integer, such as the longest prompt's length; got {prompt_length}."
        )
    rows = EncodedPrompts(rows=[{}], token_ids=[[]], dropped=[])
    return derive_run(policy, config, rows, prompt_length=prompt_length, mesh=mesh)


def _derive_sft(policy: Policy, config: SFTConfig, mesh: jax.sharding.Mesh) -> BaseRun:
    if config.max_length is None:
        raise ValueError("config.max_length = None: set it to the number of tokens in the longest example.")
    examples = Examples(rows=[{}], token_ids=[[0, 0]], dropped=[], masks=[[False, True]], blocks=[[0]])
    return derive_sft(policy, config, examples, mesh=mesh, longest=config.max_length)
