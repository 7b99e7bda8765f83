"""All sessions: which one a request belongs to, and which have been idle for too long."""

from __future__ import annotations

import itertools
import secrets
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from rollgym.core.messages import Message
from rollgym.core.seeding import derive_seed
from rollgym.core.serialization import jsonable
from rollgym.core.types import Episode, EpisodeSpec, Failure, Limits, Outcome
from rollgym.serve.requests import ApiError, ChatRequest, OpenBody, check_name, shown
from rollgym.serve.session import ServeContext, Session, continued
from rollgym.serve.session_log import LoggedSession

AUXILIARY = "@auxiliary"
"""Start of the names of sessions for one auxiliary call each; no client can choose such a name."""


class Sessions:
    """The open sessions by name.

    A request without a session name belongs to the session whose conversation it continues. Where several
    sessions have the same conversation so far, one that has not been continued yet gets it.
    """

    def __init__(self, context: ServeContext, on_end: Callable[[Session, Episode], None]) -> None:
        self._context = context
        self._on_end = on_end
        self.open: dict[str, Session] = {}
        self.ended: set[str] = set()
        self.outcomes: Counter[Outcome] = Counter()
        self._nameless: dict[bytes, list[Session]] = {}
        self._keys: dict[str, list[bytes]] = {}
        self._auxiliary = itertools.count()

    def begin(
        self,
        name: str | None,
        spec: EpisodeSpec | None = None,
        metadata: Mapping[str, Any] | None = None,
        *,
        recorded_elsewhere: bool = False,
        by_content: bool = False,
    ) -> Session:
        """Open a session.

        Args:
            name: Its name; ``None`` makes one up.
            spec: The episode; by default one of the server's environment.
            metadata: Recorded with the episode.
            recorded_elsewhere: Whether the caller writes the episode.
            by_content: Whether requests find the session by their content.
        """
        name = check_name(name) if name is not None else f"s-{secrets.token_hex(8)}"
        if name in self.ended or name in self.open:
            raise ApiError(409, f"A session {name} exists already: choose another name.")
        if len(self.open) >= self._context.options.max_sessions:
            raise ApiError(429, f"{len(self.open)} sessions are open, which is the limit: end some first.")
        session = Session(self._context, name, spec or self._spec(name, OpenBody()), metadata or {})
        session.recorded_elsewhere = recorded_elsewhere
        if self._context.log is not None and not recorded_elsewhere:
            self._context.log.begin(session, by_content)
        self.open[name] = session
        if by_content:
            self._keys[name] = []
        return session

    def restore(self, logged: LoggedSession) -> None:
        """Continue a session of an earlier process."""
        session = Session(self._context, logged.name, logged.spec, logged.metadata)
        last_keys = logged.keys[-1] if logged.keys else ()
        session.restore(logged.turns, last_keys, logged.started, logged.next_number)
        session.success, session.rewarded = logged.success, logged.rewarded
        session.instructions, session.tools = logged.instructions, logged.tools
        self.open[session.name] = session
        if logged.by_content:
            self._keys[session.name] = list(dict.fromkeys(key for keys in logged.keys for key in keys))
            for key in self._keys[session.name]:
                self._nameless.setdefault(key, []).append(session)

    def begin_from_request(self, body: OpenBody) -> Session:
        """Open the session that a client asks for."""
        name = check_name(body.id) if body.id is not None else f"s-{secrets.token_hex(8)}"
        if ":" in (body.env_id or "") and body.env_id != self._context.options.env_id:
            # A module:attribute id would be recorded, and imported where the record is replayed.
            raise ApiError(400, f"env_id {body.env_id!r} is not an id such as rollgym/Sokoban-v0.")
        try:
            spec = self._spec(name, body)
        except ValueError as error:
            raise ApiError(400, f"Invalid session: {error}.") from None
        return self.begin(name, spec, jsonable(body.metadata))

    def get_or_begin(self, name: str) -> Session:
        """Return the session of that name; open it where there is none."""
        session = self.open.get(check_name(name))
        if session is None:
            self.check_not_ended(name)
            session = self.begin(name)
        return session

    def get(self, name: str) -> Session:
        """Return the open session of that name."""
        session = self.open.get(check_name(name))
        if session is None:
            self.check_not_ended(name)
            raise ApiError(404, f"Session {name} not found.", code="session_not_found")
        return session

    def check_not_ended(self, name: str) -> None:
        """Raise an `ApiError` for the name of a session that has ended."""
        if name in self.ended:
            raise ApiError(410, f"Session {name} has ended: open another one.", code="session_ended")

    def of_request(self, name: str | None, request: ChatRequest, record: bool) -> Session:
        """Return the session of a request: by name, or the one that it continues, or a new one.

        An auxiliary call (``record`` is false) without a name opens no session.
        """
        if name is not None:
            return self.get_or_begin(name)
        for key in reversed(request.keys):
            sessions = self._nameless.get(key)
            if sessions:
                fresh = [session for session in sessions if key in session.last_keys and not session.running]
                return (fresh or sessions[-1:])[0]
        if not record:
            # A name for each: engines know requests by ids that contain it.
            name = f"{AUXILIARY}-{next(self._auxiliary)}"
            return Session(self._context, name, self._spec(AUXILIARY, OpenBody()), {})
        return self.begin(None, by_content=True)

    def history(self, answer_id: str, name: str | None) -> tuple[Session, tuple[Message, ...]]:
        """Return the session and the messages of an earlier answer.

        Args:
            answer_id: The id of the answer.
            name: The session that the request names, if any.
        """
        session = self.open.get(answer_id.partition("_")[2])
        if session is None or answer_id not in session.histories or name not in (None, session.name):
            raise ApiError(
                404,
                f"No response with the id {shown(answer_id)} in an open session: send all items instead.",
                code="previous_response_not_found",
                param="previous_response_id",
            )
        return session, session.histories[answer_id].messages

    async def count_tokens(self, request: ChatRequest) -> int:
        """Return the number of tokens of a request as a prompt."""
        conversation = await self._context.in_thread(continued, self._context.template, None, request)
        return len(conversation.prompt_ids)

    def remember(self, session: Session) -> None:
        """Index a session without a client-given name by its conversation, so that requests find it."""
        keys = self._keys.get(session.name)
        if keys is None or session.ended:
            return
        for key in session.last_keys:
            sessions = self._nameless.setdefault(key, [])
            if session not in sessions:
                sessions.append(session)
                keys.append(key)

    def finish(self, session: Session, outcome: Outcome, error: Failure | None = None) -> Episode:
        """End a session and hand out its episode."""
        session.check_open()
        episode = session.finish(outcome, error)
        if session.recorded_elsewhere:
            return episode
        self.release(session)
        self.outcomes[outcome] += 1
        self._on_end(session, episode)
        if self._context.log is not None:
            self._context.log.end(session)
        return episode

    def release(self, session: Session) -> None:
        """Stop and drop a session without handing out an episode."""
        session.stop()
        self.open.pop(session.name, None)
        self.ended.add(session.name)
        for key in self._keys.pop(session.name, ()):
            left = [other for other in self._nameless[key] if other is not session]
            if left:
                self._nameless[key] = left
            else:
                del self._nameless[key]

    def idle(self) -> list[Session]:
        """Return the open sessions without a request for too long."""
        limit = self._context.options.idle_seconds
        return [
            session
            for session in self.open.values()
            if not session.recorded_elsewhere and session.idle_seconds >= limit
        ]

    def finish_idle(self, session: Session) -> Episode:
        """End an idle session: as a time limit, unless it was rewarded."""
        abandoned = session.turns and not session.rewarded and session.limit is None
        late = Outcome.TIME_LIMIT if abandoned and not session.context_full else None
        return self.finish(session, late or session.natural_end())

    def _spec(self, name: str, body: OpenBody) -> EpisodeSpec:
        options = self._context.options
        seed = derive_seed("session", options.seed, name)
        return EpisodeSpec(
            episode_id=name,
            env_id=body.env_id or options.env_id,
            env_kwargs=jsonable(body.env_kwargs),
            task=body.task,
            split=options.split if body.split is None else body.split,
            env_seed=body.env_seed,
            sampling_seed=seed if body.sampling_seed is None else body.sampling_seed,
            group_id=body.group_id,
            member=body.member,
            limits=Limits(turns=body.max_turns, tokens=body.max_tokens),
        )
