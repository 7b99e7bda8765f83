"""A task set of verifiers with one turn per episode: add two numbers."""

import random
from typing import Literal

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: int


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=0.9)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == str(self.data.answer))

    @vf.reward(weight=0.1)
    async def short(self, trace: vf.Trace) -> float:
        if trace.last_reply == "boom":
            raise ValueError("the score function broke")
        return float(len(trace.last_reply) < 4)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumConfig(vf.TasksetConfig):
    largest: int = 9
    size: int = 300
    needs: Literal["nothing", "image"] = "nothing"


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        rng = random.Random(0)
        for _ in range(self.config.size):
            a, b = (rng.randint(0, self.config.largest) for _ in range(2))
            data = SumData(
                prompt=f"{a} + {b} =",
                system_prompt="Add the numbers.",
                answer=a + b,
                image="python:3" if self.config.needs == "image" else None,
            )
            yield SumTask(data, self.config.task)


__all__ = ["SumTaskset"]
