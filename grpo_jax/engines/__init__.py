"""Other people's engines behind `sampler`: a server samples, and the run's weights follow."""

from grpo_jax.engines.client import EngineError
from grpo_jax.engines.engine import Engine
from grpo_jax.engines.vllm import vllm

__all__ = ["Engine", "EngineError", "vllm"]
