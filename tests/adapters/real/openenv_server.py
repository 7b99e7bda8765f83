"""Run with OpenEnv's Python: serve a small environment with OpenEnv's own server, at the port in argv."""

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


app = create_fastapi_app(Hidden, Guess, Hint, max_concurrent_envs=4)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
