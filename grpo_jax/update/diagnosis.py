"""Which number went bad first, when a loss or a gradient is not finite.

```
reward → advantage → sampler log-prob → old log-prob → reference log-prob → log-prob → ratio → KL → loss → gradient
```

The terms are looked at in the order in which they are computed, by the code that the update itself runs; the first
that is not finite explains all that come after it. Of several processes, all look together and find the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.config.sft import Config
from grpo_jax.devices.sharding import fetch
from grpo_jax.maths.checks import clean
from grpo_jax.maths.kl import kl_divergence
from grpo_jax.maths.metrics import finalize_metrics
from grpo_jax.maths.surrogates import RATIOS
from grpo_jax.messages import show
from grpo_jax.types import Batch, Json, Params
from grpo_jax.update.packed import Updater
from grpo_jax.update.state import TrainState


@dataclasses.dataclass(frozen=True)
class Finding:
    """The first term that is not finite, and where.

    Attributes:
      term: "reward", "advantage", "sampler log-prob", "old log-prob", "reference log-prob", "log-prob", "ratio", "KL",
        "loss" or "gradient".
      value: NaN or an infinity.
      prompt: its number in the batch, if the term has one.
      completion: its number in the group, likewise.
      token: its number in the completion, likewise.
      parameter: path of the first parameter whose gradient is not finite.
      count: how many numbers of the term are not finite.
      bad_parameter: path of the first parameter of the policy that is itself not finite.
      row: what `completions.jsonl` says of the completion, if it is known.
    """

    term: str
    value: float
    prompt: int | None = None
    completion: int | None = None
    token: int | None = None
    parameter: str | None = None
    count: int = 1
    bad_parameter: str | None = None
    row: Json | None = None

    def __str__(self) -> str:
        places = {"prompt": self.prompt, "completion": self.completion, "token": self.token}
        where = ", ".join(f"{name} {at}" for name, at in places.items() if at is not None)
        article = "an" if self.term[0] in "ao" else "a"
        text = f"the first number that is not finite is {article} {self.term}, {self.value}"
        if self.parameter is not None:
            text += f", of the parameter {self.parameter}"
        if where:
            text += f", at {where} of the batch"
        if self.count > 1:
            text += f" ({self.count} of this term are not finite)"
        if self.row is not None:
            text += f"; the prompt is {show(self.row['prompt'])}, the completion {show(self.row['completion'])}"
            text += f", its rewards {self.row['rewards']}"
        if self.bad_parameter is not None:
            text += f"; the policy's own parameter {self.bad_parameter} is not finite"
        return text


def diagnose(
    state: TrainState, batch: Batch, updater: Updater, *, rows: Sequence[Json] | None = None
) -> Finding | None:
    """Find the first term of an update that is not finite.

    Args:
      state: the state that the update began with; after a skipped update, the next state with its `step` set back.
      rows: B·G entries as in `completions.jsonl`, for the rewards and the texts; None if they are not known.

    Returns:
      A `Finding`; None if loss and gradient are finite.
    """
    for term, values in _terms(state, batch, updater, rows):
        if isinstance(values, Mapping):
            bad = {path: value for path, value in values.items() if not np.isfinite(value)}
            if bad:
                path, value = next(iter(bad.items()))
                found = Finding(term, value, parameter=path, count=len(bad))
                break
        elif not np.isfinite(values).all():
            value, at = _first_bad(values)
            b, g, t, *_ = (*at, None, None, None)
            row = None if rows is None or b is None or g is None else rows[b * batch.mask.shape[1] + g]
            found = Finding(term, value, b, g, t, count=int((~np.isfinite(values)).sum()), row=row)
            break
    else:
        return None
    bad_parameter = next((path for path, x in _leaves(state.params) if not np.isfinite(x).all()), None)
    return dataclasses.replace(found, bad_parameter=bad_parameter)


def _terms(
    state: TrainState, batch: Batch, updater: Updater, rows: Sequence[Json] | None
) -> Iterator[tuple[str, np.ndarray | dict[str, float]]]:
    """Each term's values, whole and on the host, computed when they are asked for."""
    config, batch = updater.config, fetch(batch)
    mask = batch.mask
    if rows is not None:
        yield "reward", _rewards(rows, config).reshape(batch.mask.shape[:2])
    yield "advantage", np.asarray(batch.advantages)
    l_old = clean(batch.sampling_log_probs, mask)
    yield "sampler log-prob", np.asarray(l_old)
    if batch.old_log_probs is not None:
        l_old = clean(batch.old_log_probs, mask)
        yield "old log-prob", np.asarray(l_old)
    for reference in (batch.ref_log_probs, batch.initial_log_probs):
        if reference is not None:
            yield "reference log-prob", np.asarray(clean(reference, mask))
    l = clean(fetch(updater.score(state.params, batch.prompts, batch.tokens, mask)), mask)
    yield "log-prob", np.asarray(l)
    log_ratio = jnp.zeros_like(l) if updater.on_policy else l - l_old
    yield "ratio", np.asarray(RATIOS[config.importance_sampling_level](l, log_ratio, mask))
    if batch.ref_log_probs is not None:
        kl = kl_divergence(l, clean(batch.ref_log_probs, mask), estimator=config.kl_estimator)
        yield "KL", np.asarray(jnp.where(mask, kl, 0))
    grads, sums = updater.gradients(state, batch)
    yield "loss", np.asarray(finalize_metrics(fetch(sums))["loss"])
    first: dict[str, float] = {}
    norms: dict[str, float] = {}
    # Finite one by one, and too large together: the norm is a sum of squares.
    with np.errstate(over="ignore", invalid="ignore"):
        for path, x in _leaves(grads):  # one at a time: together they are as large as the policy
            first |= {} if np.isfinite(x).all() else {path: _first_bad(x)[0]}
            norms[path] = float(np.sqrt(np.square(x).sum(dtype=np.float32)))
        yield "gradient", first
        if np.isfinite(list(norms.values())).all():
            total = np.sqrt(np.square(np.asarray(list(norms.values()), np.float32)).sum(dtype=np.float32))
            norms = {max(norms, key=norms.__getitem__): float(total)}
    yield "gradient", norms


def _rewards(rows: Sequence[Json], config: Config) -> np.ndarray:
    """Weighted sums [B·G] of the rewards in float32; what has no score adds nothing."""
    values = [[np.nan if x is None else x for x in row["rewards"].values()] for row in rows]
    rewards = np.nan_to_num(np.asarray(values, np.float32), nan=0.0, posinf=np.inf, neginf=-np.inf)
    with np.errstate(over="ignore", invalid="ignore"):
        return (rewards * np.asarray(config.reward_weights or 1.0, np.float32)).sum(axis=-1, dtype=np.float32)


def _first_bad(values: np.ndarray) -> tuple[float, tuple[int, ...]]:
    """The first value that is not finite, and where it stands."""
    at = tuple(int(i) for i in np.argwhere(~np.isfinite(values))[0])
    return float(values[at]), at


def _leaves(tree: Params) -> Iterator[tuple[str, np.ndarray]]:
    """(path, array) of each leaf, whole and in float32."""
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        yield jax.tree_util.keystr(path, simple=True, separator="/"), fetch(x).astype(np.float32)
