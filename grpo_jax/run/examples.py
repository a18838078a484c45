"""The batches of an SFT run, and its evaluation: examples of a dataset in the place of sampled completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np

from grpo_jax.models.packing import evenly, lengths_of
from grpo_jax.models.sharding import fetch
from grpo_jax.run.run import SFTRun
from grpo_jax.text.examples import Examples
from grpo_jax.text.prompts import prompt_indices
from grpo_jax.types import Batch, Params


def next_examples(run: SFTRun, cursor: int) -> tuple[Batch, int, dict[str, float]]:
    """The batch of the next update, the cursor (blocks since the start of the run) after it, and its metrics."""
    config, count = run.config, run.sizes.prompts
    entries = prompt_indices(
        cursor,
        count,
        num_rows=len(run.data.blocks),
        seed=config.seed,
        shuffle=config.train_sampling_strategy == "random",
    )
    blocks = [block for _, block in entries]
    batch = _batch(run, run.data, blocks, run.sizes.prompts_per_update)
    return batch, cursor + count, {"num_tokens": float(run.data.count_tokens(blocks))}


def _batch(run: SFTRun, examples: Examples, blocks: Sequence[int], rows: int) -> Batch:
    """The examples of some blocks; those that begin alike as completions of one prompt, on each device of a mesh.

    So their beginning is read once, and they are laid end to end: a group alone is padded to whole blocks.
    """
    length, groups = run.updater.config.max_completion_length, run.num_groups
    batch = examples.batch(blocks, rows=rows, length=length, prompt_length=run.prompt_length)
    if groups is None:
        return batch
    order = evenly(lengths_of(np.asarray(batch.mask))[:, 0], groups)

    def grouped(x: jax.Array) -> jax.Array:
        return x[order].reshape(groups, -1, *x.shape[2:])

    return batch.replace(
        prompts=jax.tree.map(lambda x: np.repeat(x[:1], groups, axis=0), batch.prompts),
        tokens=grouped(batch.tokens),
        mask=grouped(batch.mask),
        advantages=grouped(batch.advantages),
        sampling_log_probs=grouped(batch.sampling_log_probs),
    )


def evaluate_examples(run: SFTRun, params: Params, *, interrupt: Callable[[], None] = lambda: None) -> dict[str, float]:
    """`loss` of the held-out examples, by the config's `loss_type`: the mean over all of their learned tokens."""
    examples = run.eval_data
    assert examples is not None, "asked by the caller"
    rows = run.config.per_device_eval_batch_size * run.config.data_shards()
    total = tokens = 0.0
    for start in range(0, len(examples.blocks), rows):
        interrupt()
        batch = _batch(run, examples, range(start, min(start + rows, len(examples.blocks))), rows)
        scores = fetch(run.updater.score(params, batch.prompts, batch.tokens, batch.mask))
        l = np.asarray(scores, np.float64)[batch.mask]
        total += float(-(l if run.config.loss_type == "nll" else np.exp(l) * l).sum())
        tokens += l.size
    return {"loss": total / tokens}
