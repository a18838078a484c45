"""Prompts of a teacher, which know more than the policy's.

A column of the dataset, or a function of the completion, its reward, its group and its environment. Its tokens are
those of the run's own prompts: special tokens, chat template and tools are the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from grpo_jax.config.config import GRPOConfig
from grpo_jax.messages import show
from grpo_jax.rewards.contract import arguments_of, function_name, select_inputs
from grpo_jax.run.sample import Sampled
from grpo_jax.text.prompts import make_prompts
from grpo_jax.text.rows import is_conversation
from grpo_jax.turns.interaction import Interaction, encode_rows
from grpo_jax.types import Messages, Prompts, Tokenizer

GIVEN = ("prompt", "completion", "reward", "peers", "environment")
"""Arguments of a `teacher_prompt` that are no columns of the dataset."""


TeacherPrompt = str | Callable[..., str | Messages | None]
"""Makes what the teacher reads before a completion: a column of the dataset, or a function that returns it.

The function is called for each completion after the rewards, with the keywords that it names: `prompt`, `completion`
(text, or messages), `reward` (the weighted sum; None: not scored), `peers` (pairs of completion and reward of the
others in its group), `environment` (that of the completion, where there are any and they have not been closed), and
every other column of its row. It returns a prompt of the kind that the dataset has, or None: the teacher knows nothing
of this completion, which is then not compared.
"""


def check_teacher_prompt(prompt: object, columns: Sequence[str] | None) -> None:
    """Raise unless it is a `TeacherPrompt` for a dataset with these columns, or None."""
    if prompt is None or columns is None:
        return
    known = ", ".join(columns)
    if isinstance(prompt, str):
        if prompt not in columns:
            raise ValueError(f"teacher_prompt = {prompt!r}: the dataset has no such column ({known})")
        return
    if not callable(prompt):
        raise ValueError(f"teacher_prompt is {show(prompt)}: give a function, or the name of a column")
    missing = [name for name, required in arguments_of(prompt).items() if required and name not in (*GIVEN, *columns)]
    if missing:
        raise ValueError(
            f"teacher_prompt {function_name(prompt)!r} asks for {', '.join(missing)}: there is {', '.join(GIVEN)}, and"
            f" the dataset has {known}"
        )


class Heard(NamedTuple):
    """Completions as a `teacher_prompt` meets them.

    Attributes:
      sampled: B rows of the dataset, and their environments where there are any at hand.
      texts: B·G completions, prompt-major.
      rewards: [B, G] their weighted sums; NaN: not scored.
    """

    sampled: Sampled
    texts: Sequence[str | Messages]
    rewards: np.ndarray


def ask(
    prompt: TeacherPrompt,
    heard: Heard,
    tokenizer: Tokenizer,
    interaction: Interaction | None,
    config: GRPOConfig,
    longest: int | None = None,
) -> np.ndarray:
    """The tokens that a teacher reads before each completion: [B, G] objects, lists of ids, or None.

    Args:
      interaction: of the run, whose tools the prompts show.
      longest: positions that the teacher has; None: not known.

    Raises:
      ValueError: `teacher_prompt` returned no prompt of the dataset's kind, or one that leaves the teacher no room.
    """
    b, g = heard.rewards.shape
    totals = [None if np.isnan(x) else float(x) for x in heard.rewards.reshape(-1)]
    asked = [_prompt_of(prompt, heard, totals, i, g) for i in range(b * g)]
    talks = is_conversation(heard.sampled.rows[0]["prompt"])
    name = prompt if isinstance(prompt, str) else function_name(prompt)
    for one in asked:
        if one is not None and (not one or isinstance(one, str) == talks):
            kind = "a list of messages" if talks else "text"
            raise ValueError(
                f"teacher_prompt {name!r} gave {show(one)}: give {kind}, as the dataset's prompts, or None"
            )
    rows = [{**heard.sampled.rows[i // g], "prompt": one} for i, one in enumerate(asked) if one is not None]
    ids: Iterator[list[int]] = iter(())
    if rows:
        encoded = encode_rows(
            interaction,
            rows,
            tokenizer,
            chat_template_kwargs=config.chat_template_kwargs,
            argument="teacher_prompt, of the batch's",
        )
        ids = iter(encoded.token_ids)
    found = np.empty(b * g, object)
    for i, one in enumerate(asked):
        found[i] = None if one is None else list(next(ids))
    most = max((len(one) for one in found if one is not None), default=0)
    if longest is not None and most + config.max_completion_length > longest:
        raise ValueError(
            f"teacher_prompt {name!r} gave a prompt of {most} tokens: with max_completion_length ="
            f" {config.max_completion_length} it passes the {longest} positions of the teacher; make it shorter"
        )
    return found.reshape(b, g)


def _prompt_of(
    prompt: TeacherPrompt, heard: Heard, totals: Sequence[float | None], i: int, g: int
) -> str | Messages | None:
    """Ask a `TeacherPrompt` about the completion i; `totals` are the rewards of all."""
    row = heard.sampled.rows[i // g]
    if isinstance(prompt, str):
        return row[prompt]
    group = range(i // g * g, i // g * g + g)
    known = {name: [value] for name, value in row.items() if name not in GIVEN} | {
        "prompt": [row["prompt"]],
        "completion": [heard.texts[i]],
        "reward": [totals[i]],
        "peers": [[(heard.texts[j], totals[j]) for j in group if j != i]],
    }
    chosen = {name: values[0] for name, values in select_inputs(prompt, known).items()}
    if "environment" in arguments_of(prompt):
        environments = heard.sampled.environments if jax.process_count() == 1 else None  # each has its own rows' alone
        chosen["environment"] = None if environments is None else environments[i]
    return prompt(**chosen)


@dataclasses.dataclass(frozen=True)
class PeerSolution:
    """A `teacher_prompt`: the prompt, and behind it a completion of the same group that passes (SDPO).

    Args:
      threshold: reward from which on a completion passes.
      template: text with `{prompt}` and `{solution}`; of a conversation, `{prompt}` is its last message.

    References:
      SDPO (arXiv:2601.20802), whose implicit feedback it is: the first other completion that passes; where there is
      none, None.

    Example:
      >>> PeerSolution()("2+2=", [("5", 0.0), ("4", 1.0)])
      '2+2=\\n\\nThis is a correct solution:\\n\\n4\\n\\nNow solve the problem yourself.\\n'
    """

    threshold: float = 1.0
    template: str = "{prompt}\n\nThis is a correct solution:\n\n{solution}\n\nNow solve the problem yourself.\n"
    __name__ = "peer_solution"

    def __call__(
        self, prompt: str | Messages, peers: Iterable[tuple[str | Messages, float | None]]
    ) -> str | Messages | None:
        """Return the teacher's prompt."""
        passed = (text for text, reward in peers if reward is not None and reward >= self.threshold)
        solution = next(passed, None)
        if solution is None:
            return None
        if not isinstance(solution, str):
            solution = solution[-1]["content"]
        if isinstance(prompt, str):
            return self.template.format(prompt=prompt, solution=solution)
        last = prompt[-1]
        return [*prompt[:-1], {**last, "content": self.template.format(prompt=last["content"], solution=solution)}]


def own_prompts(asked: np.ndarray, prompts: Prompts, config: GRPOConfig) -> Prompts:
    """The prompts of a teacher for each completion, [B, G, P'] and [B, G]; P' is one of few numbers."""
    b, g = asked.shape
    tokens, lengths = np.asarray(prompts.tokens), np.asarray(prompts.lengths)
    ids = [
        tokens[i // g, : lengths[i // g]].tolist() if one is None else one for i, one in enumerate(asked.reshape(-1))
    ]
    size, longest = config.padding, max(map(len, ids))
    while size < longest:
        size *= 2
    own = make_prompts(ids, length=size, on_host=True)
    return Prompts(own.tokens.reshape(b, g, -1), own.lengths.reshape(b, g))
