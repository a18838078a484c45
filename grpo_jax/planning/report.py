"""The plan of a run: its figures and its text."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Mapping

from grpo_jax.watch.summary import many, short_number


@dataclasses.dataclass(frozen=True)
class Plan:
    """Memory, operations and programs of a run.

    Attributes:
      devices: of the mesh.
      held: bytes on each device, by part: "base" (frozen, under adapters), "params", "master params", "optimizer",
        "reference", "old params", "initial params" (what the config keeps of them), "teacher", "policy" (the
        caller's own params, which training leaves alone, unless they are donated).
      peaks: bytes on each device while a phase is at its peak, `held` included: "rollout", "reference", "update", of
        `sft` this alone, and "teacher" where one tells log-probs before the update.
      parts: bytes of what a phase adds to `held`: "KV cache" (with the states of recurrent layers), "decode
        temporaries", "gradients, activations and batch", "activations of prompts" (its own, kept from reading them
        to the last backward pass), ….
      operations: of each phase of one iteration, over all devices.
      sizes: prompts and completions of an iteration, and tokens.
      largest_batch: the largest `per_device_train_batch_size` whose peak stays in `memory`; None where no memory was
        given, 0 where nothing fits.
      longest_completion: the largest `max_completion_length` whose peak stays in `memory`, likewise; of `sft`, the
        largest `max_length`.
      device: whose compiler made the programs; None: that of this machine's CPU.
      memory: bytes of a device, if they are known.
      collectives: bytes that a device gets from others in each phase, by kind; of a loop, one turn.
      kernels: custom calls of each phase, and how often each stands in its program.
      bounds: seconds of each phase of an iteration that no program can go below: operations over the peak, bytes over
        the bandwidth. No measurement.
      compile_seconds: of each phase's largest program.
      programs: all that a run may need, by name; they are compiled in its first iteration or beside it, and no later.
      state: bytes that the recurrent layers keep of each prompt and of each completion, however long it is.
      recomputes: whether activations are recomputed in the backward pass, which `gradient_checkpointing` may leave to
        the memory; where that is not known, they are.
      note: cautions on these numbers, a line for each.
    """

    devices: int
    held: dict[str, int]
    peaks: dict[str, int]
    parts: dict[str, int]
    operations: dict[str, float]
    sizes: dict[str, int]
    largest_batch: int | None = None
    longest_completion: int | None = None
    device: str | None = None
    memory: float | None = None
    collectives: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    kernels: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    bounds: dict[str, float] = dataclasses.field(default_factory=dict)
    compile_seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    programs: tuple[str, ...] = ()
    state: int = 0
    recomputes: bool = True
    note: str = ""

    @property
    def fits(self) -> bool | None:
        """Whether the peak stays in the memory of a device; None where that is not known."""
        return None if self.memory is None else self.peak <= self.memory

    @property
    def peak(self) -> int:
        """Bytes on each device at the peak of the run."""
        return max(self.peaks.values())

    def __str__(self) -> str:
        return self.describe()

    def describe(self, *, verbose: bool = False) -> str:
        """Return the plan in words, and the name of every program if it is to be verbose."""

        def line(values: Mapping[str, float], unit: str) -> str:
            return " · ".join(f"{name} {short_number(x, unit)}" for name, x in values.items())

        recurrent = short_number(self.state, "B")
        sizes = self.sizes
        devices = many(self.devices, "device") if self.device is None else f"{self.devices} {self.device}"
        examples = f"{sizes['prompts']} examples"
        batch = f"{sizes['prompts']} prompts × {sizes['group']} completions" if "rollout" in self.peaks else examples
        lines = [
            f"{devices}, each of an iteration's {batch}",
            f"held on each device: {line(self.held, 'B')}",
            f"added by the phases, activations {'recomputed' if self.recomputes else 'kept'}: {line(self.parts, 'B')}",
            *([f"recurrent state: {recurrent} of each prompt and completion"] if self.state else []),
            f"peak on each device: {line(self.peaks, 'B')}",
            f"operations of an iteration: {line(self.operations, 'FLOP')}",
        ]
        lines += [f"between devices, {phase}: {line(x, 'B')}" for phase, x in self.collectives.items() if x]
        for phase, calls in self.kernels.items():
            if calls:
                lines.append(f"kernels, {phase}: " + " · ".join(f"{name} × {n}" for name, n in calls.items()))
        if self.bounds:
            lines.append(f"not below, in an iteration (a bound, no measurement): {line(self.bounds, 's')}")
        if self.compile_seconds:
            lines.append("to compile: " + " · ".join(f"{name} {x:.0f} s" for name, x in self.compile_seconds.items()))
        if self.programs:
            kinds = collections.Counter(re.split(r"[ ,]", name)[0] for name in self.programs)
            told = ", ".join(f"{kind} × {count}" for kind, count in kinds.items())
            lines.append(f"programs of a run: {told}")
            lines += [f"  {name}" for name in self.programs] if verbose else []
        if self.memory is not None:
            lines.append(f"{'fits' if self.fits else 'does not fit'} in {short_number(self.memory, 'B')} a device")
        if self.longest_completion is not None:
            field = "max_completion_length" if "rollout" in self.peaks else "max_length"
            lines.append(f"longest {field} that fits: {self.longest_completion or 'none'}")
        if self.largest_batch is not None:
            lines.append(f"largest per_device_train_batch_size that fits: {self.largest_batch or 'none'}")
        return "\n".join([*([self.note] if self.note else []), *lines])


def most_that_fits(here: Plan, more: Plan, now: int) -> int:
    """The size at which the first phase reaches the memory, by the plans at sizes `now` and 2 · `now`; at least 0.

    The peak of a phase grows by the same amount with every completion of a micro-batch, and with every token of a
    completion, or not at all: a rollout of so many completions at a time takes what it takes, whatever the batch.

    Example:
      >>> rest = dict(held={}, parts={}, operations={}, sizes={}, memory=60.0)
      >>> here = Plan(1, peaks={"rollout": 50, "update": 30}, **rest)
      >>> more = Plan(1, peaks={"rollout": 50, "update": 40}, **rest)
      >>> most_that_fits(here, more, 8)
      32
    """
    sizes = []
    for phase, peak in here.peaks.items():
        room, slope = (here.memory or 0.0) - peak, (more.peaks[phase] - peak) / now
        sizes.append(now + room / slope if slope > 0 else math.inf if room >= 0 else 0)
    least = min(sizes)
    return now if math.isinf(least) else max(0, math.floor(least))
