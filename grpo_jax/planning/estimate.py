"""A run before there are weights or devices: bytes of each part, operations of each phase.

The programs of the run are compiled ahead of time for abstract shapes, on as many pretended CPU devices as the mesh
has, and XLA says what they hold on each. No weight is read. XLA fuses and pads otherwise on a GPU or TPU than on a CPU,
so temporaries are an estimate there; arguments (params, optimizer, cache) are exact.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence

import jax

from grpo_jax.config.sft import Config, SFTConfig, stored_config
from grpo_jax.models.bounds import state_bytes
from grpo_jax.planning.account import Account
from grpo_jax.planning.compiled import collectives, compile_program, kernels, last_error
from grpo_jax.planning.loaded import Loaded, Model, Taught, read_model
from grpo_jax.planning.report import Plan, most_that_fits
from grpo_jax.planning.targets import ENVIRONMENT, Target
from grpo_jax.types import Json

# LLVM's optimizer and the code for fusions change next to nothing in what a program holds (0.3 % at most, as measured),
# and take most of the time.
_FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
if jax.__version_info__ < (0, 11):  # then it is gone, and a flag that XLA does not know ends the process
    _FLAGS += " --xla_cpu_use_fusion_emitters=false"

UNREAD = "what {} exchanges and calls is not known: this jaxlib does not understand the program that the compiler wrote"
TAUGHT = (
    "distillation_coef = {}: no teacher is counted; unless a server has it, its params are held too, and its forward"
    " passes come on top (teacher)"
)


@dataclasses.dataclass(frozen=True)
class PlanRequest:
    """A run to be planned, as it goes to the process that plans it; fields as in `plan`.

    Attributes:
      model: the content of config.json.
    """

    model: Json
    config: Config
    prompt_length: int | None
    loaded: Loaded
    memory: float | None = None
    device: str | None = None
    largest: bool = True
    taught: Taught | None = None


def plan(
    model: Model,
    config: Config,
    *,
    prompt_length: int | None = None,
    memory: float | None = None,
    param_dtype: str = "float32",
    device: str | None = None,
    largest: bool = True,
    lora: int | Json | None = None,
    quantize: str | None = None,
    quantize_embeddings: bool = False,
    donate: bool = False,
    teacher: Model | None = None,
    teacher_quantize: str | None = None,
) -> Plan:
    """Compile a run's programs for abstract shapes, in a process of its own, and return what they need.

    Args:
      model: name of a model on the hub, a directory, a config.json, or what one holds.
      config: the settings, those of `train` or of `sft`, with `mesh` for several devices.
      prompt_length: P, tokens that prompts are padded to; not needed by `sft`, whose examples have `max_length` tokens.
      memory: bytes of a device, for what fits; None: those of `device`, if it is given.
      param_dtype: "float32" or "bfloat16", of the params as they are loaded.
      device: whose compiler is asked, such as "H100", "H100-8" or "v5e-8" (`targets`); needs the package that it comes
        in, and without it the plan is this CPU's account, and says so. None: this CPU's account.
      largest: whether the largest batch and the longest completion that fit are looked for, which compiles twice more.
      lora: rank of adapters on a frozen base, or `rank` and `targets` of `add_lora`; None: all params are trained.
      quantize: how that base is held, as in `from_pretrained`; None: plain, or in NF4 if bitsandbytes has stored it so.
      quantize_embeddings: as in `from_pretrained`.
      donate: as in `train`, which then holds no params of the caller's; so it is in `grpo-jax train`.
      teacher: the model that a run with `distillation_coef` learns from; None: none, or a server's, and the plan of
        such a run says that none is counted.
      teacher_quantize: how it is held, as in `from_pretrained`.

    Returns:
      A `Plan`.

    Raises:
      ValueError: a model or settings that make no sense.

    Example:
      >>> from grpo_jax import GRPOConfig
      >>> tiny = {"architectures": ["Qwen2ForCausalLM"], "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32,
      ...         "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
      >>> found = plan(tiny, GRPOConfig(max_completion_length=8, mesh={"fsdp": 2}), prompt_length=8)
      >>> found.devices, found.peak > found.held["params"]
      (2, True)
    """
    loaded = Loaded(param_dtype, lora, quantize, quantize_embeddings, donate)
    taught = None if teacher is None else Taught(read_model(teacher), teacher_quantize)
    request = PlanRequest(read_model(model), config, prompt_length, loaded, memory, device, largest, taught)
    loaded.check(request.model, config)
    if request.taught is not None:
        request.taught.check(config)
    target = None if device is None else Target.read(device)
    devices = math.prod((config.mesh or {}).values())
    if target is not None and devices > target.count:
        raise ValueError(f"device is {device!r}, and config.mesh = {config.mesh} takes {devices} of them")
    done = subprocess.run(
        [sys.executable, "-m", "grpo_jax.planning"],
        input=json.dumps({**dataclasses.asdict(request), "config": config.to_dict()}),
        env=os.environ | (_environment(config) if target is None or target.missing else ENVIRONMENT),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        ended = f", ended by signal {-done.returncode}" if done.returncode < 0 else ""
        raise ValueError(f"the run could not be planned{ended}: {last_error(done.stderr)}")
    found = json.loads(done.stdout.splitlines()[-1])
    return Plan(**found | {"programs": tuple(found["programs"])})


def programs(
    model: Model,
    config: Config,
    *,
    prompt_length: int | None = None,
    devices: Sequence[jax.Device],
    param_dtype: str = "float32",
    lora: int | Json | None = None,
    quantize: str | None = None,
    quantize_embeddings: bool = False,
) -> dict[str, jax.stages.Lowered]:
    """The largest program of each phase that `train` would run on some devices, lowered.

    Devices without hardware will do, as `jax.experimental.topologies` makes them: `compile()` is then the program of
    that machine, and says what it holds (`memory_analysis`) and calls (`as_text`). No weight is read.

    Args:
      model: as in `plan`.
      config: the settings, those of `train` or of `sft`. Its mesh takes as many of the devices as it needs; without
        one, the first.
      prompt_length: as in `plan`.
      devices: of one platform.
      param_dtype: "float32" or "bfloat16", of the params as they are loaded.
      lora: as in `plan`.
      quantize: likewise.
      quantize_embeddings: likewise.

    Returns:
      "rollout", a burst of the decode (not of `sft`); "update"; and with `beta` "reference". All for completions that
      are T long.

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
    raw, loaded = read_model(model), Loaded(param_dtype, lora, quantize, quantize_embeddings)
    loaded.check(raw, config)
    account = Account.of(raw, config, prompt_length, loaded, devices)
    return {phase: program.lower() for phase, program in account.largest().items()}


def _environment(config: Config) -> dict[str, str]:
    """The variables of a process in which the mesh's devices are pretended."""
    devices = math.prod((config.mesh or {}).values())
    return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {_FLAGS}"}


def answer(text: str) -> str:
    """The plan that a request of `plan` asks for, both as JSON."""
    fields = json.loads(text)
    fields |= {"config": stored_config(fields["config"]), "loaded": Loaded(**fields["loaded"])}
    fields["taught"] = None if fields["taught"] is None else Taught(*fields["taught"])
    return json.dumps(dataclasses.asdict(plan_here(PlanRequest(**fields))))


def plan_here(request: PlanRequest) -> Plan:
    """Make a plan, in this process."""
    target, memory, note = None, request.memory, ""
    if request.device is not None:
        target = Target.read(request.device)
        memory = target.memory if memory is None else memory
        if target.missing:
            note = (
                f"{target.missing} is not installed: these are a CPU's programs, and not those of {request.device}"
                f" (pip install {target.missing})"
            )
            target = None
    request = dataclasses.replace(request, memory=memory)
    here = plan_sizes(request, target)
    coef = 0.0 if request.taught is not None else request.config.distillation_coef
    notes = [one for one in (note, here.note, TAUGHT.format(coef) if coef > 0 else "") if one]
    here = dataclasses.replace(here, memory=memory, note="\n".join(notes))
    if memory is None or not request.largest:
        return here
    # The most that fits does so with activations recomputed, unless the config says that they are kept.
    recomputes = request.config.gradient_checkpointing is not False
    config = dataclasses.replace(request.config, gradient_checkpointing=recomputes)
    size, group = config.per_device_train_batch_size, config.num_generations
    longer: Config
    if isinstance(config, SFTConfig):
        length = config.max_length or 0  # `plan_sizes` has refused None
        longer = dataclasses.replace(config, max_length=2 * length)
    else:
        length = config.max_completion_length
        longer = dataclasses.replace(config, max_completion_length=2 * length)

    def plan_with(config: Config) -> Plan:
        return dataclasses.replace(plan_sizes(dataclasses.replace(request, config=config), target), memory=memory)

    least = plan_with(config) if here.recomputes != recomputes else here
    larger = dataclasses.replace(config, per_device_train_batch_size=2 * size)
    largest, longest = (most_that_fits(least, plan_with(more), now) for more, now in ((larger, size), (longer, length)))
    return dataclasses.replace(
        here,
        largest_batch=_whole(largest, group if size % group == 0 else size),
        longest_completion=_whole(longest, 64 if length >= 64 else 1),
    )


def _whole(most: int, unit: int) -> int:
    """The largest multiple of a unit that is at most so large."""
    return most // unit * unit


def plan_sizes(request: PlanRequest, target: Target | None = None) -> Plan:
    """The plan at the sizes of the config, by the compiler of a target, or of this CPU."""
    devices = None if target is None else target.devices()
    account = Account.of(
        request.model, request.config, request.prompt_length, request.loaded, devices, request.memory, request.taught
    )
    held = account.held(donate=request.loaded.donate)
    compiled = {
        phase: compile_program(program.lower(), account.own_bytes) for phase, program in account.largest().items()
    }
    added = {phase: account.added(phase, one.memory) for phase, one in compiled.items()}
    sizes = account.sizes
    found = Plan(
        devices=account.mesh.size,
        held=held,
        peaks={phase: sum(held.values()) + sum(parts.values()) for phase, parts in added.items()},
        parts={name: size for parts in added.values() for name, size in parts.items()},
        operations=account.operations(),
        sizes={
            "prompts": sizes.prompts,
            "group": request.config.num_generations,
            "tokens": sizes.completions * request.config.max_completion_length,
        },
        programs=account.names(),
        state=int(state_bytes(account.work.shape, account.work.itemsize)),
        recomputes=bool(account.config.gradient_checkpointing),
    )
    if target is None:
        return found
    unread = [phase for phase, one in compiled.items() if one.text is None]
    return dataclasses.replace(
        found,
        device=target.kind,
        note=UNREAD.format(", ".join(unread)) if unread else "",
        collectives={phase: collectives(one.text) for phase, one in compiled.items() if one.text},
        kernels={phase: kernels(one.text) for phase, one in compiled.items() if one.text},
        bounds=account.bounds(),
        compile_seconds={phase: one.seconds for phase, one in compiled.items()},
    )
