"""Evaluation: sample completions of held-out prompts and score them, with settings of their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from grpo_jax.config.config import GRPOConfig
from grpo_jax.devices.sharding import mesh_of, shard_count
from grpo_jax.maths.sampling import Sampling
from grpo_jax.policy import Policy
from grpo_jax.rewards.calls import mean_of_scored, means_of, total_rewards
from grpo_jax.rewards.contract import EXTRAS, TrainerState, as_list, check_reward_fns, reward_names
from grpo_jax.rewards.extras import Extras, check_metrics
from grpo_jax.run.sample import sample
from grpo_jax.run.sampler import Request, Sampler, check_sampler
from grpo_jax.run.scores import Scores, completion_rows, of_all_processes, score_own
from grpo_jax.text.prompts import EncodedPrompts
from grpo_jax.text.rows import load_rows
from grpo_jax.turns.interaction import (
    Interaction,
    encode_rows,
    environment_weights,
    make_interaction,
    reward_columns,
    with_environments,
)
from grpo_jax.types import Params

EVALUATION = 2
"""What the key of a seed is folded with here; a run of the same seed samples with 0, and drops out with 1."""


def evaluate(
    policy: Policy,
    dataset: Any,
    reward_fns: Callable[..., Any] | Sequence[Callable[..., Any]],
    *,
    params: Params | None = None,
    num_generations: int = 1,
    max_completion_length: int = 256,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float | None = None,
    batch_size: int = 64,
    pad_to_multiple_of: int = 32,
    seed: int = 0,
    max_prompt_length: int | None = None,
    on_long_prompt: str = "error",
    chat_template_kwargs: dict[str, Any] | None = None,
    on_reward_error: str = "raise",
    reward_weights: Sequence[float] | None = None,
    trainer_state: TrainerState | None = None,
    tools: Sequence[Callable[..., Any]] | None = None,
    environment_factory: Any = None,
    max_tool_calling_iterations: int | None = None,
    environment_timeout: float | None = 300.0,
    on_environment_error: str = "raise",
    interaction: Interaction | None = None,
    sampler: Sampler | None = None,
    interrupt: Callable[[], None] = lambda: None,
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Mean reward of each function over the completions of a dataset.

    Args:
      policy: model, params and tokenizer.
      dataset: rows with a `prompt`, as for `train`; or `EncodedPrompts`, which saves their encoding.
      reward_fns: reward functions with TRL's contract; they may be others than in training.
      params: other parameters than the policy's own, the `params` of a `TrainState` for instance.
      num_generations: completions of each prompt.
      max_completion_length: T, tokens.
      temperature: 0 is greedy.
      top_k: see `sampling.process_logits`.
      top_p: likewise.
      min_p: likewise.
      batch_size: prompts at a time on each device that prompts are cut over: one device without a mesh, all but for
        those along "tensor" with one. It does not change the samples.
      pad_to_multiple_of: tokens; prompts are padded to a multiple of it, as in training, so that a run and its
        evaluations share their compiled programs.
      seed: of the samples; prompt n of the dataset has its own keys.
      max_prompt_length: see `text.encode_prompts`.
      on_long_prompt: likewise.
      chat_template_kwargs: likewise.
      on_reward_error: "raise", or "none" to score a failure as missing.
      reward_weights: of the functions in the metric `reward`, as in training; None for ones.
      trainer_state: for reward functions that name it.
      tools: as in `train`, for completions of several turns.
      environment_factory: likewise.
      max_tool_calling_iterations: as in `GRPOConfig`.
      environment_timeout: likewise.
      on_environment_error: likewise.
      interaction: what `train` has made of these, beside `EncodedPrompts`; its reward functions are among `reward_fns`.
      sampler: another engine in the place of `generate`, as in `train`: it is given `params`, and prompts of one batch
        at a time. Not beside tools or environments.
      interrupt: called between batches and every few tokens; what it raises ends the evaluation.

    Returns:
      metrics: for each function its mean over the scored completions under its name (or as `rewards/<name>/mean`, if
        it has the name of a metric that follows); `reward`, the mean over completions of the weighted sum over the
        functions that scored them (`rewards.calls.total_rewards`); `mean_length` (tokens) and `clipped_ratio` (share of
        completions without an EOS); and what the functions logged by `log_metric`.
      rows: one dict per completion, in the order of the dataset: prompt, completion, rewards, ended.

    Raises:
      ValueError: `reward_weights` that are not one for each function; as `text.load_rows`, `text.encode_prompts` and
        `rewards.compute_rewards`.

    Example:
      A model of sixteen numbers, one for each pair of letters, which writes b after a and then ends:

      >>> import jax.numpy as jnp
      >>> from tokenizers import Tokenizer, decoders, models, pre_tokenizers
      >>> from transformers import PreTrainedTokenizerFast
      >>> class Pairs:
      ...     def apply(self, variables, tokens):
      ...         return variables["params"]["logits"][tokens]
      >>> letters = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(".abc")}, unk_token="."))
      >>> letters.pre_tokenizer, letters.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
      >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token=".")
      >>> policy = Policy(Pairs(), {"logits": jnp.zeros((4, 4)).at[1, 2].set(9.0)}, tokenizer)
      >>> def right(completions, answer):
      ...     return [float(text == truth) for text, truth in zip(completions, answer)]
      >>> metrics, rows = evaluate(policy, [{"prompt": "ca", "answer": "b"}, {"prompt": "c", "answer": "b"}], right)
      >>> metrics["right"], [row["completion"] for row in rows]
      (0.5, ['b', ''])
    """
    if pad_to_multiple_of < 1:
        raise ValueError(f"pad_to_multiple_of must be at least 1 (no padding); got {pad_to_multiple_of!r}.")
    data, all_rows = dataset, []  # rows that a run has encoded are checked
    if not isinstance(data, EncodedPrompts):
        all_rows = load_rows(dataset)
        kwargs: dict[str, Any] = {"chat_template_kwargs": chat_template_kwargs}
        given: dict[str, Any] = {"tools": tools, "environment_factory": environment_factory, **kwargs}
        given |= {"most_calls": max_tool_calling_iterations, "seconds": environment_timeout}
        own = (policy.tokenizer, policy.eos_token_ids, all_rows)
        interaction = make_interaction(*own, **given, on_error=on_environment_error)
        reward_fns = with_environments(as_list(reward_fns), interaction)
        kwargs |= {"max_prompt_length": max_prompt_length, "on_long_prompt": on_long_prompt}
        data = encode_rows(interaction, all_rows, policy.tokenizer, **kwargs)
    check_sampler(sampler, interaction)
    check_reward_fns(reward_fns, reward_columns(data.rows[0], interaction), extras=EXTRAS, rows=all_rows)
    weights, names = environment_weights(reward_weights, as_list(reward_fns)), reward_names(reward_fns)
    if weights is not None and len(weights) != len(names):
        raise ValueError(f"reward_weights has {len(weights)} weights for {', '.join(names)}: give one for each")
    params = policy.params if params is None else params
    count, longest = len(data.rows), max(len(ids) for ids in data.token_ids)
    longest = -(-longest // pad_to_multiple_of) * pad_to_multiple_of
    scored, lengths, ended, found = [], [], [], list[dict[str, Any]]()
    request = Request(
        num_generations=num_generations,
        max_completion_length=max_completion_length,
        sampling=Sampling(temperature, top_k, top_p, min_p),
        eos_token_ids=policy.eos_token_ids,
        pad_token_id=policy.pad_token_id,
        prompt_length=longest,
        padding=pad_to_multiple_of,
        interaction=interaction,
        sampler=sampler,
    )
    key = jax.random.fold_in(jax.random.key(seed), EVALUATION)
    batch_size *= shard_count(mesh_of(params))
    batch_size = -(-count // -(-count // batch_size))  # as many rollouts of equal sizes: the last one is fuller
    for start in range(0, count, batch_size):
        # The last batch is filled up with its last prompt, so that its shape is not compiled for it alone.
        at = [min(i, count - 1) for i in range(start, start + batch_size)]
        sampled = sample(policy.model, params, data, at, key, request, prompt_indices=np.array(at), interrupt=interrupt)
        interrupt()
        sampled = sampled.first(len(data.rows[start : start + batch_size]))
        own = score_own(policy.tokenizer, reward_fns, sampled, on_error=on_reward_error, extras=Extras(trainer_state))
        scored.append(of_all_processes(own, reward_fns))
        lengths.append(sampled.present.sum(-1).reshape(-1))
        ended.append(np.asarray(sampled.completions.ended).reshape(-1))
        found += completion_rows(scored[-1], names, sampled)
    mean_length, clipped_ratio = float(np.concatenate(lengths).mean()), float(1 - np.concatenate(ended).mean())
    return _means(names, weights, scored, mean_length=mean_length, clipped_ratio=clipped_ratio), found


def settings_of(config: GRPOConfig) -> dict[str, Any]:
    """The keywords of `evaluate` that a config says: those of the evaluations of its run.

    Example:
      >>> settings_of(GRPOConfig(temperature_eval=0.0))["num_generations"]
      1
    """
    return {
        "num_generations": config.eval_generations,
        "max_completion_length": config.max_completion_length,
        "temperature": config.eval_temperature,
        "top_k": config.top_k,
        "top_p": config.top_p,
        "min_p": config.min_p,
        "batch_size": max(1, config.per_device_eval_batch_size // config.eval_generations),
        "pad_to_multiple_of": config.padding,
        "seed": config.seed,
        "max_prompt_length": config.max_prompt_length,
        "on_long_prompt": config.on_long_prompt,
        "chat_template_kwargs": config.chat_template_kwargs,
        "on_reward_error": config.on_reward_error,
        "reward_weights": config.reward_weights,
        "max_tool_calling_iterations": config.max_tool_calling_iterations,
        "environment_timeout": config.environment_timeout,
        "on_environment_error": config.on_environment_error,
    }


def _means(
    names: Sequence[str], weights: Sequence[float] | None, scored: Sequence[Scores], **more: float
) -> dict[str, float]:
    """Means of what the functions logged, of each function's scores and of their sums, NaN without any; and more."""
    logged: dict[str, list[float]] = {}
    for name, values in (item for some in scored for item in some.logged.items()):
        logged.setdefault(name, []).extend(values)
    scores = np.concatenate([some.rewards.reshape(-1, len(names)) for some in scored])
    own = {"reward": mean_of_scored(total_rewards(scores, weights)), **more}
    keys = [f"rewards/{name}/mean" if name in own else name for name in names]
    metrics = dict(zip(keys, map(mean_of_scored, scores.T), strict=True)) | own
    check_metrics(logged, metrics)
    return means_of(logged) | metrics


def pass_at_k(right: Any, k: int) -> float:
    """Probability that at least one of k completions of a prompt is right, averaged over prompts.

    Of n samples of which c are right, 1 − C(n−c, k) / C(n, k) is unbiased: it is the share of the subsets of k samples
    that hold a right one.

    Args:
      right: [N, n], 1 or True for a right completion; `evaluate`'s rows are in this order.
      k: 1 … n.

    Returns:
      A number in [0, 1]; k = 1 is the mean.

    Raises:
      ValueError: a `right` of another rank or with other values, a k outside 1 … n.

    References:
      Chen et al. 2021 (arXiv:2107.03374), equation 1.

    Example:
      >>> pass_at_k([[1, 0, 0, 0], [0, 0, 0, 0]], 2)
      0.25
    """
    right = np.asarray(right)
    if right.ndim != 2 or right.size == 0 or not np.isin(right, (0, 1)).all():
        raise ValueError(f"right has the shape {right.shape}; it has to be [N, n] with values 0 and 1.")
    n = right.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"k is {k}, and there are {n} completions of each prompt: give 1 to {n}.")
    counts = right.astype(int).sum(axis=1).tolist()
    return float(np.mean([1 - math.comb(n - c, k) / math.comb(n, k) for c in counts]))
