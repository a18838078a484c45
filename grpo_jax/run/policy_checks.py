"""Validation of policies, tokenized rows and settings, shared by `train`, `sft`, `evaluate` and `chat`."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator

from grpo_jax.config.config import GRPOConfig
from grpo_jax.config.fields import nearest_sizes
from grpo_jax.config.settings import shown
from grpo_jax.config.sft import GRPOOrSFTConfig
from grpo_jax.messages import show
from grpo_jax.models.layers import is_quantized
from grpo_jax.policy import Policy
from grpo_jax.rollout.ends import BY_EOS, TurnEnds
from grpo_jax.run.placement import shape_of, vocab_size
from grpo_jax.text.prompts import EncodedPrompts
from grpo_jax.text.templates import ChatTemplate
from grpo_jax.types import Json, Messages, Params, Row


def check_is_policy(policy: object) -> None:
    """Raise ValueError unless `policy` is a `Policy`."""
    if not isinstance(policy, Policy):
        raise ValueError(f"policy must be a Policy; got {type(policy).__name__}. Load one with from_pretrained.")


def check_policy(policy: Policy, ends: TurnEnds = BY_EOS, *, trained: bool = True) -> None:
    """Raise ValueError unless the policy can be sampled from and, if `trained`, updated. Warns of a missing EOS id."""
    check_is_policy(policy)
    if trained and is_quantized(policy.params):
        raise ValueError(
            "policy.params are quantized, and quantized weights cannot be trained. Add adapters with"
            " `add_lora(policy, key)`, or load the policy without `quantize`."
        )
    policy.check_model()
    policy.check_tokenizer()
    if not (policy.eos_token_ids or ends.stop or ends.stop_token_ids):
        raise ValueError(
            "policy has no EOS token, so completions would never end. Set eos_token_id in generation_config.json, "
            "config.json or the tokenizer, use policy.replace(generation_config={'eos_token_id': ...}), or set stop."
        )
    eos, ids = getattr(policy.tokenizer, "eos_token_id", None), list(policy.eos_token_ids)
    if eos is not None and eos not in ids:
        warnings.warn(
            f"the tokenizer's EOS token {policy.tokenizer.eos_token!r} ({eos}) is not in policy.eos_token_ids = {ids},"
            f" so it does not end completions. To end completions with it, use {_with_eos(policy, eos)}",
            stacklevel=2,
        )


def _with_eos(policy: Policy, token: int) -> str:
    """Return Python code that adds a token to a policy's EOS ids."""
    return f"policy.replace(generation_config={{'eos_token_id': {[token, *policy.eos_token_ids]}}})"


def check_ends(ends: TurnEnds, policy: Policy, params: Params) -> None:
    """Raise ValueError if the policy's tokenizer or model does not support the stop strings or stop ids."""
    if policy.tokenizer is not None:  # `check_policy` reports a missing tokenizer
        ends.check(policy.tokenizer, vocab_size(policy.model, params) if ends.stop_token_ids else None)


def check_tokens(policy: Policy, data: EncodedPrompts, max_completion_length: int = 0, *, prefix: str = "") -> None:
    """Raise ValueError if a token id is outside the model's vocabulary, or if prompts and completions are too long.

    Skips custom models, and skips the lengths if `max_completion_length` is 0. The message starts with `prefix`.
    """
    largest, shape = max(max(ids) for ids in data.token_ids), shape_of(policy)
    if shape is None:
        return
    if largest >= shape.vocab_size:
        raise ValueError(
            f"{prefix}the input contains the token id {largest}, but the model's vocabulary size is"
            f" {shape.vocab_size}. Use the tokenizer from the model's checkpoint."
        )
    if max_completion_length:
        check_context_length(policy, max(map(len, data.token_ids)), max_completion_length, prefix)


def check_context_length(policy: Policy, longest_prompt: int, max_completion_length: int, prefix: str = "") -> None:
    """Raise ValueError if prompts and completions do not fit in the context of the policy's model."""
    shape = shape_of(policy)
    if shape is None or longest_prompt + max_completion_length <= shape.max_position_embeddings:
        return
    remaining = shape.max_position_embeddings - longest_prompt
    fix = (
        f"use {remaining} or less, or shorter prompts"
        if remaining > 0
        else "the prompts leave no space for completions: shorten them, drop long ones (max_prompt_length with"
        ' on_long_prompt="drop"), or use a model with a longer context'
    )
    raise ValueError(
        f"{prefix}max_completion_length = {max_completion_length}: with prompts of up to {longest_prompt} tokens, the"
        f" total exceeds the model's {shape.max_position_embeddings} positions; {fix}"
    )


def run_problems(policy: Policy, config: GRPOOrSFTConfig, *, has_eval_data: bool) -> list[str]:
    """Return an error message for each GRPO or SFT setting that does not fit the run's data or model."""
    shape, problems = shape_of(policy), list[str]()
    by_evaluation = (config.metric_for_best_model or "").startswith("eval/")
    if not has_eval_data and (config.eval_steps is not None or by_evaluation):
        name = "metric_for_best_model" if config.eval_steps is None else "eval_steps"
        problems.append(f"{shown(config, name)}: needs an evaluation dataset; set eval_dataset (RUN.yaml: eval_data)")
    if config.router_aux_loss_coef and (shape is None or not shape.num_experts):
        name = "router_aux_loss_coef"
        problems.append(f"{shown(config, name)}: the model is not a mixture of experts; set {name} to None")
    return problems


