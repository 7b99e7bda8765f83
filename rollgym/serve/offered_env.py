"""The environment of an episode, offered to the program that plays it: over HTTP and as an MCP server.

The program sees instructions, tools and observations. Rewards and success go to the record only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from rollgym.core.env import MAX_ACTION_CHARS
from rollgym.core.errors import RunError, UsageError
from rollgym.core.messages import ToolCall, ToolSpec
from rollgym.core.serialization import clean_text
from rollgym.core.version import __version__
from rollgym.pool.base import EnvSession, Reset, Step
from rollgym.serve.env_player import ACT
from rollgym.serve.requests import ApiError

__all__ = ["OfferedEnv", "StepBody", "answer_mcp"]

OVER = "The episode is over."
PROTOCOLS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
"""Versions of the Model Context Protocol, newest first."""


class StepBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of a step: an action in plain text, or a call of a tool."""

    action: str | None = None
    name: str | None = None
    arguments: dict[str, Any] = {}


class OfferedEnv:
    """One episode of an environment that a program plays.

    Args:
        lease: The environment, after its reset.
        start: The result of the reset.
        on_step: Called with every result, before the program gets it.
        on_error: Called with the error that ended the environment.
    """

    def __init__(
        self,
        lease: EnvSession,
        start: Reset,
        on_step: Callable[[Step], None],
        on_error: Callable[[RunError], None],
    ) -> None:
        self._lease, self._on_step, self._on_error = lease, on_step, on_error
        self._alone = asyncio.Lock()
        self.instructions = start.instructions
        self.observation = start.observation
        """The latest observation."""
        self.tools: tuple[ToolSpec, ...] = start.tools or (ACT,)
        """The tools of the environment, or one that plays an action in plain text."""
        self.over = False

    def describe(self) -> dict[str, Any]:
        """Return what the program may know, as JSON."""
        return {
            "instructions": self.instructions,
            "observation": self.observation,
            "tools": [spec.to_openai() for spec in self.tools],
            "over": self.over,
        }

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool; returns its result.

        Raises:
            UsageError: There is no such tool, or the episode is over.
            RunError: The environment failed; the episode is over.
        """
        if name not in {spec.name for spec in self.tools}:
            names = ", ".join(spec.name for spec in self.tools)
            raise UsageError(f"Unknown tool {name}: the tools are {names}.")
        if ACT in self.tools:
            return await self.act(str(arguments.get("action", "")))
        return await self.act(ToolCall(name=name, arguments=dict(arguments)).to_json())

    async def act(self, action: str) -> str:
        """Play an action in plain text; returns the observation."""
        async with self._alone:
            if self.over:
                raise UsageError(OVER)
            try:
                step = await self._lease.step(clean_text(action[:MAX_ACTION_CHARS]))
            except RunError as error:
                self.over = True
                self._on_error(error)
                raise
            self.observation = step.observation
            self.over = step.terminated or step.truncated
            self._on_step(step)
            return f"{step.observation}\n\n{OVER}".strip() if self.over else step.observation

    async def step(self, body: StepBody) -> dict[str, Any]:
        """Answer a request to step."""
        if (body.action is None) == (body.name is None):
            raise ApiError(400, "A step needs either action, or the name of a tool and its arguments.")
        try:
            if body.action is not None:
                result = await self.act(body.action)
            else:
                result = await self.call(body.name or "", body.arguments)
        except UsageError as error:
            raise ApiError(400, str(error)) from None
        return {"observation": result, "over": self.over}


async def answer_mcp(env: OfferedEnv, message: Any) -> dict[str, Any] | None:
    """Answer one JSON-RPC message of an MCP client; ``None`` for a notification.

    Of the protocol only tools are needed here, without a session: every request is answered by itself.
    """
    if not isinstance(message, dict) or not isinstance(message.get("method"), str):
        return _failed(None, -32600, "Expected one JSON-RPC request.")
    number, method = message.get("id"), message["method"]
    given = message.get("params")
    params: dict[str, Any] = given if isinstance(given, dict) else {}
    if number is None:
        return None
    if method == "initialize":
        asked = params.get("protocolVersion")
        return _result(
            number,
            {
                "protocolVersion": asked if asked in PROTOCOLS else PROTOCOLS[0],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "rollgym", "version": __version__},
                "instructions": env.instructions,
            },
        )
    if method == "ping":
        return _result(number, {})
    if method == "tools/list":
        tools = [
            {"name": spec.name, "description": spec.description, "inputSchema": spec.parameters}
            for spec in env.tools
        ]
        return _result(number, {"tools": tools})
    if method == "tools/call":
        arguments = params.get("arguments")
        try:
            text = await env.call(str(params.get("name")), arguments if isinstance(arguments, dict) else {})
            failed = False
        except (UsageError, RunError) as error:
            text, failed = str(error), True
        return _result(number, {"content": [{"type": "text", "text": text}], "isError": failed})
    return _failed(number, -32601, f"Unknown method {method}.")


def _result(number: Any, value: dict[str, Any]) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "result": value}


def _failed(number: Any, code: int, message: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": message}}
