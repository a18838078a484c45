"""Episodes: environments and tools that respond to the policy between the turns of a completion.

```
token ids of a turn ──► text ──► tool calls, or respond(text) ──► messages, or text ──► token ids of the observation
```

An episode is one completion with its own environment. If a tool raises an error, the policy receives the error as
the tool's result. If an environment raises an error, the run or only the episode ends (see `on_environment_error`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from grpo_jax.messages import show
from grpo_jax.models.sharding import gather_objects, local_range
from grpo_jax.rewards.contract import copy_containers
from grpo_jax.rewards.outcomes import describe_failure
from grpo_jax.rollout.episode_setup import EpisodeRecord, EpisodeSetup, schemas_of
from grpo_jax.rollout.tools import Tool, as_text, bind_arguments, call_within, environment_tools, reset_arguments
from grpo_jax.rollout.turns import TRUNCATED
from grpo_jax.text.calls import Parsed, ToolCall, assistant_message, tool_message, turn_text
from grpo_jax.text.completions import PrecedingText, continuation, preceding_text
from grpo_jax.text.rows import is_conversation
from grpo_jax.text.templates import ChatTemplate
from grpo_jax.types import Messages, Prompts, Row

MAX_WORKERS = 64
"""Maximum number of concurrent calls to environments and tools."""


class EnvironmentFailure(RuntimeError):
    """Raised if an environment fails and `on_environment_error` is "raise"."""


class _Failed(Exception):
    """Raised if an environment fails and `on_environment_error` is "end"."""


class Episode:
    """One completion with its environment. `description` identifies the completion in error messages."""

    def __init__(self, episode_setup: EpisodeSetup, row: Row, description: str):
        self._episode_setup, self.description = episode_setup, description
        self._is_chat = is_conversation(row["prompt"])
        self.environment: Any = None  # object returned by the factory
        self.tools: Mapping[str, Tool] = episode_setup.tools
        self.reset_text = ""  # text that `reset` appends to the prompt
        self.preceding = PrecedingText([], "", "")  # text before the next turn
        self.has_failed = False  # True after an environment error
        self.record = EpisodeRecord()
        self._call_turns = 0  # number of turns with tool calls
        self.turn_rewards: dict[int, float] = {}  # rewards returned by `respond`, keyed by turn

    def reset(self, row: Row) -> None:
        """Create the environment and call its `reset`."""
        factory = self._episode_setup.factories.get(self._episode_setup.factory_key(row))
        if factory is None:
            return
        with contextlib.suppress(_Failed):
            self.environment = self._guarded("the call", factory)
            methods = environment_tools(self.environment)
            self.tools = {**self._episode_setup.tools, **methods}
            if hasattr(self.environment, "reset"):
                columns = copy_containers(reset_arguments(self.environment.reset, row))
                reset = functools.partial(self.environment.reset, **columns)
                self.reset_text = as_text(self._guarded("reset", reset))

    def answer(self, ids: np.ndarray, limit: int) -> Sequence[int] | None:
        """Return the observation's token ids, None after the last turn, or `TRUNCATED` to truncate the completion."""
        parsed, episode_setup, observation = self.record_turn(ids), self._episode_setup, None
        if cut := episode_setup.ends.cut_short(ids, episode_setup.tokenizer, episode_setup.eos_token_ids):
            self.record.cut_short += 1
        if not self.has_failed:
            with contextlib.suppress(_Failed):
                observation = self._observation(parsed)
        if observation is None:
            # A turn that was cut short may lack a tool call. Its completion counts as truncated, unless it was ended by
            # `respond` or by the limit on tool calls (`clipped`).
            unanswered = cut and not self.record.clipped and not hasattr(self.environment, "respond")
            return TRUNCATED if unanswered else None
        tokens = self._encode(observation, int(ids[-1]))
        if len(tokens) <= limit:  # longer observations are not shown to the policy
            self._extend_context(tokens)
            messages = [] if isinstance(observation, str) else observation
            texts = [observation] if isinstance(observation, str) else [message["content"] for message in messages]
            self.record.turns += [(False, text) for text in texts]  # observations also count as turns here
            self.record.messages += messages
        return tokens

    def record_turn(self, ids: np.ndarray) -> Parsed:
        """Record a turn and return it in parsed form."""
        self.record.lengths.append(len(ids))
        form, text = self._episode_setup.format, self._text(ids)
        parsed = Parsed(text, (), ())
        if form is not None and self._is_chat and self.tools:
            full_text = turn_text(ids, self._text, self._episode_setup.removed_token_ids)
            schemas = {name: tool.schema for name, tool in self.tools.items()}
            parsed = form.parse(full_text, schemas=schemas, thinking=self._episode_setup.starts_in_thinking)
        self._extend_context(ids)
        self.record.turns.append((True, text))
        if self._is_chat:
            self.record.messages.append(assistant_message(parsed))
        return parsed

    def reward(self) -> float | list[float] | str | None:
        """Return a single reward, a list with one reward per turn, None if not scored, or an invalid reward as text."""
        if not hasattr(self.environment, "get_reward"):
            return None
        try:
            last = _to_float(self._guarded("get_reward", self.environment.get_reward))
            if not self.turn_rewards or isinstance(last, str):
                return last
            if isinstance(last, list):
                problem = f"must return a number or None, not a list, if respond returns rewards; got {show(last)}"
                raise self._environment_error("get_reward", problem)
        except _Failed:
            return None
        by_turn = [self.turn_rewards.get(turn, 0.0) for turn in range(len(self.record.lengths))]
        return [*by_turn[:-1], by_turn[-1] + (last or 0.0)]

    def _extend_context(self, ids: Iterable[int]) -> None:
        """Keep the last 32 tokens as context for detokenizing the next turn. Conversations do not need context."""
        self.preceding = PrecedingText([] if self._is_chat else [*self.preceding.tokens, *map(int, ids)][-32:], "", "")

    def _text(self, ids: np.ndarray, *, skip_special_tokens: bool = True) -> str:
        """Detokenize a turn as the continuation of the preceding text."""
        before, decode = self.preceding.tokens, self._episode_setup.tokenizer.decode
        text_before, text = (
            decode(tokens, skip_special_tokens=skip_special_tokens) for tokens in (before, [*before, *map(int, ids)])
        )
        return self.preceding.assistant_prefill + continuation(text_before, text)

    def _observation(self, parsed: Parsed) -> str | Messages | None:
        """Return the results of a turn's tool calls or the environment's response; None ends the completion."""
        calls, problems, limit = parsed.calls, parsed.problems, self._episode_setup.config.max_tool_calling_iterations
        if not calls and not problems:
            return self._respond(parsed.content)
        self._call_turns += 1
        if limit is not None and self._call_turns > limit:
            self.record.clipped = 1
            return None
        self.record.calls += len(calls) + len(problems)
        results = [tool_message(call.name, self._call(call)) for call in calls]
        return results + [tool_message("", self._failed_call(problem)) for problem in problems]

    def _call(self, call: ToolCall) -> str:
        """Call a tool and return its result or the error message as text."""
        tool = self.tools.get(call.name)
        if tool is None:
            return self._failed_call(f"unknown tool {call.name!r}; available tools: {', '.join(self.tools)}")
        arguments = bind_arguments(tool, call.arguments)
        if isinstance(arguments, str):
            return self._failed_call(arguments)
        begin = time.monotonic()
        try:
            call_tool = functools.partial(tool.function, **arguments)
            return as_text(call_within(self._episode_setup.config.environment_timeout, call_tool))
        except (Exception, SystemExit) as error:
            return self._failed_call(f"{type(error).__name__}: {error}")
        finally:
            self.record.seconds += time.monotonic() - begin

    def _failed_call(self, problem: str) -> str:
        """Count a failed call, and return the error message for the policy."""
        self.record.failures += 1
        return as_text(f"Error: {problem}")

    def _respond(self, text: str) -> str | Messages | None:
        """Return the environment's response, or None if the completion ends or there is no `respond` method."""
        if not hasattr(self.environment, "respond"):
            return None
        answer = self._guarded("respond", self.environment.respond, text)
        if isinstance(answer, (tuple, list)) and len(answer) == 2:
            answer, reward = answer
            if not hasattr(self.environment, "get_reward"):
                problem = "returned a reward, but there is no get_reward (add one that returns a number or None)"
                raise self._environment_error("respond", problem)
            number = _to_float(reward)
            if not isinstance(number, float) or not math.isfinite(number):
                raise self._environment_error("respond", f"must return a finite reward; got {show(reward)}")
            self.turn_rewards[len(self.record.lengths) - 1] = number
        if answer is None:
            return None
        if not isinstance(answer, str):
            problem = f"must return a string, or None to end the episode; got {show(answer)} ({type(answer).__name__})"
            raise self._environment_error("respond", problem)
        answer = as_text(answer, limit=len(answer))  # replaces unpaired Unicode surrogates, which tokenizers reject
        return [{"role": "user", "content": answer}] if self._is_chat else answer

    def _encode(self, observation: str | Messages, last_token: int) -> Sequence[int]:
        """Return the token ids of an observation that follows a turn with the given last token."""
        tokenizer, eos = self._episode_setup.tokenizer, self._episode_setup.eos_token_ids
        if isinstance(observation, str):
            return tokenizer(observation, add_special_tokens=False)["input_ids"]
        kwargs = self._episode_setup.config.chat_template_kwargs
        template = ChatTemplate(tokenizer, kwargs, schemas_of(self.tools), eos)
        return template.observation_ids(observation, last_token=last_token)

    def _guarded(self, method: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call an environment method or factory. Raises `EnvironmentFailure` or `_Failed` if the call fails."""
        begin = time.monotonic()
        try:
            return call_within(self._episode_setup.config.environment_timeout, function, *args)
        except (Exception, SystemExit) as error:
            raise self._environment_error(method, error) from error
        finally:
            self.record.seconds += time.monotonic() - begin

    def _environment_error(self, method: str, problem: BaseException | str) -> Exception:
        """Count an environment error, and return the exception to raise."""
        self.record.errors, self.has_failed = self.record.errors + 1, True
        if self._episode_setup.config.on_environment_error != "raise":
            return _Failed()
        kind = type(self.environment).__name__ if self.environment is not None else "environment_factory"
        return EnvironmentFailure(
            f"{kind}: {method} {describe_failure(problem)}, for {self.description}. Set on_environment_error='end' to"
            " end only this episode and continue the run"
        )


def _to_float(value: Any) -> float | list[float] | str | None:
    """Convert a number or a list of numbers to floats. None is returned unchanged, and any other value as text."""
    try:
        if isinstance(value, (list, tuple)):
            return [float(x) for x in value]
        return None if value is None else show(value) if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        return show(value)


class Episodes:
    """The B·G episodes of one rollout, G per dataset row. Implements `rollout.turns.NextObservation`.

    With several processes, each process creates environments for its `local_rows` only. All processes must call `reset`
    and `end` together. Use this class as a context manager, so that its threads are shut down.
    """

    def __init__(
        self, episode_setup: EpisodeSetup, rows: Sequence[Row], num_generations: int, row_indices: Sequence[int]
    ):
        """Create the episodes. `row_indices` contains the rows' indices in the dataset, for error messages."""
        self._pool = ThreadPoolExecutor(min(MAX_WORKERS, len(rows) * num_generations), "grpo_jax-episode")
        self.local_rows, self._group = local_range(len(rows)), num_generations
        self._indices = range(self.local_rows.start * num_generations, self.local_rows.stop * num_generations)
        self._tokenizer = episode_setup.tokenizer
        self.episodes = [
            Episode(episode_setup, row, f"row {number} of the dataset, completion {g}")
            for row, number in zip(rows, row_indices, strict=True)
            for g in range(num_generations)
        ]

    def __enter__(self) -> Episodes:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def reset(self, rows: Sequence[Row]) -> list[Row]:
        """Reset all environments. Returns the rows, with the text returned by the environments appended to each prompt.

        Raises ValueError if a prompt's texts differ or cannot be appended, or if two episodes share an environment.
        """
        group = self._group
        list(self._pool.map(lambda i: self.episodes[i].reset(rows[i // group]), self._indices))
        environments = [episode.environment for episode in self.episodes if episode.environment is not None]
        if len(set(map(id, environments))) < len(environments):
            raise ValueError("environment_factory must return a new object on each call; got the same object twice")
        local = [_extended_prompt(rows[b], self.episodes[b * group : (b + 1) * group]) for b in self.local_rows]
        prompts = itertools.chain.from_iterable(gather_objects(local))
        return [row if new is None else {**row, "prompt": new} for row, new in zip(rows, prompts, strict=True)]

    def set_prompts(self, rows: Sequence[Row], prompts: Prompts) -> None:
        """Store the prompts (rows from `reset`, and their tokens) as context for detokenizing the first turns."""
        tokens, lengths = np.asarray(prompts.tokens), np.asarray(prompts.lengths)
        for b in self.local_rows:
            preceding = preceding_text(self._tokenizer, rows[b]["prompt"], tokens[b, : lengths[b]].tolist())
            for episode in self.episodes[b * self._group : (b + 1) * self._group]:
                episode.preceding = preceding

    def __call__(self, completion: int, turn: np.ndarray, limit: int) -> Future[Sequence[int] | None] | None:
        """Start computing the observation that follows a turn; see `rollout.turns.NextObservation`."""
        if completion not in self._indices:
            return None
        return self._pool.submit(self.episodes[completion].answer, turn, limit)

    def end(self, tokens: np.ndarray, sampled: np.ndarray) -> list[EpisodeRecord]:
        """Compute all rewards and return the episode records. `sampled` [B·G, T] is True on sampled tokens."""
        local = [self.episodes[i] for i in self._indices]
        for i, episode in zip(self._indices, local, strict=True):
            drawn, recorded = tokens[i][sampled[i]], sum(episode.record.lengths)
            if len(drawn) > recorded:  # the last turn was truncated at the maximum length and not answered
                episode.record_turn(drawn[recorded:])
        pairs = zip(local, self._pool.map(Episode.reward, local), strict=True)
        records = [dataclasses.replace(episode.record, reward=reward) for episode, reward in pairs]
        if jax.process_count() == 1:
            return records
        parts = gather_objects([dataclasses.asdict(record) for record in records])
        return [EpisodeRecord.from_json(values) for part in parts for values in part]


def _extended_prompt(row: Row, episodes: Sequence[Episode]) -> str | Messages | None:
    """Return a row's prompt with the text from `reset` appended, or None if there is no text."""
    reset_texts = list(dict.fromkeys(episode.reset_text for episode in episodes if not episode.has_failed))
    if len(reset_texts) > 1:
        raise ValueError(
            f"{episodes[0].description}: reset must return the same text for all completions of a prompt; got"
            f" {show(reset_texts[0])} and {show(reset_texts[1])}. Compute the text from the row only; if it is random,"
            " take the seed from a column"
        )
    if not reset_texts or not reset_texts[0]:
        return None
    last = {"role": "user", "content": ""} if isinstance(row["prompt"], str) else row["prompt"][-1]
    if last["role"] != "user" or not isinstance(last["content"], str | list):
        raise ValueError(
            f"{episodes[0].description}: the prompt must end with a text message with the role 'user', to which the"
            f" text returned by reset is appended; got {show(last)}. Change the prompt, or return None from reset"
        )
    return with_appended_text(row["prompt"], reset_texts[0])


def with_appended_text(prompt: str | Messages, text: str) -> str | Messages:
    """Append text to a string prompt, or to the last message of a conversation."""
    if isinstance(prompt, str):
        return prompt + text
    *before, last = prompt
    content = last["content"]
    more = [*content, {"type": "text", "text": text}] if isinstance(content, list) else content + text
    return [*before, {**last, "content": more}]


def appended_text(prompt: str | Messages, extended: str | Messages) -> str:
    """Return the text that `with_appended_text` added. It is stored instead of the prompt, which may contain images."""
    old, new = (x if isinstance(x, str) else x[-1]["content"] for x in (prompt, extended))
    return new[len(old) :] if isinstance(new, str) else str(new[-1]["text"])
