"""Evaluation: sample completions for held-out prompts and average their rewards."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from grpo_jax.config.config import GRPOConfig
from grpo_jax.messages import ErrorList
from grpo_jax.models.sharding import mesh_of, shard_count
from grpo_jax.policy import Policy
from grpo_jax.rewards.calls import Rewards, mean_of_scored, means_of, total_rewards
from grpo_jax.rewards.contract import TrainerState, as_list, reward_names
from grpo_jax.rollout.ends import TurnEnds
from grpo_jax.run.collect import call_reward_fns, sample
from grpo_jax.run.images import check_text_only, with_encoder, without_image_token
from grpo_jax.run.policy_checks import check_ends, check_policy, check_tokens, warn_of_tokens, weight_problems
from grpo_jax.run.prepare import check_functions, encode_rows, prepare_episode_setup
from grpo_jax.run.rollout_result import completion_records, gather_rewards, join_rewards
from grpo_jax.text.prompts import EncodedPrompts, join_prompts
from grpo_jax.text.rows import load_rows
from grpo_jax.text.sources import Dataset, named_datasets
from grpo_jax.types import Environments, Params, RewardFn

if TYPE_CHECKING:  # at runtime, imported only when needed
    from grpo_jax.rollout.episode_setup import EpisodeSetup
    from grpo_jax.run.sampler import Sampler

EVALUATION = 2
"""Value folded into the seed's PRNG key for evaluation. Sampling uses 0, dropout 1 and `AdvantageFn` 3."""


