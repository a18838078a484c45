"""TRL's `rollout_func(prompts, trainer)` as a sampler, and its further fields as arguments of reward functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from grpo_jax.rewards.contract import (
    EXTRAS,
    SAMPLED,
    arguments_of,
    call_selected,
    function_name,
    own_copy,
    split_inputs,
)
from grpo_jax.text.prompts import EncodedPrompts
from grpo_jax.turns.ends import stops_of
from grpo_jax.types import Completions, Params, Prompts, RewardFn, Tokenizer

_RETURNED = ("prompt_ids", "completion_ids", "logprobs")


class RolloutSampler:
    """A `run.sampler.Sampler` that calls a `rollout_func` of TRL's.

    It is called as in TRL 1.16, with a list of B·G prompts (each repeated for its completions) and the trainer, whose
    `policy` has the present params then. It returns a dict of lists B·G long: `prompt_ids`, `completion_ids`,
    `logprobs`, and fields for the reward functions. A completion has ended where its last id is an EOS, or where it has
    a text of `stop`: the contract has no other sign.

    Args:
      rollout_func: the function.
      trainer: its second argument.
      data: the encoded rows, by which the text of a prompt is found.
    """

    def __init__(self, rollout_func: Callable[..., Any], trainer: Any, data: EncodedPrompts):
        self._function, self._trainer = rollout_func, trainer
        self._texts = {tuple(ids): row["prompt"] for ids, row in zip(data.token_ids, data.rows, strict=True)}
        self._latest: tuple[list[list[int]], dict[str, list[Any]]] = [], {}

    def __call__(
        self,
        params: Params,
        prompts: Prompts,
        *,
        num_generations: int,
        eos_token_ids: Sequence[int],
        stop: Sequence[str] = (),
        tokenizer: Tokenizer | None = None,
    ) -> Completions:
        """Completions [B, G, T], T being that of the longest."""
        rows = [
            tuple(ids[:n].tolist()) for ids, n in zip(*map(np.asarray, (prompts.tokens, prompts.lengths)), strict=True)
        ]
        asked = [ids for ids in rows for _ in range(num_generations)]
        before = self._trainer.policy
        self._trainer.policy = before.replace(params=params)  # for this call: the run will consume these params
        try:
            output = self._function([own_copy(self._texts[ids]) for ids in asked], self._trainer)
        finally:
            self._trainer.policy = before
        prompt_ids, found, log_probs = self._read(output, len(asked))
        other = next((i for i, ids in enumerate(prompt_ids) if tuple(ids) != asked[i]), None)
        if other is not None:
            raise ValueError(
                f"rollout_func returned other prompt_ids than the trainer has for prompt {other}: "
                f"{list(prompt_ids[other])} for {list(asked[other])}. Encode it by the tokenizer's chat template, with "
                "its generation prompt, or put what is to be read before it into the dataset"
            )
        stops = stops_of(tokenizer, stop) if stop else None
        ended = np.array(
            [
                bool(ids)
                and (ids[-1] in eos_token_ids or (stops is not None and stops.end_of(np.array(ids)) is not None))
                for ids in found
            ]
        )
        shape = (len(rows), num_generations)
        mask = np.arange(max(1, *map(len, found))) < np.array([len(ids) for ids in found])[:, None]
        tokens, l = np.zeros(mask.shape, np.int32), np.zeros(mask.shape, np.float32)
        tokens[mask] = [i for ids in found for i in ids]
        l[mask] = [np.nan if x is None else x for some in log_probs for x in some]

        def grouped(x: np.ndarray) -> Any:
            return x.reshape(*shape, *x.shape[1:])

        return Completions(grouped(tokens), grouped(mask), grouped(l), grouped(ended))

    def fields(self, completion_ids: Sequence[Sequence[int]]) -> dict[str, list[Any]]:
        """The further fields of just these completions; none of others, such as an evaluation's."""
        ids, fields = self._latest
        return fields if [list(some) for some in completion_ids] == ids else {}

    def _read(self, output: object, count: int) -> tuple[list[Any], list[list[int]], list[list[Any]]]:
        """Return prompt ids, completion ids and log-probs of an output that is B·G long, and keep its other fields."""
        output = dict(output) if isinstance(output, dict) else {}
        missing = [name for name in _RETURNED if name not in output]
        if missing:
            raise ValueError(f"rollout_func returned no {', '.join(missing)}: return a dict that has them")
        if any(not all(row) for row in output.pop("env_mask", ())):
            raise ValueError(
                "rollout_func returned an env_mask with zeros: tokens of an environment are not taken here"
            )
        fields = {name: [*x] if isinstance(x, list) else [x] * count for name, x in output.items()}
        wrong = {name: len(x) for name, x in fields.items() if len(x) != count}
        if wrong:
            raise ValueError(f"rollout_func returned lists of other lengths than the {count} prompts: {wrong}")
        prompt_ids, found, log_probs = (fields.pop(name) for name in _RETURNED)
        found = [[int(i) for i in ids] for ids in found]
        odd = next((i for i, (ids, l) in enumerate(zip(found, log_probs, strict=True)) if len(ids) != len(l)), None)
        if odd is not None:
            raise ValueError(
                f"rollout_func returned {len(log_probs[odd])} logprobs for the {len(found[odd])} ids of completion"
                f" {odd}: return one for each"
            )
        self._latest = found, fields
        return prompt_ids, found, log_probs


def with_fields(fn: Callable[..., Any], sampler: RolloutSampler, columns: Iterable[str]) -> RewardFn:
    """Return a reward function that takes the fields of a `rollout_func` beside the columns, as keyword lists."""
    arguments, known = arguments_of(fn), {*SAMPLED, *EXTRAS, *columns}

    def score(**inputs: Any) -> Any:
        lists, extras = split_inputs(inputs)
        columns_and_fields = lists | sampler.fields(lists["completion_ids"])
        missing = [name for name, required in arguments.items() if required and name not in columns_and_fields | extras]
        if missing:
            raise ValueError(f"it needs {', '.join(missing)}, which rollout_func did not return for these completions")
        return call_selected(fn, columns_and_fields, extras)

    wrapped: Any = score
    wrapped.__name__ = function_name(fn)
    wrapped.reward_arguments = {name: required and name in known for name, required in arguments.items()}
    return wrapped
