"""Sample completions of rows of a dataset: in one turn or several, by `generate` or by an engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from grpo_jax.config.config import GRPOConfig
from grpo_jax.policy import Policy
from grpo_jax.rollout.ends import TurnEnds
from grpo_jax.rollout.generate import generate
from grpo_jax.text.prompts import EncodedPrompts, make_prompts
from grpo_jax.types import Completions, Params, Prompts, Row

if TYPE_CHECKING:  # optional capabilities
    from grpo_jax.rollout.interaction import Interaction, Played
    from grpo_jax.rollout.turns import Answers
    from grpo_jax.run.sampler import Sampler


class RolloutResult(NamedTuple):
    """Completions of B rows of a dataset, on the host.

    Attributes:
      rows: the rows; their prompts include what environments have added.
      prompts: the tokens of the prompts.
      completions: [B, G, T].
      episodes: records of B·G episodes, prompt-major; None for completions of one turn.
      environments: the environments of this process's completions; None without environments, and once they are closed.
      process_rows: the range of rows that this process scores; None: an equal share.
      metrics: measured by the engine that sampled.
    """

    rows: list[Row]
    prompts: Prompts
    completions: Completions
    episodes: Sequence[Played] | None = None
    environments: Sequence[object] | None = None
    process_rows: range | None = None
    metrics: Mapping[str, float] = {}

    def first(self, count: int) -> RolloutResult:
        """The completions of the first `count` rows."""
        process_rows, end = self.process_rows, count * self.completions.tokens.shape[1]
        if process_rows is not None:
            process_rows = range(min(process_rows.start, count), min(process_rows.stop, count))
        environments = None if self.environments is None else self.environments[:end]
        return self.take(np.arange(count))._replace(environments=environments, process_rows=process_rows)

    def take(self, groups: np.ndarray) -> RolloutResult:
        """The completions of these rows, in this order, without their environments."""
        g = self.completions.tokens.shape[1]
        prompts, completions = jax.tree.map(lambda x: np.asarray(x)[groups], (self.prompts, self.completions))
        episodes = self.episodes
        if episodes is not None:
            episodes = [episodes[b * g + i] for b in groups for i in range(g)]
        return RolloutResult([self.rows[b] for b in groups], prompts, completions, episodes, metrics=self.metrics)

    def join(self, other: RolloutResult) -> RolloutResult:
        """These completions and then the others; prompts are padded to one length."""
        longest = max(self.prompts.tokens.shape[1], other.prompts.tokens.shape[1])

        def padded(prompts: Prompts) -> Prompts:
            more = longest - prompts.tokens.shape[1]
            return prompts.replace(tokens=np.pad(prompts.tokens, ((0, 0), (0, more))))

        arrays = ((padded(x.prompts), x.completions) for x in (self, other))
        prompts, completions = jax.tree.map(lambda *x: np.concatenate(x), *arrays)
        episodes = None
        if self.episodes is not None and other.episodes is not None:
            episodes = [*self.episodes, *other.episodes]
        return RolloutResult(self.rows + other.rows, prompts, completions, episodes, metrics=self.metrics)

    @property
    def present(self) -> np.ndarray:
        """[B, G, T] bool, True on all tokens of a completion, observations included."""
        return np.asarray(self.completions.mask if self.completions.present is None else self.completions.present)

    @property
    def turns(self) -> np.ndarray:
        """[B, G, T] int32, the turn of each sampled token, from 0; −1 elsewhere."""
        sampled = np.asarray(self.completions.mask)
        if self.episodes is None:
            return np.where(sampled, np.int32(0), np.int32(-1))
        from grpo_jax.rollout.interaction import turn_ids

        return turn_ids(sampled.reshape(-1, sampled.shape[-1]), self.episodes).reshape(sampled.shape)

    @property
    def turn_counts(self) -> list[int]:
        """B·G, the turns of each completion."""
        if self.episodes is None:
            return [1] * self.completions.ended.size
        return [max(1, len(one.lengths)) for one in self.episodes]

    @property
    def episode_metrics(self) -> dict[str, float]:
        """Metrics of the episodes; {} for completions of one turn."""
        if self.episodes is None:
            return {}
        from grpo_jax.rollout.interaction import metrics_of

        observed = (self.present & ~np.asarray(self.completions.mask)).sum(axis=-1)
        return metrics_of(self.episodes) | {"completions/observation_tokens": float(observed.mean())}

    def to_arrays(self, rows: Sequence[Row]) -> tuple[Completions, np.ndarray | None]:
        """The completions of these `rows`, and of several turns their transcript, as a checkpoint stores them.

        The transcript is JSON as bytes [n] uint8: the episodes, and the prompts to which environments have added.
        Environments are not stored.
        """
        if self.episodes is None:
            return self.completions, None
        transcript = {
            "prompts": [None if mine is row else mine["prompt"] for mine, row in zip(self.rows, rows, strict=True)],
            "episodes": [one.to_json() for one in self.episodes],
        }
        return self.completions, np.frombuffer(json.dumps(transcript).encode(), np.uint8)

    @classmethod
    def from_arrays(
        cls,
        completions: Completions,
        transcript: np.ndarray | None,
        data: EncodedPrompts,
        rows: Sequence[int],
        *,
        prompt_length: int,
        padding: int,
        interaction: Interaction | None,
    ) -> RolloutResult:
        """The completions of these rows of a dataset, from what `to_arrays` returned; arguments as in `sample`."""
        found = [data.rows[i] for i in rows]
        if interaction is None or transcript is None:
            prompts = make_prompts([data.token_ids[i] for i in rows], length=prompt_length, on_host=True)
            return cls(found, prompts, completions)
        from grpo_jax.rollout.interaction import Played

        stored = json.loads(np.asarray(transcript).tobytes())
        texts = zip(found, stored["prompts"], strict=True)
        found = [row if prompt is None else {**row, "prompt": prompt} for row, prompt in texts]
        prompts = _prompts_of_turns(interaction, data, rows, found, length=prompt_length, padding=padding)
        return cls(found, prompts, completions, [Played.from_json(one) for one in stored["episodes"]])


def sample(
    policy: Policy,
    params: Params,
    data: EncodedPrompts,
    rows: Sequence[int],
    key: jax.Array,
    config: GRPOConfig,
    *,
    prompt_indices: np.ndarray,
    prompt_length: int,
    evaluation: bool = False,
    interaction: Interaction | None = None,
    sampler: Sampler | None = None,
    interrupt: Callable[[], None] = lambda: None,
) -> RolloutResult:
    """Sample completions of rows of a dataset.

    Args:
      policy: the model, its tokenizer and token ids; `params` are its parameters.
      rows: B indices of rows of `data`.
      config: the settings of sampling; `evaluation` selects the fields for evaluations.
      prompt_indices: [B] integers that the keys of the samples are made from.
      prompt_length: P; larger if environments make a prompt longer.
      interaction: tools and environments of several turns; None: one turn.
      sampler: the engine that samples instead of `generate`.
      interrupt: called every few tokens; an exception that it raises ends the sampling.
    """
    ends = TurnEnds.of(config)
    settings: dict[str, Any] = {
        "num_generations": config.eval_generations if evaluation else config.num_generations,
        "max_completion_length": config.max_completion_length,
        "temperature": config.eval_temperature if evaluation else config.temperature,
        "top_k": config.top_k,
        "top_p": config.top_p,
        "min_p": config.min_p,
        "eos_token_ids": policy.eos_token_ids,
        "stop": ends.stop,
        "stop_token_ids": ends.stop_token_ids,
        "max_turn_length": ends.max_turn_length,
        "tokenizer": policy.tokenizer,
        "pad_token_id": policy.pad_token_id,
        "batch_size": None if evaluation else config.rollout_batch_size,
        "prompt_indices": prompt_indices,
        "interrupt": interrupt,
    }

    def complete(prompts: Prompts, answers: Answers | None = None) -> Completions:
        if sampler is None:
            return generate(policy.model, params, prompts, key, answers=answers, on_host=True, **settings)
        from grpo_jax.run.sampler import completions_by

        return completions_by(sampler, policy, params, prompts, key, answers, settings=settings)

    if interaction is None:
        prompts = make_prompts([data.token_ids[i] for i in rows], length=prompt_length, on_host=True)
        result = RolloutResult([data.rows[i] for i in rows], prompts, complete(prompts))
    else:
        group, padding = settings["num_generations"], config.padding
        result = _sample_turns(interaction, complete, data, rows, group, prompt_length, padding)
    return result._replace(metrics=dict(getattr(sampler, "measured", {})))


def _sample_turns(
    interaction: Interaction,
    complete: Callable[[Prompts, Answers], Completions],
    data: EncodedPrompts,
    rows: Sequence[int],
    num_generations: int,
    prompt_length: int,
    padding: int,
) -> RolloutResult:
    """Sample completions of several turns: their environments are opened, answer, and are closed."""
    from grpo_jax.rollout.episodes import Episodes

    opened = [data.rows[i] for i in rows]
    with Episodes(interaction, opened, num_generations, rows) as episodes:
        opened = episodes.reset(opened)
        prompts = _prompts_of_turns(interaction, data, rows, opened, length=prompt_length, padding=padding)
        episodes.follow(opened, prompts)
        completions = complete(prompts, episodes)
        tokens, mask = (np.asarray(x).reshape(-1, x.shape[-1]) for x in (completions.tokens, completions.mask))
        played = episodes.end(tokens, mask)
    environments = [episode.environment for episode in episodes.all]
    return RolloutResult(opened, prompts, completions, played, environments, episodes.own)


def _prompts_of_turns(
    interaction: Interaction,
    data: EncodedPrompts,
    rows: Sequence[int],
    opened: Sequence[Row],
    *,
    length: int,
    padding: int,
) -> Prompts:
    """The prompts of opened environments: those to which an environment has added are encoded again."""
    from grpo_jax.rollout.interaction import encode_rows

    def encode(row: Row) -> Sequence[int]:
        kwargs = interaction.template_kwargs
        encoded = encode_rows(
            *(interaction, [row], interaction.tokenizer),
            chat_template_kwargs=kwargs,
            argument="with what reset returned,",
        )
        return encoded.token_ids[0]

    ids = [data.token_ids[i] if row is data.rows[i] else encode(row) for i, row in zip(rows, opened, strict=True)]
    longest = -(-max(map(len, ids)) // padding) * padding
    return make_prompts(ids, length=max(length, longest), on_host=True)
