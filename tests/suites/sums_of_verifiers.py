"""A single-turn taskset in the form documented by verifiers, with weighted rewards and a metric."""

import asyncio

import pytest

vf = pytest.importorskip("verifiers.v1", reason="verifiers is not installed")


class SumData(vf.TaskData):
    answer: int


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        await asyncio.sleep(0)
        return float(trace.last_reply == str(self.data.answer))

    @vf.reward(weight=0.25)
    async def short(self, trace: vf.Trace) -> float:
        return 1.0 / max(len(trace.last_reply), 1)

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class Contained(SumTask):
    NEEDS_CONTAINER = True


class Rewriting(SumTask):
    @vf.intercept
    async def polite(self, response: vf.Response) -> None:
        """Leave the response unchanged."""


class Stopping(SumTask):
    @vf.stop
    async def gives_up(self, response: vf.Response) -> bool:
        return "I give up" in (response.message.content or "")


class Adder(vf.Toolset[vf.ToolsetConfig, vf.State]):
    TOOL_PREFIX = "sum"

    @vf.tool
    async def add(self, a: int, b: int) -> int:
        """Add."""
        return a + b


class Calling(SumTask):
    @classmethod
    def toolsets(cls, config):
        return [Adder(vf.ToolsetConfig())]


class Failing(SumTask):
    @vf.reward
    async def broken(self, trace: vf.Trace) -> float:
        raise ZeroDivisionError("no score")


KINDS = {one.__name__: one for one in (SumTask, Contained, Rewriting, Stopping, Calling, Failing)}


class SumConfig(vf.TasksetConfig):
    count: int = 4
    kind: str = "SumTask"
    has_tools: bool = False


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Adder(vf.ToolsetConfig())] * config.has_tools

    def load(self):
        for n in range(self.config.count):
            yield KINDS[self.config.kind](
                SumData(prompt=f"{n} + 1 =", system_prompt="Add.", answer=n + 1), self.config.task
            )


__all__ = ["SumTaskset"]
