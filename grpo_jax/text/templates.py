"""Chat templates: the tokens of an observation between two turns of the policy, and what probes of a template show.

Sampled tokens are never encoded again. To encode an observation, a conversation with a stand-in turn is rendered:

```
user: …  assistant: <mark> </turn> tool: 42 </turn> assistant:
         ▲ stand-in        ▲ closing token; the observation is the text after it
```

Only the text after the closing token is used, so it does not matter how a template changes earlier turns (many remove
their thoughts).
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

_MARK = "Zq7"
_PROBE = "Xw5"
_USER: Message = {"role": "user", "content": "Go."}
# Cuts texts of a message that look like special tokens: the parts are encoded one by one.
_CUT = "\U000f5ca1"


class _End(NamedTuple):
    """How a template ends the stand-in's turn.

    Attributes:
      text: from the mark to the closing token.
      closing: text of that token, an EOS.
      opens: whether it also opens the next turn, as GLM-4's <|user|>, and therefore differs between turns.
    """

    text: str
    closing: str
    opens: bool = False


_ENDS: weakref.WeakKeyDictionary[Tokenizer, dict[tuple[object, ...], _End]] = weakref.WeakKeyDictionary()


class ChatTemplate:
    """The chat template of a tokenizer, with the arguments that a run renders it with.

    Args:
      tokenizer: a transformers tokenizer.
      kwargs: further keywords for the chat template.
      tools: schemas that the template shows with the prompt; None for no tools.
      eos_token_ids: ids that end a turn; None means the tokenizer's EOS.
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
        """The template that transformers uses: the keyword `chat_template` or the name in it, else among several
        "tool_use" with tools and "default" without; None if there is none."""
        named = self.kwargs.get("chat_template")
        if named is None and getattr(self.tokenizer, "chat_template", None) is None:
            return None
        try:
            return self.tokenizer.get_chat_template(named, self.tools)
        except ValueError as error:  # several named templates, and none for this use
            raise ValueError(f"the tokenizer does not have a chat template for this: {error}") from error

    @property
    def opens_thinking(self) -> bool:
        """Whether the generation prompt opens <think>, so that a turn begins inside a thought."""
        text = self.render([_USER])
        opening = text[text.rfind(_USER["content"]) :]
        return opening.rfind("<think>") > opening.rfind("</think>")

    def render(self, messages: Messages, *, generation_prompt: bool = True) -> str:
        """Return the text of a conversation; ValueError if the template refuses it."""
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=self.tools, add_generation_prompt=generation_prompt, tokenize=False, **self.kwargs
            )
        except ImportError:  # jinja2 is missing
            raise
        except Exception as error:  # jinja2's errors and the ones that templates raise have no closer common class
            roles = ", ".join(str(message["role"]) for message in messages)
            raise ValueError(f"it refuses a conversation of {roles} ({type(error).__name__}: {error})") from error

    def observation_ids(self, messages: Sequence[Message], *, drawn: int | None = None) -> list[int]:
        """Return the tokens that follow a turn of the policy: messages and the opening of the next turn.

        Text in a message that looks like a special token is encoded as text, so that a tool cannot end or open a turn.

        Args:
          messages: at least one, of the role tool or user. If the first is a tool's, the turn before them is a call.
          drawn: last sampled token of the turn, if it may not end the turn; None assumes that it does.

        Returns:
          Token ids after the closing EOS, including what the template writes after it (a newline, for instance). If
          `drawn` does not end the turn, the EOS comes first. No BOS.

        Raises:
          ValueError: the template refuses the messages or does not fit (`check` finds this before a run).
        """
        if not messages:
            raise ValueError("messages is empty: give at least one message of a tool or a user")
        mark = _MARK
        while mark in str(messages):
            mark += "q"
        end = self._end_of_turn(messages[0]["role"], mark)
        special = sorted(special_tokens(self.tokenizer).values())
        guarded = [{key: _guard(value, special) for key, value in message.items()} for message in messages]
        after = self._after_mark([_stand_in(messages[0], mark), *guarded], mark)
        if not after.startswith(end.text):
            raise ValueError(
                f"the chat template ends the turn before these messages with {after[: len(end.text)]!r}, and before"
                f" others with {end.text!r}: use a template that closes every turn in the same way"
            )
        closing = _encode(self.tokenizer, end.closing)
        ids = _encode_after(self.tokenizer, end.closing, after[len(end.text) :])
        ends = closing if end.opens else self.eos_token_ids or (self.tokenizer.eos_token_id,)
        return ids if drawn is None or drawn in ends else closing + ids

    def check(self, roles: Sequence[str] = ("tool",)) -> None:
        """Raise ValueError if the template cannot be used for several turns, naming every fault.

        It must write messages of all `roles` ("tool", or "user" for an environment's messages) and the tools, and end
        the policy's turn with an EOS.
        """
        if self.source is None:
            raise ValueError(
                "several turns need a chat template, and the tokenizer does not have one: set tokenizer.chat_template,"
                " or use an instruct checkpoint"
            )
        problems = []
        for role in roles:
            try:
                self._end_of_turn(role, _MARK)
            except ValueError as error:
                problems.append(str(error))
        if self.tools and not problems and self._shows_no_tools():
            problems.append(
                "it writes the same prompt with tools and without: a template without tool support; use one that shows "
                "`tools` to the policy"
            )
        raise_all("the chat template", problems)

    def turn_of(self, message: Message) -> tuple[str, bool]:
        """Return the text of an assistant's message after the generation prompt; ValueError if it is refused.

        The second value is whether the whole generation prompt precedes the text: a template may open a thought in it,
        and write no thought in an earlier turn.
        """
        opening = self.render([_USER])
        whole = self.render([_USER, message], generation_prompt=False)
        if whole.startswith(opening):
            return whole[len(opening) :], True
        same = whole[: common_length(opening, whole)]
        # Both may continue with tags that begin with the same letters.
        return whole[max(same.rfind(">"), same.rfind("\n")) + 1 :], False

    def closing_token(self) -> int | None:
        """Return the first special token after an assistant's last turn; None without one, or if an EOS follows."""
        try:
            after = self._after_mark([{"role": "assistant", "content": _MARK}], _MARK, generation_prompt=False)
        except ValueError:  # the template refuses such a conversation
            return None
        special = {text: index for index, text in special_tokens(self.tokenizer).items() if text in after}
        found = _first(after, sorted(special))
        return None if found is None or set(self.eos_token_ids) & set(special.values()) else special[found[1]]

    def opening_token(self, role: str) -> int | None:
        """Return the EOS that ends a turn by opening the next message, of `role` (GLM-4's <|user|>); else None."""
        try:
            end = self._end_of_turn(role, _MARK)
        except ValueError:  # the template refuses such a turn, or does not end it
            return None
        return _encode(self.tokenizer, end.closing)[0] if end.opens else None

    def _shows_no_tools(self) -> bool:
        try:
            return self.render([_USER]) == ChatTemplate(self.tokenizer, self.kwargs).render([_USER])
        except ValueError:  # a template that requires tools
            return False

    def _after_mark(self, messages: Messages, mark: str, *, generation_prompt: bool = True) -> str:
        """Return the text after the last mark, of a conversation that a user opens."""
        text = self.render([_USER, *messages], generation_prompt=generation_prompt)
        _, found, after = text.rpartition(mark)
        if not found:
            raise ValueError("it does not show earlier turns of the assistant: use a template that writes them")
        return after

    def _end_of_turn(self, role: str, mark: str) -> _End:
        """Return how the turn before a message of `role` ends, cached; ValueError if the template does not show it."""
        described = json.dumps([self.kwargs, self.tools], sort_keys=True, default=repr)
        key = (str(self.tokenizer.chat_template), role, mark, described, self.eos_token_ids)
        known = _ENDS.setdefault(self.tokenizer, {})
        if key not in known:
            known[key] = self._read_end(role, mark)
        return known[key]

    def _read_end(self, role: str, mark: str) -> _End:
        probe = {"role": role, "content": _PROBE, **({"name": "tool"} if role == "tool" else {})}
        turn = _stand_in(probe, mark)
        after = self._after_mark([turn, probe], mark)
        if _PROBE not in after:
            support = ": a template without tool support" if role == "tool" else ""
            raise ValueError(f"it does not show messages of the role {role!r}{support}; use one that writes them")
        # The common beginning with and without the message belongs to the turn itself.
        common = after[: common_length(self._after_mark([turn], mark), after)]
        ids = [index for index in self.eos_token_ids or (self.tokenizer.eos_token_id,) if index is not None]
        ends = [text for index in ids if (text := self.tokenizer.decode([index], skip_special_tokens=False))]
        if not ends:
            raise ValueError("the tokenizer has no EOS: set tokenizer.eos_token, or give eos_token_ids")
        special = sorted(special_tokens(self.tokenizer).values())
        if (found := _first(common, ends)) is not None:
            position, closing = found
            return _End(after[: position + len(closing)], closing)
        opening = _first(after[: after.find(_PROBE)], [*ends, *special])
        if opening is not None and opening[1] in ends:
            position, closing = opening
            return _End(after[: position + len(closing)], closing, opens=True)
        # gpt-oss ends an earlier turn with another token than the one that the policy samples.
        found = _first(common, special)
        last = self._after_mark([turn], mark, generation_prompt=False)
        if found is None or not last[found[0] :].startswith(tuple(ends)):
            raise ValueError(
                f"it does not end the turn before a message of the role {role!r} with an EOS ({', '.join(ends)}), but "
                f"continues with {common[:40]!r}: if another token ends a turn, make its id an EOS with"
                ' policy.replace(generation_config={"eos_token_id": [...]}) or in generation_config.json; else use a'
                " template that writes an EOS"
            )
        position, closing = found
        return _End(after[: position + len(closing)], closing)


