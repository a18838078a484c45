"""A verifiers environment with a token limit for its agent."""

import pytest

vf = pytest.importorskip("verifiers.v1", reason="verifiers is not installed")


class LimitedConfig(vf.SingleAgentEnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig(max_total_tokens=10)


class LimitedEnv(vf.SingleAgentEnv, vf.Env[LimitedConfig]):
    pass


__all__ = ["LimitedEnv"]
