"""One conversation while it goes on, and the episode that it becomes.

A request that goes on where an earlier reply ended adds to that reply's ids; every other one is written anew.
A turn extends the row of the turn before it only if it goes on from there: a retry, a rewritten history or a
second conversation in the same session begin a row of their own.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rollgym.chat import ChatTemplate
from rollgym.engines import Engine, GenerateRequest, Generation, Sampling
from rollgym.errors import AgentError
from rollgym.seeding import derive_seed
from rollgym.serve.draw import draw, find_stop
from rollgym.serve.options import ServeOptions
from rollgym.serve.requests import ChatRequest, Refused
from rollgym.serve.talk import Talk
from rollgym.types import Episode, EpisodeSpec, Failure, Outcome, Seconds, Turn, Usage

_log = logging.getLogger(__name__)
KEPT_TALKS = 64
"""So many replies of a session can be gone on from with the ids that were sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Desk:
    """What all sessions share."""

    engine: Engine
    template: ChatTemplate
    options: ServeOptions
    in_thread: Callable[..., Awaitable[Any]]
    """Runs a function where tokenising holds up nobody."""
    noticed: set[tuple[str, ...]] = field(default_factory=set)
    """Sampling fields whose being ignored has been logged."""

    def notice(self, ignored: tuple[str, ...]) -> None:
        """Log, once, that requests ask for sampling that they do not get."""
        if ignored and ignored not in self.noticed:
            self.noticed.add(ignored)
            _log.warning(
                "Requests set %s, which is ignored: replies are drawn with the run's own sampling "
                "(temperature %g, all tokens, a seed for each episode).",
                ", ".join(ignored),
                self.options.temperature or 0.0,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a client is answered."""

    session: str
    text: str
    finish_reason: str
    tokens: tuple[tuple[str, float], ...]
    """Text and log-prob of each token."""
    usage: Usage
    ignored: tuple[str, ...] = ()
    """Sampling fields of the request that were not used."""


class Session:
    """A conversation: turns, rewards and how it ends."""

    def __init__(self, desk: Desk, name: str, spec: EpisodeSpec, metadata: Mapping[str, Any]) -> None:
        self.name = name
        self.spec = spec
        self.metadata = dict(metadata)
        self.turns: list[Turn] = []
        self.instructions = ""
        self.success: bool | None = None
        self.rewarded = False
        self.over = False
        self.owned = False
        """Whether somebody else tells its episode, and only wants to know how it went."""
        self.ended_as: Outcome | None = None
        self.limit: Outcome | None = None
        """The limit of the spec that a request was refused for: it can only end now."""
        self.context_full = False
        """Whether the latest request did not fit the context."""
        self.trouble: AgentError | None = None
        """Why the latest request could not be answered."""
        self.news = asyncio.Event()
        """Set whenever a turn was played or a limit reached."""
        self.running: set[asyncio.Task[Any]] = set()
        """Those who wait for a reply."""
        self.touched = time.monotonic()
        self.talks: OrderedDict[bytes, Talk] = OrderedDict()
        self._desk = desk
        self._last: bytes | None = None
        self._numbers = itertools.count()
        self._started = time.time()
        self._clock = time.perf_counter()
        self._replied = 0.0

    @property
    def last(self) -> bytes | None:
        """The digest of the conversation after the latest reply."""
        return self._last

    @property
    def idle_seconds(self) -> float:
        """For how long nothing has been said; 0 while something is."""
        return 0.0 if self.running else time.monotonic() - self.touched

    async def answer(self, request: ChatRequest) -> Reply:
        """The model's reply, which is then part of the episode. `Refused` where there is none."""
        self.check_open()
        self._check_limits()
        number = next(self._numbers)
        self._pass_time()
        task = asyncio.current_task()
        assert task is not None
        self.running.add(task)
        try:
            return await self._answer(request, f"{self.name}/{number}", number)
        except asyncio.CancelledError:
            self.check_open()  # ended from outside: the client is told so
            raise
        except AgentError as error:
            self.trouble = error
            raise
        finally:
            self.running.discard(task)
            self.touched = time.monotonic()
            self.news.set()

    async def _answer(self, request: ChatRequest, name: str, number: int) -> Reply:
        desk = self._desk
        past = request.keys[-1] if request.keys and request.keys[-1] in self.talks else None
        talk: Talk = await desk.in_thread(_hear, desk.template, self.talks.get(past or b""), request)
        prompt, added = talk.prompt_ids, talk.added_ids
        sampling, ignored = self._sampling(request, talk, number)
        made = await draw(
            desk.engine,
            GenerateRequest(request_id=name, prompt_ids=prompt, sampling=sampling, session=self.name),
            request.stops,
            desk.template.codec,
        )
        self.check_open()
        whole = talk.reply(made.token_ids, made.logprobs)
        text = whole[: find_stop(whole, request.stops)]
        goes_on = past is not None and past == self._last and not talk.new_row
        turn = self._turn(request, made, added if goes_on else prompt, whole, text)
        usage = Usage(prompt_tokens=len(prompt), completion_tokens=len(made.token_ids))
        turn = replace(turn, new_row=bool(self.turns) and not goes_on, usage=usage)
        self._keep(request.key_after(text), talk, turn, request.system)
        codec = desk.template.codec
        tokens = zip((codec.decode([one]) for one in made.token_ids), made.logprobs, strict=True)
        return Reply(
            session=self.name,
            text=text,
            finish_reason=made.finish_reason,
            tokens=tuple(tokens) if request.logprobs else (),
            usage=usage,
            ignored=ignored,
        )

    def _sampling(self, request: ChatRequest, talk: Talk, number: int) -> tuple[Sampling, tuple[str, ...]]:
        """How to draw the reply, and which fields of the request do not count for it."""
        options, length = self._desk.options, len(talk.prompt_ids)
        room = self._desk.engine.context_length - length
        self.context_full = room < 1
        if self.context_full:
            raise Refused(
                400,
                f"The conversation has {length} tokens, which leaves no room for a reply in a context of "
                f"{self._desk.engine.context_length}.",
                code="context_length_exceeded",
                param="messages",
            )
        chosen, seed = dict(request.sampling), request.seed
        ignored: tuple[str, ...] = ()
        if options.fixed_sampling:
            ignored = _overruled(request, options)
            chosen, seed = {}, None
            self._desk.notice(ignored)
        if options.temperature is not None:
            chosen["temperature"] = options.temperature
        limits = [value for value in (request.max_tokens, options.max_tokens) if value is not None]
        sampling = Sampling(
            **chosen,
            max_tokens=min([*limits, room]),
            stop_ids=talk.stop_ids,
            seed=derive_seed("serve", self.spec.sampling_seed, number) if seed is None else seed,
        )
        return sampling, ignored

    def _turn(
        self, request: ChatRequest, made: Generation, added: tuple[int, ...], whole: str, text: str
    ) -> Turn:
        return Turn(
            observation=request.text,
            action=text,
            response=whole if whole != text else None,
            prompt_ids=added,
            action_ids=made.token_ids,
            logprobs=made.logprobs,
            policy_version=made.version,
            version_spans=made.version_spans,
            finish_reason=made.finish_reason,
            seconds=Seconds(queue=made.queue_seconds, generate=made.generate_seconds),
        )

    def _keep(self, key: bytes, talk: Talk, turn: Turn, system: str) -> None:
        if not self.turns:
            self.instructions = system
        self.turns.append(turn)
        self.context_full, self.trouble = False, None
        self.talks[key] = talk
        self.talks.move_to_end(key)
        while len(self.talks) > KEPT_TALKS:
            self.talks.popitem(last=False)
        self._last = key
        self._replied = time.perf_counter()

    def _pass_time(self) -> None:
        """What passed since the reply was the client's own time."""
        if self.turns and not self.running and not self.turns[-1].seconds.step:
            own = replace(self.turns[-1].seconds, step=time.perf_counter() - self._replied)
            self.turns[-1] = replace(self.turns[-1], seconds=own)

    def check_open(self) -> None:
        """Refuse what is asked of a session that is over."""
        if self.over:
            raise Refused(410, f"The session {self.name} has ended: open another.", code="session_ended")

    def _check_limits(self) -> None:
        limits = self.spec.limits
        if limits.turns is not None and len(self.turns) >= limits.turns:
            self.limit = Outcome.TURN_LIMIT
        if limits.tokens is not None and self._tokens() >= limits.tokens:
            self.limit = Outcome.TOKEN_LIMIT
        if self.limit is not None:
            self.news.set()
            raise Refused(
                400, f"The session {self.name} has reached its {self.limit}.", code=str(self.limit.value)
            )

    def _tokens(self) -> int:
        return sum(len(turn.prompt_ids) + len(turn.action_ids) for turn in self.turns)

    def reward(self, reward: float, success: bool | None) -> None:
        """Add a reward to the latest turn, and note whether the task is achieved."""
        self.check_open()
        if not self.turns:
            raise Refused(409, f"Nothing was said in the session {self.name}: there is nothing to reward.")
        # Checked by the turn: a sum may be infinite where its parts are not.
        try:
            self.turns[-1] = replace(self.turns[-1], reward=self.turns[-1].reward + reward)
        except ValueError as error:
            raise Refused(400, f"The reward is refused: {error}.", param="reward") from None
        self.success = success if success is not None else self.success
        self.rewarded = True
        self.touched = time.monotonic()

    def natural_end(self, truncated: bool = False) -> Outcome:
        """How it ends where nothing went wrong."""
        if not self.turns:
            return Outcome.CANCELLED
        full = Outcome.TOKEN_LIMIT if self.context_full else None
        return self.limit or full or (Outcome.TRUNCATED if truncated else Outcome.TERMINATED)

    def stop(self) -> None:
        """No more replies, not even those that are being drawn."""
        self.over = True
        for task in self.running:
            task.cancel()

    def finish(self, outcome: Outcome, error: Failure | None = None) -> Episode:
        """The episode; nothing is added to it any more."""
        self.stop()
        self.ended_as = outcome
        self.news.set()
        self._pass_time()
        turns = list(self.turns)
        if turns:
            turns[-1] = replace(
                turns[-1],
                terminated=outcome is Outcome.TERMINATED,
                truncated=outcome is Outcome.TRUNCATED,
            )
        return Episode(
            spec=self.spec,
            outcome=outcome,
            turns=tuple(turns),
            instructions=self.instructions,
            reset_info=self.metadata,
            success=None if outcome.failed else self.success,
            error=error,
            started=self._started,
            seconds=time.perf_counter() - self._clock,
        )


def _overruled(request: ChatRequest, options: ServeOptions) -> tuple[str, ...]:
    """The sampling fields of a request that ask for something else than fixed sampling."""
    plain = {"temperature": options.temperature, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    found = [name for name, value in request.sampling.items() if value != plain[name]]
    return tuple(found if request.seed is None else [*found, "seed"])


def _hear(template: ChatTemplate, past: Talk | None, request: ChatRequest) -> Talk:
    if past is None:
        return Talk.begin(template, request.system, request.messages)
    talk = past.fork()
    talk.observe(request.text)
    return talk