def _stand_in(message: Message, mark: str) -> Message:
    """Return the turn that stands in for the policy's: a tool call if a tool's message follows."""
    turn: Message = {"role": "assistant", "content": mark}
    if message["role"] == "tool":
        # One call only: some templates refuse two, and others name an answer after the first.
        function = {"name": message.get("name", "tool"), "arguments": {"value": mark}}
        turn["tool_calls"] = [{"type": "function", "function": function}]
    return turn


def _first(text: str, tokens: Sequence[str]) -> tuple[int, str] | None:
    """Return the position of the first of some tokens in a text, and the longest token there."""
    places = [(text.find(token), -len(token), token) for token in tokens if token in text]
    return (min(places)[0], min(places)[2]) if places else None


def _guard(value: object, special: Sequence[str]) -> object:
    """Return a message with a cut after the first character of each text that looks like a special token."""
    if isinstance(value, str):
        value = value.replace(_CUT, "\ufffd")
        pattern = "|".join(re.escape(token) for token in sorted(special, key=len, reverse=True))
        return re.sub(pattern, lambda found: found[0][0] + _CUT + found[0][1:], value) if pattern else value
    if isinstance(value, dict):
        return {key: _guard(item, special) for key, item in value.items()}
    return [_guard(item, special) for item in value] if isinstance(value, list) else value


def _encode_after(tokenizer: Tokenizer, closing: str, text: str) -> list[int]:
    """Return the ids of a text after a closing token: some tokenizers encode the beginning of a text differently."""
    first, *rest = text.split(_CUT)
    before, ids = _encode(tokenizer, closing), _encode(tokenizer, closing + first)
    ids = ids[len(before) :] if ids[: len(before)] == before else _encode(tokenizer, first)
    return ids + [index for part in rest for index in _encode(tokenizer, part)]


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer(text=text, add_special_tokens=False)["input_ids"]) if text else []
