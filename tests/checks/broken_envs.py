"""One environment that keeps every rule, many that each break one, and a few that only raise doubts.

`BROKEN` says for each id which rules must fail: as few as the break allows.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from typing import Any

import gymnasium as gym
import numpy as np

from rollgym import SoloAgent, StepResult, Task, TaskSet, TextEnv, register

ROUNDS = 3
MAX_TURNS = 10
DIGITS = [str(digit) for digit in range(10)]
COLOURS = ["red", "green", "blue", "grey"]


class Good(TextEnv):
    """Say the digit that follows, three times; a wrong digit loses."""

    instructions = "Say the digit that follows the one you see. Answer with one digit, such as `7`."
    reward_range = (0.0, 1.0)

    def begin(self, task: Task) -> str:
        self.digits = [int(digit) for digit in task.rng().integers(0, 9, size=ROUNDS)]
        self.color = str(self.np_random.choice(COLOURS))
        self.round = self.turns = 0
        return self.show()

    def show(self) -> str:
        return f"A {self.color} {self.digits[min(self.round, ROUNDS - 1)]}."

    def facts(self) -> dict[str, Any]:
        return {"actions": list(DIGITS), "round": self.round}

    def respond(self, action: str) -> StepResult:
        self.turns += 1
        out_of_turns = self.turns >= MAX_TURNS
        if action.strip() not in DIGITS:
            return StepResult(f"Not a digit. {self.show()}", truncated=out_of_turns, valid=False)
        if int(action) != self.digits[self.round] + 1:
            return self.wrong()
        self.round += 1
        won = self.round == ROUNDS
        return StepResult(self.show(), self.prize(won), won, out_of_turns and not won, success=won)

    def wrong(self) -> StepResult:
        return StepResult("Wrong.", terminated=True)

    def prize(self, won: bool) -> float:
        return float(won)


class Expert(SoloAgent):
    def choose(self, observation: str, info: Any) -> str:
        return str(int(observation.rstrip(".").split()[-1]) + 1)


class Loser(SoloAgent):
    def choose(self, observation: str, info: Any) -> str:
        return "0"


class Clueless(SoloAgent):
    def choose(self, observation: str, info: Any) -> str:
        return {}[observation]


BROKEN: dict[str, set[str]] = {}


def breaks(*rules: str, expert: str = "Expert", expert_is: str = "expert") -> Any:
    """Register the class as ``check/ClassName-v0``, and say which rules it breaks."""

    def add(made: type[gym.Env[Any, Any]]) -> type[gym.Env[Any, Any]]:
        env_id = f"check/{made.__name__}-v0"
        BROKEN[env_id] = set(rules)
        path = f"broken_envs:{made.__name__}"
        register(env_id, path, expert=f"broken_envs:{expert}", expert_is=expert_is)
        return made

    return add


breaks()(Good)


@breaks("runs")
class CannotBeMade(Good):
    def __init__(self, **kwargs: Any) -> None:
        raise RuntimeError("the disk is full")


@breaks("runs")
class CannotBeReset(Good):
    def begin(self, task: Task) -> str:
        return {}[task.index]


@breaks("runs")
class ObjectInInfo(Good):
    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "env": self}


@breaks("deterministic")
class RaisesOnLargeDigits(Good):
    def respond(self, action: str) -> StepResult:
        if action in DIGITS[4:]:
            raise KeyError(action)
        return super().respond(action)


@breaks("gymnasium", "deterministic", "global-rng")
class PythonRandom(Good):
    def begin(self, task: Task) -> str:
        return f"Round {random.random()}. {super().begin(task)}"


@breaks("global-rng")
class WastesRandom(Good):
    def respond(self, action: str) -> StepResult:
        random.random()
        return super().respond(action)


@breaks("global-rng")
class SeedsNumpy(Good):
    def begin(self, task: Task) -> str:
        np.random.seed(0)
        return super().begin(task)


@breaks("gymnasium", "deterministic")
class ClockInInfo(Good):
    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "time": time.perf_counter_ns()}


@breaks("deterministic")
class CountsFinishedEpisodes(Good):
    finished = 0

    def wrong(self) -> StepResult:
        type(self).finished += 1
        return StepResult(f"Wrong, time {self.finished}.", terminated=True)


@breaks("processes")
class UsesHash(Good):
    def begin(self, task: Task) -> str:
        first = super().begin(task)
        self.color = COLOURS[hash(f"{task.split} {task.index}") % len(COLOURS)]
        return first.replace("A ", f"A {self.color} ")


@breaks("processes")
class RandomActionFromSet(Good):
    def random_action(self, observation: str, info: Any, rng: np.random.Generator) -> str:
        return list(set(DIGITS))[int(rng.integers(10))]


@breaks("siblings")
class RemembersOthers(Good):
    played: set[int] = set()

    def begin(self, task: Task) -> str:
        self.task = task.index
        others = len(self.played - {task.index})
        return f"After {others} other tasks. {super().begin(task)}"

    def respond(self, action: str) -> StepResult:
        self.played.add(self.task)
        return super().respond(action)


@breaks("copies")
class SharesItsState(Good):
    def begin(self, task: Task) -> str:
        self.lengths: list[int] = []
        return super().begin(task)

    def wrong(self) -> StepResult:
        return StepResult("Wrong.", terminated=self.turns >= ROUNDS)

    def step(self, action: str) -> Any:
        *rest, info = super().step(action)
        self.lengths.append(len(action))
        return (*rest, {**info, "lengths": self.lengths})


@breaks("seeds")
class IgnoresSeed(Good):
    def begin(self, task: Task) -> str:
        super().begin(task)
        self.digits, self.color = [1, 2, 3], "red"
        return self.show()


@breaks("tasks")
class IgnoresTask(Good):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return super().reset(seed=seed)


@breaks("tasks")
class AcceptsAnyTask(Good):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        wanted = dict(options or {})
        if "task" in wanted:
            wanted["task"] = wanted["task"] % 1_000
        first, info = super().reset(seed=seed, options=wanted)
        return first, {**info, **(options or {})}


@breaks("range")
class NanReward(Good):
    def prize(self, won: bool) -> float:
        return float("nan") if won else 0.0


@breaks("range")
class TooMuchReward(Good):
    def prize(self, won: bool) -> float:
        return 5.0 * won


@breaks("range")
class TupleInInfo(Good):
    def reset(self, **kwargs: Any) -> Any:
        first, info = super().reset(**kwargs)
        return first, {**info, "place": (1, 2)}


@breaks("range")
class SuccessIsLost(Good):
    def respond(self, action: str) -> StepResult:
        reply = super().respond(action)
        if not reply.valid or reply.terminated:
            return reply
        return StepResult(reply.observation, 0.0, success=self.round == 1)


@breaks("gymnasium", "nonsense")
class RaisesOnNonsense(Good):
    def respond(self, action: str) -> StepResult:
        int(action)
        return super().respond(action)


@breaks("gymnasium", "nonsense")
class RaisesWithTheAction(Good):
    def respond(self, action: str) -> StepResult:
        if action not in DIGITS:
            raise ValueError(f"what is \x1b[31m{action * 2}?")
        return super().respond(action)


@breaks("gymnasium", "nonsense")
class ExitsOnNonsense(Good):
    def respond(self, action: str) -> StepResult:
        if action not in DIGITS:
            sys.exit(0)
        return super().respond(action)


@breaks("nonsense")
class ParsesUnicodeDigits(Good):
    def respond(self, action: str) -> StepResult:
        return super().respond(str(int(action)) if action.isdigit() else action)


@breaks("ends")
class NeverEnds(Good):
    lost = False

    def begin(self, task: Task) -> str:
        self.lost = False
        return super().begin(task)

    def respond(self, action: str) -> StepResult:
        self.turns = 0
        return StepResult("You lost.", valid=action in DIGITS) if self.lost else super().respond(action)

    def wrong(self) -> StepResult:
        self.lost = True
        return StepResult("You lost.")


@breaks("after-end")
class PlaysOn(Good):
    def step(self, action: str) -> Any:
        result = super().step(action)
        self.round = min(self.round, ROUNDS - 1)
        self._running = True
        return result


@breaks("before-reset")
class PlaysBeforeReset(Good):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.digits, self.color, self.round, self.turns = [1, 2, 3], "red", 0, 0
        self._running = True


@breaks("close")
class ClosesOnce(Good):
    def close(self) -> None:
        del self.observation_space


@breaks("leak")
class LeaksMemory(Good):
    past: list[str] = []

    def begin(self, task: Task) -> str:
        first = super().begin(task)
        self.past.append(f"{first} {task}")
        return first


@breaks("leak")
class LeaksFiles(Good):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.files: list[int] = []

    def begin(self, task: Task) -> str:
        self.files.append(os.open(os.devnull, os.O_RDONLY))
        return super().begin(task)

    def close(self) -> None:
        while self.files:
            os.close(self.files.pop())


@breaks("leak")
class LeaksThreads(Good):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.closed = threading.Event()

    def begin(self, task: Task) -> str:
        threading.Thread(target=self.closed.wait, daemon=True).start()
        return super().begin(task)

    def close(self) -> None:
        self.closed.set()


@breaks("instructions")
class NoInstructions(Good):
    instructions = ""


@breaks("instructions")
class VagueInstructions(Good):
    instructions = "This is a difficult game about numbers."


@breaks("instructions")
class CannotBeSeen(Good):
    def render_text(self) -> str:
        return ""


@breaks("expert", expert="Loser")
class ExpertLoses(Good):
    pass


@breaks("expert", expert="Clueless")
class ExpertRaises(Good):
    pass


@breaks("expert", expert="Loser", expert_is="baseline")
class BaselineLoses(Good):
    pass


@breaks("random")
class RandomWins(Good):
    def respond(self, action: str) -> StepResult:
        reply = super().respond(action)
        return StepResult("Well done.", 1.0, terminated=True, success=True) if reply.valid else reply


@breaks("random")
class RandomIsInvalid(Good):
    def random_action(self, observation: str, info: Any, rng: np.random.Generator) -> str:
        return f"digit {rng.integers(10)}"


# Not broken, but a person should look.


class Coin(TextEnv):
    """The example of rollgym.core.env, as it stands there."""

    instructions = "Guess how the coin falls. Answer `heads` or `tails`."
    reward_range = (0.0, 1.0)

    def begin(self, task: Task) -> str:
        self.side = str(self.np_random.choice(["heads", "tails"]))
        return "The coin is in the air. Your guess?"

    def respond(self, action: str) -> StepResult:
        right = action.strip().lower() == self.side
        return StepResult(f"It fell {self.side}.", float(right), terminated=True, success=right)


register("check/Coin-v0", "broken_envs:Coin")


class OneTask(Good):
    """A game with one start: seeds and tasks cannot differ."""

    def __init__(self, *, start: int = 1, render_mode: str | None = None) -> None:
        self.tasks = TaskSet(f"OneTask-{start}", {"train": 1})
        self.first = start
        super().__init__(render_mode=render_mode)

    def begin(self, task: Task) -> str:
        super().begin(task)
        self.digits, self.color = [self.first] * ROUNDS, "red"
        return self.show()


register("check/OneTask-v0", "broken_envs:OneTask")
