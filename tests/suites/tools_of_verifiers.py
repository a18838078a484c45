"""A taskset with tools in the form documented by verifiers: a stateful server, stop conditions and weighted rewards.

The task is to add up to a goal. The servers are separate processes that import this module.
"""

from __future__ import annotations

import pytest

vf = pytest.importorskip("verifiers.v1", reason="verifiers is not installed")


class AddData(vf.TaskData):
    goal: int


class AddState(vf.State):
    total: int = 0


class Adder(vf.Toolset[vf.ToolsetConfig, AddState]):
    TOOL_PREFIX = "sum"

    @vf.tool
    async def add(self, n: int) -> int:
        """Add to the total, which is returned."""
        if n < 0:
            raise ValueError("only from 0 up")
        self.state.total += n
        return self.state.total


class AddConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()
    own: bool = False


class AddTask(vf.Task[AddData, AddState, AddConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Adder(config.tools)] if config.own else []

    @vf.stop
    async def reached(self, trace: vf.Trace) -> bool:
        return trace.state.total >= self.data.goal

    @vf.stop
    async def gives_up(self, response: vf.Response) -> bool:
        return "I give up" in (response.message.content or "")

    @vf.reward(weight=2.0)
    async def exact(self, trace: vf.Trace) -> float:
        return float(trace.state.total == self.data.goal)

    @vf.reward(weight=-0.25)
    async def calls(self, trace: vf.Trace) -> float:
        return float(
            sum(len(node.message.tool_calls or ()) for node in trace.nodes if node.message.role == "assistant")
        )

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class AddTasksetConfig(vf.TasksetConfig):
    task: AddConfig = AddConfig()


class AddTaskset(vf.Taskset[AddTask, AddTasksetConfig]):
    @classmethod
    def toolsets(cls, config):
        return [] if config.task.own else [Adder(config.task.tools)]

    def load(self):
        return [AddTask(AddData(prompt=f"Add up to {goal}.", goal=goal), self.config.task) for goal in (5, 20)]


__all__ = ["AddTaskset"]

if __name__ == "__main__":
    Adder.run()
