"""A human at the terminal."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Mapping
from typing import Any, TextIO

from rollgym.core.agent import Agent, AgentSetup, Briefing, Player
from rollgym.core.errors import AgentError, UsageError
from rollgym.core.tools import list_tools, typed_call
from rollgym.utils.terminal import printable

LEAVE = "quit"


class HumanAgent(Agent):
    """Shows each observation and reads the action as a line; ``quit`` or end of input ends the episode.

    Concurrent episodes take turns at the keyboard.
    """

    def __init__(
        self, setup: AgentSetup, *, input: TextIO | None = None, output: TextIO | None = None
    ) -> None:
        for stream, name, method in ((input, "input", "readline"), (output, "output", "write")):
            if stream is not None and not hasattr(stream, method):
                raise UsageError(f"{name} must be an open text stream, not {stream!r}.")
        self._input = input
        self._output = output
        self._keyboard = asyncio.Lock()

    def player(self, briefing: Briefing) -> HumanPlayer:
        """Return a player that uses the shared keyboard."""
        return HumanPlayer(self, briefing)

    async def ask(self, text: str) -> str:
        """Show the text and return the next line that is not blank."""
        async with self._keyboard:
            self._show(text)
            while True:
                self._show("> ")
                line = await _in_thread(self._input or sys.stdin)
                if not line or line.strip().lower() == LEAVE:
                    raise AgentError("the player left")
                if line.strip():
                    return line.strip()

    def _show(self, text: str) -> None:
        output = self._output or sys.stdout
        output.write(printable(text))
        output.flush()


class HumanPlayer(Player):
    """One episode, played by a human."""

    def __init__(self, agent: HumanAgent, briefing: Briefing) -> None:
        self._agent = agent
        title = f"Episode {briefing.spec.episode_id}: {briefing.spec.env_id} (`{LEAVE}` to leave)"
        rules = f"{title}\n\n{briefing.instructions.strip()}".rstrip()
        self._tools = briefing.tools
        self._intro = f"{rules}\n\n{list_tools(self._tools)}".rstrip() + "\n"

    async def act(self, observation: str, info: Mapping[str, Any]) -> str:
        """Return the line that the human typed."""
        intro, self._intro = self._intro, ""
        actions = info.get("actions")
        choices = (
            f"Actions: {', '.join(map(str, actions))}\n" if isinstance(actions, list) and actions else ""
        )
        return typed_call(await self._agent.ask(f"{intro}\n{observation}\n{choices}"), self._tools)


async def _in_thread(stream: TextIO) -> str:
    """Read a line of the stream in a thread; empty at the end of input."""
    loop = asyncio.get_running_loop()
    line_read: asyncio.Future[str] = loop.create_future()

    def settle(line: str | None, error: Exception | None) -> None:
        if line_read.done():
            return
        if error is not None:
            line_read.set_exception(AgentError(f"The input cannot be read: {error}"))
        else:
            line_read.set_result(line or "")

    def read() -> None:
        line, failure = None, None
        try:
            line = _read_line(stream)
        except Exception as error:
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, line, failure)

    # A thread of the loop's executor would keep the program from ending until the user presses Enter.
    threading.Thread(target=read, name="keyboard", daemon=True).start()
    return await line_read


def _read_line(stream: TextIO) -> str:
    try:
        descriptor = stream.fileno()
    except (AttributeError, OSError, ValueError):
        return stream.readline()
    # Byte by byte, bypassing the stream's buffer: no line is read ahead of its turn, and a thread that waits
    # here does not hold a lock that the interpreter needs to exit.
    line = bytearray()
    while not line.endswith(b"\n") and (byte := os.read(descriptor, 1)):
        line += byte
    return line.decode("utf-8", "replace")
