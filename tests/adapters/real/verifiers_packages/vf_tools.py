"""A task set of verifiers with a tool server, which the adapter refuses."""

import verifiers.v1 as vf


class Clock(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "clock"

    @vf.tool
    def now(self) -> str:
        """Return the time."""
        return "noon"


class ClockTask(vf.Task[vf.TaskData]):
    @classmethod
    def toolsets(cls, config):
        return [Clock(vf.ToolsetConfig())]


class ClockTaskset(vf.Taskset[ClockTask, vf.TasksetConfig]):
    def load(self):
        return [ClockTask(vf.TaskData(prompt=f"{number}"), self.config.task) for number in range(9)]


__all__ = ["ClockTaskset"]
