"""Episodes: between the turns of each completion of a rollout its environment and its tools answer the policy.

```
the policy's turn (ids) ──► text ──► calls of tools, or respond(text) ──► messages, or text ──► ids of the observation
        kept as they are    only read                                     only these are encoded
```

An episode is a completion with an environment of its own. What goes wrong in a tool is told to the policy; what goes
wrong in an environment ends the run or the episode, as `on_environment_error` says.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from grpo_jax.messages import show
from grpo_jax.models.sharding import gather_objects, own_part
from grpo_jax.rewards.contract import own_copy
from grpo_jax.rewards.outcomes import describe_fault
from grpo_jax.rollout.interaction import Interaction, schemas_of
from grpo_jax.rollout.played import EpisodeCounts, Played
from grpo_jax.rollout.tools import Tool, as_text, bind_arguments, call_within, environment_tools, reset_arguments
from grpo_jax.text.calls import Parsed, ToolCall, assistant_message, tool_message, turn_text
from grpo_jax.text.completions import Before, Texts, before_of, continuation
from grpo_jax.text.rows import is_conversation
from grpo_jax.text.templates import observation_ids
from grpo_jax.types import Messages, Prompts, Row

WORKERS = 64
"""Calls at a time, at most."""

LONGEST_TEXT = 16
"""Characters per token that there is room for, beyond which a text is not even encoded: it cannot fit."""


class EnvironmentFault(RuntimeError):
    """An environment failed, and `on_environment_error` is "raise"."""


def _plain_number(value: Any) -> float | list[float] | str | None:
    """Return a number, or a list of some, as Python's, whoever made them; None as None; else a text that shows it."""
    try:
        if isinstance(value, (list, tuple)):
            return [float(one) for one in value]
        return None if value is None else show(value) if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        return show(value)


