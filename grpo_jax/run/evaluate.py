"""Evaluation: completions of held-out prompts, and the means of their rewards."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import numpy.typing as npt

from grpo_jax.config.config import GRPOConfig
from grpo_jax.models.sharding import mesh_of, shard_count
from grpo_jax.policy import Policy
from grpo_jax.rewards.calls import Rewards, mean_of_scored, means_of, total_rewards
from grpo_jax.rewards.contract import TrainerState, as_list, check_metrics, check_reward_fns, reward_names
from grpo_jax.rollout.ends import TurnEnds
from grpo_jax.run.collect import call_reward_fns, sample
from grpo_jax.run.policy_checks import check_ends, check_policy, check_tokens, warn_of_tokens
from grpo_jax.run.rollout_rewards import completion_rows, gather_rewards
from grpo_jax.text.prompts import EncodedPrompts, encode_prompts, join_prompts
from grpo_jax.text.rows import load_rows
from grpo_jax.text.sources import Dataset, named_datasets
from grpo_jax.types import Environments, Params, RewardFn

if TYPE_CHECKING:  # optional capabilities
    from grpo_jax.rollout.interaction import Interaction
    from grpo_jax.run.sampler import Sampler

EVALUATION = 2
"""Folded into the key of a seed; a run of the same seed folds in 0 for sampling and 1 for dropout."""


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
    """Mean reward of each function over the completions of a dataset.

    Args:
      policy: model, params and tokenizer.
      dataset: rows with a `prompt`, as for `train`, or a dict of several datasets by name.
      reward_fns: reward functions with TRL's contract; they may be others than in training.
      params: parameters to use instead of the policy's own, such as `TrainState.params`.
      num_generations: completions of each prompt.
      max_completion_length: T, tokens.
      temperature: 0 is greedy.
      batch_size: prompts at a time on each data-parallel device. It does not change the samples.
      seed: of the samples; prompt n of the dataset has its own keys.
      tools: as in `train`.
      environment_factory: as in `train`.
      sampler: an engine instead of `generate`, as in `train`; it is given `params`, and prompts of one batch at a time.
      settings: other fields of `GRPOConfig`, such as `top_p`, `stop`, `reward_weights`, `on_reward_error`,
        `chat_template_kwargs` or `max_tool_calling_iterations`.

    Returns:
      metrics: for each function its mean over the scored completions under its name (or as `rewards/<name>/mean`, if
        it has the name of a metric that follows); `reward`, the mean over completions of the weighted sum over the
        functions that scored them (`rewards.calls.total_rewards`); `mean_length` (tokens) and `clipped_ratio` (share of
        completions that were truncated); and what the functions logged by `log_metric`. With several datasets, each
        name begins with `<dataset>/`.
      rows: one dict per completion, in the order of the dataset: prompt, completion, rewards, ended.

    Raises:
      ValueError: settings, rows or reward functions that cannot be used, before anything is sampled.

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
    """`evaluate` with the settings of a run's config."""
    from grpo_jax.rollout import interaction as turns

    ends, template_kwargs = TurnEnds.of(config), config.chat_template_kwargs
    check_policy(policy, ends, trained=False)
    check_ends(ends, policy, params)
    by_part = {name: load_rows(some) for name, some in named_datasets(dataset).items()}
    rows = [row for some in by_part.values() for row in some]
    interaction = turns.make_interaction(
        policy.tokenizer, policy.eos_token_ids, rows, config, tools=tools, environment_factory=environment_factory
    )
    encoded = {
        name: encode_prompts(
            some,
            policy.tokenizer,
            max_prompt_length=config.max_prompt_length,
            on_long_prompt=config.on_long_prompt,
            chat_template_kwargs=template_kwargs,
            tools=None if interaction is None else [interaction.schemas(row) for row in some],
        )
        for name, some in by_part.items()
    }
    data = join_prompts(encoded)
    fns = turns.with_environments(as_list(reward_fns), interaction)
    if sampler is not None:
        from grpo_jax.run.sampler import check_sampler

        check_sampler(sampler, interaction, ends)
    own_columns = () if interaction is None else turns.REWARD_COLUMNS
    check_reward_fns(fns, [*data.rows[0], *own_columns], rows=rows)
    check_tokens(policy, data, config.max_completion_length)
    warn_of_tokens(data, policy, "dataset", ends=ends, template_kwargs=template_kwargs)
    weights = turns.environment_weights(config.reward_weights, fns)
    if weights is not None and len(weights) != len(fns):
        names = ", ".join(reward_names(fns))
        raise ValueError(f"reward_weights has {len(weights)} weights for {names}: give one for each")
    return evaluate_encoded(
        policy,
        data,
        fns,
        dataclasses.replace(config, reward_weights=weights),
        params=params,
        interaction=interaction,
        sampler=sampler,
    )


