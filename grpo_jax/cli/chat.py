"""`grpo-jax chat`: completes prompts, and prints the completions as they are sampled."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterable, Iterator

import jax
import numpy as np

from grpo_jax.config.config import GRPOConfig
from grpo_jax.policy import Policy
from grpo_jax.rollout.ends import TurnEnds
from grpo_jax.run.collect import sample
from grpo_jax.run.images import with_encoder, without_image_token
from grpo_jax.run.placement import shape_of, with_settings
from grpo_jax.run.policy_checks import check_ends, check_policy, check_tokens, warn_of_tokens
from grpo_jax.run.prepare import encode_rows
from grpo_jax.text.completions import PrecedingText, continuation, preceding_text
from grpo_jax.types import Json, Messages, Row, Tokenizer
from grpo_jax.watch.display import escape_controls


class Printer:
    """Callback that prints sampled text. Holds back incomplete characters and escapes control characters."""

    def __init__(self, tokenizer: Tokenizer, preceding: PrecedingText | None = None):
        self._tokenizer, self._preceding, self.text = tokenizer, preceding or PrecedingText([], "", ""), ""

    def __call__(self, tokens: np.ndarray, mask: np.ndarray, *, complete: bool = False) -> None:
        """Print the new part of a completion. `tokens` and `mask` are [1, 1, T]. If `complete`, no tokens follow."""
        ids = [*self._preceding.tokens, *tokens[0, 0][mask[0, 0]].tolist()]
        text = continuation(self._preceding.text, self._tokenizer.decode(ids, skip_special_tokens=True))
        text = text if complete else text.rstrip("\ufffd")
        if text.startswith(self.text):
            print(escape_controls(text[len(self.text) :]), end="", flush=True)
        elif complete:  # a new token can change previous text, e.g. remove a space before a period
            print(f"\n{escape_controls(text)}", end="")
        else:
            return
        self.text = text


def read_stdin() -> Iterator[str]:
    """Yield lines from standard input. In a terminal, print "> " before reading each line."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            yield input("> ")


def attach_images(lines: Iterable[str]) -> Iterator[tuple[str, list[Json]]]:
    """Yield prompts, each with the image parts from the `/image PATH` lines that precede it."""
    images: list[Json] = []
    for line in lines:
        if line.startswith("/image "):
            images.append({"type": "image", "image": line.removeprefix("/image ").strip()})
        else:
            yield line, images
            images = []


def run_chat(policy: Policy, config: GRPOConfig, prompts: Iterable[str], *, echo: bool = False) -> None:
    """Complete the prompts one by one, printing each completion as it is sampled at `config.eval_temperature`.

    `/image PATH` adds an image to the next prompt. With a chat template, the prompts form a conversation, and an empty
    prompt starts a new one. Otherwise, they are independent, and a prompt with images must contain the image token.
    """
    check_policy(policy, TurnEnds.of(config), trained=False)
    check_ends(TurnEnds.of(config), policy, policy.params)
    policy = policy.replace(model=with_settings(policy.model, config, jax.devices()[:1]))
    has_template, messages = policy.tokenizer.chat_template is not None, Messages()
    for index, (prompt, images) in enumerate(attach_images(prompts)):
        if not prompt.strip():
            messages = Messages()
            continue
        if echo:
            print(*(f"> /image {part['image']}" for part in images), f"> {prompt}", sep="\n", flush=True)
        content = [*images, {"type": "text", "text": prompt}] if images else prompt
        messages = [*messages, {"role": "user", "content": content}]
        row = {"prompt": prompt, "images": [part["image"] for part in images]}
        text = _answer(policy, config, {"prompt": messages} if has_template else row, index)
        messages = [*messages, {"role": "assistant", "content": text}]
        print(flush=True)


def _answer(policy: Policy, config: GRPOConfig, row: Row, index: int) -> str:
    """Sample, print and return a completion for a row's prompt. `index` is folded into the PRNG key."""
    data = encode_rows(policy, config, None, [row], "the prompt in")
    data = with_encoder(policy, {"": data}, params=policy.params)[""]
    policy = without_image_token(policy) if data.images else policy
    check_tokens(policy, data, 1)
    if index == 0:
        kwargs = config.chat_template_kwargs
        warn_of_tokens(data, policy, "the prompt", ends=TurnEnds.of(config), template_kwargs=kwargs)
    (ids,), shape = data.token_ids, shape_of(policy)
    if shape is not None:
        max_length = min(config.max_completion_length, shape.max_position_embeddings - len(ids))
        config = dataclasses.replace(config, max_completion_length=max_length)
    printer = Printer(policy.tokenizer, preceding_text(policy.tokenizer, row["prompt"], ids))
    completions = sample(
        policy,
        policy.params,
        data,
        [0],
        jax.random.key(config.seed),
        dataclasses.replace(config, num_generations_eval=1),
        prompt_indices=np.array([index]),
        prompt_length=config.padded(len(ids)),
        evaluation=True,
        on_tokens=printer,
    ).completions
    printer(np.asarray(completions.tokens), np.asarray(completions.mask), complete=True)
    return printer.text
