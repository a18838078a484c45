"""Rollouts: the completions that a run learns from, and when they are sampled.

The n-th prompt of a run is the n-th entry of the shuffled epochs, and its samples have keys made from n: the position
of a run in its dataset is one integer, `cursor`. A run has one source of rollouts, chosen once:

```
LocalRollouts       device:  sample 1 from θ0 │           │ update 1 │ sample 2 from θ1 │           │ update 2 │ …
                    host:                     │ rewards 1 │                             │ rewards 2 │
PrefetchedRollouts  device:  sample 1 from θ0 │ sample 2 from θ0 │ update 1 │ sample 3 from θ1 │ update 2 │ …
(rollout_ahead)     host:                     │ rewards 1        │          │ rewards 2        │
EngineRollouts      engine:  sample 1 from θ0 │ sample 2 from θ0 ────────────┤ sample 3 from θ1 ────────────┤ …
(and an engine)     trainer:                  │ rewards 1 │ update 1 (θ0→θ1) │ rewards 2 │ update 2 (θ1→θ2) │ …
```
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Self

import jax
import numpy as np

from grpo_jax.models.streams import in_background
from grpo_jax.policy import Policy
from grpo_jax.run.run import Run
from grpo_jax.run.sample import RolloutResult, sample
from grpo_jax.run.signals import Interrupted
from grpo_jax.types import Batch, Completions, Params
from grpo_jax.update.state import TrainState
from grpo_jax.watch.monitor import Progress


class LocalRollouts:
    """Samples a run's prompts when their completions are requested, by the present policy.

    The stored attributes change only in `commit`, when an iteration has its batch: a resumed run repeats an iteration
    that was interrupted.

    Attributes:
      cursor: prompts sampled since the start of the run; stored.
      waiting: completions of the prompts from `cursor` on, sampled for the next iteration; stored.
      in_progress: whether an engine is sampling these; stored.
      position: `cursor`, and the prompts of the present iteration.
    """

    def __init__(
        self,
        run: Run,
        *,
        cursor: int = 0,
        count: int | None = None,
        waiting: RolloutResult | None = None,
        interrupt: Callable[[], None] = lambda: None,
    ):
        self.run, self._interrupt = run, interrupt
        self._count = run.sizes.prompts if count is None else count
        self.cursor = self.position = cursor
        self.waiting = self._next = waiting
        self.in_progress = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...

    def settle(self, state: TrainState) -> None:
        """Wait for completions in progress, while `state` still has the policy that they are sampled from."""

    def next(self, state: TrainState) -> RolloutResult:
        """The completions of the next prompts."""
        start, self.position = self.position, self.position + self._count
        return self._sample(state, start)

    def prefetch(self, state: TrainState, batch: Batch | None) -> AbstractContextManager[None]:
        """A context in which the next completions may be sampled; `batch` is what the devices still compute."""
        return contextlib.nullcontext()

    def commit(self) -> None:
        """End the iteration: its prompts are done."""
        self.cursor = self.position

    def _sample(self, state: TrainState, start: int) -> RolloutResult:
        """Completions of the prompts from `start` on, with the trainer's own log-probs if an engine samples."""
        run, params = self.run, _sampling_params(state)
        result = self._sample_by(params, _sampling_key(state), start, self._interrupt)
        return result if run.sampler is None else _with_old_log_probs(run, result, params)

    def _sample_by(self, params: Params, key: jax.Array, start: int, interrupt: Callable[[], None]) -> RolloutResult:
        run = self.run
        return sample(
            *(run.policy, params, run.data, run.rows_at(start, self._count), key, run.config),
            prompt_indices=start + np.arange(self._count),
            prompt_length=run.prompt_length,
            interaction=run.interaction,
            sampler=run.sampler,
            interrupt=interrupt,
        )

    def stored(self) -> tuple[Completions, np.ndarray | None] | tuple[None, None]:
        """`waiting` as the arrays of a checkpoint."""
        if self.waiting is None:
            return None, None
        run = self.run
        return self.waiting.to_arrays([run.data.rows[i] for i in run.rows_at(self.cursor, self._count)])


class PrefetchedRollouts(LocalRollouts):
    """Samples the next completions while the reward functions run, by the policy that sampled the present ones.

    Their environments are closed by then, and not stored.
    """

    def next(self, state: TrainState) -> RolloutResult:
        """The completions of the next prompts, sampled now if none wait."""
        start, self.position = self.position, self.position + self._count
        result, self._next = self._next, None
        # Environments of waiting completions are not kept, so no iteration has any.
        return (self._sample(state, start) if result is None else result)._replace(environments=None)

    def prefetch(self, state: TrainState, batch: Batch | None) -> AbstractContextManager[None]:
        """Sample the next completions in a thread while the block runs, and wait for them at its end."""
        return self._in_thread(state, batch) if self._continues_after(state) else contextlib.nullcontext()

    @contextlib.contextmanager
    def _in_thread(self, state: TrainState, batch: Batch | None) -> Iterator[None]:
        def sample_next() -> RolloutResult:
            jax.block_until_ready(batch)  # programs of two threads could reach the devices of a mesh in another order
            return self._sample(state, self.position)._replace(environments=None)

        with in_background(sample_next) as coming:
            yield
            self._next = coming.result()

    def commit(self) -> None:
        """End the iteration: its prompts are done, and the next completions are stored from here on."""
        self.cursor, self.waiting = self.position, self._next

    def _continues_after(self, state: TrainState) -> bool:
        """Whether there is an iteration after the present one."""
        return int(state.step) + self.run.sizes.updates < self.run.total_steps


