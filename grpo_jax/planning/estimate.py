"""What a run will need, before there are weights or devices: bytes of each part, operations of each phase.

The programs of the run are compiled ahead of time for abstract shapes, on as many pretended CPU devices as the mesh
has, and XLA says what they hold on each. No weight is read. XLA fuses and pads otherwise on a GPU or TPU than on a CPU,
so temporaries are an estimate there; arguments (params, optimizer, cache) are exact.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from grpo_jax.config.config import GRPOConfig
from grpo_jax.devices.platform import compute_dtype
from grpo_jax.devices.sharding import make_mesh, shard_count, split_sharding, tree_sharding
from grpo_jax.hub.families import read_config
from grpo_jax.hub.policy import with_settings
from grpo_jax.hub.quantize import without_quantization
from grpo_jax.models.bounds import Work, count_weights, peaks_of, state_bytes
from grpo_jax.models.layers import TransformerConfig
from grpo_jax.models.lora import LoraModel
from grpo_jax.models.transformer import Transformer
from grpo_jax.planning.compiled import bytes_on_device, collectives, compile_program, kernels, last_error, placed
from grpo_jax.planning.loaded import Loaded, checked, held_bytes, read_model
from grpo_jax.planning.report import Plan, most_that_fits
from grpo_jax.planning.targets import ENVIRONMENT, Target
from grpo_jax.rollout.draw import DecodeSettings
from grpo_jax.rollout.layout import places
from grpo_jax.rollout.programs import RolloutShapes
from grpo_jax.types import Batch, Prompts
from grpo_jax.update.objective import sampling_of
from grpo_jax.update.optimizer import make_optimizer
from grpo_jax.update.packed import choose_updater, sequence_tokens
from grpo_jax.update.programs import UpdatePrograms, kept_bytes, update_programs
from grpo_jax.update.state import create_state

# LLVM's optimizer and the code for fusions change next to nothing in what a program holds (0.3 % at most, as measured),
# and take most of the time.
_FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
_FLAGS += " --xla_cpu_use_fusion_emitters=false"

UNREAD = "what {} exchanges and calls is not known: this jaxlib does not understand the program that the compiler wrote"


def plan(
    model: str | os.PathLike[str] | Mapping[str, Any],
    config: GRPOConfig,
    *,
    prompt_length: int,
    memory: float | None = None,
    param_dtype: str = "float32",
    device: str | None = None,
    largest: bool = True,
    lora: int | Mapping[str, Any] | None = None,
    quantize: str | None = None,
    quantize_embeddings: bool = False,
    donate: bool = False,
) -> Plan:
    """Compile a run's programs for abstract shapes, in a process of its own, and return what they need.

    Args:
      model: name of a model on the hub, a directory, a config.json, or what one holds.
      config: the settings, with `mesh` for several devices.
      prompt_length: P, tokens that prompts are padded to.
      memory: bytes of a device, for what fits; None: those of `device`, if it is given.
      param_dtype: "float32" or "bfloat16", of the params as they are loaded.
      device: whose compiler is asked, such as "H100", "H100-8" or "v5e-8" (`targets`); needs the package that it comes
        in, and without it the plan is this CPU's account, and says so. None: this CPU's account.
      largest: whether the largest batch and the longest completion that fit are looked for, which compiles twice more.
      lora: rank of adapters on a frozen base, or `rank` and `targets` of `add_lora`; None: all params are trained.
      quantize: how that base is held, as in `from_pretrained`; None: plain, or in NF4 if bitsandbytes has stored it so.
      quantize_embeddings: as in `from_pretrained`.
      donate: as in `train`, which then holds no params of the caller's; so it is in `grpo-jax train`.

    Returns:
      A `Plan`.

    Raises:
      ValueError: a model or settings that make no sense.

    Example:
      >>> tiny = {"architectures": ["Qwen2ForCausalLM"], "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32,
      ...         "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
      >>> found = plan(tiny, GRPOConfig(max_completion_length=8, mesh={"fsdp": 2}), prompt_length=8)
      >>> found.devices, found.peak > found.held["params"]
      (2, True)
    """
    raw = read_model(model)
    loaded = checked(raw, config, Loaded(param_dtype, lora, quantize, quantize_embeddings, donate))
    request = {
        "model": raw,
        "config": config.to_dict(),
        "prompt_length": prompt_length,
        "memory": memory,
        "device": device,
        "largest": largest,
        "loaded": loaded,
    }
    target = None if device is None else Target.read(device)
    devices = math.prod((config.mesh or {}).values())
    if target is not None and devices > target.count:
        raise ValueError(f"device is {device!r}, and config.mesh = {config.mesh} takes {devices} of them")
    done = subprocess.run(
        [sys.executable, "-m", "grpo_jax.planning"],
        input=json.dumps(request),
        env=os.environ | (_environment(config) if target is None or target.missing else ENVIRONMENT),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ValueError(f"the run could not be planned: {last_error(done.stderr)}")
    found = json.loads(done.stdout.splitlines()[-1])
    return Plan(**found | {"programs": tuple(found["programs"])})


def programs(
    model: str | os.PathLike[str] | Mapping[str, Any],
    config: GRPOConfig,
    *,
    prompt_length: int,
    devices: Sequence[Any],
    param_dtype: str = "float32",
    lora: int | Mapping[str, Any] | None = None,
    quantize: str | None = None,
    quantize_embeddings: bool = False,
) -> dict[str, jax.stages.Lowered]:
    """The largest program of each phase that `train` would run on some devices, lowered.

    Devices without hardware will do, as `jax.experimental.topologies` makes them: `compile()` is then the program of
    that machine, and says what it holds (`memory_analysis`) and calls (`as_text`). No weight is read.

    Args:
      model: as in `plan`.
      config: the settings. Its mesh takes as many of the devices as it needs; without one, the first.
      prompt_length: P, tokens that prompts are padded to.
      devices: of one platform.
      param_dtype: "float32" or "bfloat16", of the params as they are loaded.
      lora, quantize, quantize_embeddings: as in `plan`.

    Returns:
      "rollout", a burst of the decode; "update"; and with `beta` "reference". All for completions that are T long.

    Raises:
      ValueError: a model or settings that make no sense, or too few devices.

    Example:
      >>> tiny = {"architectures": ["Qwen2ForCausalLM"], "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32,
      ...         "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
      >>> found = programs(tiny, GRPOConfig(max_completion_length=8), prompt_length=8, devices=jax.devices("cpu"))
      >>> sorted(found)
      ['rollout', 'update']
      >>> found["update"].compile().memory_analysis().temp_size_in_bytes > 0
      True
    """
    raw = read_model(model)
    loaded = checked(raw, config, Loaded(param_dtype, lora, quantize, quantize_embeddings))
    run = _Run.of(raw, config, prompt_length, loaded, devices)
    lowered = {"rollout": run.rollout.largest().lower(), "update": run.updates.update.lower()}
    return lowered | ({"reference": run.updates.score.lower()} if config.beta > 0 else {})


def _environment(config: GRPOConfig) -> dict[str, str]:
    """Variables of a process in which the mesh's devices are pretended."""
    devices = math.prod((config.mesh or {}).values())
    return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {_FLAGS}"}


def answer(text: str) -> str:
    """The plan that a request of `plan` asks for, both as JSON."""
    request = json.loads(text)
    config = GRPOConfig.from_dict(request["config"])
    rest = {name: request[name] for name in ("prompt_length", "memory", "device", "largest")}
    return json.dumps(dataclasses.asdict(_plan(request["model"], config, loaded=Loaded(*request["loaded"]), **rest)))


def _plan(
    raw: Mapping[str, Any],
    config: GRPOConfig,
    *,
    prompt_length: int,
    memory: float | None,
    loaded: Loaded,
    device: str | None = None,
    largest: bool = True,
) -> Plan:
    """`plan`, in this process."""
    target, note = None if device is None else Target.read(device), ""
    if target is not None:
        memory = target.memory if memory is None else memory
        if target.missing:
            note = (
                f"{target.missing} is not installed: these are a CPU's programs, and not those of {device}"
                f" (pip install {target.missing})"
            )
            target = None
    given = (prompt_length, loaded, target)
    here = _at_batch(raw, config, *given)
    here = dataclasses.replace(here, memory=memory, note=note or here.note)
    if memory is None or not largest:
        return here
    size, length = config.per_device_train_batch_size, config.max_completion_length
    unit = config.num_generations if size % config.num_generations == 0 else size

    def most(name: str, now: int, unit: int) -> int:
        changed: dict[str, Any] = {name: 2 * now}
        more = _at_batch(raw, dataclasses.replace(config, **changed), *given)
        return most_that_fits(here, more, now) // unit * unit

    return dataclasses.replace(
        here,
        largest_batch=most("per_device_train_batch_size", size, unit),
        longest_completion=most("max_completion_length", length, 64 if length >= 64 else 1),
    )


def _at_batch(
    raw: Mapping[str, Any], config: GRPOConfig, prompt_length: int, loaded: Loaded, target: Target | None = None
) -> Plan:
    """The plan at one batch size."""
    devices = None if target is None else target.devices()
    run = _Run.of(raw, config, prompt_length, loaded, devices)
    held = held_bytes(run.state, run.base, donate=loaded.donate)
    compiled = {"rollout": run.rollout.largest().lower(), "update": run.updates.update.lower()}
    compiled |= {"reference": run.updates.score.lower()} if config.beta > 0 else {}
    found = {phase: compile_program(lowered, run.own_bytes) for phase, lowered in compiled.items()}
    phases = {phase: run.parts(phase, one.memory) for phase, one in found.items()}
    peaks = {phase: sum(held.values()) + sum(parts.values()) for phase, parts in phases.items()}
    parts = {name: size for parts in phases.values() for name, size in parts.items()}
    sizes = {"prompts": run.sizes.prompts, "group": run.group, "tokens": run.sizes.completions * run.length}
    also: dict[str, Any] = {"programs": run.program_names(), "state": int(state_bytes(run.shape, run.work.itemsize))}
    plan = Plan(run.mesh.size, held, peaks, parts, run.operations(), sizes, **also)
    if target is None:
        return plan
    unread = [phase for phase, one in found.items() if one.text is None]
    return dataclasses.replace(
        plan,
        device=target.kind,
        note=UNREAD.format(", ".join(unread)) if unread else "",
        collectives={phase: collectives(one.text) for phase, one in found.items() if one.text},
        kernels={phase: kernels(one.text) for phase, one in found.items() if one.text},
        bounds=run.bounds(),
        compile_seconds={phase: one.seconds for phase, one in found.items()},
    )


@dataclasses.dataclass(frozen=True)
class _Run:
    """A run of abstract shapes, each with its place on the mesh.

    Attributes:
      config: the settings.
      prompt_length: P, tokens that prompts are padded to.
      shape: of the decoder.
      mesh: of one device or several.
      optimizer: of the config.
      state: as training begins with it.
      base: of adapters, frozen; None where all params are trained.
    """

    config: GRPOConfig
    prompt_length: int
    shape: TransformerConfig
    mesh: Any
    optimizer: Any
    state: Any
    base: Any

    @classmethod
    def of(
        cls,
        raw: Mapping[str, Any],
        config: GRPOConfig,
        prompt_length: int,
        loaded: Loaded,
        devices: Sequence[Any] | None = None,
    ) -> _Run:
        """The run of a config.json and a config, on the first of some devices."""
        mesh, optimizer = make_mesh(config.mesh or {}, devices), make_optimizer(config, 1000)
        # Without devices that were asked for, the plan is that of an accelerator.
        dtype = config.compute_dtype if devices is not None else config.compute_dtype.replace("auto", "bfloat16")
        config = dataclasses.replace(config, compute_dtype=compute_dtype(dtype, list(mesh.devices.flat)))
        shape = read_config(without_quantization(raw), dtype=config.compute_dtype)
        params, base = loaded.params(shape, raw)
        make = functools.partial(
            create_state,
            optimizer=optimizer,
            keep_old=config.sizes().updates > 1,
            keep_reference=config.beta > 0,
            keep_initial=config.sync_ref_model,
            keep_masters=config.master_params,
            mix_adapters=config.ref_model_mixup_alpha if config.sync_ref_model and base is not None else None,
        )
        state = jax.eval_shape(lambda params: make(params, key=jax.random.key(0)), params)
        state, base = (placed(tree, tree_sharding(tree, mesh)) for tree in (state, base))
        return cls(config, prompt_length, shape, mesh, optimizer, state, base)

    @property
    def sizes(self) -> Any:
        """Prompts and completions of an iteration and of its parts."""
        return self.config.sizes()

    @property
    def group(self) -> int:
        """G, completions per prompt."""
        return self.config.num_generations

    @property
    def length(self) -> int:
        """T, the most tokens of a completion."""
        return self.config.max_completion_length

    @property
    def several(self) -> Any:
        """The mesh, if it has several devices."""
        return self.mesh if self.mesh.size > 1 else None

    @functools.cached_property
    def model(self) -> Any:
        """The decoder with the settings of the config."""
        decoder = Transformer(self.shape)
        model = decoder if self.base is None else LoraModel(self.base, decoder)
        return with_settings(model, self.config, list(self.mesh.devices.flat), self.mesh)

    @functools.cached_property
    def batch(self) -> Batch:
        """What one update sees."""
        b, g, t = self.sizes.prompts_per_update, self.group, self.length
        log_probs = self._arrays(b, g, t, dtype=jnp.float32)
        return Batch(
            prompts=self._prompts(b),
            tokens=self._arrays(b, g, t),
            mask=self._arrays(b, g, t, dtype=jnp.bool_),
            advantages=self._arrays(b, g, dtype=jnp.float32),
            sampling_log_probs=log_probs,
            ref_log_probs=log_probs if self.config.beta > 0 else None,
            initial_log_probs=log_probs if self.config.sync_ref_model else None,
        )

    @property
    def own_bytes(self) -> int:
        """Of params and base on each device, which every program is given and `held` counts."""
        return bytes_on_device((self.state.params, self.base))

    def parts(self, phase: str, stats: Any) -> dict[str, int]:
        """Bytes that a phase adds on each device, by its program's memory; params and base are of its arguments."""
        params = self.own_bytes
        if phase == "reference":
            return {"reference temporaries": stats.temp_size_in_bytes}
        if phase == "rollout":
            cache = max(0, stats.argument_size_in_bytes - params)
            return {"KV cache": cache, "decode temporaries": stats.temp_size_in_bytes}
        given = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
        # It is the program of a packed sequence, which is given the params and the gradients so far.
        beside = max(0, given - params)
        parts = {"gradients, activations and batch": beside + stats.temp_size_in_bytes}
        if kept := kept_bytes(self.updater, self.state, self.batch, tokens=self.tokens):
            parts["activations of all prompts"] = kept
        return parts

    @functools.cached_property
    def updater(self) -> Any:
        """As `train` chooses it."""
        micro = (self.sizes.micro_prompts, self.sizes.micro_completions)
        return choose_updater(self.model, self.config, micro=micro, optimizer=self.optimizer, mesh=self.several)

    @property
    def tokens(self) -> int:
        """Of a packed sequence on one device, the most."""
        micro = max(1, self.sizes.micro_prompts // shard_count(self.mesh)) * self.sizes.micro_completions
        return sequence_tokens(micro * self.length, self.length, cpu=False)

    @property
    def at_once(self) -> int:
        """Groups that stand on the devices at a time."""
        return places(self.sizes.prompts, self.group, self.config.rollout_batch_size, shard_count(self.mesh))

    @functools.cached_property
    def rollout(self) -> RolloutShapes:
        """Its programs, by their shapes; the largest decodes all completions that stand on the devices at a time."""
        shapes = RolloutShapes.of(
            *(self.model, self.state.params, self.sizes.prompts, self.prompt_length),
            num_generations=self.group,
            max_completion_length=self.length,
            batch_size=self.config.rollout_batch_size,
            settings=DecodeSettings(sampling=sampling_of(self.config)),
        )
        assert shapes is not None, "a decoder has a cache"
        return shapes

    @functools.cached_property
    def updates(self) -> UpdatePrograms:
        """The programs of an update on these devices."""
        return update_programs(self.updater, self.state, self.batch, tokens=self.tokens)

    def program_names(self) -> tuple[str, ...]:
        """Of all programs of the rollout and the updates."""
        updates = update_programs(self.updater, self.state, self.batch)
        return tuple(program.name for program in (*self.rollout.programs(), *updates.by_length))

    @functools.cached_property
    def work(self) -> Work:
        """Of one iteration."""
        itemsize = jnp.dtype(self.config.compute_dtype).itemsize
        return Work(self.shape, self.sizes.prompts, self.group, self.prompt_length, self.length, itemsize)

    def operations(self) -> dict[str, float]:
        """Operations of each phase of one iteration, over all devices."""
        update = self.work.update_operations
        reference = {"reference": update / 3} if self.config.beta > 0 else {}
        return {"rollout": update / 3, **reference, "update": update * self.config.num_iterations}

    def bounds(self) -> dict[str, float]:
        """Seconds of each phase of one iteration at least; none for devices whose peaks are not known."""
        found = peaks_of(self.mesh.devices.flat[0].device_kind)
        if found is None:
            return {}
        operations, bandwidth = (peak * self.mesh.size for peak in found)
        seconds = {phase: count / operations for phase, count in self.operations().items()}
        seconds["rollout"] = max(seconds["rollout"], self.decode_bytes / bandwidth)
        return seconds

    @property
    def decode_bytes(self) -> float:
        """Bytes that the decode of one iteration reads, over all devices."""
        # Weights are read for each device's own completions, as often as these follow one another; devices along
        # "tensor" share completions, and read a part each.
        times = shard_count(self.mesh) * math.ceil(self.sizes.prompts / self.at_once)
        weights = self.length * count_weights(self.shape) * self.work.itemsize
        return self.work.decode_bytes + (times - 1) * weights

    def _arrays(self, b: int, *rest: int, dtype: Any = jnp.int32) -> Any:
        x = jax.ShapeDtypeStruct((b, *rest), dtype)
        return placed(x, split_sharding(x, self.mesh))

    def _prompts(self, b: int) -> Prompts:
        return Prompts(self._arrays(b, self.prompt_length), self._arrays(b))