class Episode:
    """One completion with its environment, and all that both have said.

    Attributes:
      where: how messages name it.
      environment: an object of the user's, or None.
      opening: what `reset` adds to the prompt, "" for nothing.
      turns: (True if the policy wrote it, text) of each turn and observation so far.
      messages: the same as messages, of a conversation.
      counts: of its events.
      lengths: tokens of each turn of the policy so far.
      turn_rewards: turn → what the environment gave for it beside its answer.
      over: True once an error has ended it.
      before: the text that the next turn continues.
    """

    def __init__(self, interaction: Interaction, row: Row, where: str, texts: Texts):
        self._interaction, self.where, self._texts = interaction, where, texts
        self._talks = is_conversation(row["prompt"])
        self.environment: Any = None
        self.tools: Mapping[str, Tool] = dict(interaction.tools)
        self._answers_calls = False
        self.opening = ""
        self.turns: list[tuple[bool, str]] = []
        self.messages: Messages = []
        self.lengths: list[int] = []
        self.turn_rewards: dict[int, float] = {}
        limited = interaction.ends.max_turn_length is not None
        self.counts, self.over = EpisodeCounts(cut_short=0 if limited else None), False
        self.before = Before([], "", "")

    def reset(self, row: Row) -> None:
        """Make the environment, and let it begin."""
        factory = self._interaction.factories.get(self._interaction.name_of(row))
        if factory is None:
            return
        made, self.environment = self._guarded("the call", factory)
        if not made:
            return
        own = environment_tools(self.environment)
        self.tools = {**self._interaction.tools, **own}
        self._answers_calls = bool(own) and hasattr(self.environment, "answer_calls")
        if hasattr(self.environment, "reset"):
            columns = own_copy(reset_arguments(self.environment.reset, row))
            _, opening = self._guarded("reset", self.environment.reset, **columns)
            self.opening = "" if opening is None else as_text(opening)

    def answer(self, ids: np.ndarray, room: int) -> Sequence[int] | None:
        """Return the observation after a turn; None where the completion is over."""
        parsed, own = self.note(ids), self._interaction
        if own.ends.cut_short(ids, own.tokenizer, own.eos_token_ids):
            self.counts.cut_short = (self.counts.cut_short or 0) + 1
        if self.over:
            return None
        if parsed.calls or parsed.problems:
            if self._interaction.most_calls is not None and self.counts.turns > self._interaction.most_calls:
                self.counts.clipped = 1
                return None
            said: str | Messages | None = self._call(parsed)
            if self.over:
                return None
        else:
            said = self._respond(parsed.content)
        if said is None:
            return None
        tokens = self._encode(said, room, int(ids[-1]))
        if len(tokens) <= room:  # else the policy never sees it
            self._follow(tokens)
            self.turns += [(False, text) for text in _texts(said)]
            self.messages += [] if isinstance(said, str) else said
        return tokens

    def note(self, ids: np.ndarray) -> Parsed:
        """Take note of a turn, and return it parsed; for a last turn, which had no room to end, this is all."""
        self.counts.turns += 1
        self.lengths.append(len(ids))
        text, parsed = self._read(ids)
        self._follow(ids)
        self.turns.append((True, text))
        if self._talks:
            self.messages.append(assistant_message(parsed))
        return parsed

    def reward(self) -> float | list[float] | str | None:
        """Ask the environment for the completion's reward, or those of its turns; None for "not scored"."""
        if not hasattr(self.environment, "get_reward"):
            return None
        done, last = self._guarded("get_reward", self.environment.get_reward)
        last = _plain_number(last)
        if not done or not self.turn_rewards or isinstance(last, str):
            return last
        if isinstance(last, list):
            self._fail(
                "get_reward", f"returned {show(last)}, and respond has rewarded the turns; give a number, or None"
            )
            return None
        by_turn = [self.turn_rewards.get(turn, 0.0) for turn in range(len(self.lengths))]
        return [*by_turn[:-1], by_turn[-1] + (last or 0.0)]

    def _follow(self, ids: Iterable[int]) -> None:
        """Take note of tokens that stand before the next turn, of the last of them; a message is decoded alone."""
        self.before = Before([] if self._talks else [*self.before.tokens, *map(int, ids)][-32:], "", "")

    def _text(self, ids: np.ndarray, *, skip_special_tokens: bool = True) -> str:
        """Return the text of a turn, decoded behind the text that it continues."""
        decode, before = self._texts.decode, np.array(self.before.tokens, np.int32)
        texts = [decode(x, skip_special_tokens=skip_special_tokens) for x in (before, np.append(before, ids))]
        return self.before.prefill + continuation(*texts)

    def _read(self, ids: np.ndarray) -> tuple[str, Parsed]:
        """Return the text of a turn, and the turn parsed."""
        form, text = self._interaction.format, self._text(ids)
        if form is None or not self._talks or not self.tools:
            return text, Parsed(text, (), ())
        whole = turn_text(ids, self._text, form, self._interaction.hidden)
        schemas = {name: tool.schema for name, tool in self.tools.items()}
        return text, form.parse(whole, schemas=schemas, thinking=self._interaction.thinking)

    def _call(self, parsed: Parsed) -> Messages | None:
        """Call the tools, and return their results as messages; of one that could not be called, why."""
        self.counts.calls += len(parsed.calls) + len(parsed.problems)
        if self._answers_calls:
            return self._results(parsed)
        said = [tool_message(call.name, self._result(call)) for call in parsed.calls]
        return said + [tool_message("", self._error(problem)) for problem in parsed.problems]

    def _results(self, parsed: Parsed) -> Messages | None:
        """Let the environment call its tools, and return their results as messages; None at the end."""
        message, problems = assistant_message(parsed), list(parsed.problems)
        done, said = self._guarded("answer_calls", self.environment.answer_calls, message, problems)
        if not done or said is None:
            return None
        names = [*(call.name for call in parsed.calls), *("" for _ in problems)]
        rows = said if isinstance(said, (list, tuple)) else []
        if len(rows) != len(names) or not all(isinstance(row, (list, tuple)) and len(row) == 2 for row in rows):
            fault = f"returned {show(said)}; for each call (text, whether it failed) is needed, or None at the end"
            self._fail("answer_calls", fault)
            return None
        self.counts.failures += sum(bool(failed) for _, failed in rows)
        return [tool_message(name, as_text(text)) for name, (text, _) in zip(names, rows, strict=True)]

    def _result(self, call: ToolCall) -> str:
        """Call one tool, and return its result as text, or the error."""
        tool = self.tools.get(call.name)
        if tool is None:
            return self._error(f"there is no tool {call.name!r}; there are {', '.join(self.tools)}")
        arguments = bind_arguments(tool, call.arguments)
        if isinstance(arguments, str):
            return self._error(arguments)
        begin = time.monotonic()
        try:
            return as_text(call_within(self._interaction.seconds, tool.function, **arguments))
        except (Exception, SystemExit) as error:
            return self._error(f"{type(error).__name__}: {error}")
        finally:
            self.counts.seconds += time.monotonic() - begin

    def _error(self, problem: str) -> str:
        """Count a failed call, and return the error for the policy."""
        self.counts.failures += 1
        return as_text(f"Error: {problem}")

    def _respond(self, text: str) -> str | Messages | None:
        """Return the answer of an environment that speaks text; None at the end."""
        if not hasattr(self.environment, "respond"):
            return None
        done, said = self._guarded("respond", self.environment.respond, text)
        if done and isinstance(said, (tuple, list)) and len(said) == 2:
            said, reward = said
            if fault := self._take_reward(reward):
                self._fail("respond", fault)
                return None
        if done and said is not None and not isinstance(said, str):
            fault = f"returned {show(said)}, a {type(said).__name__}; text is needed, or None at the end"
            self._fail("respond", fault)
            return None
        if said is None:
            return None
        said = as_text(said, limit=len(said))  # half a character is none that a tokenizer takes
        return [{"role": "user", "content": said}] if self._talks else said

    def _take_reward(self, reward: object) -> str:
        """Take note of the reward of the last turn, and return what is wrong with it, "" if nothing is."""
        if not hasattr(self.environment, "get_reward"):
            return "returned a reward, and there is no get_reward: add one, whose number (or 0.0) is added at the end"
        number = _plain_number(reward)
        if not isinstance(number, float) or not math.isfinite(number):
            return f"returned the reward {show(reward)}; a finite number is needed"
        self.turn_rewards[len(self.lengths) - 1] = number
        return ""

    def _encode(self, said: str | Messages, room: int, drawn: int) -> Sequence[int]:
        """Return the tokens of an observation behind the token that ended a turn; too many for a far too long text."""
        if sum(map(len, _texts(said))) > 1000 + LONGEST_TEXT * room:
            return range(room + 1)
        if isinstance(said, str):
            return self._texts.encode(said)
        return observation_ids(
            self._interaction.tokenizer,
            said,
            chat_template_kwargs=self._interaction.template_kwargs,
            tools=schemas_of(self.tools),
            eos_token_ids=self._interaction.eos_token_ids,
            drawn=drawn,
        )

    def _guarded(self, what: str, function: Callable[..., Any], *args: Any, **keywords: Any) -> tuple[bool, Any]:
        """Call the environment; return whether it succeeded, and its result."""
        begin = time.monotonic()
        try:
            return True, call_within(self._interaction.seconds, function, *args, **keywords)
        except (Exception, SystemExit) as error:
            self._fail(what, error)
            return False, None
        finally:
            self.counts.seconds += time.monotonic() - begin

    def _fail(self, what: str, fault: BaseException | str) -> None:
        """Take note of an error of the environment: it ends the episode, or the run."""
        self.counts.errors, self.over = self.counts.errors + 1, True
        if self._interaction.on_error == "raise":
            kind = type(self.environment).__name__ if self.environment is not None else "environment_factory"
            cause = fault if isinstance(fault, BaseException) else None
            raise EnvironmentFault(
                f"{kind}: {what} {describe_fault(fault)}, for {self.where} (on_environment_error='end' would end that"
                " episode and go on)"
            ) from cause


