"""A taskset with a tool, as a server for a harness."""

import verifiers.v1 as vf


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
