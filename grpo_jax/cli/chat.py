"""`grpo-jax chat`: prompts and their completions, shown as they are drawn."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator

import jax
import numpy as np

from grpo_jax.config.config import GRPOConfig
from grpo_jax.hub.policy import with_settings
from grpo_jax.policy import Policy
from grpo_jax.rollout.ends import TurnEnds
from grpo_jax.rollout.generate import generate
from grpo_jax.run.cautions import check_policy, check_tokens, shape_of, warn_of_tokens
from grpo_jax.run.sampler import check_ends
from grpo_jax.text.completions import Before, before_of, continuation
from grpo_jax.text.prompts import encode_prompts, make_prompts
from grpo_jax.types import Messages, Tokenizer
from grpo_jax.watch.display import escape_controls


class _Shown:
    """Prints a completion as its tokens come, control characters escaped; an incomplete character waits for its end."""

    def __init__(self, tokenizer: Tokenizer, before: Before | None = None):
        self._tokenizer, self._before, self._text = tokenizer, before or Before([], "", ""), ""

    def __call__(self, tokens: np.ndarray, mask: np.ndarray, *, whole: bool = False) -> None:
        """Take in what there is of one completion, tokens and mask [1, 1, T]."""
        ids = [*self._before.tokens, *tokens[0, 0][mask[0, 0]].tolist()]
        text = continuation(self._before.text, self._tokenizer.decode(ids, skip_special_tokens=True))
        text = text if whole else text.rstrip("\ufffd")
        if text.startswith(self._text):
            print(escape_controls(text[len(self._text) :]), end="", flush=True)
        elif whole:  # a tokenizer that takes back what stood there, as some do before a full stop
            print(f"\n{escape_controls(text)}", end="")
        else:
            return
        self._text = text

    @property
    def text(self) -> str:
        """The text so far."""
        return self._text


def typed() -> Iterator[str]:
    """Yield the lines of standard input; at a terminal with a cue."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            yield input("> ")


def talk(policy: Policy, config: GRPOConfig, prompts: Iterable[str], *, samples: int = 1, echo: bool = False) -> None:
    """Complete prompts one after another, and print each completion as it is drawn.

    Tokens come as `generate` draws them: up to 16 at a time, and on an accelerator a burst late. They are drawn at
    `config.eval_temperature`, 0 being greedy. With a chat template and one sample the prompts make one conversation,
    until one is empty; otherwise each stands by itself. The `samples` of a prompt differ by their keys.
    """
    check_policy(policy, TurnEnds.of(config), trained=False)
    check_ends(TurnEnds.of(config), policy, policy.params)
    policy = policy.replace(model=with_settings(policy.model, config, jax.devices()[:1]))
    drawn, talks, said = 0, policy.tokenizer.chat_template is not None, Messages()
    for prompt in prompts:
        if not prompt.strip():
            said = Messages()
            continue
        said = [*said, {"role": "user", "content": prompt}] if talks else said
        if echo:
            print(f"> {prompt}", flush=True)
        for number in range(samples):
            print(f"[{number + 1}] " * (samples > 1), end="", flush=True)
            text = _answer(policy, config, said if talks else prompt, drawn)
            drawn += 1
            print(flush=True)
        said = [*said, {"role": "assistant", "content": text}] if talks and samples == 1 else Messages()


def _answer(policy: Policy, config: GRPOConfig, prompt: str | Messages, index: int) -> str:
    """Draw, print and return the completion of a prompt; `index` sets its key apart from those of others."""
    data = encode_prompts(
        [{"prompt": prompt}],
        policy.tokenizer,
        max_prompt_length=config.max_prompt_length,
        chat_template_kwargs=config.chat_template_kwargs,
        argument="the prompt,",
    )
    check_tokens(policy, data, 1)
    if index == 0:
        kwargs = config.chat_template_kwargs
        warn_of_tokens(data, policy, "the prompt", ends=TurnEnds.of(config), template_kwargs=kwargs)
    ids, shape, most = data.token_ids, shape_of(policy), config.max_completion_length
    shown = _Shown(policy.tokenizer, before_of(policy.tokenizer, prompt, ids[0]))
    completions = generate(
        policy.model,
        policy.params,
        make_prompts(ids, length=-(-len(ids[0]) // config.padding) * config.padding),
        jax.random.key(config.seed),
        num_generations=1,
        max_completion_length=most if shape is None else min(most, shape.max_position_embeddings - len(ids[0])),
        temperature=config.eval_temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        eos_token_ids=policy.eos_token_ids,
        stop=config.stop,
        stop_token_ids=config.stop_token_ids,
        max_turn_length=config.max_turn_length,
        tokenizer=policy.tokenizer,
        pad_token_id=policy.pad_token_id,
        prompt_indices=np.array([index]),
        watch=shown,
    )
    shown(np.asarray(completions.tokens), np.asarray(completions.mask), whole=True)
    return shown.text
