"""The account of a run of abstract shapes: what it holds, and what each phase adds and computes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from grpo_jax.config.sft import Config, SFTConfig
from grpo_jax.config.sizes import Sizes
from grpo_jax.devices.platform import compute_dtype
from grpo_jax.devices.program import Program
from grpo_jax.devices.sharding import make_mesh, shard_count, split_sharding, tree_sharding
from grpo_jax.hub.families import read_config
from grpo_jax.hub.policy import with_settings
from grpo_jax.hub.quantize import without_quantization
from grpo_jax.models.bounds import Work, count_weights, peaks_of
from grpo_jax.models.lora import LoraModel
from grpo_jax.models.transformer import Transformer
from grpo_jax.planning.compiled import Memory, bytes_on_device, placed
from grpo_jax.planning.loaded import Loaded, Taught
from grpo_jax.policy import Policy
from grpo_jax.rollout.layout import places
from grpo_jax.rollout.programs import RolloutShapes
from grpo_jax.run.beginning import decide_checkpointing, new_state
from grpo_jax.run.prepare import derive_run
from grpo_jax.run.programs import abstract_batch, rollout_programs
from grpo_jax.run.run import BaseRun, Run
from grpo_jax.run.sft import derive_sft
from grpo_jax.text.examples import Examples
from grpo_jax.text.prompts import EncodedPrompts
from grpo_jax.types import Batch, Json, Params, is_cached
from grpo_jax.update.optimizer import make_optimizer
from grpo_jax.update.packed import sequence_tokens
from grpo_jax.update.programs import UpdatePrograms, constant_programs, kept_bytes, update_programs
from grpo_jax.update.state import TrainState
from grpo_jax.update.teaching import Teacher

_NO_ROWS = EncodedPrompts(rows=[{}], token_ids=[[]], dropped=[])
_NO_EXAMPLES = Examples(rows=[{}], token_ids=[[0, 0]], dropped=[], masks=[[False, True]], blocks=[[0]])
_STEPS = 1000
"""Optimizer steps of a plan's schedule: no array depends on them."""


