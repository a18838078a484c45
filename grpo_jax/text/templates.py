"""Chat templates: encoding of messages between two turns by the policy, and template properties.

Sampled tokens are never re-encoded. To encode an observation, a conversation with a placeholder turn is rendered:

```
user: …  assistant: <mark> </turn> tool: 42 </turn> assistant:
         ▲ placeholder     ▲ closing token; the observation is the text after it
```

Only the text after the closing token is used, so it does not matter if a template changes earlier turns, for example by
omitting their reasoning.
"""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Collection, Sequence
from typing import NamedTuple

from grpo_jax.messages import raise_all
from grpo_jax.text.completions import common_length, special_tokens
from grpo_jax.types import Json, Message, Messages, Tokenizer

_MARK = "Zq7"  # content of a placeholder turn
_PROBE = "Xw5"  # content of a test message
_USER: Message = {"role": "user", "content": "Go."}
# Inserted into strings that look like special tokens. The parts are encoded separately.
_SPLIT = "\U000f5ca1"


class _End(NamedTuple):
    """The end of a policy turn: `text` after the placeholder mark, up to and including the token `closing`."""

    text: str
    closing: str


_END_CACHE: weakref.WeakKeyDictionary[Tokenizer, dict[tuple[object, ...], _End]] = weakref.WeakKeyDictionary()


class ChatTemplate:
    """The chat template of a transformers tokenizer, with fixed template keywords `kwargs` and tool schemas `tools`.

    A turn ends with any of `eos_token_ids`, or with the tokenizer's EOS if `eos_token_ids` is empty.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        kwargs: Json | None = None,
        tools: Sequence[Json] | None = None,
        eos_token_ids: Collection[int] | None = None,
    ):
        self.tokenizer = tokenizer
        self.kwargs = {name: value for name, value in (kwargs or {}).items() if name != "tools"}
        self.tools = list(tools or (kwargs or {}).get("tools") or ()) or None
        self.eos_token_ids = tuple(sorted(eos_token_ids or ()))

    @property
    def source(self) -> str | None:
        """Source of the template transformers uses, or None. With tools, it is the one named "tool_use", if any."""
        named = self.kwargs.get("chat_template")
        if named is None and getattr(self.tokenizer, "chat_template", None) is None:
            return None
        try:
            return self.tokenizer.get_chat_template(named, self.tools)
        except ValueError as error:  # none of the named templates applies
            raise ValueError(f"the tokenizer has no applicable chat template: {error}") from error

    @property
    def opens_thinking(self) -> bool:
        """Whether the generation prompt opens <think>, so that a turn starts inside a `<think>` block."""
        text = self.render([_USER])
        opening = text[text.rfind(_USER["content"]) :]
        return opening.rfind("<think>") > opening.rfind("</think>")

    def render(self, messages: Messages, *, generation_prompt: bool = True) -> str:
        """Render a conversation as a string. Raises ValueError if the template rejects it."""
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=self.tools, add_generation_prompt=generation_prompt, tokenize=False, **self.kwargs
            )
        except ImportError:  # jinja2 is missing
            raise
        except Exception as error:  # no narrower class covers both jinja2's errors and errors raised in templates
            roles = ", ".join(str(message["role"]) for message in messages)
            raise ValueError(f"the template rejects messages from {roles} ({type(error).__name__}: {error})") from error

    def observation_ids(self, messages: Sequence[Message], *, last_token: int | None = None) -> list[int]:
        """Return the token ids between two turns by the policy: `messages` and the generation prompt.

        Strings in a message that look like special tokens are encoded as ordinary text, so tools cannot end or open a
        turn. The messages' role must be "tool" (after a turn with a call) or "user". `last_token` is the last sampled
        token of the previous turn. If it is not None and does not end that turn, the result starts with the closing
        token. Raises ValueError if the template rejects the messages or is unsuitable (see `check`).
        """
        mark = _MARK
        while mark in str(messages):
            mark += "q"
        end = self._end_of_turn(messages[0]["role"], mark)
        special = sorted(special_tokens(self.tokenizer).values())
        guarded = [{key: _guard(value, special) for key, value in message.items()} for message in messages]
        suffix = self._after_mark([_placeholder(messages[0], mark), *guarded], mark)
        if not suffix.startswith(end.text):
            raise ValueError(
                f"the chat template ends a turn with {suffix[: len(end.text)]!r} before these messages, but with"
                f" {end.text!r} before other messages; use a template that ends all turns with the same text"
            )
        closing = _encode(self.tokenizer, end.closing)
        ids = _encode_after(self.tokenizer, end.closing, suffix[len(end.text) :])
        ends = self.eos_token_ids or (self.tokenizer.eos_token_id,)
        return ids if last_token is None or last_token in ends else closing + ids

    def check(self, roles: Sequence[str] = ("tool",)) -> None:
        """Raise ValueError if the template is missing, omits tools or any of `roles`, or ends turns without an EOS."""
        if self.source is None:
            raise ValueError(
                "multi-turn rollouts need a chat template, but the tokenizer has none; set tokenizer.chat_template or"
                " use an instruct checkpoint"
            )
        problems = []
        for role in roles:
            try:
                self._end_of_turn(role, _MARK)
            except ValueError as error:
                problems.append(str(error))
        if self.tools and not problems and self._omits_tools():
            problems.append("the template renders the same prompt with and without tools; use one with tool support")
        raise_all("the chat template", problems)

    def turn_of(self, message: Message) -> tuple[str, bool]:
        """Render an assistant message and strip the generation prompt. Also returns whether the whole prompt was found.

        Many templates open <think> in the generation prompt, but omit the reasoning when they render earlier turns.
        Only a part of the prompt is then found and stripped. Raises ValueError if the template rejects the message.
        """
        opening = self.render([_USER])
        whole = self.render([_USER, message], generation_prompt=False)
        if whole.startswith(opening):
            return whole[len(opening) :], True
        prefix = whole[: common_length(opening, whole)]
        # The common prefix may end inside a tag, since different tags can start with the same letters.
        return whole[max(prefix.rfind(">"), prefix.rfind("\n")) + 1 :], False

    def closing_token(self) -> int | None:
        """Return the id of the first special token after a final assistant turn.

        Returns None if there is no such token, or if the text after the turn contains an EOS.
        """
        try:
            suffix = self._after_mark([{"role": "assistant", "content": _MARK}], _MARK, generation_prompt=False)
        except ValueError:
            return None
        special = {text: index for index, text in special_tokens(self.tokenizer).items() if text in suffix}
        token = _first(suffix, sorted(special))
        return None if token is None or set(self.eos_token_ids) & set(special.values()) else special[token[1]]

    def _omits_tools(self) -> bool:
        try:
            return self.render([_USER]) == ChatTemplate(self.tokenizer, self.kwargs).render([_USER])
        except ValueError:  # the template requires tools
            return False

    def _after_mark(self, messages: Messages, mark: str, *, generation_prompt: bool = True) -> str:
        """Render the messages after a user message, and return the text after the last mark."""
        _, separator, suffix = self.render([_USER, *messages], generation_prompt=generation_prompt).rpartition(mark)
        if not separator:
            raise ValueError("the template omits earlier assistant turns; use a template that renders them")
        return suffix

    def _end_of_turn(self, role: str, mark: str) -> _End:
        """Return the cached end of a turn before a message with `role`. Raises ValueError for unsuitable templates."""
        keywords = json.dumps([self.kwargs, self.tools], sort_keys=True, default=repr)
        key = (str(self.tokenizer.chat_template), role, mark, keywords, self.eos_token_ids)
        cache = _END_CACHE.setdefault(self.tokenizer, {})
        if key not in cache:
            cache[key] = self._find_end(role, mark)
        return cache[key]

    def _find_end(self, role: str, mark: str) -> _End:
        probe = {"role": role, "content": _PROBE, **({"name": "tool"} if role == "tool" else {})}
        turn = _placeholder(probe, mark)
        suffix = self._after_mark([turn, probe], mark)
        if _PROBE not in suffix:
            support = " with tool support" if role == "tool" else ""
            raise ValueError(
                f"the template omits messages with the role {role!r}; use a template{support} that renders them"
            )
        # Text that is rendered both with and without the message belongs to the turn.
        common = suffix[: common_length(self._after_mark([turn], mark), suffix)]
        ids = [index for index in self.eos_token_ids or (self.tokenizer.eos_token_id,) if index is not None]
        ends = [text for index in ids if (text := self.tokenizer.decode([index], skip_special_tokens=False))]
        if not ends:
            raise ValueError("the tokenizer has no EOS token; set tokenizer.eos_token or pass eos_token_ids")
        found = _first(common, ends)
        if found is None:
            # gpt-oss ends the final turn with the token that the policy samples, and earlier turns with another token.
            found = _first(common, sorted(special_tokens(self.tokenizer).values()))
            final = self._after_mark([turn], mark, generation_prompt=False)
            if found is None or not final[found[0] :].startswith(tuple(ends)):
                raise ValueError(
                    f"before a message with the role {role!r}, the template ends a turn with {common[:40]!r}, which"
                    f" contains no EOS token ({', '.join(ends)}); if a different token ends a turn, add its id with"
                    ' policy.replace(generation_config={"eos_token_id": [...]}) or in generation_config.json'
                )
        position, closing = found
        return _End(suffix[: position + len(closing)], closing)


def _placeholder(message: Message, mark: str) -> Message:
    """Return a placeholder for the policy's turn. It contains a tool call if a message from a tool follows."""
    turn: Message = {"role": "assistant", "content": mark}
    if message["role"] == "tool":
        # Use a single call: some templates reject two, and others label all results with the first call's name.
        function = {"name": message.get("name", "tool"), "arguments": {"value": mark}}
        turn["tool_calls"] = [{"type": "function", "function": function}]
    return turn


