"""A run from its arguments to its end: `prepare`, `collect` (rollout, rewards, advantages), `train`, `evaluate`;
`rehearse` tries everything once, `replay` makes a bad update again, `push_to_hub` publishes what came of it.
"""

from grpo_jax.run.evaluate import evaluate, pass_at_k
from grpo_jax.run.publish import push_to_hub
from grpo_jax.run.rehearse import rehearse
from grpo_jax.run.replay import replay
from grpo_jax.run.train import train

__all__ = ["evaluate", "pass_at_k", "push_to_hub", "rehearse", "replay", "train"]
