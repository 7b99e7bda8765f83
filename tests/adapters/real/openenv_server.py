"""Run with OpenEnv's Python: serve a small environment with OpenEnv's own server.

python openenv_server.py hidden|sum|walk PORT
"""

import random
import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    """A guess."""

    number: str


class Hint(Observation):
    """What a player hears."""

    hint: str = ""


class Hidden(Environment[Guess, Hint, State]):
    """Find a number from 0 to 99."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()
        self._number = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Hint:
        self._number = random.Random(seed).randrange(100)
        self._state = State(episode_id=episode_id)
        return Hint(hint=f"It ends in {self._number % 10}.", done=False, reward=0.0)

    def step(self, action: Guess, timeout_s: float | None = None, **kwargs: Any) -> Hint:
        self._state.step_count += 1
        right = action.number.strip() == str(self._number)
        return Hint(hint="Yes." if right else "No.", done=right, reward=float(right))

    @property
    def state(self) -> State:
        return self._state


class Answer(Action):
    """A total with a remark, so that actions are JSON objects."""

    total: int
    remark: str = ""


class Numbers(Observation):
    """Two numbers, so that observations have several fields."""

    left: int = 0
    right: int = 0


class Sum(Environment[Answer, Numbers, State]):
    """Add two numbers; one action."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()
        self._numbers = Numbers()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Numbers:
        rng = random.Random(seed)
        self._numbers = Numbers(left=rng.randrange(1000), right=rng.randrange(1000), done=False, reward=0.0)
        self._state = State(episode_id=episode_id)
        return self._numbers

    def step(self, action: Answer, timeout_s: float | None = None, **kwargs: Any) -> Numbers:
        self._state.step_count += 1
        numbers = self._numbers
        right = action.total == numbers.left + numbers.right
        return Numbers(left=numbers.left, right=numbers.right, done=True, reward=1.0 if right else -1.0)

    @property
    def state(self) -> State:
        return self._state


class Move(Action):
    """A step."""

    direction: str


class Place(Observation):
    """Where the walker and the goal are."""

    position: int = 0
    goal: int = 0


class Walk(Environment[Move, Place, State]):
    """Walk to a goal on a line; the server has no limit."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()
        self._position = self._goal = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Place:
        rng = random.Random(seed)
        self._position, self._goal = rng.randrange(-500, 0), 0
        self._goal = self._position + rng.choice((-6, -4, 4, 6))
        self._state = State(episode_id=episode_id)
        return Place(position=self._position, goal=self._goal, done=False, reward=0.0)

    def step(self, action: Move, timeout_s: float | None = None, **kwargs: Any) -> Place:
        self._state.step_count += 1
        self._position += {"left": -1, "right": 1}[action.direction]
        done = self._position == self._goal
        return Place(position=self._position, goal=self._goal, done=done, reward=1.0 if done else -0.1)

    @property
    def state(self) -> State:
        return self._state


SERVED = {"hidden": (Hidden, Guess, Hint), "sum": (Sum, Answer, Numbers), "walk": (Walk, Move, Place)}

if __name__ == "__main__":
    app = create_fastapi_app(*SERVED[sys.argv[1]], max_concurrent_envs=4)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="error")
