"""The settings of an evaluation: those of a call of `evaluate`, or of a run.

A run's evaluation (`run.evaluate.evaluate_encoded`, called by `run.loop`) has the reward functions and weights of its
training. Its `reward`, in the log `eval/reward`, is the same mean of weighted sums (`rewards.calls.total_rewards`) as
the `reward` of a rollout (`run.groups.rollout_metrics`), of other completions:

- prompts: all of `eval_dataset`, once each; a rollout has the next ones of the dataset;
- policy: the present one; where iterations overlap (`rollout_ahead`) a rollout's is older;
- samples: `num_generations_eval` of each prompt at `temperature_eval`, with the same random numbers in each evaluation
  of a run, and by `generate` also where another engine samples for the training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from grpo_jax.config.config import GRPOConfig
from grpo_jax.rollout.ends import TurnEnds
from grpo_jax.types import Json


@dataclasses.dataclass(frozen=True)
class EvaluationSettings:
    """The settings of an evaluation, which `evaluate` documents.

    Example:
      >>> EvaluationSettings.of(GRPOConfig(temperature_eval=0.0)).num_generations
      1
    """

    num_generations: int
    max_completion_length: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float | None
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
        return cls(
            num_generations=config.eval_generations,
            max_completion_length=config.max_completion_length,
            temperature=config.eval_temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            min_p=config.min_p,
            ends=TurnEnds.of(config),
            batch_size=max(1, config.per_device_eval_batch_size // config.eval_generations),
            pad_to_multiple_of=config.padding,
            seed=config.seed,
            max_prompt_length=config.max_prompt_length,
            on_long_prompt=config.on_long_prompt,
            chat_template_kwargs=config.chat_template_kwargs,
            on_reward_error=config.on_reward_error,
            reward_weights=config.reward_weights,
            max_tool_calling_iterations=config.max_tool_calling_iterations,
            environment_timeout=config.environment_timeout,
            on_environment_error=config.on_environment_error,
        )
