"""Where the time of a run goes, and what a run is called."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator

from grpo_jax.config.config import GRPOConfig
from grpo_jax.watch.names import many, short


class Phases:
    """A stopwatch: the seconds of each phase of an iteration.

    Phases may lie inside each other; a second counts for the innermost only, so that phases add up to no more than the
    total. JAX returns before the device is done: end a phase with what waits for its results, or the next one pays.

    Args:
      clock: returns seconds.

    Example:
      >>> phases = Phases()
      >>> with phases("rollout"):
      ...     tokens = list(range(1000))
      >>> list(phases.take())
      ['seconds/rollout', 'seconds/total']
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._start = self._last = clock()
        self._open: list[str] = []
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a phase; one that is entered again goes on."""
        self._lap()
        self._open.append(name)
        try:
            yield
        finally:
            self._lap()
            self._open.pop()

    def take(self) -> dict[str, float]:
        """Return `seconds/<phase>` of each and `seconds/total` since the last call, and start anew."""
        self._lap()
        seconds = {f"seconds/{name}": value for name, value in self._seconds.items()}
        seconds["seconds/total"] = self._last - self._start
        self._start, self._seconds = self._last, {}
        return seconds

    def _lap(self) -> None:
        """Give the seconds since the last lap to the innermost open phase."""
        now = self._clock()
        if self._open:
            self._seconds[self._open[-1]] = self._seconds.get(self._open[-1], 0.0) + now - self._last
        self._last = now


def describe_run(
    config: GRPOConfig,
    *,
    num_rows: int,
    num_parameters: int,
    state_bytes: int,
    num_devices: int | None = None,
    device: str = "",
) -> str:
    """Return what the sizes of a run come to, in three lines for its start.

    Args:
      config: the run's settings.
      num_rows: rows of the dataset.
      num_parameters: of the policy.
      state_bytes: of the whole training state: policy, old policy, references, optimizer.
      num_devices: devices of the run; None: those of `config.mesh`, 1 without one.
      device: their kind.

    Example:
      >>> config = GRPOConfig(per_device_train_batch_size=64, max_steps=50)
      >>> print(describe_run(config, num_rows=400, num_parameters=1_234_567, state_bytes=14_815_000, device="cpu"))
      1.23 M parameters · 14.8 MB of training state · 1 device (cpu)
      each iteration: 8 prompts × 8 = 64 completions of up to 512 tokens · 1 pass × 1 minibatch = 1 update of 8 prompts
      50 optimizer steps · 50 iterations · 400 prompts, gone through 1 time
    """
    sizes, steps = config.sizes(num_devices), config.total_steps(num_rows, num_devices)
    devices = num_devices or math.prod((config.mesh or {}).values())
    iterations = math.ceil(steps / sizes.updates)
    micro = f" in {many(sizes.micro_batches, 'micro-batch', 'es')}" if sizes.micro_batches > 1 else ""
    epochs = float(f"{iterations * sizes.prompts / max(num_rows, 1):.2g}")
    return (
        f"{short(num_parameters)} parameters · {short(state_bytes, 'B')} of training state ·"
        f" {many(devices, 'device')}{f' ({device})' if device else ''}\n"
        f"each iteration: {many(sizes.prompts, 'prompt')} × {config.num_generations} = {sizes.completions} completions"
        f" of up to {config.max_completion_length} tokens ·"
        f" {many(config.num_iterations, 'pass', 'es')} × {many(sizes.minibatches, 'minibatch', 'es')} ="
        f" {many(sizes.updates, 'update')} of {many(sizes.prompts_per_update, 'prompt')}{micro}\n"
        f"{many(steps, 'optimizer step')} · {many(iterations, 'iteration')} ·"
        f" {many(num_rows, 'prompt')}, gone through {epochs:g} time{'s' * (epochs != 1)}"
    )