def evaluate(
    policy: Policy,
    dataset: Dataset,
    reward_fns: RewardFn | Sequence[RewardFn],
    *,
    params: Params | None = None,
    num_generations: int = 1,
    max_completion_length: int = 256,
    temperature: float = 0.0,
    batch_size: int = 64,
    seed: int = 0,
    tools: Sequence[Callable[..., Any]] | None = None,
    environment_factory: Environments | None = None,
    sampler: Sampler | None = None,
    **settings: Any,
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Compute the mean of each reward function over completions sampled for a dataset's prompts.

    Args:
      policy: model, params and tokenizer.
      dataset: rows with a `prompt`, as in `train`, or a dict of such datasets keyed by name.
      reward_fns: reward functions with TRL's signature, which may differ from the training rewards.
      params: parameters to use instead of the policy's params, such as `TrainState.params`.
      num_generations: number of completions per prompt.
      max_completion_length: T, maximum number of tokens in a completion.
      temperature: sampling temperature. 0 selects greedy decoding.
      batch_size: maximum number of prompts per batch on each data-parallel device. It does not affect the samples. The
        last batch is padded by repeating its last prompt, and the additional completions and episodes are discarded.
      seed: seed for sampling. A prompt's PRNG keys depend only on the seed and the prompt's index in the dataset.
      tools: functions that the policy can call, as in `train`.
      environment_factory: factory of environments for multi-turn completions, as in `train`.
      sampler: engine that replaces `generate`, as in `train`. Each call receives `params` and one batch of prompts.
      settings: other fields of `GRPOConfig`, such as `top_p`, `stop`, `reward_weights`, `on_reward_error`,
        `chat_template_kwargs` or `max_tool_calling_iterations`.

    Returns:
      metrics: a dict with the mean of each function over the completions that it scored, under the function's name
        (`rewards/<name>/mean` for "reward", "mean_length" and "clipped_ratio"); `reward`, the weighted sum of a
        completion's rewards, averaged over completions (`rewards.calls.total_rewards`); `mean_length`, in tokens;
        `clipped_ratio`, the fraction of truncated completions; and metrics logged with `log_metric`. For a dict of
        datasets, each name starts with `<dataset>/`.
      rows: one dict per completion, in dataset order, in the format of `completions.jsonl`: prompt, completion,
        rewards, ended and, if present, images, turns, turn rewards and logged columns.

    Raises:
      ValueError: if settings, rows or reward functions are invalid. It is raised before sampling starts.

    Example:
      >>> metrics, rows = evaluate(policy, [{"prompt": "1 + 1 =", "answer": "2"}], number_reward())  # doctest: +SKIP
      >>> metrics["accuracy"], rows[0]["completion"]  # doctest: +SKIP
      (1.0, ' 2')
    """
    if params is None:
        policy.check_held()
    config = GRPOConfig(
        num_generations_eval=num_generations,
        max_completion_length=max_completion_length,
        temperature_eval=temperature,
        per_device_eval_batch_size=batch_size * num_generations,
        seed=seed,
        **settings,
    )
    return evaluate_rows(
        policy,
        dataset,
        reward_fns,
        config,
        params=policy.params if params is None else params,
        tools=tools,
        environment_factory=environment_factory,
        sampler=sampler,
    )


def evaluate_rows(
    policy: Policy,
    dataset: Dataset,
    reward_fns: RewardFn | Sequence[RewardFn],
    config: GRPOConfig,
    *,
    params: Params,
    tools: Sequence[Callable[..., Any]] | None,
    environment_factory: Environments | None,
    sampler: Sampler | None = None,
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Run `evaluate` with the settings in `config`."""
    ends, errors = TurnEnds.of(config), ErrorList()
    check_policy(policy, ends, trained=False)
    check_ends(ends, policy, params)
    datasets = {name: load_rows(rows) for name, rows in named_datasets(dataset).items()}
    arguments = {f"dataset[{name!r}]" if name else "dataset": rows for name, rows in datasets.items()}
    episode_setup = prepare_episode_setup(policy, config, arguments, tools, environment_factory)
    encoded = {name: encode_rows(policy, config, episode_setup, rows, "dataset") for name, rows in datasets.items()}
    data = join_prompts(with_encoder(policy, encoded, mesh_of(params), params))
    policy = policy if data.images is None else without_image_token(policy)
    if sampler is not None:
        from grpo_jax.run.sampler import check_sampler

        check_sampler(sampler, episode_setup, ends)
        check_text_only(arguments, "sampler", sampler)
    fns, config = check_functions(as_list(reward_fns), arguments, config, episode_setup, errors, required=True)
    errors.raise_together(weight_problems(config, len(fns)))
    if data.dropped:
        warnings.warn(f"dropped rows with prompts longer than max_prompt_length: {len(data.dropped)}", stacklevel=3)
    check_tokens(policy, data, config.max_completion_length)
    warn_of_tokens(data, policy, "dataset", ends=ends, template_kwargs=config.chat_template_kwargs)
    return evaluate_encoded(policy, data, fns, config, params=params, episode_setup=episode_setup, sampler=sampler)


def evaluate_encoded(
    policy: Policy,
    data: EncodedPrompts,
    reward_fns: Sequence[RewardFn],
    config: GRPOConfig,
    *,
    params: Params,
    episode_setup: EpisodeSetup | None,
    sampler: Sampler | None = None,
    trainer_state: TrainerState | None = None,
    check_interrupt: Callable[[], None] = lambda: None,
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Run `evaluate` on encoded rows. `check_interrupt` is called repeatedly and may raise an exception."""
    key, names = jax.random.fold_in(jax.random.key(config.seed), EVALUATION), reward_names(reward_fns)
    max_prompts = max(1, config.per_device_eval_batch_size // config.eval_generations) * shard_count(mesh_of(params))
    metrics, rows = dict[str, float](), list[dict[str, Any]]()
    for dataset, part in data.by_part().items():
        count, longest, rewards, lengths, ended = len(part.rows), max(map(len, part.token_ids)), [], [], []
        batch_size = -(-count // -(-count // max_prompts))  # equal batch sizes, except that the last may be smaller
        for start in range(0, count, batch_size):
            # Repeat the last prompt so that the last batch has the same shape as the others.
            indices = [min(i, count - 1) for i in range(start, start + batch_size)]
            sampled = sample(
                policy,
                params,
                part,
                indices,
                key,
                config,
                prompt_indices=np.array(indices),
                prompt_length=config.padded(longest),
                evaluation=True,
                episode_setup=episode_setup,
                sampler=sampler,
                check_interrupt=check_interrupt,
            ).head(min(batch_size, count - start))
            check_interrupt()
            local = call_reward_fns(
                policy.tokenizer, reward_fns, sampled, on_error=config.on_reward_error, trainer_state=trainer_state
            )
            rewards.append(gather_rewards(local, reward_fns))
            lengths.append(sampled.present.sum(-1).reshape(-1))
            ended.append(np.asarray(sampled.completions.ended).reshape(-1))
            rows += completion_records(rewards[-1], names, sampled)
        means = _means(rewards, names, config.reward_weights)
        means["mean_length"] = float(np.concatenate(lengths).mean())
        means["clipped_ratio"] = float(1 - np.concatenate(ended).mean())
        metrics |= {f"{dataset}/{name}" if dataset else name: value for name, value in means.items()}
    return metrics, rows


def _means(batches: Sequence[Rewards], names: Sequence[str], weights: Sequence[float] | None) -> dict[str, float]:
    """Return the mean total reward, the mean of each reward function, and the means of the logged metrics."""
    joined = join_rewards(batches)
    scores = np.concatenate(joined.values)  # [B·G, K]; K is 0 if a teacher replaces the reward functions
    metrics = means_of(joined.logged_metrics)
    for name, values in zip(names, scores.T, strict=True):
        taken = name in ("reward", "mean_length", "clipped_ratio")
        metrics[f"rewards/{name}/mean" if taken else name] = mean_of_scored(values)
    return metrics | {"reward": mean_of_scored(total_rewards(scores, weights))}
