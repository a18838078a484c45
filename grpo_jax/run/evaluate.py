"""Evaluation: sample completions of held-out prompts and score them, with settings of their own."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from grpo_jax.config.config import GRPOConfig
from grpo_jax.maths.sampling import Sampling
from grpo_jax.models.sharding import mesh_of, shard_count
from grpo_jax.policy import Policy
from grpo_jax.rewards.calls import mean_of_scored, means_of, total_rewards
from grpo_jax.rewards.contract import EXTRAS, TrainerState, as_list, check_reward_fns, reward_names
from grpo_jax.rewards.extras import Extras, check_metrics
from grpo_jax.rollout.ends import TurnEnds
from grpo_jax.rollout.interaction import (
    Interaction,
    encode_rows,
    environment_weights,
    make_interaction,
    reward_columns,
    with_environments,
)
from grpo_jax.run.cautions import check_policy, check_tokens, warn_of_tokens
from grpo_jax.run.sample import sample
from grpo_jax.run.sampler import Request, Sampler, check_ends, check_sampler
from grpo_jax.run.scores import Rewarded, completion_rows, of_all_processes, score_own
from grpo_jax.text.prompts import EncodedPrompts
from grpo_jax.text.rows import load_rows
from grpo_jax.text.sources import Dataset
from grpo_jax.types import Environments, Json, Params, RewardFn, Row

EVALUATION = 2
"""What the key of a seed is folded with here; a run of the same seed samples with 0, and drops out with 1."""


@dataclasses.dataclass(frozen=True)
class EvaluationSettings:
    """The settings of an evaluation, which `evaluate` documents.

    In a run, `eval/reward` is the same mean of weighted sums as the `reward` of a rollout
    (`run.scores.rollout_metrics`), over other completions: of all of `eval_dataset`, by the present policy, and always
    sampled by `generate`, with the same random numbers in each evaluation.

    Example:
      >>> EvaluationSettings.of(GRPOConfig(temperature_eval=0.0)).num_generations
      1
    """

    num_generations: int
    max_completion_length: int
    sampling: Sampling
    ends: TurnEnds
    batch_size: int
    pad_to_multiple_of: int
    seed: int
    max_prompt_length: int | None
    on_long_prompt: str
    chat_template_kwargs: Json | None
    on_reward_error: str
    reward_weights: Sequence[float] | None
    max_tool_calling_iterations: int | None
    environment_timeout: float | None
    on_environment_error: str

    def __post_init__(self) -> None:
        if self.pad_to_multiple_of < 1:
            raise ValueError(f"pad_to_multiple_of must be at least 1 (no padding); got {self.pad_to_multiple_of!r}.")

    @classmethod
    def of(cls, config: GRPOConfig) -> EvaluationSettings:
        """The settings of the evaluations of a run."""
        names = (field.name for field in dataclasses.fields(cls))
        settings = {name: getattr(config, name) for name in names if hasattr(config, name)}
        settings |= {
            "num_generations": config.eval_generations,
            "sampling": Sampling(config.eval_temperature, config.top_k, config.top_p, config.min_p),
            "ends": TurnEnds.of(config),
            "batch_size": max(1, config.per_device_eval_batch_size // config.eval_generations),
            "pad_to_multiple_of": config.padding,
        }
        return cls(**settings)


def evaluate(
    policy: Policy,
    dataset: Dataset | EncodedPrompts,
    reward_fns: RewardFn | Sequence[RewardFn],
    *,
    params: Params | None = None,
    num_generations: int = 1,
    max_completion_length: int = 256,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: int | Sequence[int] | None = None,
    max_turn_length: int | None = None,
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
    environment_factory: Environments | None = None,
    max_tool_calling_iterations: int | None = None,
    environment_timeout: float | None = 300.0,
    on_environment_error: str = "raise",
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
      stop: as in `GRPOConfig`.
      stop_token_ids: likewise.
      max_turn_length: likewise.
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
      sampler: another engine in the place of `generate`, as in `train`: it is given `params`, and prompts of one batch
        at a time. Not beside tools or environments.
      interrupt: called between batches and every few tokens; what it raises ends the evaluation.

    Returns:
      metrics: for each function its mean over the scored completions under its name (or as `rewards/<name>/mean`, if
        it has the name of a metric that follows); `reward`, the mean over completions of the weighted sum over the
        functions that scored them (`rewards.calls.total_rewards`); `mean_length` (tokens) and `clipped_ratio` (share of
        completions that have not ended by themselves); and what the functions logged by `log_metric`.
      rows: one dict per completion, in the order of the dataset: prompt, completion, rewards, ended.

    Raises:
      ValueError: `reward_weights` that are not one for each function; what can end no turn; tokens or positions that
        the model does not have; as `text.load_rows`, `text.encode_prompts` and `rewards.compute_rewards`.

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
    settings = EvaluationSettings(
        num_generations=num_generations,
        max_completion_length=max_completion_length,
        sampling=Sampling(temperature, top_k, top_p, min_p),
        ends=TurnEnds.read(stop, stop_token_ids, max_turn_length),
        batch_size=batch_size,
        pad_to_multiple_of=pad_to_multiple_of,
        seed=seed,
        max_prompt_length=max_prompt_length,
        on_long_prompt=on_long_prompt,
        chat_template_kwargs=chat_template_kwargs,
        on_reward_error=on_reward_error,
        reward_weights=reward_weights,
        max_tool_calling_iterations=max_tool_calling_iterations,
        environment_timeout=environment_timeout,
        on_environment_error=on_environment_error,
    )
    return evaluate_rows(
        policy,
        dataset,
        reward_fns,
        settings,
        params=params,
        trainer_state=trainer_state,
        tools=tools,
        environment_factory=environment_factory,
        sampler=sampler,
        interrupt=interrupt,
    )


def evaluate_rows(
    policy: Policy,
    dataset: Dataset | EncodedPrompts,
    reward_fns: RewardFn | Sequence[RewardFn],
    settings: EvaluationSettings,
    *,
    params: Params | None = None,
    trainer_state: TrainerState | None = None,
    tools: Sequence[Callable[..., Any]] | None = None,
    environment_factory: Environments | None = None,
    sampler: Sampler | None = None,
    interrupt: Callable[[], None] = lambda: None,
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """`evaluate`, with its settings as one value."""
    rows, interaction = list[Row](), None
    if params is None:
        policy.check_held()
    check_policy(policy, settings.ends, trained=False)
    check_ends(settings.ends, policy, policy.params if params is None else params)
    if isinstance(dataset, EncodedPrompts):
        data = dataset
    else:
        rows = load_rows(dataset)
        interaction = make_interaction(
            policy.tokenizer,
            policy.eos_token_ids,
            rows,
            tools=tools,
            environment_factory=environment_factory,
            chat_template_kwargs=settings.chat_template_kwargs,
            most_calls=settings.max_tool_calling_iterations,
            seconds=settings.environment_timeout,
            on_error=settings.on_environment_error,
            ends=settings.ends,
        )
        data = encode_rows(
            interaction,
            rows,
            policy.tokenizer,
            max_prompt_length=settings.max_prompt_length,
            on_long_prompt=settings.on_long_prompt,
            chat_template_kwargs=settings.chat_template_kwargs,
        )
    fns = with_environments(as_list(reward_fns), interaction)
    check_sampler(sampler, interaction, settings.ends)
    check_reward_fns(fns, reward_columns(data.rows[0], interaction), extras=EXTRAS, rows=rows)
    check_tokens(policy, data, settings.max_completion_length)
    template_kwargs = settings.chat_template_kwargs
    warn_of_tokens(data, policy, "dataset", reward_fns=fns, ends=settings.ends, template_kwargs=template_kwargs)
    weights = environment_weights(settings.reward_weights, fns)
    if weights is not None and len(weights) != len(fns):
        names = ", ".join(reward_names(fns))
        raise ValueError(f"reward_weights has {len(weights)} weights for {names}: give one for each")
    return evaluate_encoded(
        policy,
        data,
        fns,
        dataclasses.replace(settings, reward_weights=weights),
        params=policy.params if params is None else params,
        trainer_state=trainer_state,
        interaction=interaction,
        sampler=sampler,
        interrupt=interrupt,
    )


def evaluate_encoded(
    policy: Policy,
    data: EncodedPrompts,
    reward_fns: Sequence[RewardFn],
    settings: EvaluationSettings,
    *,
    params: Params,
    trainer_state: TrainerState | None,
    interaction: Interaction | None,
    sampler: Sampler | None,
    interrupt: Callable[[], None],
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """`evaluate`, of rows that are encoded and reward functions that are checked, those of environments among them."""
    count, longest, padding = len(data.rows), max(map(len, data.token_ids)), settings.pad_to_multiple_of
    request = Request(
        num_generations=settings.num_generations,
        max_completion_length=settings.max_completion_length,
        sampling=settings.sampling,
        eos_token_ids=policy.eos_token_ids,
        pad_token_id=policy.pad_token_id,
        prompt_length=-(-longest // padding) * padding,
        padding=padding,
        interaction=interaction,
        sampler=sampler,
        policy=policy,
        ends=settings.ends,
    )
    key, names = jax.random.fold_in(jax.random.key(settings.seed), EVALUATION), reward_names(reward_fns)
    scored, lengths, ended, found = [], [], [], list[dict[str, Any]]()
    batch_size = settings.batch_size * shard_count(mesh_of(params))
    batch_size = -(-count // -(-count // batch_size))  # as many rollouts of equal sizes: the last one is fuller
    for start in range(0, count, batch_size):
        # The last batch is filled up with its last prompt, so that its shape is not compiled for it alone.
        at = [min(i, count - 1) for i in range(start, start + batch_size)]
        sampled = sample(policy.model, params, data, at, key, request, prompt_indices=np.array(at), interrupt=interrupt)
        interrupt()
        sampled = sampled.first(len(data.rows[start : start + batch_size]))
        own = score_own(
            policy.tokenizer, reward_fns, sampled, on_error=settings.on_reward_error, extras=Extras(trainer_state)
        )
        scored.append(of_all_processes(own, reward_fns))
        lengths.append(sampled.present.sum(-1).reshape(-1))
        ended.append(np.asarray(sampled.completions.ended).reshape(-1))
        found += completion_rows(scored[-1], names, sampled)
    metrics = _means(
        names,
        settings.reward_weights,
        scored,
        mean_length=float(np.concatenate(lengths).mean()),
        clipped_ratio=float(1 - np.concatenate(ended).mean()),
    )
    return metrics, found


def _means(
    names: Sequence[str],
    weights: Sequence[float] | None,
    scored: Sequence[Rewarded],
    *,
    mean_length: float,
    clipped_ratio: float,
) -> dict[str, float]:
    """The metrics of an evaluation: means of logged numbers, of each function's scores and of their weighted sums."""
    logged: dict[str, list[float]] = {}
    for name, values in (item for some in scored for item in some.logged.items()):
        logged.setdefault(name, []).extend(values)
    scores = np.concatenate([some.rewards.reshape(-1, len(names)) for some in scored])
    reward = mean_of_scored(total_rewards(scores, weights))
    own = {"reward": reward, "mean_length": mean_length, "clipped_ratio": clipped_ratio}
    keys = [f"rewards/{name}/mean" if name in own else name for name in names]
    metrics = dict(zip(keys, map(mean_of_scored, scores.T), strict=True)) | own
    check_metrics(logged, metrics)
    return means_of(logged) | metrics


def pass_at_k(right: npt.ArrayLike, k: int) -> float:
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
