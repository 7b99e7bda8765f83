"""Expert of the terminal tasks: the commands of the task's kind, then ``submit``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollgym.core.agent import Briefing, SoloAgent
from rollgym.core.errors import UsageError
from rollgym.core.messages import ToolCall
from rollgym.envs.terminal.generate import KINDS
from rollgym.envs.terminal.shell import command_hash


class TerminalExpert(SoloAgent):
    """Solves generated tasks with shell commands made from what the instruction states.

    It does not know the hidden checks. Task folders have no kind: make the environment with ``reveal=True``,
    to play their ``solution/solve.sh``.
    """

    def start(self, briefing: Briefing) -> None:
        """Forget the last episode."""
        self._commands: list[str] | None = None

    def choose(self, observation: str, info: Mapping[str, Any]) -> str:
        """The next command, then ``submit``; again, where another agent played the last turn."""
        if self._commands is None:
            self._commands = self._plan(info)
        elif self._commands and info.get("last_command") == command_hash(self._commands[0]):
            del self._commands[0]
        if self._commands:
            return ToolCall(name="bash", arguments={"command": self._commands[0]}).to_json()
        return ToolCall(name="submit").to_json()

    def _plan(self, info: Mapping[str, Any]) -> list[str]:
        if info.get("kind") in KINDS:
            return KINDS[info["kind"]].solve(info["parameters"])
        if info.get("solution"):
            return list(info["solution"])
        raise UsageError(
            "The expert knows generated tasks only: make the environment with reveal=True (--env-arg "
            "reveal=true), to play the solutions of task folders that have one."
        )
