"""Diagnostics for updates with an infinite or NaN loss or gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from grpo_jax.maths.checks import masked
from grpo_jax.messages import show
from grpo_jax.models.sharding import fetch
from grpo_jax.types import Batch, Params
from grpo_jax.update.step import Updater


def name_not_finite(
    updater: Updater, params: Params, batch: Batch, metrics: Mapping[str, float], tokenizer: Any = None
) -> str:
    """Describe the first non-finite value found in a skipped update, with its prompt and completion.

    Searches the advantages, then the log-probs of the sampler, the old policy, the references and `params`, and finally
    the metrics. `params` are the params before the update. With several processes, all of them must call this.
    """
    batch = fetch(batch)
    used = batch.mask if batch.advantages.ndim == 3 else batch.mask.any(axis=-1)
    inputs = {
        "the advantage": np.where(used, batch.advantages, 0),
        "the sampler's log-prob": batch.sampling_log_probs,
        "the old log-prob": batch.old_log_probs,
        "the reference's log-prob": batch.ref_log_probs,
        "the initial policy's log-prob": batch.initial_log_probs,
        "the policy's log-prob": fetch(updater.log_probs(params, batch.prompts, batch.tokens, batch.mask)),
    }
    for name, values in inputs.items():
        if values is None:
            continue
        # The loss bounds log-probs of −inf, but not advantages.
        array = np.asarray(values if name == "the advantage" else masked(values, batch.mask))
        if not np.isfinite(array).all():
            at = tuple(int(i) for i in np.argwhere(~np.isfinite(array))[0])
            where = ", ".join(f"{axis} {i}" for axis, i in zip(("prompt", "completion", "token"), at, strict=False))
            return f"{name} is {array[at]} at {where} of the batch{_texts(batch, at[0], at[1], tokenizer)}"
    names = ("policy_loss", "kl_in_loss", "loss", "grad_norm")
    bad = next(name for name in names if not np.isfinite(metrics.get(name, 0.0)))
    return f"the metric {bad} is {metrics[bad]}, although all advantages and log-probs in the batch are finite"


def _texts(batch: Batch, prompt: int, completion: int, tokenizer: Any) -> str:
    """Return the decoded prompt and completion in parentheses, or "" without a tokenizer."""
    if tokenizer is None:
        return ""
    read = batch.prompts.tokens[prompt, : batch.prompts.lengths[prompt]]
    drawn = batch.tokens[prompt, completion][batch.mask[prompt, completion]]
    return f" (prompt {show(tokenizer.decode(read))}, completion {show(tokenizer.decode(drawn))})"
