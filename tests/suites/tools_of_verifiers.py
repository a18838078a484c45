"""A taskset with a tool, as a server for a harness."""

import pytest

vf = pytest.importorskip("verifiers.v1", reason="verifiers is not installed, whose taskset this is")


class Echo(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    def echo(self, text: str) -> str:
        """Return the text."""
        return text


class ToolTask(vf.Task[vf.TaskData]):
    @classmethod
    def toolsets(cls, config):
        return [Echo(vf.ToolsetConfig())]


class ToolTaskset(vf.Taskset[ToolTask, vf.TasksetConfig]):
    def load(self):
        return [ToolTask(vf.TaskData(prompt="Echo."), self.config.task)]


__all__ = ["ToolTaskset"]
