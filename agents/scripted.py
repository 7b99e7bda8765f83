"""Actions from a file: the same for every episode, or a list for each task or episode.

- Plain text: one action a line. Blank lines and lines that start with ``# `` (a hash and a space) are
  left out; other lines with a hash are actions.
- ``.json``: a list of actions for all episodes, or an object from task index or episode id to a list.
- ``.jsonl``: lines such as ``{"task": 3, "actions": ["Up"]}`` or ``{"episode_id": "…", "actions": […]}``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollgym.core.agent import Agent, AgentSetup, Briefing, Player
from rollgym.core.errors import AgentError, UsageError
from rollgym.core.types import EpisodeSpec

REPEATS = ("stop", "cycle", "last")
_ALL = "*"

Scripts = dict[str, list[str]]
"""Actions by episode id or task index; ``*`` for every episode."""


class ScriptedAgent(Agent):
    """Plays the actions of a file.

    Args:
        setup: The environment.
        path: The file.
        repeat: After the last action: ``stop`` (an error), ``cycle`` (start over) or ``last`` (repeat it).
    """

    def __init__(self, setup: AgentSetup, *, path: str | Path = "", repeat: str = "stop") -> None:
        if not isinstance(path, (str, Path)) or not str(path):
            raise UsageError("No file given: pass path=FILE, a file with the actions.")
        if repeat not in REPEATS:
            raise UsageError(f"repeat must be {', '.join(REPEATS[:-1])} or {REPEATS[-1]}, not {repeat!r}.")
        self._scripts = read_scripts(Path(str(path)))
        self._repeat = repeat
        self._path = str(path)

    def player(self, briefing: Briefing) -> ScriptedPlayer:
        """Return a player at the start of the episode's script."""
        return ScriptedPlayer(self._find(briefing.spec), self._repeat, briefing.spec)

    def describe(self) -> dict[str, Any]:
        """Return the settings, for the record of a run."""
        return {"agent": "scripted", "path": self._path, "repeat": self._repeat}

    def _find(self, spec: EpisodeSpec) -> list[str]:
        names = (spec.episode_id, str(spec.task), _ALL)
        return next((self._scripts[name] for name in names if name in self._scripts), [])


class ScriptedPlayer(Player):
    """One episode's position in its script."""

    def __init__(self, actions: list[str], repeat: str, spec: EpisodeSpec) -> None:
        self._actions = actions
        self._repeat = repeat
        self._spec = spec
        self._played = 0

    async def act(self, observation: str, info: Mapping[str, Any]) -> str:
        """Return the next action of the script."""
        count, turn = len(self._actions), self._played
        if not count:
            raise AgentError(
                f"the script has no actions for task {self._spec.task} (episode {self._spec.episode_id})"
            )
        if turn >= count and self._repeat == "stop":
            raise AgentError(f"the script ended after {count} action{'s' if count > 1 else ''}")
        self._played += 1
        return self._actions[turn % count if self._repeat == "cycle" else min(turn, count - 1)]


def read_scripts(path: Path) -> Scripts:
    """Read the scripts of a file; raise a `UsageError` where it is malformed."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"The script {path} cannot be read: {error.strerror or error}.") from None
    except ValueError:
        raise UsageError(f"The script {path} cannot be read: it is not UTF-8 text.") from None
    if path.suffix == ".json":
        scripts = _from_json(_parse(text, str(path)), str(path))
    elif path.suffix == ".jsonl":
        scripts = _from_lines(text, str(path))
    else:
        lines = (line for line in text.split("\n") if line.strip() and not line.startswith("# "))
        scripts = {_ALL: list(lines)}
    if not any(scripts.values()):
        raise UsageError(f"The script {path} holds no actions.")
    return scripts


def _from_json(data: Any, where: str) -> Scripts:
    if isinstance(data, list):
        return {_ALL: _check_actions(data, where)}
    if not isinstance(data, dict):
        raise UsageError(f"{where} must hold a list of actions, or an object of such lists.")
    return {name: _check_actions(actions, f"{where}, {name!r}") for name, actions in data.items()}


def _from_lines(text: str, path: str) -> Scripts:
    scripts: Scripts = {}
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        data = _parse(line, where)
        name = data.get("episode_id", data.get("task")) if isinstance(data, dict) else None
        if isinstance(name, bool) or not isinstance(name, (str, int)) or "actions" not in data:
            raise UsageError(f"{where} must be an object with task (or episode_id) and actions.")
        if str(name) in scripts:
            raise UsageError(f"{where} gives a second script for {name!r}.")
        scripts[str(name)] = _check_actions(data["actions"], where)
    return scripts


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not JSON: {error}.") from None


def _check_actions(actions: Any, where: str) -> list[str]:
    if not isinstance(actions, list) or not all(isinstance(action, str) for action in actions):
        raise UsageError(f"{where}: the actions must be a list of texts.")
    return actions
