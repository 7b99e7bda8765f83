"""Experts of the code environments: write the reference program of a task's family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollgym.core.agent import SoloAgent
from rollgym.core.errors import UsageError
from rollgym.core.messages import ToolCall
from rollgym.envs.code.actions import action_calls
from rollgym.envs.code.generate import FAMILIES
from rollgym.envs.code.questions import KINDS
from rollgym.envs.code.snippets import CODE, NAMES


class CodeExpert(SoloAgent):
    """Writes the reference solution of the problem's family, then submits.

    ``info`` has the family and the parameters, which the statement describes. Problems from a file have no
    family: make the environment with ``reveal=True``.
    """

    def calls(self, action: str) -> list[ToolCall]:
        """Return a block or ``submit`` as a call of the tool form."""
        return action_calls(action)

    def choose(self, observation: str, info: Mapping[str, Any]) -> str:
        """The program first, then ``submit``."""
        if info["has_solution"]:
            return "submit"
        return f"```python\n{self._program(info)}```"

    def _program(self, info: Mapping[str, Any]) -> str:
        if info.get("solution"):
            return f"{str(info['solution']).rstrip()}\n"
        if info.get("family") not in FAMILIES:
            raise UsageError(
                "The expert knows generated problems only: make the environment with reveal=True (--env-arg "
                "reveal=true), to reveal the solutions of a file."
            )
        return FAMILIES[info["family"]].program(info["parameters"])


class PythonToolExpert(SoloAgent):
    """Writes the program for a question, runs it and answers with its output."""

    def choose(self, observation: str, info: Mapping[str, Any]) -> str:
        """A block first, then the answer."""
        head, _, rest = observation.partition("\n")
        if head == "stdout:":
            return f"answer: {rest.splitlines()[0]}"
        if info.get("kind") not in KINDS:
            raise UsageError("The expert knows generated questions only, not those of a file.")
        return f"```python\n{KINDS[info['kind']].program_for(info['parameters'])}```"


class SnippetsExpert(SoloAgent):
    """Maps the words of a goal to the lines that implement it."""

    def choose(self, observation: str, info: Mapping[str, Any]) -> str:
        """The lines of the goal's steps, in its order, by number or name."""
        lines = [CODE[words] for words in info["goal"]]
        if lines[0] in info["lines"]:
            return " ".join(str(info["lines"].index(line) + 1) for line in lines)
        return " ".join(NAMES[line] for line in lines)
