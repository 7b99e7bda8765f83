"""Open sessions on disk, so that a killed server loses no recorded turn.

Each open session is a file ``open_sessions/NAME.jsonl`` in the run folder: its start, then one line per turn
and per reward. The file is removed once the episode is in ``episodes.jsonl``. A line that a crash cut off is
dropped: its reply never reached the client.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from rollgym.core.errors import ResultsError
from rollgym.core.files import open_append, open_inside
from rollgym.core.messages import ToolSpec
from rollgym.core.types import EpisodeSpec, Turn
from rollgym.io.atomic import written
from rollgym.serve.session import AddedTurn, Session

OPEN_SESSIONS = "open_sessions"


class _Begin(msgspec.Struct, tag="begin", kw_only=True):
    name: str
    spec: EpisodeSpec
    metadata: dict[str, Any]
    by_content: bool
    started: float


class _Turn(msgspec.Struct, tag="turn", kw_only=True):
    turn: Turn
    keys: list[str]
    number: int = 0
    results: list[dict[str, Any]] = []
    """Results of the tools that the turn before called."""
    instructions: str = ""
    tools: tuple[ToolSpec, ...] = ()


class _Reward(msgspec.Struct, tag="reward", kw_only=True):
    reward: float
    success: bool | None


_decoder = msgspec.json.Decoder(_Begin | _Turn | _Reward)


@dataclass(slots=True, kw_only=True)
class LoggedSession:
    """A session that was open when its server was killed."""

    name: str
    spec: EpisodeSpec
    metadata: dict[str, Any]
    by_content: bool
    """True where requests find the session by their content, not by its name."""
    started: float
    turns: list[Turn] = field(default_factory=list)
    keys: list[list[bytes]] = field(default_factory=list)
    """Digests of the conversation after each turn."""
    next_number: int = 0
    """The number of the next request: greater than that of any request that was answered."""
    success: bool | None = None
    rewarded: bool = False
    instructions: str = ""
    tools: tuple[ToolSpec, ...] = ()


class FileSessionLog:
    """The log of open sessions in a run folder."""

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder / OPEN_SESSIONS

    def begin(self, session: Session, by_content: bool) -> None:
        """Record the start of a session."""
        self._folder.mkdir(exist_ok=True)
        self._append(
            session.name,
            _Begin(
                name=session.name,
                spec=session.spec,
                metadata=session.metadata,
                by_content=by_content,
                started=session.started,
            ),
        )

    def add_turn(self, session: Session, added: AddedTurn) -> None:
        """Record a turn."""
        line = _Turn(
            turn=added.turn,
            keys=[key.hex() for key in added.keys],
            number=added.number,
            results=list(added.results),
            instructions=session.instructions,
            tools=session.tools,
        )
        self._append(session.name, line)

    def add_reward(self, session: Session, reward: float, success: bool | None) -> None:
        """Record a reward for the latest turn."""
        self._append(session.name, _Reward(reward=reward, success=success))

    def end(self, session: Session) -> None:
        """Remove a session whose episode is written."""
        self._path(session.name).unlink(missing_ok=True)

    def restore(self, ended: set[str]) -> Iterator[LoggedSession]:
        """Yield the sessions that were open; the files of ended ones are removed."""
        for path in sorted(self._folder.glob("*.jsonl")):
            if path.stem in ended:
                path.unlink()  # killed between writing the episode and removing this file
                continue
            session = self._read(path)
            if session is None:
                path.unlink()
            else:
                yield session

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.jsonl"

    def _append(self, name: str, line: _Begin | _Turn | _Reward) -> None:
        path = self._path(name)
        with written(path), open_append(path) as file:
            file.write(msgspec.json.encode(line) + b"\n")

    def _read(self, path: Path) -> LoggedSession | None:
        with open_inside(path, self._folder) as file:
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            with open_append(path) as file:
                file.truncate(len(whole))
        session: LoggedSession | None = None
        for number, text in enumerate(whole.splitlines(), 1):
            try:
                line = _decoder.decode(text)
            except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
                reason = f"not a valid line of a session ({error})"
                raise ResultsError(f"{path}, line {number}: {reason}.") from None
            match line:
                case _Begin():
                    session = LoggedSession(
                        name=line.name,
                        spec=line.spec,
                        metadata=line.metadata,
                        by_content=line.by_content,
                        started=line.started,
                    )
                case _Turn() if session is not None:
                    if line.results and session.turns:
                        session.turns[-1] = replace(session.turns[-1], info={"messages": line.results})
                    session.turns.append(line.turn)
                    # Lines of older versions have no number.
                    session.next_number = max(session.next_number, line.number + 1, len(session.turns))
                    session.keys.append([bytes.fromhex(key) for key in line.keys])
                    session.instructions, session.tools = line.instructions, line.tools
                case _Reward() if session is not None and session.turns:
                    last = session.turns[-1]
                    session.turns[-1] = replace(last, reward=last.reward + line.reward)
                    session.success = line.success if line.success is not None else session.success
                    session.rewarded = True
        if session is not None and session.name != path.stem:
            raise ResultsError(f"{path} is the file of session {session.name}.")
        return session
