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
from grpo_jax.maths.sampling import Sampling
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
