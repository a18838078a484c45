"""Checkpoints of a run: one directory per checkpoint, with everything that decides the rest of the run.

```
checkpoints/40/   params   what is exported
                  rest     the other fields of `TrainState`: optimizer, old policy, reference, master params, key, …
                  batch    the batch, if some of its updates are still to be made
                  ahead    completions that an earlier policy has sampled for the next iteration (`rollout_ahead`)
                  told     their transcript if they have several turns, as the bytes of a JSON text
                  and as JSON: the counters on the host, and the description of the run (`resume.describe`)
```

A frozen base of adapters and a teacher are not stored, but compared on resume. Checkpoints are scheduled at multiples
of `save_steps` and after the last step. Others (a stop, an error, `save_minutes`) are only for resuming: which is best,
and which are kept in the end, does not depend on where a run was interrupted.

Orbax writes in the background, under a temporary name, and renames at the end, so a killed process leaves no partial
checkpoint. The arrays are copied when `save` is called: the next update may donate them at once.
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
import numpy as np

from grpo_jax.config.sft import Config
from grpo_jax.messages import one_line, raise_all
from grpo_jax.models.sharding import fetch, gather_objects, mesh_of, split
from grpo_jax.run.resume import changed_functions, differences, warn_of_changes
from grpo_jax.run.stored import abstract_of, as_target, shapes_of, tried_by_all
from grpo_jax.types import Batch, Completions, Json, Params
from grpo_jax.update.state import TrainState
from grpo_jax.watch.monitor import Progress

RESUME = ("auto", "must", "never", "changed")

_PENDING = {"batch": Batch, "ahead": Completions, "told": jax.Array}


class Restored(NamedTuple):
    """What a run resumes from: state, counters (None for a new run), unfinished batch, prefetched completions and their
    transcript.
    """

    state: TrainState
    progress: Progress | None = None
    batch: Batch | None = None
    ahead: Completions | None = None
    transcript: np.ndarray | None = None


class Checkpoints:
    """The checkpoints of a run directory; without a directory, nothing is written or found.

    A context manager, whose exit waits for a save in progress. `about` is from `resume.describe`. A failed save raises
    an `OSError` in `save`, `wait` or the exit. All processes of a run call the methods together.
    """

    def __init__(self, run_dir: str | Path | None, config: Config, about: Json | None = None):
        self._config, self._about = config, about
        self._last_step = None if about is None else about["total_steps"]
        self._metrics: Mapping[str, float] = {}  # step → `metric_for_best_model`, as of the last save
        self._run_dir, self._where = None if run_dir is None else Path(run_dir), f"run_dir = {str(run_dir)!r}"
        self._saved_at = time.monotonic()
        self._checkpointer = None
        self._pending: tuple[int, Any] | None = None  # step and orbax's response, while a checkpoint is written
        if run_dir is not None:
            from orbax.checkpoint import v1 as ocp  # here: importing grpo_jax must stay light

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
            error.add_note(str(failed))  # the first error is the one to be seen
        finally:
            with contextlib.suppress(Exception):  # raised by `wait` already
                self._checkpointer.close()

    @property
    def enabled(self) -> bool:
        """Whether there is a run directory to write checkpoints to."""
        return self._checkpointer is not None

    def scheduled(self, step: int) -> bool:
        """Whether `save_steps` or the end of the run requires a checkpoint of this step."""
        every = self._config.save_steps
        return step == self._last_step or (every is not None and step > 0 and step % every == 0)

    def due(self, step: int) -> bool:
        """Whether to save the run after this step."""
        minutes = self._config.save_minutes
        if self.scheduled(step) or minutes is None or self._checkpointer is None:
            return self.scheduled(step)
        # The clock of process 0 decides for all, since they write together.
        return bool(gather_objects(time.monotonic() - self._saved_at >= 60 * minutes)[0])

    def save(
        self,
        state: TrainState,
        progress: Progress,
        batch: Batch | None,
        ahead: Completions | None = None,
        transcript: np.ndarray | None = None,
    ) -> None:
        """Begin to write a checkpoint, unless its step has one, after waiting for the one before it."""
        if self._checkpointer is None:
            return
        steps = self.steps()
        progress.metrics = {step: value for step, value in progress.metrics.items() if int(step) in steps}
        self.measured(progress)
        if progress.step in steps[-1:]:
            return
        self.wait()
        _trim_heap()
        arrays = {"params": state.params, "rest": state.replace(params=None)}
        pending = dict(zip(_PENDING, (batch, ahead, transcript), strict=True))
        arrays |= {name: split(some, mesh_of(state.params)) for name, some in pending.items() if some is not None}
        shapes = {name: shapes_of(some) for name, some in pending.items()}
        about = {"run": self._about, "progress": dataclasses.asdict(progress), **shapes}
        self._metrics = progress.metrics
        with self._explained(progress.step):
            response = self._checkpointer.save_checkpointables_async(
                progress.step, arrays, custom_metadata={"about": json.dumps(about)}, force=True
            )
        self._pending = progress.step, response
        self._saved_at = time.monotonic()

    def wait(self) -> None:
        """Wait until the last checkpoint is written."""
        pending, self._pending = self._pending, None
        if pending is not None:
            step, response = pending
            with self._explained(step):
                response.result()  # not the checkpointer's wait, which leaves an event loop behind

    def steps(self) -> list[int]:
        """Return the steps that have checkpoints, in order."""
        own = [] if self._checkpointer is None else [found.step for found in self._checkpointer.checkpoints]
        return gather_objects(own)[0]

    def measured(self, progress: Progress) -> None:
        """Record the `metric_for_best_model` of a scheduled step, if it was measured.

        A stop may have written the checkpoint before the resumed run evaluates.
        """
        name, step = self._config.metric_for_best_model, progress.step
        if name is None or not self.scheduled(step):
            return
        if progress.metric is None:
            warnings.warn(
                f"metric_for_best_model = {name!r} has not been measured up to step {step}, so its checkpoint cannot"
                " become the best, and without a best the last policy is returned: look for the right name in"
                " metrics.jsonl",
                stacklevel=3,
            )
        elif not name.startswith("eval/") or progress.evaluated == step:
            progress.metrics[str(step)] = progress.metric

    def best(self, progress: Progress) -> tuple[int, float] | None:
        """Return step and metric of the best checkpoint; None if none was measured."""
        return self.best_of(self.steps(), progress.metrics)

    def best_of(self, steps: Sequence[int], metrics: Mapping[str, float]) -> tuple[int, float] | None:
        """Return the best scheduled step with its metric, the later of two equal ones; None if none was measured."""
        sign = 1 if self._config.best_is_greatest else -1
        measured = [(sign * metrics[str(n)], n) for n in steps if str(n) in metrics and self.scheduled(n)]
        value, step = max(measured, default=(0.0, None))
        return None if step is None else (step, sign * value)

    def kept_of(self, steps: Sequence[int], metrics: Mapping[str, float]) -> set[int]:
        """Return the steps whose checkpoints are kept.

        The newest `save_total_limit` scheduled ones (None: all), the best, and of those after the last scheduled one as
        many again (None: one). Without `save_steps` a limit applies to all.
        """
        limit, steps = self._config.save_total_limit, sorted(steps)
        limits_all = self._config.save_steps is None and limit is not None
        scheduled = [step for step in steps if limits_all or self.scheduled(step)]
        later = [step for step in steps if step > max(scheduled, default=-1)]
        best = self.best_of(steps, metrics)
        return {*scheduled[-(limit or 0) :], *later[-(limit or 1) :], *([] if best is None else best[:1])}

    def should_preserve(self, checkpoints: Sequence[Any], *, context: object) -> list[bool]:
        """Return whether to keep each checkpoint: orbax's protocol of a preservation policy."""
        steps = [checkpoint.step for checkpoint in checkpoints]
        kept = self.kept_of(steps, self._metrics)
        return [step in kept for step in steps]

    def restore_best(self, state: TrainState, progress: Progress) -> TrainState:
        """Return the state of the best checkpoint if `load_best_model_at_end`, else `state`.

        The arrays of `state` are deleted before others are read, so that only one state is in memory.
        """
        if not self._config.load_best_model_at_end:
            return state
        best = self.best(progress)
        if best is None or best[0] == int(state.step):
            return state
        like = jax.tree.map(as_target, state)
        _delete(state)
        return self._load(best[0], like, {"progress": {}}).state

    def restore(self, state: TrainState, resume: str = "auto", *, keep_params: bool = False) -> Restored:
        """Return the newest checkpoint that can be read, with the shapes and devices of `state`; for a new run `state`.

        `state` is deleted before arrays are read, so that only one state is in memory; with `keep_params` its params
        are not, which are the caller's until a checkpoint has been read (`donate`). `resume` is as in `train`. Raises a
        `ValueError` that lists all differences from the run, or if no checkpoint can be read.
        """
        steps = self.steps()
        self._check_mode(steps, resume)
        like, unreadable = jax.tree.map(as_target, state), dict[int, str]()
        for step in reversed(steps):
            stored, unreadable[step] = tried_by_all(functools.partial(self._stored_json, step))
            if stored is None:
                continue
            if self._about is not None:
                what = f"{self._where} holds a run with other settings (use these, or another run_dir): this call"
                changed = changed_functions(stored["run"], self._about, accept=resume == "changed")
                raise_all(what, [*differences(stored["run"], self._about, step), *changed])
            _delete(state.replace(params=None) if keep_params else state)
            found, unreadable[step] = tried_by_all(functools.partial(self._load, step, like, stored))
            if found is None:
                continue
            del unreadable[step]
            self._set_aside(unreadable, step)
            if self._about is not None:
                warn_of_changes(stored["run"], self._about)
                if stored["run"]["config"]["metric_for_best_model"] != self._config.metric_for_best_model:
                    assert found.progress is not None
                    found.progress.metric, found.progress.metrics = None, {}  # values of another metric
            return found
        if unreadable:
            reasons = "; ".join(f"step {step}: {reason}" for step, reason in unreadable.items())
            raise ValueError(
                f"{self._where}: none of its checkpoints can be read ({reasons}). Restore the files from a copy, or"
                f" move {self._directory} away to begin a new run"
            )
        return Restored(state)

    def _check_mode(self, steps: Sequence[int], resume: str) -> None:
        """Raise a `ValueError` if there is a run and `resume` forbids one, or there is none and it requires one."""
        if resume == "must" and not steps:
            raise ValueError(
                f'{self._where} holds no checkpoint to resume from (resume="must"). If the run ended before its'
                ' first one, begin it again: resume="auto", or grpo-jax train with its RUN.yaml. Else check its name.'
            )
        if resume == "never" and self._run_dir is not None and (steps or (self._run_dir / "metrics.jsonl").exists()):
            raise ValueError(
                f'{self._where} holds a run (resume="never"): give this one a directory of its own, move the old one'
                ' away, or resume it by resume="auto"'
            )

    def _stored_json(self, step: int) -> Json:
        """Read the JSON of a checkpoint from orbax's file.

        `checkpointables_metadata` also reads the arrays' metadata, and may hang if they are torn (orbax 0.12.8).
        """
        stored = json.loads((self._directory / str(step) / "_CHECKPOINT_METADATA").read_text(encoding="utf-8"))
        metadata = stored.get("custom_metadata")
        if not metadata or "about" not in metadata:
            raise ValueError("not a checkpoint of this library")
        return json.loads(metadata["about"])

    def _load(self, step: int, like: TrainState, stored: Json) -> Restored:
        """Read one checkpoint, placed like `like`; no process waits for the others, since one may fail."""
        from orbax.checkpoint import v1 as ocp

        context, own = ocp.Context(), jax.process_index()
        context.multiprocessing.primary_host, context.multiprocessing.active_processes = own, {own}
        wanted: dict[str, Params] = {"params": like.params, "rest": like.replace(params=None)}
        for name, kind in _PENDING.items():
            if stored.get(name) is not None:
                wanted[name] = abstract_of(kind, stored[name], like.step.sharding)
        with context:
            found = ocp.load_checkpointables(self._directory / str(step), wanted)
        state = found["rest"].replace(params=found["params"])
        batch, ahead, transcript = (fetch(found.get(name)) for name in _PENDING)
        return Restored(state, Progress(**stored["progress"]), batch, ahead, transcript)

    def _set_aside(self, unreadable: Mapping[int, str], good: int) -> None:
        """Rename unreadable checkpoints, with a warning, because the run will write their steps again."""
        assert self._checkpointer is not None
        now = gather_objects(time.time_ns())[0]
        for step, reason in unreadable.items():
            path = self._directory / str(step)
            aside = path.with_name(f"{step}.unreadable-{now}")
            if jax.process_index() == 0:
                path.rename(aside)
            warnings.warn(
                f"the checkpoint of step {step} cannot be read ({reason}); it is kept as {aside}, and the run resumes"
                f" from the one of step {good}",
                RuntimeWarning,
                stacklevel=5,
            )
        if unreadable:
            gather_objects(None)  # a barrier: all are renamed
            self._checkpointer.reload()

    @contextlib.contextmanager
    def _explained(self, step: int) -> Iterator[None]:
        """Raise an error in saving as an `OSError` that names the last whole checkpoint and the fix."""
        try:
            yield
        except Exception as error:
            whole = [int(path.name) for path in self._directory.iterdir() if path.name.isdigit()]
            last = f"the last whole one is of step {max(whole)}" if whole else "there is none before it"
            raise OSError(
                f"the checkpoint of step {step} could not be written to {self._directory} ({one_line(error)}); {last}."
                " Free some space or repair the directory, then call train again with the same run_dir to resume"
            ) from error


def _delete(state: TrainState) -> None:
    """Free the memory of a state's arrays."""
    for leaf in jax.tree.leaves(state):
        leaf.delete()


def _remove_unfinished(directory: Path) -> None:
    """Remove what an interrupted save has left, on which orbax's first save would fail.

    Another thread of this process may still be writing there and make a directory again, so repeat for 10 seconds.
    """
    deadline = time.monotonic() + 10
    while left := [*directory.glob("*.orbax-checkpoint-tmp")] if jax.process_index() == 0 else []:
        for path in left:
            shutil.rmtree(path, ignore_errors=True)
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)


def _trim_heap() -> None:
    """Return free memory to the system; glibc keeps what compilations and the threads of each save have freed."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
