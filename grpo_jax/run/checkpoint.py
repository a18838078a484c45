"""Checkpoints of a run: one atomic directory with everything that decides what comes next.

```
checkpoints/40/   params   what is exported
                  rest     the other fields of `TrainState`: optimizer, old policy, reference, master params, key, …
                  batch    the batch, if some of its updates are still to be made
                  ahead    completions that an earlier policy has sampled for the next iteration (`rollout_ahead`)
                  told     of several turns, their transcript, as the bytes of a JSON text
                  and as JSON: the counters on the host, and what the run was begun with (`resume.describe`)
```

A frozen base of adapters and a teacher policy are not saved, but compared on resume. `run.loop` saves where
`Checkpoints.due` says so, on a signal or a `StopRun`, and before an error ends the run.

Orbax writes in the background, under a temporary name, and renames when all is written; the remains of a kill are
ignored. The arrays are copied when `save` is called: the next update may consume them at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from grpo_jax.config.sft import Config
from grpo_jax.messages import one_line, raise_all
from grpo_jax.models.sharding import fetch, gather_objects, mesh_of, split
from grpo_jax.run.resume import changed_functions, differences, warn_of_changes, warn_of_no_rollout
from grpo_jax.run.schedule import Retention, best_of, is_scheduled
from grpo_jax.run.stored import abstract_of, as_target, shapes_of, tried_by_all
from grpo_jax.types import Batch, Completions, Json, Params
from grpo_jax.update.state import TrainState
from grpo_jax.watch.monitor import Progress

_PENDING = {"batch": Batch, "ahead": Completions, "told": jax.Array}

RESUME = ("auto", "must", "never", "changed")

_PAUSE = 20  # a checkpoint by the clock comes at least 20 times as long after the last one as that held the run up


class Restored(NamedTuple):
    """The moment that a run resumes from: state, counters (None for a new run), unfinished batch, completions sampled
    ahead, and their transcript as the bytes of a JSON text.
    """

    state: TrainState
    progress: Progress | None = None
    batch: Batch | None = None
    ahead: Completions | None = None
    transcript: np.ndarray | None = None


class Checkpoints:
    """The checkpoints of a run directory; without a directory, nothing is written or found.

    A context manager: leaving it waits for a save in progress. `about` is from `resume.describe`. `save`, `wait` and
    leaving raise an `OSError` if a checkpoint could not be written (a full disk).
    """

    def __init__(self, run_dir: str | Path | None, config: Config, about: Json | None = None):
        self._config, self._about = config, about
        self._last = None if about is None else about["total_steps"]
        self._retention = Retention(config, self._last)
        self._run_dir = None if run_dir is None else Path(run_dir)
        self._saved_at, self._held_up = time.monotonic(), 0.0
        self._checkpointer = None
        self._pending: tuple[int, Any] | None = None  # step, and orbax's response, of what is being written
        if run_dir is not None:
            from orbax.checkpoint import v1 as ocp  # here: importing grpo_jax must stay light

            self._directory = Path(run_dir).expanduser().absolute() / "checkpoints"
            self._directory.mkdir(parents=True, exist_ok=True)
            _clear_away(self._directory)
            self._checkpointer = ocp.training.Checkpointer(
                self._directory, preservation_policy=self._retention, cleanup_tmp_directories=True
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
            with contextlib.suppress(Exception):  # it has been told by wait
                self._checkpointer.close()

    @property
    def enabled(self) -> bool:
        """Whether there is a run directory to write checkpoints to."""
        return self._checkpointer is not None

    def due(self, step: int) -> bool:
        """Whether the run is to be saved after this step."""
        if self.scheduled(step):
            return True
        minutes = self._config.save_minutes
        if minutes is None or self._checkpointer is None:
            return False
        # A state so large that writing it takes minutes is not written all the time.
        pause = max(60 * minutes, _PAUSE * self._held_up)
        # The clock of process 0 decides, for all write together: one that asked its own would wait for the others.
        return bool(gather_objects(time.monotonic() - self._saved_at >= pause)[0])

    def scheduled(self, step: int) -> bool:
        """Whether a run that nothing disturbs has a checkpoint of this step, whatever its clock says."""
        return is_scheduled(self._config, step, self._last)

    def save(
        self,
        state: TrainState,
        progress: Progress,
        batch: Batch | None,
        ahead: Completions | None = None,
        transcript: np.ndarray | None = None,
    ) -> None:
        """Begin to write a checkpoint of this moment; a step that has one already is left alone.

        Waits for the checkpoint before it, if that is still being written.
        """
        if self._checkpointer is None:
            return
        steps = self.steps()
        progress.metrics = {step: value for step, value in progress.metrics.items() if int(step) in steps}
        self.measured(progress)
        if progress.step in steps[-1:]:
            return
        began = time.monotonic()
        self.wait()
        _give_back_memory()
        arrays = {"params": state.params, "rest": state.replace(params=None)}
        pending = dict(zip(_PENDING, (batch, ahead, transcript), strict=True))
        arrays |= {name: split(some, mesh_of(state.params)) for name, some in pending.items() if some is not None}
        shapes = {name: shapes_of(some) for name, some in pending.items()}
        about = {"run": self._about, "progress": dataclasses.asdict(progress), **shapes}
        self._retention.metrics = progress.metrics
        with self._explained(progress.step):
            response = self._checkpointer.save_checkpointables_async(
                progress.step, arrays, custom_metadata={"about": json.dumps(about)}, force=True
            )
        self._pending = progress.step, response
        self._saved_at = time.monotonic()
        self._held_up = self._saved_at - began

    def wait(self) -> None:
        """Wait until the last checkpoint is whole."""
        pending, self._pending = self._pending, None
        if pending is not None:
            step, response = pending
            with self._explained(step):
                response.result()  # not the checkpointer's wait: it would leave an event loop behind

    def steps(self) -> list[int]:
        """Return the steps that there are checkpoints of, in order; all processes have to ask together."""
        own = [] if self._checkpointer is None else [found.step for found in self._checkpointer.checkpoints]
        return gather_objects(own)[0]

    def measured(self, progress: Progress) -> None:
        """Note the metric that the best checkpoint is found by, if it was measured for this step and that is scheduled.

        Its checkpoint may be written already: a stop did so, and the evaluation was made when the run went on.
        """
        name, step = self._config.metric_for_best_model, progress.step
        if name is None or not is_scheduled(self._config, step, self._last):
            return
        if progress.metric is None:
            warnings.warn(
                f"metric_for_best_model = {name!r} has not been measured up to step {step}, so its checkpoint cannot"
                " become the best: look for the right name in metrics.jsonl",
                stacklevel=3,
            )
        elif not name.startswith("eval/") or progress.evaluated == step:
            progress.metrics[str(step)] = progress.metric

    def best(self, progress: Progress) -> tuple[int, float] | None:
        """Return step and metric of the checkpoint with the best `metric_for_best_model`; None if none was measured."""
        return best_of(self._config, self.steps(), progress.metrics, self._last)

    def restore_best(self, state: TrainState, progress: Progress) -> TrainState:
        """Return with `load_best_model_at_end` the state of the best checkpoint, else `state`.

        The arrays of `state` are deleted before others are read, so that only one state is in memory.
        """
        if not self._config.load_best_model_at_end:
            return state
        best = self.best(progress)
        if best is None:
            warnings.warn(
                f"load_best_model_at_end: no checkpoint has a measured {self._config.metric_for_best_model!r}, so the"
                " policy is that of the last step: look for the right name in metrics.jsonl",
                RuntimeWarning,
                stacklevel=5,
            )
        if best is None or best[0] == int(state.step):
            return state
        like = jax.tree.map(as_target, state)
        for leaf in jax.tree.leaves(state):
            leaf.delete()
        return self._load(best[0], like, {**self._about_of(best[0]), **dict.fromkeys(_PENDING)}).state

    def target(self, state: TrainState) -> TrainState:
        """Return the state as `restore` takes it: only its shapes, where another is read and this one can be freed."""
        return jax.tree.map(as_target, state) if self.steps() else state

    def restore(self, state: TrainState, resume: str = "auto") -> Restored:
        """Return the newest checkpoint that can be read; at the start of a new run `state` alone.

        Args:
          state: the state at step 0, or its `target`; arrays get its shapes and devices.
          resume: "auto", "must" (there has to be a checkpoint), "never" (there must not be a run) or "changed" (the
            sources of reward functions, tools and environments may differ).

        Raises:
          ValueError: other settings, data or models (all differences listed), no readable checkpoint, or against
            `resume`.
        """
        steps, where = self.steps(), f"run_dir = {str(self._run_dir)!r}"
        if resume == "must" and not steps:
            raise ValueError(
                f'{where} holds no checkpoint to go on from (resume="must"). If the run ended before its first one,'
                ' begin it again: resume="auto", or grpo-jax train with its RUN.yaml. Else check the directory\'s name.'
            )
        if resume == "never" and self._run_dir is not None and (steps or (self._run_dir / "metrics.jsonl").exists()):
            raise ValueError(
                f'{where} holds a run (resume="never"): give this one a directory of its own, move the old one away,'
                ' or go on with it by resume="auto"'
            )
        unreadable: dict[int, str] = {}
        for step in reversed(steps):
            about, unreadable[step] = tried_by_all(self._about_of, step)
            if about is None:
                continue
            if self._about is not None:
                what = f"{where} holds a run that was begun otherwise (use its settings, or another run_dir): this call"
                changed = changed_functions(about["run"], self._about, accept=resume == "changed")
                raise_all(what, [*differences(about["run"], self._about, step), *changed])
            found, unreadable[step] = tried_by_all(self._load, step, state, about)
            if found is None:
                continue
            del unreadable[step]
            if self._about is not None:
                warn_of_changes(about["run"], self._about)
                asked = found.progress is not None and found.progress.asked
                if self._config.rollout_ahead and found.ahead is None and not asked:
                    warn_of_no_rollout(about["run"], self._about)
            self._set_aside(unreadable, step)
            self._know_metrics(found.progress, about)
            return found
        if unreadable:
            reasons = "; ".join(f"step {step}: {reason}" for step, reason in unreadable.items())
            raise ValueError(
                f"{where}: none of its checkpoints can be read ({reasons}). Put back the files from a copy, or move"
                f" {self._directory} away to begin anew"
            )
        return Restored(state)

    def _about_of(self, step: int) -> Json:
        """Read the JSON that stands beside the arrays of a checkpoint.

        From orbax's file of it: `checkpointables_metadata` reads that of the arrays too, and over torn ones it
        sometimes never returns (orbax 0.12.8, two processes).
        """
        stored = json.loads((self._directory / str(step) / "_CHECKPOINT_METADATA").read_text(encoding="utf-8"))
        metadata = stored.get("custom_metadata")
        if not metadata or "about" not in metadata:
            raise ValueError("not a checkpoint of this library")
        return json.loads(metadata["about"])

    def _load(self, step: int, state: TrainState, about: Json) -> Restored:
        """Read one checkpoint, shaped and placed like `state`; no process waits for another, since one may fail."""
        from orbax.checkpoint import v1 as ocp

        context, own = ocp.Context(), jax.process_index()
        context.multiprocessing.primary_host, context.multiprocessing.active_processes = own, {own}
        context.pytree.loading.partial_load = True  # fields that only earlier versions had are left out
        like = jax.tree.map(as_target, state)
        wanted: dict[str, Params] = {"params": like.params, "rest": like.replace(params=None)}
        for name, kind in _PENDING.items():
            if about.get(name) is not None:
                wanted[name] = abstract_of(kind, about[name], state.step.sharding)
        with context:
            loaded = ocp.load_checkpointables(self._directory / str(step), wanted)
        return Restored(
            loaded["rest"].replace(params=loaded["params"]),
            Progress(**about["progress"]),
            *(fetch(loaded.get(name)) for name in _PENDING),
        )

    def _set_aside(self, unreadable: Mapping[int, str], good: int) -> None:
        """Say which checkpoints cannot be read, and give them other names: the run will write those steps again."""
        assert self._checkpointer is not None
        now = gather_objects(time.time_ns())[0]
        for step, reason in unreadable.items():
            path = self._directory / str(step)
            aside = path.with_name(f"{step}.unreadable-{now}")
            if jax.process_index() == 0:
                path.rename(aside)
            warnings.warn(
                f"the checkpoint of step {step} cannot be read ({reason}); it is kept as {aside}, and the run goes on"
                f" from the one of step {good}",
                RuntimeWarning,
                stacklevel=5,
            )
        if unreadable:
            gather_objects(None)  # so that no process looks before they are renamed
            self._checkpointer.reload()

    def _know_metrics(self, progress: Progress | None, about: Json) -> None:
        """Leave out metrics of another name than that of the best model."""
        assert progress is not None
        name = self._config.metric_for_best_model
        if about["run"] is not None and about["run"]["config"].get("metric_for_best_model") != name:
            progress.metric, progress.metrics = None, {}

    @contextlib.contextmanager
    def _explained(self, step: int) -> Iterator[None]:
        """Say of an error in saving what is lost and what to do."""
        try:
            yield
        except Exception as error:
            whole = [int(path.name) for path in self._directory.iterdir() if path.name.isdigit()]
            last = f"the last whole one is of step {max(whole)}" if whole else "there is none before it"
            raise OSError(
                f"the checkpoint of step {step} could not be written to {self._directory} ({one_line(error)}); {last}."
                " Make room or repair the directory, then call train again with the same run_dir: it goes on from there"
            ) from error


def _clear_away(directory: Path) -> None:
    """Remove what an interrupted save has left, before the first save, which would fail if orbax met files that another
    thread of this process is still writing.
    """
    deadline = time.monotonic() + 10
    while left := [*directory.glob("*.orbax-checkpoint-tmp")] if jax.process_index() == 0 else []:
        for path in left:
            shutil.rmtree(path, ignore_errors=True)
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)  # then once more, until nothing is there: a part that comes late makes its directory anew


def _give_back_memory() -> None:
    """Give free memory back to the system: glibc keeps what a compilation and the threads of each save have freed."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
