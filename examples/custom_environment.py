"""A third-party environment with an expert: one file, no change to rollgym.

From the folder of this file:

    rollgym eval lights/Lights-v0 --env-module custom_environment --agent expert
    rollgym check lights/Lights-v0 --env-module custom_environment --quick

In an installed package, an entry point replaces `--env-module`:

    [project.entry-points."rollgym.envs"]
    lights = "custom_environment:register"
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import rollgym
from rollgym import SoloAgent, StepResult, Task, TaskSet, TextEnv
from rollgym.evaluation.runner import Request, evaluate

LAMPS = 7


class Lights(TextEnv):
    """Press lamps until all are on; each press switches a lamp and its neighbors."""

    instructions = f"Switch all {LAMPS} lamps on. `press 2` switches lamp 2 and the lamps beside it."
    success_means = "all lamps are on"
    reward_range = (-0.1, 1.0)

    def __init__(self, *, render_mode: str | None = None) -> None:
        # The name must contain everything that decides the content of tasks.
        self.tasks = TaskSet(f"lights-{LAMPS}", {"train": 1_000, "test": 200})
        super().__init__(render_mode=render_mode)

    def begin(self, task: Task) -> str:
        """Make a row by random presses, so that presses can solve it."""
        rng = task.rng()
        self.row = [True] * LAMPS
        while all(self.row):
            for lamp in range(LAMPS):
                if rng.random() < 0.5:
                    self._switch(lamp)
        return self.render_text()

    def respond(self, action: str) -> StepResult:
        """Press a lamp; invalid text changes nothing and gets feedback."""
        word = action.strip().lower().removeprefix("press").strip()
        if word not in map(str, range(LAMPS)):
            return StepResult(f"{self.render_text()}\nSay: press 0 to press {LAMPS - 1}.", -0.1, valid=False)
        self._switch(int(word))
        done = all(self.row)
        return StepResult(self.render_text(), 1.0 if done else -0.1, terminated=done, success=done)

    def facts(self) -> Mapping[str, Any]:
        """Structured facts for agents; they contain no more than the text."""
        return {"actions": [f"press {lamp}" for lamp in range(LAMPS)], "row": list(self.row)}

    def render_text(self) -> str:
        """Show a star for each lamp that is on."""
        return "".join("*" if lamp else "." for lamp in self.row)

    def _switch(self, lamp: int) -> None:
        for near in range(max(lamp - 1, 0), min(lamp + 2, LAMPS)):
            self.row[near] = not self.row[near]


class Expert(SoloAgent):
    """Tries all sets of presses and plays the first press of the smallest solution."""

    def choose(self, observation: str, info: Mapping[str, Any]) -> str:
        """Choose the next press."""
        for presses in sorted(range(1, 2**LAMPS), key=int.bit_count):
            row = list(info["row"])
            for lamp in (lamp for lamp in range(LAMPS) if presses >> lamp & 1):
                for near in range(max(lamp - 1, 0), min(lamp + 2, LAMPS)):
                    row[near] = not row[near]
            if all(row):
                return f"press {(presses & -presses).bit_length() - 1}"
        return "press 0"


def register() -> None:
    """Register the environment; called on import, or by rollgym through the entry point."""
    here = "custom_environment"
    rollgym.register("lights/Lights-v0", f"{here}:Lights", max_turns=10, expert=f"{here}:Expert")


register()

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as root:
        for agent in ("random", "expert"):
            request = Request(env_id="lights/Lights-v0", agent=agent, episodes=50)
            print(f"{agent:7} {evaluate(request, Path(root) / agent)['success_rate']:.2f}")
