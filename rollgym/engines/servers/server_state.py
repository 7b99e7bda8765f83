"""State of an inference server, so that no call is sent that would crash it.

A server cannot report everything that decides which call it survives, and some calls in the wrong state kill
it: releasing memory while it generates, resuming memory it has not released, flushing while retracted
requests wait (SGLang before 0.5.22), a broadcast to a group it has not joined. Each method of `ServerState`
returns what to send, or raises; it is a pure state machine, and the caller sends.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from rollgym.core.errors import AgentError, UsageError
from rollgym.engines.base import MEMORY_TAGS

Version = tuple[int, int, int]


class Compat(Protocol):
    """Features that a version of a server supports."""

    @property
    def version(self) -> Version:
        """The version."""

    @property
    def sessions(self) -> bool:
        """Whether weights by tensor or broadcast must be sent within an update session."""

    def can_flush(self, mode: str) -> bool:
        """Whether the cache can be flushed while the server is paused like this."""


def parse_version(version: object) -> Version | None:
    """Return the first three numbers of a reported version; ``None`` if it is not one."""
    if not isinstance(version, str):
        return None
    match = re.match(r"v?(\d{1,6})\.(\d{1,6})\.(\d{1,6})(?!\d)", version)
    if match is None:
        return None
    major, minor, patch = map(int, match.groups())
    return major, minor, patch


def version_text(version: Version) -> str:
    """Return a version as text."""
    return ".".join(map(str, version))


@dataclass(slots=True)
class ServerState:
    """The state of one server, tracked from the calls sent to it."""

    compat: Compat
    paused: str | None = None
    """The mode in which it is paused: ``abort``, or one in which its replies wait."""
    released: set[str] = field(default_factory=set)
    group: str | None = None
    """The broadcast group it has joined."""
    session: bool = False
    """Whether an update session is open."""
    stale: bool = False
    """Whether its cache may contain entries of older weights."""
    consistent: bool = True
    """False after an update that failed halfway: it has weights of two versions."""
    weights_missing: bool = False
    """Whether the memory of its weights was released and reallocated, but not written since."""

    def pause(self, mode: str) -> bool:
        """Return whether to send a pause."""
        if self.paused == mode:
            return False
        if self.paused is not None:
            raise AgentError(f"The server is paused ({self.paused}) and cannot be paused as {mode}.")
        self.paused = mode
        return True

    def resume(self) -> bool:
        """Return whether to send a continue."""
        if self.paused is None:
            return False
        self._check_memory()
        self.paused = None
        return True

    def may_generate(self) -> None:
        """Raise if a request would fail or use wrong weights."""
        self._check_memory()
        if not self.consistent:
            raise AgentError(
                "The server has weights of two versions, because an update failed halfway: update again."
            )
        if self.weights_missing:
            raise AgentError("The server's weights were released: call wake_up or update_weights.")

    def _check_memory(self) -> None:
        if self.released:
            names = " and ".join(sorted(self.released))
            raise AgentError(f"The server has released its memory ({names}): call wake_up first.")

    def release(self, tags: Iterable[str], *, live: int) -> list[str]:
        """Return the memory to release now. The server must be idle and paused."""
        requested = _check_tags(tags)
        if self.paused != "abort" or live:
            raise AgentError("Only an idle server can release memory: pause it first.")
        to_send = [tag for tag in MEMORY_TAGS if tag in requested and tag not in self.released]
        self.released.update(to_send)
        return to_send

    def resume_memory(self, tags: Iterable[str]) -> list[str]:
        """Return the memory to reallocate now: none that was not released."""
        requested = _check_tags(tags)
        to_send = [tag for tag in reversed(MEMORY_TAGS) if tag in requested and tag in self.released]
        self.released.difference_update(to_send)
        self.weights_missing = self.weights_missing or "weights" in to_send
        return to_send

    def begin_update(self, *, tensors: bool) -> bool:
        """Return whether to open an update session first; ``tensors``: weights by tensor or broadcast."""
        if self.paused is None:
            raise AgentError("Weights can be updated on a paused server only.")
        if "weights" in self.released:
            raise AgentError("The memory of the weights is released: call resume_memory(['weights']) first.")
        begin = tensors and self.compat.sessions and not self.session
        self.session = self.session or begin
        return begin

    def end_update(self) -> bool:
        """Return whether to close an update session."""
        ended, self.session = self.session, False
        return ended

    def written(self) -> None:
        """Record a complete update."""
        self.consistent, self.weights_missing = True, False

    def flush(self) -> bool:
        """Return whether an update may flush the cache now; if not, the cache is stale from now on."""
        allowed = self.paused is not None and self.compat.can_flush(self.paused)
        if "kv_cache" in self.released:
            allowed = False
        self.stale = self.stale or not allowed
        return allowed

    def flushed(self) -> None:
        """Record a flush of the cache."""
        self.stale = False

    def join(self, group: str) -> None:
        """Record that it has joined a broadcast group."""
        if self.group is not None:
            raise AgentError(f"The server is already in the group {self.group}.")
        self.group = group

    def broadcast(self) -> str:
        """Return the broadcast group."""
        if self.group is None:
            raise AgentError("The server has not joined a broadcast group.")
        return self.group

    def leave(self) -> str | None:
        """Return the group to leave, if any."""
        group, self.group = self.group, None
        return group


def _check_tags(tags: Iterable[str]) -> set[str]:
    requested = set(tags)
    if unknown := sorted(requested.difference(MEMORY_TAGS)):
        raise UsageError(f"Unknown memory tag {', '.join(unknown)}: choose from {', '.join(MEMORY_TAGS)}.")
    return requested