def evaluate_encoded(
    policy: Policy,
    data: EncodedPrompts,
    reward_fns: Sequence[RewardFn],
    config: GRPOConfig,
    *,
    params: Params,
    interaction: Interaction | None,
    sampler: Sampler | None = None,
    trainer_state: TrainerState | None = None,
    interrupt: Callable[[], None] = lambda: None,
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """`evaluate` of encoded rows and checked reward functions, which include the environments'.

    `interrupt` is called between batches and every few tokens; what it raises ends the evaluation.
    """
    key, names = jax.random.fold_in(jax.random.key(config.seed), EVALUATION), reward_names(reward_fns)
    most = max(1, config.per_device_eval_batch_size // config.eval_generations) * shard_count(mesh_of(params))
    metrics, rows = dict[str, float](), list[dict[str, Any]]()
    for dataset, part in data.by_part().items():
        count, longest, scored, lengths, ended = len(part.rows), max(map(len, part.token_ids)), [], [], []
        batch_size = -(-count // -(-count // most))  # batches of equal size, except that the last one may be shorter
        for start in range(0, count, batch_size):
            # The last batch repeats its last prompt, so that it has the shape of the others and needs no compilation.
            at = [min(i, count - 1) for i in range(start, start + batch_size)]
            sampled = sample(
                policy,
                params,
                part,
                at,
                key,
                config,
                prompt_indices=np.array(at),
                prompt_length=-(-longest // config.padding) * config.padding,
                evaluation=True,
                interaction=interaction,
                sampler=sampler,
                interrupt=interrupt,
            ).head(min(batch_size, count - start))
            interrupt()
            own = call_reward_fns(
                policy.tokenizer, reward_fns, sampled, on_error=config.on_reward_error, trainer_state=trainer_state
            )
            scored.append(gather_rewards(own, reward_fns))
            lengths.append(sampled.present.sum(-1).reshape(-1))
            ended.append(np.asarray(sampled.completions.ended).reshape(-1))
            rows += completion_rows(scored[-1], names, sampled)
        found = _means(scored, names, config.reward_weights)
        found["mean_length"] = float(np.concatenate(lengths).mean())
        found["clipped_ratio"] = float(1 - np.concatenate(ended).mean())
        metrics |= {f"{dataset}/{name}" if dataset else name: value for name, value in found.items()}
    return metrics, rows


def _means(batches: Sequence[Rewards], names: Sequence[str], weights: Sequence[float] | None) -> dict[str, float]:
    """Return the mean reward, the mean score of each function, and the means of the metrics that they logged."""
    scores = np.concatenate([some.values.reshape(-1, len(names)) for some in batches])
    taken = {"reward", "mean_length", "clipped_ratio"}
    keys = [f"rewards/{name}/mean" if name in taken else name for name in names]
    metrics = dict(zip(keys, map(mean_of_scored, scores.T), strict=True))
    metrics["reward"] = mean_of_scored(total_rewards(scores, weights))
    logged: dict[str, list[float]] = {}
    for name, values in (item for some in batches for item in some.metrics.items()):
        logged.setdefault(name, []).extend(values)
    check_metrics(logged, metrics.keys() | taken)
    return means_of(logged) | metrics


def pass_at_k(right: npt.ArrayLike, k: int) -> float:
    """Return the probability that at least one of k completions of a prompt is right, averaged over prompts.

    `right` [N, n] is 1 or True for a right completion, in the order of `evaluate`'s rows. With c right ones among n,
    1 − C(n−c, k) / C(n, k) is unbiased: the share of subsets of k that contain a right one (Chen et al. 2021,
    arXiv:2107.03374, equation 1).
    """
    right = np.asarray(right)
    if right.ndim != 2 or right.size == 0 or not np.isin(right, (0, 1)).all():
        raise ValueError(f"right has the shape {right.shape}; it has to be [N, n] with values 0 and 1.")
    n = right.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"k is {k}, and there are {n} completions of each prompt: give 1 to {n}.")
    counts = right.astype(int).sum(axis=1).tolist()
    return float(np.mean([1 - math.comb(n - c, k) / math.comb(n, k) for c in counts]))
