"""One recorded session, and the episode that it becomes.

A request that continues an earlier reply extends that reply's ids; every other request is rendered from its
messages. A turn extends the row of the previous turn only if it continues it: a retry, a rewritten history or
a second conversation in the same session start a new row.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rollgym.chat import BranchingConversation, ChatTemplate
from rollgym.chat.tokenizer import Codec
from rollgym.core.errors import AgentError
from rollgym.core.seeding import derive_seed
from rollgym.core.types import Episode, EpisodeSpec, Failure, Outcome, Seconds, Turn, Usage
from rollgym.engines.base import Engine, GenerateRequest, Generation, Sampling
from rollgym.serve.options import ServeOptions
from rollgym.serve.requests import ApiError, ChatRequest

PIECE = 32
"""Tokens that are sampled between two checks for a stop string."""


async def generate_until_stop(
    engine: Engine, request: GenerateRequest, stops: Sequence[str], codec: Codec
) -> Generation:
    """Sample a reply; one with a stop string ends with the token that completes it."""
    if not stops:
        return _whole(await engine.generate(request))
    pieces: list[Generation] = []
    ids: tuple[int, ...] = ()
    left = request.sampling.max_tokens
    while True:
        size = min(PIECE, left)
        piece_request = dataclasses.replace(
            request,
            prompt_ids=request.prompt_ids + ids,
            sampling=dataclasses.replace(request.sampling, max_tokens=size),
        )
        pieces.append(_whole(await engine.generate(piece_request)))
        ids += pieces[-1].token_ids
        left -= len(pieces[-1].token_ids)
        if find_stop(codec.decode(ids, special=False), stops) is not None:
            return _cut(_joined(pieces), _tokens_to_stop(ids, stops, codec))
        if pieces[-1].finish_reason == "stop" or left < 1 or len(pieces[-1].token_ids) < size:
            return _joined(pieces)


def find_stop(text: str, stops: Sequence[str]) -> int | None:
    """Return the position of the first stop string."""
    return min((text.index(stop) for stop in stops if stop in text), default=None)


def _whole(generation: Generation) -> Generation:
    if generation.finish_reason == "aborted":
        raise AgentError("The reply was aborted.")
    return generation


def _joined(pieces: Sequence[Generation]) -> Generation:
    spans: list[tuple[int, int]] = []
    for version, count in (span for piece in pieces for span in piece.version_spans):
        if spans and spans[-1][0] == version:
            spans[-1] = (version, spans[-1][1] + count)
        else:
            spans.append((version, count))
    return Generation(
        token_ids=tuple(number for piece in pieces for number in piece.token_ids),
        logprobs=tuple(value for piece in pieces for value in piece.logprobs),
        finish_reason=pieces[-1].finish_reason,
        version_spans=tuple(spans),
        queue_seconds=sum(piece.queue_seconds for piece in pieces),
        generate_seconds=sum(piece.generate_seconds for piece in pieces),
    )


def _tokens_to_stop(ids: Sequence[int], stops: Sequence[str], codec: Codec) -> int:
    """Return the number of tokens up to the one that completes a stop string."""
    for count in range(max(1, len(ids) - PIECE), len(ids)):
        if find_stop(codec.decode(ids[:count], special=False), stops) is not None:
            return count
    return len(ids)


def _cut(generation: Generation, count: int) -> Generation:
    spans, left = [], count
    for version, length in generation.version_spans:
        if left > 0:
            spans.append((version, min(length, left)))
            left -= length
    return dataclasses.replace(
        generation,
        token_ids=generation.token_ids[:count],
        logprobs=generation.logprobs[:count],
        finish_reason="stop",
        version_spans=tuple(spans),
    )


_log = logging.getLogger(__name__)
MAX_CONVERSATIONS = 64
"""Number of most recent replies per session that a request can continue with the sampled ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeContext:
    """Engine, template and options that all sessions share."""

    engine: Engine
    template: ChatTemplate
    options: ServeOptions
    in_thread: Callable[..., Awaitable[Any]]
    """Runs a function in the tokenizer thread, so that it does not block the event loop."""
    noticed: set[tuple[str, ...]] = field(default_factory=set)
    """Sets of ignored sampling fields that have been logged."""

    def notice(self, ignored: tuple[str, ...]) -> None:
        """Log, once per set of fields, that requests set sampling fields that are ignored."""
        if ignored and ignored not in self.noticed:
            self.noticed.add(ignored)
            _log.warning(
                "Requests set %s, which is ignored: replies are sampled with the run's settings "
                "(temperature %g, all tokens, one seed per episode).",
                ", ".join(ignored),
                self.options.temperature or 0.0,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The reply to a client."""

    session: str
    text: str
    finish_reason: str
    tokens: tuple[tuple[str, float], ...]
    """Text and log-prob of each token."""
    usage: Usage
    ignored: tuple[str, ...] = ()
    """Sampling fields of the request that were not used."""


class Session:
    """A conversation of one client: turns, rewards and outcome."""

    def __init__(
        self, context: ServeContext, name: str, spec: EpisodeSpec, metadata: Mapping[str, Any]
    ) -> None:
        self.name = name
        self.spec = spec
        self.metadata = dict(metadata)
        self.turns: list[Turn] = []
        self.instructions = ""
        self.success: bool | None = None
        self.rewarded = False
        self.ended = False
        self.recorded_elsewhere = False
        """True where a `SubprocessAgent` records the episode."""
        self.outcome: Outcome | None = None
        self.limit: Outcome | None = None
        """The limit of the spec that was reached; every further request is rejected."""
        self.context_full = False
        """True where the latest request did not fit the context."""
        self.last_error: AgentError | None = None
        """Why the latest request failed."""
        self.changed = asyncio.Event()
        """Set whenever a turn was added, a limit reached or the session ended."""
        self.running: set[asyncio.Task[Any]] = set()
        """The requests in flight."""
        self.last_active = time.monotonic()
        self.conversations: OrderedDict[bytes, BranchingConversation] = OrderedDict()
        self._context = context
        self.last: bytes | None = None
        """Digest of the conversation after the latest reply."""
        self._numbers = itertools.count()
        self._started = time.time()
        self._clock = time.perf_counter()
        self._replied = 0.0

    @property
    def idle_seconds(self) -> float:
        """Seconds since the last request; 0 while one is in flight."""
        return 0.0 if self.running else time.monotonic() - self.last_active

    async def answer(self, request: ChatRequest) -> Reply:
        """Sample a reply and add it to the episode.

        Raises:
            ApiError: The session has ended, reached a limit, or the request does not fit the context.
        """
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
            self.check_open()  # ended meanwhile: the client gets that as an error
            raise
        except AgentError as error:
            self.last_error = error
            raise
        finally:
            self.running.discard(task)
            self.last_active = time.monotonic()
            self.changed.set()

    async def _answer(self, request: ChatRequest, name: str, number: int) -> Reply:
        context = self._context
        past = request.keys[-1] if request.keys and request.keys[-1] in self.conversations else None
        conversation: BranchingConversation = await context.in_thread(
            _continue, context.template, self.conversations.get(past or b""), request
        )
        prompt, added = conversation.prompt_ids, conversation.added_ids
        sampling, ignored = self._sampling(request, conversation, number)
        generation = await generate_until_stop(
            context.engine,
            GenerateRequest(request_id=name, prompt_ids=prompt, sampling=sampling, session=self.name),
            request.stops,
            context.template.codec,
        )
        self.check_open()
        whole = conversation.reply(generation.token_ids)
        text = whole[: find_stop(whole, request.stops)]
        continues = past is not None and past == self.last and not conversation.new_row
        usage = Usage(prompt_tokens=len(prompt), completion_tokens=len(generation.token_ids))
        turn = Turn(
            observation=request.text,
            action=text,
            response=whole if whole != text else None,
            prompt_ids=added if continues else prompt,
            action_ids=generation.token_ids,
            logprobs=generation.logprobs,
            new_row=bool(self.turns) and not continues,
            policy_version=generation.version,
            version_spans=generation.version_spans,
            finish_reason=generation.finish_reason,
            seconds=Seconds(queue=generation.queue_seconds, generate=generation.generate_seconds),
            usage=usage,
        )
        self._keep(request.key_after(text), conversation, turn, request.system)
        texts = (context.template.codec.decode([token_id]) for token_id in generation.token_ids)
        return Reply(
            session=self.name,
            text=text,
            finish_reason=generation.finish_reason,
            tokens=tuple(zip(texts, generation.logprobs, strict=True)) if request.logprobs else (),
            usage=usage,
            ignored=ignored,
        )

    def _sampling(
        self, request: ChatRequest, conversation: BranchingConversation, number: int
    ) -> tuple[Sampling, tuple[str, ...]]:
        """Return the sampling of the reply, and the ignored fields of the request."""
        options, length = self._context.options, len(conversation.prompt_ids)
        room = self._context.engine.context_length - length
        self.context_full = room < 1
        if self.context_full:
            raise ApiError(
                400,
                f"The conversation has {length} tokens, which leaves no room for a reply in a context of "
                f"{self._context.engine.context_length}.",
                code="context_length_exceeded",
                param="messages",
            )
        fields, seed = dict(request.sampling), request.seed
        ignored: tuple[str, ...] = ()
        if options.fixed_sampling:
            ignored = _overruled(request, options)
            fields, seed = {}, None
            self._context.notice(ignored)
        if options.temperature is not None:
            fields["temperature"] = options.temperature
        limits = [value for value in (request.max_tokens, options.max_tokens) if value is not None]
        sampling = Sampling(
            **fields,
            max_tokens=min([*limits, room]),
            stop_ids=conversation.stop_ids,
            seed=derive_seed("serve", self.spec.sampling_seed, number) if seed is None else seed,
        )
        return sampling, ignored

    def _keep(self, key: bytes, conversation: BranchingConversation, turn: Turn, system: str) -> None:
        if not self.turns:
            self.instructions = system
        self.turns.append(turn)
        self.context_full, self.last_error = False, None
        self.conversations[key] = conversation
        self.conversations.move_to_end(key)
        while len(self.conversations) > MAX_CONVERSATIONS:
            self.conversations.popitem(last=False)
        self.last = key
        self._replied = time.perf_counter()

    def _pass_time(self) -> None:
        """Count the time since the last reply as the environment's step time."""
        if self.turns and not self.running and not self.turns[-1].seconds.step:
            seconds = replace(self.turns[-1].seconds, step=time.perf_counter() - self._replied)
            self.turns[-1] = replace(self.turns[-1], seconds=seconds)

    def check_open(self) -> None:
        """Raise an `ApiError` where the session has ended."""
        if self.ended:
            raise ApiError(410, f"Session {self.name} has ended: open another one.", code="session_ended")

    def _check_limits(self) -> None:
        limits = self.spec.limits
        if limits.turns is not None and len(self.turns) >= limits.turns:
            self.limit = Outcome.TURN_LIMIT
        tokens = sum(len(turn.prompt_ids) + len(turn.action_ids) for turn in self.turns)
        if limits.tokens is not None and tokens >= limits.tokens:
            self.limit = Outcome.TOKEN_LIMIT
        if self.limit is not None:
            self.changed.set()
            raise ApiError(
                400, f"Session {self.name} has reached its {self.limit}.", code=str(self.limit.value)
            )

    def reward(self, reward: float, success: bool | None) -> None:
        """Add a reward to the latest turn, and set whether the task succeeded."""
        self.check_open()
        if not self.turns:
            raise ApiError(409, f"Session {self.name} has no turns to reward.")
        # `Turn` checks the sum, which may be infinite where its parts are not.
        try:
            self.turns[-1] = replace(self.turns[-1], reward=self.turns[-1].reward + reward)
        except ValueError as error:
            raise ApiError(400, f"Invalid reward: {error}.", param="reward") from None
        self.success = success if success is not None else self.success
        self.rewarded = True
        self.last_active = time.monotonic()

    def natural_end(self, truncated: bool = False) -> Outcome:
        """Return the outcome where nothing failed."""
        if not self.turns:
            return Outcome.CANCELLED
        full = Outcome.TOKEN_LIMIT if self.context_full else None
        return self.limit or full or (Outcome.TRUNCATED if truncated else Outcome.TERMINATED)

    def stop(self) -> None:
        """Reject further requests and cancel those in flight."""
        self.ended = True
        for task in self.running:
            task.cancel()

    def finish(self, outcome: Outcome, error: Failure | None = None) -> Episode:
        """End the session and return its episode."""
        self.stop()
        self.outcome = outcome
        self.changed.set()
        self._pass_time()
        turns = list(self.turns)
        if turns:
            turns[-1] = replace(
                turns[-1], terminated=outcome is Outcome.TERMINATED, truncated=outcome is Outcome.TRUNCATED
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
    """Return the sampling fields of a request that differ from fixed sampling."""
    fixed = {"temperature": options.temperature, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    ignored = [name for name, value in request.sampling.items() if value != fixed[name]]
    return tuple(ignored if request.seed is None else [*ignored, "seed"])


def _continue(
    template: ChatTemplate, past: BranchingConversation | None, request: ChatRequest
) -> BranchingConversation:
    if past is None:
        return BranchingConversation.begin(template, request.system, request.messages)
    conversation = past.fork()
    conversation.observe(request.text)
    return conversation