def _texts(said: str | Messages) -> list[str]:
    """Return an observation message by message."""
    return [said] if isinstance(said, str) else [message["content"] for message in said]


class Episodes:
    """The episodes of one rollout: B rows, G completions of each; they answer as `rollout.turns.Answers`.

    Each of several processes plays those of its own rows, and all have to call `reset` and `end` together. A context
    manager: its threads end with the block.

    Attributes:
      own: range of the rows that this process plays.
      all: the B·G episodes, prompt-major; those of other rows have not begun.
    """

    def __init__(self, interaction: Interaction, rows: Sequence[Row], num_generations: int, numbers: Sequence[int]):
        """`numbers` are those of the rows in the dataset, for messages."""
        places = itertools.product(zip(rows, numbers, strict=True), range(num_generations))
        self._pool = ThreadPoolExecutor(min(WORKERS, len(rows) * num_generations), "grpo_jax-episode")
        self.own, self._group = own_part(len(rows)), num_generations
        self._tokenizer = interaction.tokenizer
        texts, where = Texts(interaction.tokenizer), "row {} of the dataset, completion {}"
        self.all = [Episode(interaction, row, where.format(n, g), texts) for (row, n), g in places]

    def __enter__(self) -> Episodes:
        return self

    def __exit__(self, *error: Any) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def reset(self, rows: Sequence[Row]) -> list[Row]:
        """Let all begin, and return the rows with what `reset` adds to their prompts.

        Raises:
          ValueError: `reset` added different things for completions of one prompt, which are one group.
        """
        group = self._group
        list(self._pool.map(lambda i: self.all[i].reset(rows[i // group]), self._places))
        own = [self._opened(rows[b], self.all[b * group : (b + 1) * group]) for b in self.own]
        opened = [None if new is rows[b] else new["prompt"] for b, new in zip(self.own, own, strict=True)]
        prompts = itertools.chain.from_iterable(gather_objects(opened))
        return [row if new is None else {**row, "prompt": new} for row, new in zip(rows, prompts, strict=True)]

    def follow(self, rows: Sequence[Row], prompts: Prompts) -> None:
        """Take note of all prompts, as they were opened, and of their tokens: the first turns continue them."""
        tokens, lengths = np.asarray(prompts.tokens), np.asarray(prompts.lengths)
        for b in self.own:
            before = before_of(self._tokenizer, rows[b]["prompt"], tokens[b, : lengths[b]].tolist())
            for episode in self.all[b * self._group : (b + 1) * self._group]:
                episode.before = before

    @property
    def _places(self) -> range:
        """Indices of this process's episodes among all."""
        return range(self.own.start * self._group, self.own.stop * self._group)

    @staticmethod
    def _opened(row: Row, episodes: Sequence[Episode]) -> Row:
        """Return a row whose prompt ends with the text that `reset` returned."""
        openings = list(dict.fromkeys(episode.opening for episode in episodes if not episode.over))
        if len(openings) > 1:
            raise ValueError(
                f"{episodes[0].where}: reset returned {show(openings[0])} for one completion and {show(openings[1])}"
                " for another of the same prompt; a group is compared with itself, so make what reset returns follow"
                " from the row alone (seed it by a column)"
            )
        if not openings or not openings[0]:
            return row
        if isinstance(row["prompt"], str):
            return {**row, "prompt": row["prompt"] + openings[0]}
        *before, last = row["prompt"]
        if last["role"] != "user" or not isinstance(last["content"], str):
            raise ValueError(
                f"{episodes[0].where}: reset returned text, which is added to the user's last message, and the prompt"
                f" ends with {show(last)}: end it with a text of the role 'user', or let reset return None"
            )
        return {**row, "prompt": [*before, {**last, "content": last["content"] + openings[0]}]}

    def __call__(self, completion: int, turn: np.ndarray, room: int) -> Future[Sequence[int] | None] | None:
        """Begin to answer a turn, and return the future of its observation; None where another process plays."""
        if completion not in self._places:
            return None
        return self._pool.submit(self.all[completion].answer, turn, room)

    def end(self, tokens: np.ndarray, sampled: np.ndarray) -> list[Played]:
        """Ask for the rewards, and return the records of all; of tokens [B·G, T], `sampled` marks the policy's own."""
        for place in self._places:
            episode, ids, own = self.all[place], tokens[place], sampled[place]
            noted = sum(episode.lengths)
            if own.sum() > noted:
                episode.note(ids[own][noted:])
        own = [self.all[place] for place in self._places]
        rewards = self._pool.map(Episode.reward, own)
        played = [
            Played(one.turns, one.messages, reward, one.counts, one.lengths)
            for one, reward in zip(own, rewards, strict=True)
        ]
        if jax.process_count() == 1:
            return played
        parts = gather_objects([one.to_json() for one in played])
        return [Played.from_json(kept) for part in parts for kept in part]
