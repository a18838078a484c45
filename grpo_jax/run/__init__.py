"""A run from its arguments to its end: `prepare`, `collect` (rollout, rewards, advantages), `train`, `evaluate`;
`rehearse` tries everything once.
"""

from grpo_jax.run.evaluate import evaluate, pass_at_k
from grpo_jax.run.rehearse import rehearse
from grpo_jax.run.train import train

__all__ = ["evaluate", "pass_at_k", "rehearse", "train"]
