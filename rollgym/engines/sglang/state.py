"""What a server was told so far, so that nothing is ever sent that is known to end it.

A server cannot be asked whether it is paused or which memory it has given up, and some calls in the wrong
state kill it: giving up memory while it generates, taking back memory it has not given up, flushing while
retracted replies wait (before 0.5.22), a broadcast into a group it is not in. Each method here says what to
send, or raises; it is a pure state machine, and the caller does the sending.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from rollgym.engines.sglang.contract import Contract
from rollgym.errors import AgentError, UsageError

Mode = Literal["abort", "in_place", "retract"]
TAGS = ("kv_cache", "weights")
"""What memory can be given up, in the order of doing so; it is taken back the other way round."""


@dataclass(slots=True)
class ServerState:
    """The state of one server, as far as it follows from what was sent."""

    contract: Contract
    paused: Mode | None = None
    released: set[str] = field(default_factory=set)
    group: str | None = None
    """The broadcast group it is in."""
    session: bool = False
    """Whether an update was begun and not ended."""
    stale: bool = False
    """Whether its cache may hold what older weights computed."""
    whole: bool = True
    """False where an update ended halfway: its weights are of two versions."""
    empty: bool = False
    """Whether the memory of its weights was given up and taken back, and nothing was written there since."""

    def pause(self, mode: Mode) -> bool:
        """Whether to send a pause."""
        if self.paused == mode:
            return False
        if self.paused is not None:
            raise AgentError(f"The server is paused ({self.paused}) and cannot be paused as {mode}.")
        self.paused = mode
        return True

    def resume(self) -> bool:
        """Whether to send a continue."""
        if self.paused is None:
            return False
        self._has_memory()
        self.paused = None
        return True

    def may_generate(self) -> None:
        """Raise where a request could not be answered, or not rightly."""
        self._has_memory()
        if not self.whole:
            raise AgentError(
                "The server's weights are of two versions, as an update failed halfway: update again."
            )
        if self.empty:
            raise AgentError("The server's weights went with their memory: call resume, or update them.")

    def _has_memory(self) -> None:
        if self.released:
            gone = " and ".join(sorted(self.released))
            raise AgentError(f"The server has given up its memory ({gone}): call resume first.")

    def release(self, tags: Iterable[str], *, live: int) -> list[str]:
        """Which memory to give up now. Only an idle, paused server may."""
        wanted = _known(tags)
        if self.paused != "abort" or live:
            raise AgentError("Memory is given up by an idle server only: pause it first.")
        asked = [tag for tag in TAGS if tag in wanted and tag not in self.released]
        self.released.update(asked)
        return asked

    def take_back(self, tags: Iterable[str]) -> list[str]:
        """Which memory to take back now: none that was not given up."""
        wanted = _known(tags)
        asked = [tag for tag in reversed(TAGS) if tag in wanted and tag in self.released]
        self.released.difference_update(asked)
        self.empty = self.empty or "weights" in asked
        return asked

    def begin_update(self, *, tensors: bool) -> bool:
        """Whether to send the begin of a session before weights; ``tensors``: by tensor or broadcast."""
        if self.paused is None:
            raise AgentError("Weights are changed on a paused server only.")
        if "weights" in self.released:
            raise AgentError("The server has given up its weights' memory: resume_memory(['weights']) first.")
        begin = tensors and self.contract.sessions and not self.session
        self.session = self.session or begin
        return begin

    def end_update(self) -> bool:
        """Whether to send the end of a session."""
        ended, self.session = self.session, False
        return ended

    def written(self) -> None:
        """It has all of one version's weights now."""
        self.whole, self.empty = True, False

    def flush(self) -> bool:
        """Whether an update may flush the cache now; where it may not, the cache is stale from now on."""
        allowed = self.paused == "abort" or (self.paused == "retract" and self.contract.flush_after_retract)
        if "kv_cache" in self.released:
            allowed = False
        self.stale = self.stale or not allowed
        return allowed

    def flushed(self) -> None:
        """The cache is empty."""
        self.stale = False

    def join(self, group: str) -> None:
        """It is in a broadcast group now."""
        if self.group is not None:
            raise AgentError(f"The server is in the group {self.group} already.")
        self.group = group

    def broadcast(self) -> str:
        """The group to send weights to."""
        if self.group is None:
            raise AgentError("The server is in no broadcast group.")
        return self.group

    def leave(self) -> str | None:
        """The group to leave, if there is one."""
        group, self.group = self.group, None
        return group


def _known(tags: Iterable[str]) -> set[str]:
    wanted = set(tags)
    if unknown := sorted(wanted.difference(TAGS)):
        raise UsageError(f"There is no memory called {', '.join(unknown)}: choose from {', '.join(TAGS)}.")
    return wanted