class EngineRollouts(PrefetchedRollouts):
    """Lets an engine sample the next completions in the background, during the rewards and the updates.

    The engine takes its params beforehand (`follow`). `old_params` of the state keeps them, to score the completions
    when they are there, and for a resumed run, which requests them again. Leaving the context abandons them.
    """

    def __init__(
        self,
        run: Run,
        *,
        cursor: int = 0,
        waiting: RolloutResult | None = None,
        interrupt: Callable[[], None] = lambda: None,
    ):
        super().__init__(run, cursor=cursor, waiting=waiting, interrupt=interrupt)
        self._future: Future[RolloutResult] | None = None
        self._thread, self._abandoned = contextlib.ExitStack(), threading.Event()

    def __exit__(self, *error: object) -> None:
        self._abandoned.set()
        self._thread.close()

    def begin(self, state: TrainState) -> None:
        """Let the engine sample the next prompts by the params of `state`, which may change after this returns."""
        run, params, start = self.run, _sampling_params(state), self.position
        follow: Callable[[Policy, Params], None] = getattr(run.sampler, "follow")  # noqa: B009 (optional in `Sampler`)
        follow(run.policy, params)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        # On one device: the programs of a mesh are the trainer's, and have to reach its devices in one order.
        key = jax.device_put(_sampling_key(state), jax.local_devices()[0])

        def interrupt() -> None:
            if self._abandoned.is_set():
                raise Interrupted
            self._interrupt()

        self._future = self._thread.enter_context(in_background(lambda: self._sample_by(shapes, key, start, interrupt)))

    def settle(self, state: TrainState) -> None:
        """Wait for completions in progress, and score them by the policy that sampled them."""
        if self._future is not None:
            self.waiting = self._next = self._result(state)
            self.in_progress = False

    def next(self, state: TrainState) -> RolloutResult:
        """The completions of the next prompts, which the engine may be sampling."""
        if self._future is not None:
            self._next = self._result(state)
        return super().next(state)

    def prefetch(self, state: TrainState, batch: Batch | None) -> AbstractContextManager[None]:
        """Let the engine begin; it continues after the block."""
        if self._continues_after(state):
            self.begin(state)
        return contextlib.nullcontext()

    def commit(self) -> None:
        """End the iteration: its prompts are done, and the engine's completions are requested again on resume."""
        super().commit()
        self.in_progress = self._future is not None

    def _result(self, state: TrainState) -> RolloutResult:
        future, self._future = self._future, None
        assert future is not None
        with self._thread.pop_all():
            result = future.result()
        return _with_old_log_probs(self.run, result, _sampling_params(state))._replace(environments=None)


def rollout_source(
    run: Run,
    state: TrainState,
    progress: Progress,
    completions: Completions | None = None,
    transcript: np.ndarray | None = None,
    *,
    interrupt: Callable[[], None] = lambda: None,
) -> LocalRollouts:
    """The source of a run's rollouts; `completions` and `transcript` are from the checkpoint that it resumes from."""
    cursor = progress.cursor
    if not run.config.rollout_ahead:
        return LocalRollouts(run, cursor=cursor, interrupt=interrupt)
    waiting = None
    if completions is not None:
        waiting = RolloutResult.from_arrays(
            *(completions, transcript, run.data, run.rows_at(cursor, run.sizes.prompts)),
            prompt_length=run.prompt_length,
            padding=run.config.padding,
            interaction=run.interaction,
        )
    if not run.samples_in_background:
        return PrefetchedRollouts(run, cursor=cursor, waiting=waiting, interrupt=interrupt)
    source = EngineRollouts(run, cursor=cursor, waiting=waiting, interrupt=interrupt)
    if progress.asked:  # a checkpoint does not wait for the engine
        source.begin(state)
        source.in_progress = True
    return source


def _sampling_params(state: TrainState) -> Params:
    """The policy that samples: the old one, if it is kept."""
    return state.params if state.old_params is None else state.old_params


def _with_old_log_probs(run: Run, result: RolloutResult, params: Params) -> RolloutResult:
    """An engine's completions with the log-probs of the trainer's own scorer."""
    from grpo_jax.run.sampler import with_old_log_probs

    return result._replace(completions=with_old_log_probs(result.completions, run.updater, params, result.prompts))


def _sampling_key(state: TrainState) -> jax.Array:
    """The key of a run's samples, from which `prompt_indices` make their own."""
    return jax.random.fold_in(state.key, 0)
