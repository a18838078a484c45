"""Suites of tasks that others have made, each by a thin adapter whose package is an extra: `suite` (what all of them
are to a run), `described` (as a RUN.yaml names them), and a module for each suite.
"""

from grpo_jax.suites.described import SUITES, is_suite, suite_of
from grpo_jax.suites.openenv import openenv
from grpo_jax.suites.reasoning_gym import reasoning_gym
from grpo_jax.suites.suite import Suite
from grpo_jax.suites.verifiers import verifiers

__all__ = ["SUITES", "Suite", "is_suite", "openenv", "reasoning_gym", "suite_of", "verifiers"]
