"""Rollout results: completions with their prompts, dataset rows and episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np

from grpo_jax.types import Completions, Prompts, Row

if TYPE_CHECKING:  # at runtime, imported only where a run uses these features
    from grpo_jax.rollout.interaction import EpisodeRecord


class RolloutResult(NamedTuple):
    """Completions [B, G, T] for B dataset rows, as NumPy arrays.

    The prompts in `rows` include text that environments added. `episodes` are the records of B·G multi-turn
    completions, prompt-major. `environments` are the environments for this process's completions, or None if the
    completions were prefetched. `process_rows` are this process's rows. None divides the rows equally.
    `metrics` are the sampling engine's metrics.
    """

    rows: list[Row]
    prompts: Prompts
    completions: Completions
    episodes: Sequence[EpisodeRecord] | None = None
    environments: Sequence[object] | None = None
    process_rows: range | None = None
    metrics: Mapping[str, float] = {}

    @property
    def present(self) -> np.ndarray:
        """Mask [B, G, T] bool, True for all of a completion's tokens, including observations."""
        return np.asarray(self.completions.mask if self.completions.present is None else self.completions.present)

    @property
    def turns(self) -> np.ndarray:
        """Turn index of each sampled token, [B, G, T] int32, starting at 0; −1 elsewhere."""
        sampled = np.asarray(self.completions.mask)
        if self.episodes is None:
            return np.where(sampled, np.int32(0), np.int32(-1))
        from grpo_jax.rollout.interaction import turn_ids

        return turn_ids(sampled.reshape(-1, sampled.shape[-1]), self.episodes).reshape(sampled.shape)

    @property
    def turn_counts(self) -> list[int]:
        """Number of turns in each of the B·G completions."""
        if self.episodes is None:
            return [1] * self.completions.ended.size
        return [max(1, len(one.lengths)) for one in self.episodes]

    @property
    def episode_metrics(self) -> dict[str, float]:
        """Metrics of the episodes, empty for single-turn completions."""
        if self.episodes is None:
            return {}
        from grpo_jax.rollout.interaction import metrics_of

        observed = (self.present & ~np.asarray(self.completions.mask)).sum(axis=-1)
        return metrics_of(self.episodes) | {"completions/observation_tokens": float(observed.mean())}

    def head(self, count: int) -> RolloutResult:
        """Return the completions for the first `count` rows."""
        process_rows, end = self.process_rows, count * self.completions.tokens.shape[1]
        if process_rows is not None:
            process_rows = range(min(process_rows.start, count), min(process_rows.stop, count))
        environments = None if self.environments is None else self.environments[:end]
        return self.take(np.arange(count))._replace(environments=environments, process_rows=process_rows)

    def take(self, groups: np.ndarray) -> RolloutResult:
        """Return the completions of the given rows, in the given order. The result has no environments."""
        g = self.completions.tokens.shape[1]
        prompts, completions = jax.tree.map(lambda x: np.asarray(x)[groups], (self.prompts, self.completions))
        episodes = self.episodes
        if episodes is not None:
            episodes = [episodes[b * g + i] for b in groups for i in range(g)]
        return RolloutResult([self.rows[b] for b in groups], prompts, completions, episodes, metrics=self.metrics)

    def join(self, other: RolloutResult) -> RolloutResult:
        """Concatenate two rollouts, without environments. Prompts are padded to the longer of the two lengths."""

        def joined(x: np.ndarray, y: np.ndarray) -> np.ndarray:
            shape = np.maximum(x.shape, y.shape)[1:]
            widths = ([(0, 0), *((0, n - size) for n, size in zip(shape, z.shape[1:], strict=True))] for z in (x, y))
            # Repeat the last values: in `PromptImages.feature_index`, 0 would mark the padding as an image token.
            return np.concatenate([np.pad(z, width, mode="edge") for z, width in zip((x, y), widths, strict=True)])

        mine, others = ((x.prompts, x.completions) for x in (self, other))
        prompts, completions = jax.tree.map(joined, mine, others)
        episodes = None
        if self.episodes is not None and other.episodes is not None:
            episodes = [*self.episodes, *other.episodes]
        return RolloutResult(self.rows + other.rows, prompts, completions, episodes, metrics=self.metrics)
