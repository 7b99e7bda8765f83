"""Prompts to an engine's actor: of each turn only the ids that the actor does not have yet.

Requests of a session extend one another, and the actor has seen the earlier ones and sampled the replies. So
the driver sends what is new, packed as 32-bit integers, and the name of the conversation that it continues.
If the actor does not have that conversation (it was restarted, or dropped the session to bound its memory),
it says so, and the driver sends the whole prompt.
"""

from __future__ import annotations

import itertools
from array import array
from collections import OrderedDict
from typing import NamedTuple

from rollgym.engines.base import GenerateRequest, Generation, Sampling

MOST_SESSIONS = 20_000
"""Sessions that the driver keeps the ids of."""
MOST_TOKENS = 100_000_000
"""Ids that an actor keeps, over all sessions."""


class PromptDelta(NamedTuple):
    """A request for a reply, with the ids that its actor does not have."""

    request_id: str
    session: str
    sampling: Sampling
    serial: int
    """Names the conversation after the reply."""
    base: int
    """The conversation that is continued; 0 for none."""
    ids: array[int]


class PromptSender:
    """What one actor knows of each session; in the driver."""

    def __init__(self) -> None:
        self._serials = itertools.count(1)
        self._sessions: OrderedDict[str, tuple[int, tuple[int, ...]]] = OrderedDict()

    def delta(self, request: GenerateRequest, *, whole: bool = False) -> PromptDelta | None:
        """The request as it is sent; ``None`` where an id has more than 32 bits."""
        base, known = (0, ()) if whole else self._sessions.get(request.session, (0, ()))
        if request.prompt_ids[: len(known)] != known:  # the template rewrote history
            base, known = 0, ()
        try:
            ids = array("i", request.prompt_ids[len(known) :])
        except (OverflowError, TypeError):
            return None  # the engine says what is wrong with it
        serial = next(self._serials)
        return PromptDelta(request.request_id, request.session, request.sampling, serial, base, ids)

    def replied(self, request: GenerateRequest, serial: int, reply: Generation) -> None:
        """Note what the actor has after a reply."""
        if request.session:
            self._sessions[request.session] = serial, request.prompt_ids + reply.token_ids
            self._sessions.move_to_end(request.session)
            if len(self._sessions) > MOST_SESSIONS:
                self._sessions.popitem(last=False)

    def forget(self, session: str) -> None:
        """Forget a session that has ended."""
        self._sessions.pop(session, None)

    def clear(self) -> None:
        """Forget everything: there is a new actor."""
        self._sessions.clear()


class PromptReceiver:
    """The conversations of all sessions; in the actor."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, tuple[int, array[int]]] = OrderedDict()
        self._tokens = 0

    def request(self, delta: PromptDelta) -> GenerateRequest | None:
        """The whole request; ``None`` if the conversation that it continues is not here."""
        ids = delta.ids
        if delta.base:
            serial, known = self._sessions.get(delta.session, (0, array("i")))
            if serial != delta.base:
                return None
            ids = known + ids
        return GenerateRequest(
            request_id=delta.request_id,
            prompt_ids=tuple(ids),
            sampling=delta.sampling,
            session=delta.session,
        )

    def replied(self, delta: PromptDelta, request: GenerateRequest, reply: Generation) -> None:
        """Keep the conversation with its reply."""
        if not delta.session:
            return
        self.forget(delta.session)
        ids = array("i", request.prompt_ids + reply.token_ids)
        self._sessions[delta.session] = delta.serial, ids
        self._tokens += len(ids)
        while self._tokens > MOST_TOKENS:
            self._tokens -= len(self._sessions.popitem(last=False)[1][1])

    def forget(self, session: str) -> None:
        """Drop a session that has ended."""
        if session in self._sessions:
            self._tokens -= len(self._sessions.pop(session)[1])
