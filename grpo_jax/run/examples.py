"""The batches of an SFT run, and its evaluation: examples of a dataset in the place of sampled completions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from grpo_jax.devices.sharding import fetch
from grpo_jax.run.run import SFTRun
from grpo_jax.text.prompts import prompt_indices
from grpo_jax.types import Batch, Params


def next_examples(run: SFTRun, cursor: int) -> tuple[Batch, int, dict[str, float]]:
    """The batch of the next update, the cursor after it, and its metrics.

    Args:
      run: the run.
      cursor: blocks used since the start of the run.
    """
    config, count = run.config, run.sizes.prompts
    entries = prompt_indices(
        cursor,
        count,
        num_rows=len(run.data.blocks),
        seed=config.seed,
        shuffle=config.train_sampling_strategy == "random",
    )
    blocks = [block for _, block in entries]
    length = run.updater.config.max_completion_length
    batch = run.data.batch(blocks, rows=run.sizes.prompts_per_update, length=length)
    return batch, cursor + count, {"num_tokens": float(run.data.count_tokens(blocks))}


def evaluate_examples(run: SFTRun, params: Params, *, interrupt: Callable[[], None] = lambda: None) -> dict[str, float]:
    """`loss` of the held-out examples, by the config's `loss_type`: the mean over all of their learned tokens.

    Args:
      run: the run, with `eval_data`.
      params: of the policy.
      interrupt: called between batches; what it raises ends the evaluation.
    """
    examples = run.eval_data
    assert examples is not None, "asked by the caller"
    rows = run.config.per_device_eval_batch_size * run.config.data_shards()
    length = run.updater.config.max_completion_length
    total = tokens = 0.0
    for start in range(0, len(examples.blocks), rows):
        interrupt()
        batch = examples.batch(range(start, min(start + rows, len(examples.blocks))), rows=rows, length=length)
        scores = fetch(run.updater.score(params, batch.prompts, batch.tokens, batch.mask))
        l = np.asarray(scores, np.float64)[batch.mask]
        total += float(-(l if run.config.loss_type == "nll" else np.exp(l) * l).sum())
        tokens += l.size
    return {"loss": total / tokens}
