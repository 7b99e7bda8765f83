"""A session with an OpenEnv server over its WebSocket, and what the server says about itself."""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx

from rollgym.core.errors import EnvError, UsageError, WorkerLost, one_line

MAX_MESSAGE_BYTES = 16_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """What a server says about its environment."""

    name: str
    version: str
    description: str
    action: Mapping[str, Any]
    """JSON schema of an action."""


def addresses(url: str) -> tuple[str, str]:
    """The HTTP address of a server and that of its WebSocket; `UsageError` for any other text."""
    parts = urlsplit(url)
    plain, secure = ("http", "ws"), ("https", "wss")
    schemes = {"ws": plain, "http": plain, "wss": secure, "https": secure}
    if parts.scheme not in schemes or not parts.netloc:
        raise UsageError(
            f"{url!r} is not the address of an OpenEnv server: expected one such as ws://127.0.0.1:8000."
        )
    web, socket = schemes[parts.scheme]
    path = parts.path.rstrip("/").removesuffix("/ws")
    return (
        urlunsplit((web, parts.netloc, path, "", "")),
        urlunsplit((socket, parts.netloc, f"{path}/ws", "", "")),
    )


def read_info(url: str, timeout: float) -> ServerInfo:
    """Ask a server for its metadata and schema.

    Raises:
        WorkerLost: Nothing answers at the address, now or any more.
        UsageError: What answers is not an OpenEnv server.
    """
    web, _ = addresses(url)
    try:
        answers = [httpx.get(f"{web}/{path}", timeout=timeout) for path in ("schema", "metadata")]
        schema, metadata = (answer.raise_for_status().json() for answer in answers)
    except httpx.TransportError as error:
        raise WorkerLost(f"No OpenEnv server answers at {url}: {one_line(error)}.") from error
    except (httpx.HTTPError, ValueError) as error:
        raise UsageError(f"{url} is not an OpenEnv server: {one_line(error)}.") from error
    action = schema.get("action") if isinstance(schema, dict) else None
    if not isinstance(action, dict) or not isinstance(metadata, dict):
        raise UsageError(f"{url} is not an OpenEnv server: /schema describes no action.")
    return ServerInfo(
        name=str(metadata.get("name") or "environment"),
        version=str(metadata.get("version") or ""),
        description=str(metadata.get("description") or ""),
        action=action,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """A server's answer to a reset or step."""

    observation: dict[str, Any]
    reward: float
    done: bool
    metadata: dict[str, Any]


class OpenEnvSession:
    """One connection: a separate session on the server.

    Raises:
        WorkerLost: The server cannot be reached, vanished, or did not answer in time.
        EnvError: The server answered with an error, or with other types than the protocol's.
    """

    def __init__(self, url: str, timeout: float) -> None:
        connect = importlib.import_module("websockets.sync.client").connect
        self._url, self._timeout = url, timeout
        self._stack = contextlib.ExitStack()
        try:
            # websockets 17 warns about a connection that is not entered.
            self._socket: Any = self._stack.enter_context(
                connect(
                    addresses(url)[1],
                    open_timeout=timeout,
                    close_timeout=1.0,
                    max_size=MAX_MESSAGE_BYTES,
                    proxy=None,
                )
            )
        except Exception as error:  # refused, timed out, not a WebSocket
            raise WorkerLost(f"Cannot connect to the OpenEnv server at {url}: {one_line(error)}.") from error

    def reset(self, data: Mapping[str, Any]) -> Observed:
        """Start an episode."""
        return self._observed(self._call("reset", data))

    def step(self, action: Mapping[str, Any]) -> Observed:
        """Play an action."""
        return self._observed(self._call("step", action))

    def close(self) -> None:
        """End the session; a server that is gone is fine."""
        with contextlib.suppress(Exception):
            self._socket.send(json.dumps({"type": "close"}))
        with contextlib.suppress(Exception):
            self._stack.close()

    def _call(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        ConnectionClosed = importlib.import_module("websockets.exceptions").ConnectionClosed
        with contextlib.suppress(ConnectionClosed):  # a refused session sends its error, then closes
            self._socket.send(json.dumps({"type": kind, "data": dict(data)}))
        try:
            text = self._socket.recv(timeout=self._timeout)
        except TimeoutError:
            raise WorkerLost(
                f"The OpenEnv server at {self._url} did not answer a {kind} within {self._timeout:g} s."
            ) from None
        except (ConnectionClosed, OSError) as error:
            raise WorkerLost(
                f"The OpenEnv server at {self._url} closed the connection during a {kind}."
            ) from error
        try:
            message = json.loads(text)
        except ValueError as error:
            raise EnvError(f"The OpenEnv server at {self._url} sent no JSON: {error}.") from error
        if isinstance(message, dict) and message.get("type") == "error":
            details = message.get("data")
            reason = f"{details!r:.200}"
            if isinstance(details, dict):
                reason = f"{details.get('message')} ({details.get('code')})"
            raise EnvError(f"The OpenEnv server at {self._url} refused a {kind}: {reason}.")
        answer = message.get("data") if isinstance(message, dict) else None
        if not isinstance(answer, dict) or message.get("type") != "observation":
            raise EnvError(f"The OpenEnv server at {self._url} answered a {kind} without an observation.")
        return answer

    def _observed(self, data: Mapping[str, Any]) -> Observed:
        observation, reward, done = data.get("observation"), data.get("reward"), data.get("done", False)
        metadata = data.get("metadata")
        if not isinstance(observation, dict):
            raise EnvError(
                f"The OpenEnv server at {self._url} sent an observation of type "
                f"{type(observation).__name__}, not an object."
            )
        if not isinstance(reward, (int, float, type(None))) or not isinstance(done, bool):
            raise EnvError(
                f"The OpenEnv server at {self._url} sent reward {reward!r} and done {done!r}: expected a "
                "number and a bool."
            )
        if not isinstance(metadata, dict):
            metadata = observation.get("metadata")
        return Observed(
            observation=observation,
            reward=float(reward or 0.0),
            done=done,
            metadata=metadata if isinstance(metadata, dict) else {},
        )
