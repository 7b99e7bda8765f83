"""A task set of verifiers without an end, with an environment that plays the user, and a stop condition.

The hint is drawn from the global generator on purpose: rollgym must make it depend on the episode's seed.
"""

import itertools
import random

import verifiers.v1 as vf


class HiddenData(vf.TaskData):
    number: int


class HiddenTask(vf.Task[HiddenData]):
    @vf.stop
    async def gave_up(self, trace: vf.Trace) -> bool:
        return trace.last_reply == "stop"


class HiddenEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class HiddenEnv(vf.Env[HiddenEnvConfig]):
    async def run(self, task, agents):
        number, right = task.data.number, False
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn(f"It ends in {number % 10}. Try {random.randrange(100)}?")
            while not segment.terminated and not right:
                right = segment.last_reply == str(number)
                if not right:
                    segment = await interaction.turn(f"No. Try {random.randrange(100)}?")
        interaction.trace.record_reward("found", float(right))


class HiddenTaskset(vf.Taskset[HiddenTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        for index in itertools.count():
            yield HiddenTask(HiddenData(number=index % 500), self.config.task)


__all__ = ["HiddenEnv", "HiddenTaskset"]