@dataclasses.dataclass(frozen=True)
class Account:
    """A run by the shapes of its arrays, each with its place on the mesh, and what they come to.

    Attributes:
      run: as `prepare` derives it, or `prepare_sft`.
      mesh: of one device or several.
      state: as training begins with it.
      base: of adapters, frozen; None where all params are trained.
      batch: of one update.
    """

    run: BaseRun
    mesh: Mesh
    state: TrainState
    base: Params | None
    batch: Batch

    @classmethod
    def of(
        cls,
        raw: Json,
        config: Config,
        prompt_length: int | None,
        loaded: Loaded,
        devices: Sequence[jax.Device] | None = None,
        memory: float | None = None,
        taught: Taught | None = None,
    ) -> Account:
        """The account of a config.json and a config, on the first of some devices, each with so many bytes.

        Without them, activations are recomputed where the config leaves that to the memory. `prompt_length` is that of
        a `GRPOConfig`'s run; examples of SFT are `max_length` tokens long.
        """
        mesh = make_mesh(config.mesh or {}, devices)
        on = list(mesh.devices.flat)
        # Without devices that were asked for, the plan is that of an accelerator, whatever is here.
        stands_in = devices is None and config.compute_dtype == "auto"
        dtype = compute_dtype("bfloat16" if stands_in else config.compute_dtype, on)
        config = dataclasses.replace(config, compute_dtype=dtype)
        shape = read_config(without_quantization(raw), dtype=dtype)
        decoder = Transformer(dataclasses.replace(shape, wide_sums=False if stands_in else None))
        params, base = loaded.params(decoder.config, raw)
        params, base = placed((params, base), tree_sharding((params, base), mesh))
        model = with_settings(decoder if base is None else LoraModel(base, decoder), config, on, mesh)
        policy, optimizer = Policy(model, params, config=raw), make_optimizer(config, _STEPS)
        run: BaseRun
        if isinstance(config, SFTConfig):
            longest, context = _example_length(config), decoder.config.max_position_embeddings
            run = derive_sft(
                policy, config, _NO_EXAMPLES, mesh=mesh, longest=longest, context=context, optimizer=optimizer
            )
        else:
            if prompt_length is None:
                raise ValueError("prompt_length is missing: give the tokens that prompts are padded to.")
            teacher = None
            if taught is not None:
                assert isinstance(model, Transformer | LoraModel), "made above"
                theirs = read_config(without_quantization(taught.model), dtype=dtype)
                own = Transformer(dataclasses.replace(theirs, wide_sums=model.config.wide_sums))
                held = loaded.of_teacher(taught)
                teacher = Policy(with_settings(own, config, on, mesh), placed(held, tree_sharding(held, mesh)))
            made = derive_run(
                policy, config, _NO_ROWS, prompt_length=prompt_length, mesh=mesh, optimizer=optimizer, teacher=teacher
            )
            run = decide_checkpointing(made, memory, tokens=_tokens(made))

        def make_state(params: Params) -> TrainState:
            return new_state(dataclasses.replace(run, policy=run.policy.replace(params=params), mesh=None))

        state = jax.eval_shape(make_state, params)
        state = placed(state, tree_sharding(state, mesh))
        batch = abstract_batch(run, state)
        return cls(run, mesh, state, base, placed(batch, split_sharding(batch, mesh)))

    @property
    def config(self) -> Config:
        """The settings, with the dtype that the devices have decided."""
        return self.run.config

    @property
    def sizes(self) -> Sizes:
        """Prompts and completions of an iteration and of its parts."""
        return self.run.sizes

    @functools.cached_property
    def rollout(self) -> RolloutShapes | None:
        """The programs of the rollout; None where nothing is sampled."""
        if not isinstance(self.run, Run):
            return None
        shapes = rollout_programs(self.run, self.state.params)
        assert shapes is not None, "a decoder has a cache"
        return shapes

    @functools.cached_property
    def teacher(self) -> Teacher | None:
        """A model that is the teacher, with params; None where there is none."""
        teaching = self.run.teaching if isinstance(self.run, Run) else None
        return None if teaching is None else teaching.teacher

    @property
    def _taught_in_update(self) -> bool:
        """Whether its forward passes are in the updates, and not before them."""
        return isinstance(self.run, Run) and self.run.config.distillation_mode == "full_logits"

    @functools.cached_property
    def updates(self) -> UpdatePrograms:
        """The programs of an update, of packed sequences as an accelerator has them."""
        return update_programs(self.run.updater, self.state, self.batch, tokens=_tokens(self.run))

    def largest(self) -> dict[str, Program]:
        """The largest program of each phase: a burst of the decode, scoring by the reference, an update."""
        rollout = {} if self.rollout is None else {"rollout": self.rollout.largest()}
        reference = {"reference": self.updates.score} if self.config.beta > 0 else {}
        taught = {} if self.teacher is None or self._taught_in_update else {"teacher": self._teacher_score()}
        return {**rollout, "update": self.updates.update, **reference, **taught}

    def _teacher_score(self) -> Program:
        """The program by which a teacher tells the log-probs of drawn tokens before an update."""
        assert isinstance(self.run, Run)
        assert self.run.teaching is not None
        assert self.run.teaching.updater is not None
        assert self.teacher is not None
        state = self.state.replace(params=self.teacher.params, ref_params=None)
        return update_programs(self.run.teaching.updater, state, self.batch, tokens=_tokens(self.run)).score

    def names(self) -> tuple[str, ...]:
        """The names of all programs that a run needs, or that its policy's lengths choose from."""
        cpu = self.mesh.devices.flat[0].platform == "cpu"
        sizes, tokens = (self.run.updater, self.state, self.batch), None if cpu else _tokens(self.run)
        updates, constant = update_programs(*sizes, tokens=tokens), constant_programs(*sizes, tokens=tokens)
        rollouts = [] if self.rollout is None else self.rollout.programs()
        return tuple(program.name for program in (*rollouts, *constant, *updates.by_length))

    def held(self, *, donate: bool) -> dict[str, int]:
        """Bytes that stay on each device, by part; with `donate` the caller holds no params beside the run's."""
        parts = {
            "base": self.base,
            "params": self.state.params,
            "master params": self.state.master_params,
            "optimizer": self.state.opt_state,
            "reference": self.state.ref_params,
            "old params": self.state.old_params,
            "initial params": self.state.initial_params,
            "teacher": None if self.teacher is None else self.teacher.params,
            "policy": None if donate else self.state.params,
        }
        return {name: size for name, tree in parts.items() if (size := bytes_on_device(tree))}

    @functools.cached_property
    def own_bytes(self) -> int:
        """Bytes of params and base on each device, which every program is given and `held` counts."""
        return bytes_on_device((self.state.params, self.base))

    @property
    def _teacher_bytes(self) -> int:
        """Bytes of a teacher on each device, which an update is given."""
        if self.teacher is None:
            return 0
        return bytes_on_device(self.teacher.params)

    def added(self, phase: str, memory: Memory) -> dict[str, int]:
        """Bytes that a phase adds on each device, by its largest program's memory."""
        if phase in ("reference", "teacher"):
            return {f"{phase} temporaries": memory.temporaries}
        if phase == "rollout":
            assert self.rollout is not None
            # In the place of some params, which stay, the program is given copies.
            kept, copies = map(bytes_on_device, self.rollout.copied())
            cache = max(0, memory.arguments - (self.own_bytes - kept + copies))
            added = {"KV cache": cache, "decode temporaries": memory.temporaries}
            return added | ({"params for decoding": copies} if copies else {})
        # The program is that of a packed sequence, which is given the gradients so far.
        taught = self._teacher_bytes if self._taught_in_update else 0
        beside = max(0, memory.arguments + memory.results - self.own_bytes - taught)
        added = {"gradients, activations and batch": beside + memory.temporaries}
        if kept := kept_bytes(self.run.updater, self.state, self.batch, tokens=_tokens(self.run)):
            added["activations of prompts"] = kept
        return added

    @functools.cached_property
    def work(self) -> Work:
        """The arithmetic of one iteration."""
        return Work(
            self.run.policy.model.config,
            self.sizes.prompts,
            self.config.num_generations,
            self.run.prompt_length,
            self.run.updater.config.max_completion_length,
            jnp.dtype(self.config.compute_dtype).itemsize,
        )

    def operations(self) -> dict[str, float]:
        """Operations of each phase of one iteration, over all devices."""
        update = self.work.update_operations
        rollout = {} if self.rollout is None else {"rollout": update / 3}
        reference = {"reference": update / 3} if self.config.beta > 0 else {}
        taught = 0.0 if self.teacher is None else self._teacher_operations
        before = {"teacher": taught} if taught and not self._taught_in_update else {}
        passes = update + (taught if self._taught_in_update else 0.0)
        return {**rollout, **reference, **before, "update": passes * self.config.num_iterations}

    @property
    def _teacher_operations(self) -> float:
        """Operations of a forward pass of the teacher over an iteration, over all devices."""
        assert self.teacher is not None
        assert is_cached(self.teacher.model)
        return dataclasses.replace(self.work, shape=self.teacher.model.config).update_operations / 3

    def bounds(self) -> dict[str, float]:
        """Seconds of each phase of one iteration at least; none for devices whose peaks are not known."""
        found = peaks_of(self.mesh.devices.flat[0].device_kind)
        if found is None:
            return {}
        operations, bandwidth = (peak * self.mesh.size for peak in found)
        seconds = {phase: count / operations for phase, count in self.operations().items()}
        if self.rollout is not None:
            seconds["rollout"] = max(seconds["rollout"], self.decode_bytes / bandwidth)
        return seconds

    @property
    def decode_bytes(self) -> float:
        """Bytes that the decode of one iteration reads, over all devices."""
        # Weights are read for each device's own completions, as often as these follow one another; devices along
        # "tensor" share completions, and read a part each.
        shards, work = shard_count(self.mesh), self.work
        at_once = places(self.sizes.prompts, work.group, self.config.rollout_batch_size, shards)
        times = shards * math.ceil(self.sizes.prompts / at_once)
        weights = work.completion_length * count_weights(work.shape) * work.itemsize
        return work.decode_bytes + (times - 1) * weights


def _example_length(config: SFTConfig) -> int:
    """Tokens of the longest example of a run that is only planned."""
    if config.max_length is None:
        raise ValueError("max_length = None: give the tokens of the longest example, by which the run is planned.")
    return config.max_length


def _tokens(run: BaseRun) -> int:
    """Tokens of a packed sequence on one accelerator at most."""
    micro = max(1, run.sizes.micro_prompts // shard_count(run.mesh)) * run.sizes.micro_completions
    longest = run.updater.config.max_completion_length
    return sequence_tokens(micro * longest, longest, cpu=False)