def group_problems(config: GRPOConfig, *, num_reward_fns: int, has_eval_data: bool) -> list[str]:
    """Return an error message for each GRPO setting that does not fit the reward functions or the evaluation groups."""
    problems = weight_problems(config, num_reward_fns)
    batch, group = config.per_device_eval_batch_size, config.eval_generations
    if has_eval_data and batch % group:
        problems.append(
            f"{shown(config, 'per_device_eval_batch_size')}: must be a multiple of the group size {group}"
            f" (num_generations_eval); {nearest_sizes(batch, lambda size: size % group == 0)}"
        )
    return problems


def check_best_metric(config: GRPOOrSFTConfig, names: Iterable[str]) -> None:
    """Raise ValueError if `metric_for_best_model` is "eval/<name>" and `<name>` is not in `names`."""
    metric, known = config.metric_for_best_model or "", [f"eval/{name}" for name in names]
    if metric.startswith("eval/") and metric not in known:
        raise ValueError(f"metric_for_best_model={metric!r} is not an evaluation metric; available: {', '.join(known)}")


def weight_problems(config: GRPOConfig, num_reward_fns: int) -> list[str]:
    """Return a list with an error message if the numbers of reward weights and functions differ, else []."""
    if config.reward_weights is None or len(config.reward_weights) == num_reward_fns:
        return []
    n, functions = len(config.reward_weights), f"{num_reward_fns} reward function{'s' * (num_reward_fns != 1)}"
    return [
        f"{shown(config, 'reward_weights')}: got {n} weight{'s' * (n != 1)} for {functions};"
        " pass one weight per function, or None to use 1.0 for each function"
    ]


def warn_of_tokens(
    data: EncodedPrompts, policy: Policy, argument: str, *, ends: TurnEnds = BY_EOS, template_kwargs: Json | None = None
) -> None:
    """Warn about duplicate special tokens, end-of-turn tokens without effect, and templates that include the date."""
    for line in (
        *_duplicate_special_tokens(data, policy, argument),
        *_missing_turn_ends(data, policy, ends, template_kwargs, argument),
        *_current_date(data, policy, template_kwargs, argument),
    ):
        warnings.warn(line, stacklevel=3)


def _messages_in(row: Row) -> Messages:
    """Return all messages in a row's prompt, completion and messages columns. Strings and token ids are skipped."""
    columns = [row.get(name) for name in ("prompt", "completion", "messages")]
    messages = [message for column in columns if isinstance(column, list | tuple) for message in column]
    return [message for message in messages if isinstance(message, dict)]


def _duplicate_special_tokens(data: EncodedPrompts, policy: Policy, argument: str) -> Iterator[str]:
    """Yield a warning if strings have duplicate BOS or EOS tokens, or if prompts end with an EOS token."""
    bos, eos = (getattr(policy.tokenizer, f"{name}_token_id", None) for name in ("bos", "eos"))
    examples = data.masks is not None  # SFT examples, which must end with a single EOS
    strings = [ids for row, ids in zip(data.rows, data.token_ids, strict=True) if not _messages_in(row)]
    extra_eos = [ids for ids in strings if ids[-1] == eos and (not examples or ids[-2:-1] == ids[-1:])]
    extra_bos = [ids for ids in strings if bos is not None and list(ids[:2]) == [bos, bos]]
    end = "end with two EOS tokens" if examples else "end with an EOS token before the completion"
    for problem, rows in (("start with two BOS tokens", extra_bos), (end, extra_eos)):
        if rows:
            yield (
                f"{argument}: {len(rows)} of {len(data.rows)} rows {problem}, because the tokenizer adds special tokens"
                f" (add_bos_token, add_eos_token). The first is {show(policy.tokenizer.decode(rows[0]))}. Remove the"
                " special tokens from the strings, disable these options, or pass messages instead of strings"
            )


def _missing_turn_ends(
    data: EncodedPrompts, policy: Policy, ends: TurnEnds, template_kwargs: Json | None, argument: str
) -> Iterator[str]:
    """Yield a warning if the loss excludes all end-of-turn tokens, or if they do not end sampled completions."""
    end_ids, token, warning = {*policy.eos_token_ids, *ends.stop_token_ids}, None, ""
    if _messages_in(data.rows[0]):
        token = ChatTemplate(policy.tokenizer, template_kwargs, eos_token_ids=end_ids).closing_token()
    if token is not None:
        warning = (
            f"the chat template ends a turn with {policy.tokenizer.decode([token])!r} ({token}), which does not end"
            f" completions (policy.eos_token_ids = {list(policy.eos_token_ids)}). Use {_with_eos(policy, token)}"
        )
    if data.masks is None:
        if warning and not ends.stop:
            yield f"{argument}: {warning}, or stop_token_ids=[{token}]"
        return
    targets = zip(data.token_ids, data.masks, strict=True)
    if all(end_ids.isdisjoint(itertools.compress(ids[1:], mask[1:])) for ids, mask in targets):
        yield f"{argument}: the loss excludes all end-of-turn tokens, so the policy does not learn to stop; " + (
            warning
            or "append tokenizer.eos_token to strings, or use a chat template that writes an EOS after assistant"
            " turns, inside the generation tags. If max_length truncates all examples, increase it"
        )


def _current_date(data: EncodedPrompts, policy: Policy, kwargs: Json | None, argument: str) -> Iterator[str]:
    """Yield a warning if the chat template writes the current date into the training data (Llama 3, gpt-oss)."""
    messages = argument == "dataset" and _messages_in(data.rows[0])
    template = ChatTemplate(policy.tokenizer, kwargs).source if messages else None
    if "strftime_now(" in (template or "") and "date_string" not in (kwargs or {}):
        yield (
            "dataset: the chat template writes the current date, so the prompts change daily, and a run can be resumed"
            " only on the same day. Set a date with chat_template_kwargs={'date_string': ...} (Llama 3), or write it"
            " into the template and pass {'chat_template': ...}"
        )
