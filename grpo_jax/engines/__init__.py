"""Other people's engines: a server samples for a run, whose weights it follows, or is its teacher."""

from grpo_jax.engines.client import EngineError
from grpo_jax.engines.engine import Engine
from grpo_jax.engines.scorer import EngineScorer
from grpo_jax.engines.vllm import vllm, vllm_scorer

__all__ = ["Engine", "EngineError", "EngineScorer", "vllm", "vllm_scorer"]
