"""An environment whose agent has a limit in tokens."""

import pytest

vf = pytest.importorskip("verifiers.v1", reason="verifiers is not installed, whose environment this is")


class LimitedConfig(vf.SingleAgentEnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig(max_total_tokens=10)


class LimitedEnv(vf.SingleAgentEnv, vf.Env[LimitedConfig]):
    pass


__all__ = ["LimitedEnv"]
