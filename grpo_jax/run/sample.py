"""Completions of some rows of a dataset: of one turn, or of several where somebody answers."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from grpo_jax.devices.sharding import fetch
from grpo_jax.rollout.generate import generate
from grpo_jax.rollout.turns import generate_turns
from grpo_jax.text.prompts import make_prompts
from grpo_jax.text.rows import Row
from grpo_jax.turns.episodes import Episode, Episodes, Setting
from grpo_jax.turns.setting import encode_rows
from grpo_jax.types import Completions, Model, Params, Prompts


class Sampled(NamedTuple):
    """Completions of B rows, on the host.

    Attributes:
      rows: of the dataset; their prompts with what environments have added.
      prompts: their tokens.
      completions: [B, G, T].
      episodes: B·G, prompt-major; None for completions of one turn.
      rewards: what the environments said of each; None likewise.
      metrics: of the episodes.
    """

    rows: list[Row]
    prompts: Prompts
    completions: Completions
    episodes: Sequence[Episode] | None = None
    rewards: list[float | None] | None = None
    metrics: Mapping[str, float] = types.MappingProxyType({})

    def first(self, count: int) -> Sampled:
        """Those of the first `count` rows."""
        own = count * self.completions.tokens.shape[1]
        prompts, completions = jax.tree.map(lambda x: x[:count], (self.prompts, self.completions))
        episodes = None if self.episodes is None else self.episodes[:own]
        rewards = None if self.rewards is None else self.rewards[:own]
        return Sampled(self.rows[:count], prompts, completions, episodes, rewards, self.metrics)

    @property
    def present(self) -> np.ndarray:
        """[B, G, T] bool, all tokens of the completions, those that were observed too."""
        return np.asarray(self.completions.mask if self.completions.present is None else self.completions.present)


def sample(
    model: Model,
    params: Params,
    rows: Sequence[Row],
    token_ids: Sequence[Sequence[int]],
    key: jax.Array,
    *,
    setting: Setting | None,
    numbers: Sequence[int],
    prompt_length: int,
    padding: int,
    num_generations: int,
    **how: Any,
) -> Sampled:
    """Sample completions of rows.

    Args:
      model, params: the policy.
      rows: of the dataset.
      token_ids: of their prompts.
      key: as in `generate`.
      setting: what the completions are answered by; None: nothing, they have one turn.
      numbers: of the rows in the dataset, for messages.
      prompt_length: P, unless environments make prompts longer.
      padding: to a multiple of which P is then rounded.
      num_generations: G.
      how: further settings of `generate`.
    """
    if setting is None:
        prompts = make_prompts(token_ids, length=prompt_length)
        completions = generate(model, params, prompts, key, num_generations=num_generations, **how)
        return Sampled(list(rows), prompts, fetch(completions))
    with Episodes(setting, rows, num_generations, numbers) as episodes:
        opened = episodes.reset(rows)
        ids = [_encoded(setting, row, new, own) for row, new, own in zip(rows, opened, token_ids, strict=True)]
        longest = max(prompt_length, -(-max(map(len, ids)) // padding) * padding)
        prompts = make_prompts(ids, length=longest)
        how |= {"num_generations": num_generations}
        completions = fetch(generate_turns(model, params, prompts, key, episodes, **how))
        flat = lambda x: np.asarray(x).reshape(-1, x.shape[-1])
        rewards = episodes.end(flat(completions.tokens), flat(completions.mask))
    observed = np.asarray(completions.present & ~completions.mask).sum(axis=-1)
    metrics = episodes.metrics() | {"completions/observation_tokens": float(observed.mean())}
    return Sampled(opened, prompts, completions, episodes.all, rewards, metrics)


def _encoded(setting: Setting, row: Row, opened: Row, token_ids: Sequence[int]) -> Sequence[int]:
    """The tokens of a row's prompt, encoded anew if an environment has added to it."""
    if opened is row:
        return token_ids
    how = {"chat_template_kwargs": setting.template_kwargs, "argument": "with what reset returned,"}
    return encode_rows(setting, [opened], setting.tokenizer, **how).token_ids[0]
