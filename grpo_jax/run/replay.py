"""Batches whose update was skipped, because loss or gradient was not finite: kept, explained, and run again alone.

`run_dir/bad_batches/step-N/` holds what that update read: `arrays.npz` (batch, params) and `about.json` (config, texts
and rewards of the rows, what was found).
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.config.sft import Config, stored_config
from grpo_jax.devices.sharding import mesh_of
from grpo_jax.devices.streams import devices_of
from grpo_jax.hub.files import appearing
from grpo_jax.hub.policy import with_settings
from grpo_jax.maths.surrogates import Surrogate
from grpo_jax.policy import Policy
from grpo_jax.rewards.contract import function_name
from grpo_jax.run.run import BaseRun
from grpo_jax.types import Batch, Prompts
from grpo_jax.update.diagnosis import Finding, diagnose
from grpo_jax.update.packed import choose_updater
from grpo_jax.update.state import TrainState
from grpo_jax.watch.writer import plain, read_lines

MOST_KEPT = 3
"""Batches of a run that are kept at most: each is as large as the policy, and the first ones tell the most."""


class NotFiniteError(FloatingPointError):
    """Too many updates in a row were skipped, since loss or gradient was not finite."""


class BadBatches:
    """The skipped updates of a run; without a run directory they are explained, and not kept."""

    def __init__(self, run_dir: str | Path | None, run: BaseRun):
        self._directory = None if run_dir is None else Path(run_dir).expanduser() / "bad_batches"
        self._run = run
        self._said = False

    def note(self, state: TrainState, batch: Batch, *, step: int, index: int) -> None:
        """Keep the batch of a skipped update if it is one of the first, and say so once.

        Args:
          state: the state after the update, whose params are those before it.
          step: optimizer steps done, this one included.
          index: which minibatch of the iteration it is.
        """
        target = None if self._directory is None else self._directory / f"step-{step}"
        # A batch that is there already is of the part of the run that a kill took back: it is written anew.
        full = target is not None and not target.exists() and len(list(target.parent.glob("step-*"))) >= MOST_KEPT
        if (target is None or full) and self._said:
            return
        rows = self._rows(step, index)
        found = self._explain(state, batch, rows)
        kept = ""
        if target is not None and not full:
            kept = f" The batch is kept: grpo_jax.replay({str(target)!r}, policy) runs it again alone."
            try:
                _write(target, state, batch, self._run, rows, found)
            except OSError as error:  # a full disk, say; the evidence is not worth the run
                kept = f" The batch could not be kept in {str(target)!r} ({error.strerror or error})."
        if not self._said:
            warnings.warn(
                f"step {step} was skipped, params and optimizer are as they were: {found or 'all is finite now'}.{kept}"
                " From here on skipped updates are only counted, in the metric update_skipped",
                RuntimeWarning,
                stacklevel=5,  # the call of `train`
            )
            self._said = True

    def error(self, state: TrainState, batch: Batch, *, step: int, index: int) -> NotFiniteError:
        """The error that ends a run after `max_skipped_updates` in a row; arguments as of `note`."""
        found = self._explain(state, batch, self._rows(step, index))
        kept = sorted(self._directory.glob("step-*"), key=_step_of) if self._directory else []
        where = f" Batches are kept in {str(self._directory)!r}; grpo_jax.replay runs one again alone." if kept else ""
        most = self._run.config.max_skipped_updates
        return NotFiniteError(
            f"step {step}: {most} updates in a row were skipped (max_skipped_updates); of the last one "
            f"{found or 'all is finite now'}.{where} The policy is as it was before the first of them, and the same "
            "run_dir goes on from here"
        )

    def _explain(self, state: TrainState, batch: Batch, rows: list[dict[str, Any]] | None) -> Finding | None:
        return diagnose(state.replace(step=state.step - 1), batch, self._run.updater, rows=rows)

    def _rows(self, step: int, index: int) -> list[dict[str, Any]] | None:
        """The lines of `completions.jsonl` that the minibatch has."""
        if self._directory is None:
            return None
        rows: list[dict[str, Any]] = []
        for row in read_lines(self._directory.parent / "completions.jsonl"):
            if row["step"] > step:
                break
            rows = [row] if not rows or row["step"] != rows[0]["step"] else [*rows, row]
        count = self._run.sizes.prompts_per_update * self._run.config.num_generations
        rows = rows[index * count : (index + 1) * count]
        return rows if len(rows) == count else None


def replay(
    where: str | Path, policy: Policy, config: Config | None = None, *, surrogate: Surrogate | None = None
) -> Finding | None:
    """Run the update of a kept batch again, alone, and print which number is the first that is not finite.

    Args:
      where: a directory `run_dir/bad_batches/step-N`, or the run directory (then the first that was kept).
      policy: the policy that the run began with, for its model; the params are the kept ones.
      config: settings to try, as a remedy (`compute_dtype="float32"` for instance); None for those of the run.
      surrogate: that of the run, if it had one of the caller's own. What a teacher that is a model adds to the loss is
        left out.

    Returns:
      A `Finding` with the term and its place; None if loss and gradient are finite.

    Raises:
      FileNotFoundError: nothing is kept there.
      ValueError: the params belong to another model, or the run's own surrogate is missing.

    Example:
      >>> replay("runs/none", None)
      Traceback (most recent call last):
      FileNotFoundError: no bad batch is kept in 'runs/none': give a run directory, or its bad_batches/step-N ...
    """
    directory = Path(where).expanduser()
    if not (directory / "about.json").exists():
        kept = sorted((directory / "bad_batches").glob("step-*"), key=_step_of)
        if not kept:
            raise FileNotFoundError(
                f"no bad batch is kept in {str(where)!r}: give a run directory, or its bad_batches/step-N (without "
                "one, no update of the run was skipped)"
            )
        directory = kept[0]
    about = json.loads((directory / "about.json").read_text(encoding="utf-8"))
    of_run = stored_config(about["config"])
    config = of_run if config is None else config
    if surrogate is None and about.get("surrogate") is not None:
        raise ValueError(f"surrogate: the run had one of its own, {about['surrogate']}; give it")
    with np.load(directory / "arrays.npz") as arrays:
        state, batch = _read(arrays, policy)
    sizes = of_run.sizes()
    updater = choose_updater(
        with_settings(policy.model, config, list(devices_of(state.params))),
        config,
        micro=(sizes.micro_prompts, sizes.micro_completions),
        mesh=mesh_of(state.params),
        on_policy=of_run.on_policy,
        surrogate=surrogate,
    )
    found = diagnose(state, batch, updater, rows=about["rows"])
    print(f"{directory}: {found or 'loss and gradient are finite'}")
    return found


def _step_of(directory: Path) -> int:
    return int(directory.name.removeprefix("step-"))


def _write(
    target: Path,
    state: TrainState,
    batch: Batch,
    run: BaseRun,
    rows: list[dict[str, Any]] | None,
    found: Finding | None,
) -> None:
    """Write all that the update read; the directory appears when it is whole."""
    fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    prompts = fields.pop("prompts")
    arrays = {f"batch/{name}": x for name, x in fields.items() if x is not None}
    arrays |= {"prompts/tokens": prompts.tokens, "prompts/lengths": prompts.lengths}
    arrays |= {f"params/{i}": x for i, x in enumerate(jax.tree.leaves(state.params))}
    arrays |= {"key": jax.random.key_data(state.key), "step": state.step - 1, "entropy_bonus": state.entropy_bonus}
    about = {
        "found": None if found is None else str(found),
        "config": run.config.to_dict(),
        "surrogate": None if run.updater.surrogate is None else function_name(run.updater.surrogate),
        "rows": None if rows is None else plain(rows),
    }
    with appearing(target) as scratch:
        as_numpy: dict[str, Any] = {name: np.asarray(x) for name, x in arrays.items()}
        np.savez(scratch / "arrays.npz", **as_numpy)
        (scratch / "about.json").write_text(json.dumps(about, indent=2, ensure_ascii=False), encoding="utf-8")


def _read(arrays: Mapping[str, Any], policy: Policy) -> tuple[TrainState, Batch]:
    """The state and batch of a skipped update; the params take their tree and their dtypes from the policy."""
    like, tree = jax.tree.flatten(policy.params)
    leaves = [arrays[f"params/{i}"] for i in range(sum(name.startswith("params/") for name in arrays))]
    if [x.shape for x in leaves] != [x.shape for x in like]:
        raise ValueError("policy: its params have other shapes than those of the kept batch; give the run's own model")
    # NumPy's files know bfloat16 as two bytes only.
    leaves = [jnp.asarray(x.view(y.dtype) if x.dtype.kind == "V" else x) for x, y in zip(leaves, like, strict=True)]
    fields = {name[6:]: arrays[name] for name in arrays if name.startswith("batch/")}
    fields["prompts"] = Prompts(arrays["prompts/tokens"], arrays["prompts/lengths"])
    state = TrainState(
        params=jax.tree.unflatten(tree, leaves),
        old_params=None,
        ref_params=None,
        initial_params=None,
        opt_state=(),
        step=jnp.asarray(arrays["step"]),
        key=jax.random.wrap_key_data(jnp.asarray(arrays["key"])),
        entropy_coef=jnp.zeros(()),
        entropy_bonus=jnp.asarray(arrays["entropy_bonus"]),
        skipped=jnp.zeros((), jnp.int32),
    )
    return state, Batch(**fields)
