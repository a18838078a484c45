"""Completions of some rows of a dataset: of one turn, or of several where somebody answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from grpo_jax.rollout.episodes import Episodes
from grpo_jax.rollout.generate import generate
from grpo_jax.rollout.interaction import Interaction, Played, encode_rows, metrics_of, turn_ids
from grpo_jax.rollout.turns import Answers
from grpo_jax.run.sampler import Request, completions_by, with_old_log_probs
from grpo_jax.text.prompts import EncodedPrompts, make_prompts
from grpo_jax.types import Completions, Model, Params, Prompts, Row
from grpo_jax.update.packed import Updater


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
    def turns(self) -> np.ndarray:
        """[B, G, T] int32, the turn that each drawn token belongs to, from 0; −1 elsewhere."""
        drawn = np.asarray(self.completions.mask)
        if self.episodes is None:
            return np.where(drawn, np.int32(0), np.int32(-1))
        return turn_ids(drawn.reshape(-1, drawn.shape[-1]), self.episodes).reshape(drawn.shape)

    @property
    def turn_counts(self) -> list[int]:
        """B·G, the turns of each completion."""
        if self.episodes is None:
            return [1] * self.completions.ended.size
        return [max(1, len(one.lengths)) for one in self.episodes]

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the episodes."""
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
    def of(cls, sampled: Sampled, data: EncodedPrompts, numbers: Sequence[int]) -> Ahead:
        """The part of some completions that waits; the arguments are those of `sample`."""
        if sampled.episodes is None:
            return cls(sampled.completions)
        rows = zip(sampled.rows, (data.rows[i] for i in numbers), strict=True)
        transcript = {
            "prompts": [None if opened is row else opened["prompt"] for opened, row in rows],
            "episodes": [one.to_json() for one in sampled.episodes],
        }
        return cls(sampled.completions, np.frombuffer(json.dumps(transcript).encode(), np.uint8))

    def sampled(self, data: EncodedPrompts, numbers: Sequence[int], request: Request) -> Sampled:
        """The completions as they were sampled, without their environments; the arguments are those of `sample`."""
        rows = [data.rows[i] for i in numbers]
        if request.interaction is None or self.transcript is None:
            prompts = make_prompts([data.token_ids[i] for i in numbers], length=request.prompt_length, on_host=True)
            return Sampled(rows, prompts, self.completions)
        transcript = json.loads(np.asarray(self.transcript).tobytes())
        kept = zip(rows, transcript["prompts"], strict=True)
        opened = [row if prompt is None else {**row, "prompt": prompt} for row, prompt in kept]
        encoded = _prompts(request.interaction, request, data, numbers, opened)
        return Sampled(opened, encoded, self.completions, [Played.from_json(one) for one in transcript["episodes"]])


def sample(
    model: Model,
    params: Params,
    data: EncodedPrompts,
    numbers: Sequence[int],
    key: jax.Array,
    request: Request,
    *,
    prompt_indices: np.ndarray,
    interrupt: Callable[[], None],
    updater: Updater | None = None,
) -> Sampled:
    """Sample completions of rows of a dataset: by the engine that the request names, or by `generate`.

    Args:
      numbers: B rows of it, by their indices.
      updater: scores the completions of another engine, which have no old log-probs otherwise.
    """

    at: dict[str, Any] = {"prompt_indices": prompt_indices, "interrupt": interrupt}
    interaction, sampler = request.interaction, request.sampler

    def by_sampler(prompts: Prompts, key: jax.Array, answers: Answers | None = None) -> Completions:
        assert sampler is not None, "asked for where there is one"
        completions = completions_by(sampler, model, params, prompts, key, request, answers=answers, **at)
        return completions if updater is None else with_old_log_probs(completions, updater, params, prompts)

    def by_generate(prompts: Prompts, key: jax.Array, answers: Answers | None = None) -> Completions:
        return generate(model, params, prompts, key, answers=answers, on_host=True, **at, **request.arguments)

    if interaction is not None:
        play = by_generate if sampler is None else by_sampler
        return _sample_turns(interaction, play, data, numbers, key, request)
    rows = [data.rows[i] for i in numbers]
    prompts = make_prompts([data.token_ids[i] for i in numbers], length=request.prompt_length, on_host=True)
    if sampler is None:
        return Sampled(rows, prompts, by_generate(prompts, key))
    return Sampled(rows, prompts, by_sampler(prompts, key))


def _sample_turns(
    interaction: Interaction,
    play: Callable[..., Completions],
    data: EncodedPrompts,
    numbers: Sequence[int],
    key: jax.Array,
    request: Request,
) -> Sampled:
    """`sample`, of completions of several turns: their environments are opened, answer, and are closed."""
    rows = [data.rows[i] for i in numbers]
    with Episodes(interaction, rows, request.num_generations, numbers) as episodes:
        opened = episodes.reset(rows)
        prompts = _prompts(interaction, request, data, numbers, opened)
        episodes.follow(opened, prompts)
        completions = play(prompts, key, episodes)
        tokens, mask = (np.asarray(x).reshape(-1, x.shape[-1]) for x in (completions.tokens, completions.mask))
        played = episodes.end(tokens, mask)
    environments = [episode.environment for episode in episodes.all]
    return Sampled(opened, prompts, completions, played, environments, episodes.own)


def _prompts(
    interaction: Interaction, request: Request, data: EncodedPrompts, numbers: Sequence[int], opened: Sequence[Row]
) -> Prompts:
    """The prompts with what environments have added, as long as before unless one has become longer."""
    ids = [
        data.token_ids[i] if row is data.rows[i] else _encoded(interaction, row)
        for i, row in zip(numbers, opened, strict=True)
    ]
    longest = -(-max(map(len, ids)) // request.padding) * request.padding
    return make_prompts(ids, length=max(request.prompt_length, longest), on_host=True)


def _encoded(interaction: Interaction, opened: Row) -> Sequence[int]:
    """The tokens of a prompt to which an environment has added."""
    encoded = encode_rows(
        interaction,
        [opened],
        interaction.tokenizer,
        chat_template_kwargs=interaction.template_kwargs,
        argument="with what reset returned,",
    )
    return encoded.token_ids[0]
