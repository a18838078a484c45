"""Rollout sources. A run's source determines when completions are sampled and from which policy.

```
RolloutSource       device:  sample 1 from θ0 │           │ update 1 │ sample 2 from θ1 │           │ update 2 │ …
(run.collect)       host:                     │ rewards 1 │                             │ rewards 2 │
PrefetchedRollouts  device:  sample 1 from θ0 │ sample 2 from θ0 │ update 1 │ sample 3 from θ1 │ update 2 │ …
(rollout_ahead)     host:                     │ rewards 1        │          │ rewards 2        │
EngineRollouts      engine:  sample 1 from θ0 │ sample 2 from θ0 ────────────┤ sample 3 from θ1 ────────────┤ …
(plus an engine)    trainer:                  │ rewards 1 │ update 1 (θ0→θ1) │ rewards 2 │ update 2 (θ1→θ2) │ …
```
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import jax

from grpo_jax.models.sharding import gather_objects
from grpo_jax.models.threads import in_background
from grpo_jax.policy import Policy
from grpo_jax.run.collect import RolloutSource, rollout_params, sampling_key
from grpo_jax.run.rollout_result import RolloutResult
from grpo_jax.run.run import Run
from grpo_jax.run.signals import Interrupted
from grpo_jax.types import Batch, Completions, Json, Params
from grpo_jax.update.state import TrainState
from grpo_jax.watch.monitor import Progress


class PrefetchedRollouts(RolloutSource):
    """A source that samples the next completions, from the current policy, while the current rewards are computed."""

    prefetched: RolloutResult | None = None  # completions for the prompts from `cursor` on, stored in checkpoints
    _unconsumed: RolloutResult | None = None  # what `next` will return, if already sampled

    def set_prefetched(self, prefetched: RolloutResult | None) -> None:
        """Set the prefetched completions, for example from a checkpoint."""
        self.prefetched = self._unconsumed = prefetched

    def next(self, state: TrainState) -> RolloutResult:
        """Return completions for the next prompts, sampling them first if they were not prefetched."""
        start, self.next_cursor = self.next_cursor, self.next_cursor + self._num_prompts
        result, self._unconsumed = self._unconsumed, None
        # Drop the environments: restored rollouts have none, and a resumed run must give the same result.
        return (self.sample_at(state, start) if result is None else result)._replace(environments=None)

    @contextlib.contextmanager
    def prefetch(self, state: TrainState, batch: Batch | None) -> Iterator[None]:
        """Sample the next completions in a thread, and wait for them when the context exits."""

        def sample_next() -> RolloutResult:
            jax.block_until_ready(batch)  # all devices of a mesh must execute programs in the same order
            return self.sample_at(state, self.next_cursor)._replace(environments=None)

        if not self._has_next(state):
            yield
            return
        with in_background(sample_next) as future:
            yield
            self._unconsumed = future.result()

    def commit(self) -> None:
        """Mark the current batch as collected. From now on, checkpoints store the prefetched completions."""
        self.cursor, self.prefetched = self.next_cursor, self._unconsumed

    def to_checkpoint(self) -> tuple[Completions | None, Json | None]:
        """Return the prefetched completions, and their metrics, episodes and reset texts as JSON values."""
        if self.prefetched is None:
            return None, None
        metrics = {name: float(value) for name, value in self.prefetched.engine_metrics.items()}
        stored: dict[str, object] = {"metrics": gather_objects(metrics)[0]}  # metrics differ between processes
        if self.prefetched.episodes is not None:
            from grpo_jax.rollout.episodes import appended_text

            rows = [self.run.data.rows[i] for i in self.run.row_indices(self.cursor, self._num_prompts)]
            pairs = zip(rows, self.prefetched.rows, strict=True)
            prompts = [(row["prompt"], reset_row["prompt"]) for row, reset_row in pairs]
            stored["reset_texts"] = ["" if new is old else appended_text(old, new) for old, new in prompts]
            stored["episodes"] = [dataclasses.asdict(episode) for episode in self.prefetched.episodes]
        return self.prefetched.completions, stored

    def _has_next(self, state: TrainState) -> bool:
        """Return whether another iteration follows the current one."""
        return int(state.step) + self.run.sizes.updates_per_iteration < self.run.total_steps


class EngineRollouts(PrefetchedRollouts):
    """A source whose engine samples the next completions in the background, during rewards and updates.

    The engine samples from the state's `old_params`. Checkpoints do not wait for the engine, and a resumed run samples
    the unfinished completions again.
    """

    _future: Future[RolloutResult] | None = None
    _worker = contextlib.ExitStack()  # closing it waits for the sampling thread
    _closed = False

    def close(self) -> None:
        self._closed = True
        self._worker.close()

    def start_sampling(self, state: TrainState) -> None:
        """Start sampling the next completions from the `old_params` in `state`, which may be donated afterwards."""
        run, params, start = self.run, rollout_params(state), self.next_cursor
        set_params: Callable[[Policy, Params], None] = getattr(run.sampler, "set_params")  # noqa: B009 (optional in `Sampler`)
        set_params(run.policy, params)
        # The shapes suffice. The engine has the values, and an update may overwrite the arrays.
        specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        # Put the key on one device, so that the thread runs no program on the mesh. Devices might run such a program
        # and the main thread's programs in different orders.
        key = jax.device_put(sampling_key(state), jax.local_devices()[0])

        def check_interrupt() -> None:
            if self._closed:
                raise Interrupted
            self._check_interrupt()

        self._worker = contextlib.ExitStack()
        self._future = self._worker.enter_context(
            in_background(lambda: self.sample_with(specs, key, start, check_interrupt))
        )

    def wait_pending(self, state: TrainState) -> None:
        """Wait for completions in progress, and compute their log-probs under the policy that sampled them."""
        if self._future is not None:
            self.set_prefetched(self._result(state))
            self.in_progress = False

    def next(self, state: TrainState) -> RolloutResult:
        """Return completions for the next prompts, waiting for the engine if necessary."""
        if self._future is not None:
            self._unconsumed = self._result(state)
        return super().next(state)

    @contextlib.contextmanager
    def prefetch(self, state: TrainState, batch: Batch | None) -> Iterator[None]:
        """Start sampling the next completions. Sampling continues after the context exits."""
        if self._has_next(state):
            self.start_sampling(state)
        yield

    def commit(self) -> None:
        """Mark the current batch as collected. From now on, checkpoints store whether the engine is sampling."""
        super().commit()
        self.in_progress = self._future is not None

    def _result(self, state: TrainState) -> RolloutResult:
        from grpo_jax.run.sampler import with_old_log_probs

        future, self._future = self._future, None
        assert future is not None
        with self._worker:
            result = future.result()
        return with_old_log_probs(result, self.run.updater, rollout_params(state))._replace(environments=None)


def rollout_source(
    run: Run,
    state: TrainState,
    progress: Progress,
    prefetched_completions: Completions | None = None,
    prefetched_metadata: Json | None = None,
    check_interrupt: Callable[[], None] = lambda: None,
) -> RolloutSource:
    """Create a run's rollout source. If the run is resumed, `prefetched_*` are from its checkpoint."""
    cursor = progress.cursor
    if not run.config.rollout_ahead:
        return RolloutSource(run, cursor=cursor, check_interrupt=check_interrupt)
    kind = EngineRollouts if run.samples_during_updates else PrefetchedRollouts
    source = kind(run, cursor=cursor, check_interrupt=check_interrupt)
    if prefetched_completions is not None:
        source.set_prefetched(_restored(run, cursor, prefetched_completions, prefetched_metadata))
    if isinstance(source, EngineRollouts) and progress.in_progress:
        source.start_sampling(state)
        source.in_progress = True
    return source


def _restored(run: Run, cursor: int, completions: Completions, metadata: Json | None) -> RolloutResult:
    """Rebuild the rollout from the results of `PrefetchedRollouts.to_checkpoint`."""
    data, indices = run.data, run.row_indices(cursor, run.sizes.prompts_per_iteration)
    rows = [data.rows[i] for i in indices]
    stored = metadata or {}
    metrics = stored.get("metrics", {})
    if run.episode_setup is None or "episodes" not in stored:
        prompts = data.prompts(indices, length=run.prompt_length)
        return RolloutResult(rows, prompts, completions, engine_metrics=metrics)
    from grpo_jax.rollout.episode_setup import EpisodeRecord
    from grpo_jax.rollout.episodes import with_appended_text
    from grpo_jax.run.multi_turn import episode_prompts

    pairs = zip(rows, stored["reset_texts"], strict=True)
    rows = [{**row, "prompt": with_appended_text(row["prompt"], text)} if text else row for row, text in pairs]
    prompts = episode_prompts(run.episode_setup, data, indices, rows, length=run.prompt_length)
    episodes = [EpisodeRecord.from_json(episode) for episode in stored["episodes"]]
    return RolloutResult(rows, prompts, completions, episodes, engine_metrics=metrics)
