"""Completions of some rows of a dataset: of one turn, or of several where somebody answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from grpo_jax.rollout.generate import generate
from grpo_jax.rollout.turns import generate_turns
from grpo_jax.run.sampler import Sampler, completions_by
from grpo_jax.text.prompts import make_prompts
from grpo_jax.turns.episodes import Episodes, Played, metrics_of
from grpo_jax.turns.interaction import Interaction, encode_rows
from grpo_jax.types import Completions, Model, Params, Prompts, Row


class Sampled(NamedTuple):
    """Completions of B rows, on the host.

    Attributes:
      rows: of the dataset; their prompts with what environments have added.
      prompts: their tokens.
      completions: [B, G, T].
      episodes: B·G, prompt-major; None for completions of one turn.
      environments: of each, those of this process's rows; None likewise, and where they are not to be had any more.
      own: the rows whose environments they are; None: `own_part` of all.
    """

    rows: list[Row]
    prompts: Prompts
    completions: Completions
    episodes: Sequence[Played] | None = None
    environments: Sequence[Any] | None = None
    own: range | None = None

    def first(self, count: int) -> Sampled:
        """Those of the first `count` rows."""
        end = count * self.completions.tokens.shape[1]
        prompts, completions = jax.tree.map(lambda x: x[:count], (self.prompts, self.completions))
        episodes = None if self.episodes is None else self.episodes[:end]
        environments = None if self.environments is None else self.environments[:end]
        own = None if self.own is None else range(min(self.own.start, count), min(self.own.stop, count))
        return Sampled(self.rows[:count], prompts, completions, episodes, environments, own)

    @property
    def present(self) -> np.ndarray:
        """[B, G, T] bool, all tokens of the completions, those that were observed too."""
        return np.asarray(self.completions.mask if self.completions.present is None else self.completions.present)

    @property
    def metrics(self) -> dict[str, float]:
        """Of the episodes."""
        if self.episodes is None:
            return {}
        observed = (self.present & ~np.asarray(self.completions.mask)).sum(axis=-1)
        return metrics_of(self.episodes) | {"completions/observation_tokens": float(observed.mean())}


class Ahead(NamedTuple):
    """Completions that wait for their iteration, in arrays that a checkpoint takes; their environments do not wait.

    Attributes:
      completions: [B, G, T].
      transcript: of several turns the bytes of a JSON text [n] uint8 that holds the episodes, and the prompts to which
        environments have added; None for one turn.
    """

    completions: Completions
    transcript: np.ndarray | None = None

    @classmethod
    def of(cls, sampled: Sampled, rows: Sequence[Row]) -> Ahead:
        """What waits of completions of rows of the dataset."""
        if sampled.episodes is None:
            return cls(sampled.completions)
        prompts = [None if new is row else new["prompt"] for new, row in zip(sampled.rows, rows, strict=True)]
        transcript = {"prompts": prompts, "episodes": [one.to_json() for one in sampled.episodes]}
        return cls(sampled.completions, np.frombuffer(json.dumps(transcript).encode(), np.uint8))

    def sampled(
        self,
        rows: Sequence[Row],
        token_ids: Sequence[Sequence[int]],
        *,
        interaction: Interaction | None,
        prompt_length: int,
        padding: int,
    ) -> Sampled:
        """What was sampled, but for the environments; the arguments are those of `sample`."""
        if interaction is None or self.transcript is None:
            return Sampled(list(rows), make_prompts(token_ids, length=prompt_length), self.completions)
        transcript = json.loads(np.asarray(self.transcript).tobytes())
        prompts = zip(rows, transcript["prompts"], strict=True)
        opened = [row if prompt is None else {**row, "prompt": prompt} for row, prompt in prompts]
        encoded = _prompts(interaction, rows, opened, token_ids, prompt_length, padding)
        return Sampled(opened, encoded, self.completions, [Played.from_json(kept) for kept in transcript["episodes"]])


def sample(
    model: Model,
    params: Params,
    rows: Sequence[Row],
    token_ids: Sequence[Sequence[int]],
    key: jax.Array,
    *,
    interaction: Interaction | None,
    numbers: Sequence[int],
    prompt_length: int,
    padding: int,
    num_generations: int,
    sampler: Sampler | None = None,
    **how: Any,
) -> Sampled:
    """Sample completions of rows.

    Args:
      model, params: the policy.
      rows: of the dataset.
      token_ids: of their prompts.
      key: as in `generate`.
      interaction: what the completions are answered by; None: nothing, they have one turn.
      numbers: of the rows in the dataset, for messages.
      prompt_length: P, unless environments make prompts longer.
      padding: to a multiple of which P is then rounded.
      num_generations: G.
      sampler: another engine in the place of `generate`, for completions of one turn; their log-probs are its own.
      how: further settings of `generate`.
    """
    if interaction is None:
        prompts = make_prompts(token_ids, length=prompt_length)
        given: Any = (model, params, prompts, key)
        if sampler is not None:
            how = {"batch_size": None, **how, "num_generations": num_generations}
            return Sampled(list(rows), prompts, completions_by(sampler, *given, **how))
        completions = generate(*given, num_generations=num_generations, on_host=True, **how)
        return Sampled(list(rows), prompts, completions)
    with Episodes(interaction, rows, num_generations, numbers) as episodes:
        opened = episodes.reset(rows)
        prompts = _prompts(interaction, rows, opened, token_ids, prompt_length, padding)
        episodes.follow(opened, prompts)
        how |= {"num_generations": num_generations}
        completions = generate_turns(model, params, prompts, key, episodes, **how)
        tokens, mask = (np.asarray(x).reshape(-1, x.shape[-1]) for x in (completions.tokens, completions.mask))
        played = episodes.end(tokens, mask)
    environments = [episode.environment for episode in episodes.all]
    return Sampled(opened, prompts, completions, played, environments, episodes.own)


def _prompts(
    interaction: Interaction,
    rows: Sequence[Row],
    opened: Sequence[Row],
    token_ids: Sequence[Sequence[int]],
    prompt_length: int,
    padding: int,
) -> Prompts:
    """The prompts with what environments have added, as long as before unless one has become longer."""
    ids = [_encoded(interaction, row, new, own) for row, new, own in zip(rows, opened, token_ids, strict=True)]
    return make_prompts(ids, length=max(prompt_length, -(-max(map(len, ids)) // padding) * padding))


def _encoded(interaction: Interaction, row: Row, opened: Row, token_ids: Sequence[int]) -> Sequence[int]:
    """The tokens of a row's prompt, encoded anew if an environment has added to it."""
    if opened is row:
        return token_ids
    encoded = encode_rows(
        interaction,
        [opened],
        interaction.tokenizer,
        chat_template_kwargs=interaction.template_kwargs,
        argument="with what reset returned,",
    )
    return encoded.token_ids[0]
