"""Run checkpoints: one directory per checkpoint, with all the state that is needed to continue the run exactly.

```
checkpoints/40/   params   the trained params, the only part needed for export
                  rest     the other fields of `TrainState`: optimizer, old policy, reference, master params, key, …
                  batch    the current batch, if not all of its updates are done
                  ahead    completions for the next iteration, already sampled from an earlier policy (`rollout_ahead`)
                  JSON metadata: the host-side counters, the run's description (`resume.run_identity`), and the
                           metadata of the completions in `ahead`
```

Checkpoints are scheduled at multiples of `save_steps` and after the last step. Other checkpoints (saved after a
stop, an error or `save_minutes`) exist for resuming. They do not replace scheduled ones and cannot be the best one.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import json
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from grpo_jax.config.sft import GRPOOrSFTConfig
from grpo_jax.messages import one_line
from grpo_jax.models.sharding import fetch, gather_objects, mesh_of, shard
from grpo_jax.run.checkpoint_reader import abstract_of, as_target, shapes_of, try_read_in_all_processes
from grpo_jax.run.resume import differences
from grpo_jax.types import Batch, Completions, Json, Params
from grpo_jax.update.state import TrainState
from grpo_jax.watch.monitor import Progress

RESUME_MODES = ("auto", "must", "never")

_OPTIONAL = {"batch": Batch, "ahead": Completions}


class Restored(NamedTuple):
    """State that a run starts from. `progress` is None for a new run.

    `prefetched_metadata` contains the metrics, episodes and reset texts of `prefetched_completions`, as JSON values.
    """

    state: TrainState
    progress: Progress | None = None
    batch: Batch | None = None  # with updates left to do
    prefetched_completions: Completions | None = None
    prefetched_metadata: Json | None = None


class Checkpoints:
    """The checkpoints in a run directory. If `run_dir` is None, nothing is written or found.

    If a save fails, `save`, `wait` or `__exit__` raises OSError. Each method must be called in all processes of a run.
    """

    def __init__(self, run_dir: str | Path | None, config: GRPOOrSFTConfig, identity: Json | None = None):
        self._config, self._identity = config, identity
        self._last_step = None if identity is None else identity["total_steps"]
        self._metrics: Mapping[str, float] = {}  # step → value of `metric_for_best_model`, as of the last save
        self._run_dir, self._where = None if run_dir is None else Path(run_dir), f"run_dir = {str(run_dir)!r}"
        self._saved_at = time.monotonic()
        self._checkpointer = None
        self._saving: tuple[int, Any] | None = None  # while saving: the step and orbax's response
        if run_dir is not None:
            from orbax.checkpoint import v1 as ocp  # imported lazily: importing grpo_jax must stay fast

            self._directory = Path(run_dir).expanduser().absolute() / "checkpoints"
            self._directory.mkdir(parents=True, exist_ok=True)
            _remove_unfinished(self._directory)
            self._checkpointer = ocp.training.Checkpointer(
                self._directory, preservation_policy=self, cleanup_tmp_directories=True
            )

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._checkpointer is None:
            return
        try:
            self.wait()
        except OSError as failed:
            if error is None:
                raise
            error.add_note(str(failed))  # the original error takes precedence
        finally:
            with contextlib.suppress(Exception):  # already raised by `wait`
                self._checkpointer.close()

    def is_save_step(self, step: int) -> bool:
        """Return whether `step` is scheduled: a positive multiple of `save_steps`, or the last step.

        Steps saved only after a stop, an error or `save_minutes` are not scheduled.
        """
        every = self._config.save_steps
        return step == self._last_step or (every is not None and step > 0 and step % every == 0)

    def should_save(self, step: int) -> bool:
        """Return whether `step` is scheduled or `save_minutes` have passed since the last save."""
        minutes = self._config.save_minutes
        if self.is_save_step(step) or minutes is None or self._checkpointer is None:
            return self.is_save_step(step)
        # All processes use process 0's clock, because they write together.
        return bool(gather_objects(time.monotonic() - self._saved_at >= 60 * minutes)[0])

    def save(
        self,
        state: TrainState,
        progress: Progress,
        batch: Batch | None,
        prefetched_completions: Completions | None = None,
        prefetched_metadata: Json | None = None,
    ) -> None:
        """Wait for the previous save, then start writing a checkpoint. Writes nothing if this step is already saved."""
        if self._checkpointer is None:
            return
        steps = self.steps()
        progress.metrics = {step: value for step, value in progress.metrics.items() if int(step) in steps}
        self.record_metric(progress)
        if progress.step in steps[-1:]:
            return
        self.wait()
        _trim_heap()
        arrays = {"params": state.params, "rest": state.replace(params=None)}
        pending = dict(zip(_OPTIONAL, (batch, prefetched_completions), strict=True))
        arrays |= {name: shard(tree, mesh_of(state.params)) for name, tree in pending.items() if tree is not None}
        shapes = {name: shapes_of(tree) for name, tree in pending.items()}
        counters = {"progress": dataclasses.asdict(progress), "transcript": prefetched_metadata}
        metadata = {"run": self._identity, **counters, **shapes}
        self._metrics = progress.metrics
        with self._as_os_error(progress.step):
            response = self._checkpointer.save_checkpointables_async(
                progress.step, arrays, custom_metadata={"about": json.dumps(metadata)}, force=True
            )
        self._saving = progress.step, response
        self._saved_at = time.monotonic()

    def wait(self) -> None:
        """Wait until the save in progress, if any, is complete."""
        pending, self._saving = self._saving, None
        if pending is not None:
            step, response = pending
            with self._as_os_error(step):
                response.result()  # the checkpointer's own wait would leave an event loop open

    def steps(self) -> list[int]:
        """Return the steps that have checkpoints, in increasing order."""
        local = [] if self._checkpointer is None else [found.step for found in self._checkpointer.checkpoints]
        return gather_objects(local)[0]

    def record_metric(self, progress: Progress) -> None:
        """Record `metric_for_best_model` if the step is scheduled and its value is current. Warns if it has none."""
        name, step = self._config.metric_for_best_model, progress.step
        if name is None or not self.is_save_step(step):
            return
        if progress.metric is None:
            warnings.warn(
                f"metric_for_best_model = {name!r} has no finite value at step {step}, so the checkpoint at this step"
                " cannot be selected as the best. If no checkpoint has a value, the last policy is returned. Check the"
                " name and the values in metrics.jsonl",
                stacklevel=3,
            )
        elif not name.startswith("eval/") or progress.evaluated == step:
            progress.metrics[str(step)] = progress.metric

    def best(self, progress: Progress) -> tuple[int, float] | None:
        """Return the best checkpoint's step and metric value, or None if no checkpoint has a value."""
        return self.best_among(self.steps(), progress.metrics)

    def best_among(self, steps: Sequence[int], metrics: Mapping[str, float]) -> tuple[int, float] | None:
        """Return the best scheduled step (the latest, if tied) and its metric value, or None if no step has a value."""
        sign = 1 if self._config.best_is_greatest else -1
        measured = [(sign * metrics[str(n)], n) for n in steps if str(n) in metrics and self.is_save_step(n)]
        value, step = max(measured, default=(0.0, None))
        return None if step is None else (step, sign * value)

    def steps_to_keep(self, steps: Sequence[int], metrics: Mapping[str, float]) -> set[int]:
        """Return the steps whose checkpoints are kept: the best and the newest.

        `save_total_limit` applies to the scheduled checkpoints (None keeps all) and, separately, to checkpoints after
        the last scheduled one (None keeps one). Without `save_steps`, a limit applies to all checkpoints together.
        """
        limit, steps = self._config.save_total_limit, sorted(steps)
        limits_all = self._config.save_steps is None and limit is not None
        scheduled = [step for step in steps if limits_all or self.is_save_step(step)]
        later = [step for step in steps if step > max(scheduled, default=-1)]
        best = self.best_among(steps, metrics)
        return {*scheduled[-(limit or 0) :], *later[-(limit or 1) :], *([] if best is None else best[:1])}

    def should_preserve(self, checkpoints: Sequence[Any], *, context: object) -> list[bool]:
        """Return, for each checkpoint, whether to keep it (orbax's `PreservationPolicy` protocol)."""
        steps = [checkpoint.step for checkpoint in checkpoints]
        kept = self.steps_to_keep(steps, self._metrics)
        return [step in kept for step in steps]

    def restore_best(self, state: TrainState, progress: Progress) -> TrainState:
        """Return the best checkpoint's state if `load_best_model_at_end` is True and there is one, else `state`."""
        if not self._config.load_best_model_at_end:
            return state
        best = self.best(progress)
        if best is None or best[0] == int(state.step):
            return state
        like = jax.tree.map(as_target, state)
        _delete(state)  # so that only one state is in memory
        return self._load(best[0], like, {"progress": {}}).state

    def restore(self, state: TrainState, resume: str = "auto", *, keep_params: bool = False) -> Restored:
        """Restore the newest readable checkpoint with the shardings of `state`. Returns `state` for a new run.

        The arrays of `state` are deleted before the checkpoint is read, except the params if `keep_params` is True.
        Raises ValueError if a fixed setting changed, all checkpoints are unreadable, or `resume` does not fit the run.
        """
        steps = self.steps()
        self._check_mode(steps, resume)
        like, unreadable = jax.tree.map(as_target, state), dict[int, str]()
        for step in reversed(steps):
            stored, unreadable[step] = try_read_in_all_processes(functools.partial(self._stored_json, step))
            if stored is None:
                continue
            if self._identity is not None and (lines := differences(stored["run"], self._identity, step)):
                heading = "contains a run with different settings. Use the run's settings, or a new run_dir."
                raise ValueError("\n  ".join([f"{self._where} {heading} Differences:", *lines]))
            _delete(state.replace(params=None) if keep_params else state)
            found, unreadable[step] = try_read_in_all_processes(functools.partial(self._load, step, like, stored))
            if found is None:
                continue
            del unreadable[step]
            self._rename_unreadable(unreadable, step)
            metric = self._config.metric_for_best_model
            if self._identity is not None and stored["run"]["config"]["metric_for_best_model"] != metric:
                assert found.progress is not None
                found.progress.metric, found.progress.metrics = None, {}  # discard the previous metric's values
            return found
        if unreadable:
            reasons = "; ".join(f"step {step}: {reason}" for step, reason in unreadable.items())
            raise ValueError(
                f"{self._where}: none of its checkpoints can be read ({reasons}). Restore the files from a backup, or"
                f" move {self._directory} away to start a new run"
            )
        return Restored(state)

    def _check_mode(self, steps: Sequence[int], resume: str) -> None:
        """Raise ValueError if `resume` is "must" and no checkpoint exists, or if it is "never" and a run exists."""
        if resume == "must" and not steps:
            raise ValueError(
                f'resume="must" needs a checkpoint to resume from, but {self._where} does not contain one. Check the'
                ' path. If the run ended before its first checkpoint, use resume="auto" or run grpo-jax train on its'
                " RUN.yaml"
            )
        if resume == "never" and self._run_dir is not None and (steps or (self._run_dir / "metrics.jsonl").exists()):
            raise ValueError(
                f'resume="never" needs a run_dir without a run, but {self._where} contains a run. Use a different'
                ' directory, move the old run away, or resume it with resume="auto"'
            )

    def _stored_json(self, step: int) -> Json:
        """Read the JSON metadata from its file; orbax's `checkpointables_metadata` may hang if arrays are truncated."""
        stored = json.loads((self._directory / str(step) / "_CHECKPOINT_METADATA").read_text(encoding="utf-8"))
        metadata = stored.get("custom_metadata")
        if not metadata or "about" not in metadata:
            raise ValueError("not a checkpoint written by grpo_jax")
        return json.loads(metadata["about"])

    def _load(self, step: int, like: TrainState, stored: Json) -> Restored:
        """Read a checkpoint with the shardings of `like`. A process whose read fails does not block the others."""
        from orbax.checkpoint import v1 as ocp

        context, index = ocp.Context(), jax.process_index()
        context.multiprocessing.primary_host, context.multiprocessing.active_processes = index, {index}
        context.pytree.loading.partial_load = True  # other versions of grpo_jax may store more arrays
        wanted: dict[str, Params] = {"params": like.params, "rest": like.replace(params=None)}
        for name, kind in _OPTIONAL.items():
            if stored.get(name) is not None:
                wanted[name] = abstract_of(kind, stored[name], like.step.sharding)
        with context:
            found = ocp.load_checkpointables(self._directory / str(step), wanted)
        state = found["rest"].replace(params=found["params"])
        batch, prefetched_completions = (fetch(found.get(name)) for name in _OPTIONAL)
        names = (field.name for field in dataclasses.fields(Progress))
        progress = Progress(**{name: stored["progress"][name] for name in names if name in stored["progress"]})
        return Restored(state, progress, batch, prefetched_completions, stored.get("transcript"))

    def _rename_unreadable(self, unreadable: Mapping[int, str], good: int) -> None:
        """Rename unreadable checkpoints, so that the run can save these steps again, and issue a warning for each."""
        assert self._checkpointer is not None
        now = gather_objects(time.time_ns())[0]
        for step, reason in unreadable.items():
            path = self._directory / str(step)
            aside = path.with_name(f"{step}.unreadable-{now}")
            if jax.process_index() == 0:
                path.rename(aside)
            warnings.warn(
                f"the checkpoint at step {step} cannot be read ({reason}). It was renamed to {aside}; the run resumes"
                f" from the checkpoint at step {good}",
                RuntimeWarning,
                stacklevel=5,
            )
        if unreadable:
            gather_objects(None)  # barrier: wait for the renames
            self._checkpointer.reload()

    @contextlib.contextmanager
    def _as_os_error(self, step: int) -> Iterator[None]:
        """Convert an error during a save to an OSError that names the last complete checkpoint and the fix."""
        try:
            yield
        except Exception as error:
            complete = [int(path.name) for path in self._directory.iterdir() if path.name.isdigit()]
            last = f"the last complete one is from step {max(complete)}" if complete else "no earlier one exists"
            raise OSError(
                f"the checkpoint at step {step} could not be written to {self._directory} ({one_line(error)}); {last}."
                " Free disk space or fix the directory, then repeat the call with the same run_dir to resume"
            ) from error


def _delete(state: TrainState) -> None:
    """Delete a state's arrays to free their memory."""
    for leaf in jax.tree.leaves(state):
        leaf.delete()


def _remove_unfinished(directory: Path) -> None:
    """Remove an interrupted save's temporary directories. Retries for up to 10 s, in case the save is still running."""
    deadline = time.monotonic() + 10
    while unfinished := [*directory.glob("*.orbax-checkpoint-tmp")] if jax.process_index() == 0 else []:
        for path in unfinished:
            shutil.rmtree(path, ignore_errors=True)
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)


def _trim_heap() -> None:
    """Return freed memory to the operating system. glibc retains memory freed by compilations and save threads."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
