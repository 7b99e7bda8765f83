"""All conversations: which one a request belongs to, which have been idle for too long."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from rollgym.records import jsonable
from rollgym.seeding import derive_seed
from rollgym.serve.requests import ChatRequest, OpenBody, Refused, check_name
from rollgym.serve.session import Desk, Session
from rollgym.types import Episode, EpisodeSpec, Failure, Limits, Outcome


class Sessions:
    """The open conversations by name.

    Requests that name no session belong to the one whose conversation they go on with. Where several had the
    same conversation so far, one that nobody has gone on with yet takes it.
    """

    def __init__(self, desk: Desk, on_end: Callable[[Session, Episode], None]) -> None:
        self._desk = desk
        self._on_end = on_end
        self.open: dict[str, Session] = {}
        self.ended: set[str] = set()
        self.outcomes: Counter[Outcome] = Counter()
        self._nameless: dict[bytes, list[Session]] = {}
        self._keys: dict[str, list[bytes]] = {}

    def begin(
        self, name: str | None, spec: EpisodeSpec | None = None, metadata: Mapping[str, Any] | None = None
    ) -> Session:
        """A new conversation."""
        name = check_name(name) if name is not None else f"s-{secrets.token_hex(8)}"
        if name in self.ended or name in self.open:
            raise Refused(409, f"There is or was a session {name} already: choose another name.")
        if len(self.open) >= self._desk.options.max_sessions:
            raise Refused(
                429, f"{len(self.open)} conversations are open, which is the limit: end some first."
            )
        session = Session(self._desk, name, spec or self._spec(name, OpenBody()), metadata or {})
        self.open[name] = session
        return session

    def begin_as_asked(self, asked: OpenBody) -> Session:
        """A new conversation that a client describes."""
        name = check_name(asked.id) if asked.id is not None else f"s-{secrets.token_hex(8)}"
        if ":" in (asked.env_id or "") and asked.env_id != self._desk.options.env_id:
            # It would be recorded, and name code where the record is played again.
            raise Refused(400, f"env_id {asked.env_id!r} is not an id such as rollgym/Sokoban-v0.")
        try:
            spec = self._spec(name, asked)
        except ValueError as error:
            raise Refused(400, f"The session cannot be opened: {error}.") from None
        return self.begin(name, spec, jsonable(asked.metadata))

    def named(self, name: str) -> Session:
        """The conversation of that name, which begins if there is none."""
        found = self.open.get(check_name(name))
        if found is None:
            self.check_not_ended(name)
            found = self.begin(name)
        return found

    def existing(self, name: str) -> Session:
        """The open conversation of that name."""
        found = self.open.get(check_name(name))
        if found is None:
            self.check_not_ended(name)
            raise Refused(404, f"There is no session {name}.", code="session_not_found")
        return found

    def check_not_ended(self, name: str) -> None:
        """Refuse what is asked of a session that is over."""
        if name in self.ended:
            raise Refused(410, f"The session {name} has ended: open another.", code="session_ended")

    def matching(self, request: ChatRequest) -> Session:
        """The conversation that a request without a name goes on with, or a new one."""
        for key in reversed(request.keys):
            found = self._nameless.get(key)
            if found:
                fresh = [session for session in found if session.last == key and not session.running]
                return (fresh or found[-1:])[0]
        session = self.begin(None)
        self._keys[session.name] = []
        return session

    def remember(self, session: Session) -> None:
        """Note where a nameless conversation stands, so that it is found again."""
        keys, last = self._keys.get(session.name), session.last
        if keys is not None and last is not None and not session.over:
            known = self._nameless.setdefault(last, [])
            if session not in known:
                known.append(session)
                keys.append(last)

    def finish(self, session: Session, outcome: Outcome, error: Failure | None = None) -> Episode:
        """End a conversation: its episode is handed on."""
        session.check_open()
        episode = session.finish(outcome, error)
        if session.owned:
            return episode
        self.release(session)
        self.outcomes[outcome] += 1
        self._on_end(session, episode)
        return episode

    def release(self, session: Session) -> None:
        """Forget a conversation, whoever tells of it."""
        session.stop()
        self.open.pop(session.name, None)
        self.ended.add(session.name)
        for key in self._keys.pop(session.name, ()):
            left = [other for other in self._nameless[key] if other is not session]
            if left:
                self._nameless[key] = left
            else:
                del self._nameless[key]

    def finish_idle(self) -> None:
        """End those in which nothing was said for long: as a time limit, unless they were rewarded."""
        for session in list(self.open.values()):
            if not session.owned and session.idle_seconds >= self._desk.options.idle_seconds:
                given_up = session.turns and not session.rewarded and session.limit is None
                late = Outcome.TIME_LIMIT if given_up and not session.context_full else None
                self.finish(session, late or session.natural_end())

    def _spec(self, name: str, asked: OpenBody) -> EpisodeSpec:
        options = self._desk.options
        seed = derive_seed("session", options.seed, name)
        return EpisodeSpec(
            episode_id=name,
            env_id=asked.env_id or options.env_id,
            env_kwargs=jsonable(asked.env_kwargs),
            task=asked.task,
            split=options.split if asked.split is None else asked.split,
            env_seed=asked.env_seed,
            sampling_seed=seed if asked.sampling_seed is None else asked.sampling_seed,
            group_id=asked.group_id,
            member=asked.member,
            limits=Limits(turns=asked.max_turns, tokens=asked.max_tokens),
        )