def _first(text: str, tokens: Sequence[str]) -> tuple[int, str] | None:
    """Return the first position of any token and the longest token at that position, or None if no token occurs."""
    matches = [(text.find(token), -len(token), token) for token in tokens if token in text]
    return (min(matches)[0], min(matches)[2]) if matches else None


def _guard(value: object, special: Sequence[str]) -> object:
    """Insert `_SPLIT` after the first character of each special token in the strings of `value`."""
    if isinstance(value, str):
        value = value.replace(_SPLIT, "\ufffd")
        pattern = "|".join(re.escape(token) for token in sorted(special, key=len, reverse=True))
        return re.sub(pattern, lambda match: match[0][0] + _SPLIT + match[0][1:], value) if pattern else value
    if isinstance(value, dict):
        return {key: _guard(item, special) for key, item in value.items()}
    return [_guard(item, special) for item in value] if isinstance(value, list) else value


def _encode_after(tokenizer: Tokenizer, closing: str, text: str) -> list[int]:
    """Encode `text` after a closing token. Some tokenizers encode text differently at the start of a string."""
    first, *rest = text.split(_SPLIT)
    prefix, ids = _encode(tokenizer, closing), _encode(tokenizer, closing + first)
    ids = ids[len(prefix) :] if ids[: len(prefix)] == prefix else _encode(tokenizer, first)
    return ids + [index for part in rest for index in _encode(tokenizer, part)]


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer(text=text, add_special_tokens=False)["input_ids"]) if text else []
