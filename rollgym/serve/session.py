"""One recorded session, and the episode that it becomes.

A request that continues an earlier reply extends that reply's ids; every other request is rendered from its
messages. A turn extends the row of the previous turn only if it continues it: a retry, a rewritten history,
a sub-agent or any other second conversation in the same session start a new row.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from msgspec import UNSET

from rollgym.chat import BranchingConversation, ChatTemplate
from rollgym.core.errors import AgentError
from rollgym.core.messages import Message, ToolSpec
from rollgym.core.seeding import derive_seed
from rollgym.core.tools import write_calls
from rollgym.core.types import Episode, EpisodeSpec, Failure, Outcome, Seconds, Turn
from rollgym.engines.base import Engine, GenerateRequest, Generation, Sampling
from rollgym.serve.dialects.base import Reply, StreamHead
from rollgym.serve.generation import generate_until_stop
from rollgym.serve.offered_env import OfferedEnv
from rollgym.serve.options import ServeOptions
from rollgym.serve.partial_reply import PartialReply
from rollgym.serve.reply_feed import ReplyFeed
from rollgym.serve.requests import ApiError, ChatRequest
from rollgym.serve.visible_reply import visible_reply

_log = logging.getLogger(__name__)
MAX_CONVERSATIONS = 64
"""Number of most recent replies per session that a request can continue with the sampled ids."""
MAX_KEPT_TOKENS = 500_000
"""Bound on the tokens of all those replies with their prompts; twice the latest where that is more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedTurn:
    """A turn, and what else is needed to continue after it."""

    turn: Turn
    number: int
    """Number of its request within the session."""
    keys: tuple[bytes, ...]
    """Digests of the conversation after it, one for each form in which it may return."""
    results: tuple[dict[str, Any], ...] = ()
    """Results of the tools that the turn before called."""


class SessionLog(Protocol):
    """Keeps what open sessions have recorded, so that it survives the process."""

    def begin(self, session: Session, by_content: bool) -> None:
        """Record the start of a session."""

    def add_turn(self, session: Session, added: AddedTurn) -> None:
        """Record a turn."""

    def add_reward(self, session: Session, reward: float, success: bool | None) -> None:
        """Record a reward for the latest turn."""

    def end(self, session: Session) -> None:
        """Remove a session whose episode is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeContext:
    """Engine, template and options that all sessions share."""

    engine: Engine
    template: ChatTemplate
    options: ServeOptions
    in_thread: Callable[..., Awaitable[Any]]
    """Runs a function in the tokenizer thread, so that it does not block the event loop."""
    log: SessionLog | None = None
    """Keeps the turns of open sessions on disk."""
    noticed: set[tuple[str, ...]] = field(default_factory=set)
    """Sets of ignored sampling fields that have been logged."""

    def notice(self, ignored: tuple[str, ...], reason: str) -> None:
        """Log, once per set of fields, that requests set fields that are ignored."""
        if ignored and ignored not in self.noticed:
            self.noticed.add(ignored)
            _log.warning("Requests set %s, which is ignored: %s.", ", ".join(ignored), reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The replies to one request."""

    head: StreamHead
    """Its name within the server, and what else was known before the first token."""
    replies: tuple[Reply, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A conversation after a reply, which a later request may continue."""

    conversation: BranchingConversation
    num_tokens: int
    call_ids: Mapping[str, str]
    """Ids of the reply's tool calls: those that the client knows, and those of the conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptHistory:
    """The messages up to an answer, which a later request may continue by naming the answer."""

    messages: tuple[Message, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prompt:
    """A request as token ids, ready to be sampled from."""

    conversation: BranchingConversation
    ids: tuple[int, ...]
    added: tuple[int, ...]
    """The ids after the last reply of the row: all of them in a new row."""
    continues: bytes | None
    """Digest of the conversation whose row this extends."""
    begun: tuple[int, ...]
    """The last of the ids, which are the start of the reply: those of a call that the request demands."""


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
        self.tools: tuple[ToolSpec, ...] = ()
        """Tools of the first request."""
        self.success: bool | None = None
        self.rewarded = False
        self.ended = False
        self.recorded_elsewhere = False
        """True where a `SubprocessAgent` records the episode."""
        self.rewards_from: str | None = None
        """The source of rewards where that is not the client: then it can neither set nor read them."""
        self.env: OfferedEnv | None = None
        """The environment that the client plays, if it is offered one."""
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
        self.conversations: OrderedDict[bytes, Kept] = OrderedDict()
        self._context = context
        self.last_keys: tuple[bytes, ...] = ()
        """Digests of the conversation after the latest reply, one for each form in which it may return."""
        self.histories: OrderedDict[str, KeptHistory] = OrderedDict()
        """Messages up to each of the latest answers, by its id, for clients that continue an answer by id."""
        self._numbers = itertools.count()
        self._auxiliary = itertools.count()
        self.started = time.time()
        self._clock = time.perf_counter()
        self._replied = 0.0

    @property
    def idle_seconds(self) -> float:
        """Seconds since the last request; 0 while one is in flight."""
        return 0.0 if self.running else time.monotonic() - self.last_active

    async def answer(
        self, request: ChatRequest, *, record: bool = True, feed: ReplyFeed | None = None
    ) -> Answer:
        """Sample the replies to a request and add them to the episode.

        Args:
            request: The request.
            record: Whether the replies become turns; False for an auxiliary call.
            feed: Gets the text of the replies while they are sampled.

        Raises:
            ApiError: The session has ended, reached a limit, or the request does not fit the context.
        """
        self.check_open()
        if record:
            self._check_limits()
            self._pass_time()
        number = next(self._numbers if record else self._auxiliary)
        task = asyncio.current_task()
        assert task is not None
        self.running.add(task)
        try:
            return await self._answer(request, number, record, feed)
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

    async def _answer(
        self, request: ChatRequest, number: int, record: bool, feed: ReplyFeed | None
    ) -> Answer:
        name = f"{number}_{self.name}" if record else f"aux{number}_{self.name}"
        prompt = await self._prompt(request)
        unforced = ("tool_choice",) if request.forced and not prompt.begun else ()
        self._context.notice(request.ignored, "reasoning and verbosity are up to the model")
        self._context.notice(unforced, "the start of a reply cannot be set with this chat template")
        sampling, overruled = self._sampling(request, prompt, number, record)
        head = StreamHead(
            id=name,
            created=int(time.time()),
            prompt_tokens=len(prompt.ids),
            ignored=(*request.ignored, *unforced, *overruled),
        )
        if feed is not None:
            feed.begin(head)
        generations = await self._generate(request, name, prompt, sampling, feed)
        self.check_open()
        replies = []
        for index, generation in enumerate(generations):
            conversation = (
                prompt.conversation if index == len(generations) - 1 else prompt.conversation.fork()
            )
            whole = conversation.reply(generation.token_ids)
            reply = visible_reply(
                request, conversation, whole, generation, name=f"{name}/{index}", begun=prompt.begun
            )
            reply = replace(reply, usage=replace(reply.usage, prompt_tokens=len(prompt.ids)))
            if record:
                known = zip(reply.message.tool_calls, conversation.last_message.tool_calls, strict=False)
                kept = Kept(
                    conversation=conversation,
                    num_tokens=len(prompt.ids) + len(generation.token_ids),
                    call_ids={shown.id: call.id for shown, call in known},
                )
                turn = self._turn(request, prompt, generation, reply, whole)
                self._keep(request, kept, number, turn, reply)
            replies.append(reply)
        return Answer(head=head, replies=tuple(replies))

    async def _prompt(self, request: ChatRequest) -> _Prompt:
        past = request.keys[-1] if request.keys and request.keys[-1] in self.conversations else None
        template = self._context.template
        conversation: BranchingConversation = await self._context.in_thread(
            continued, template, self.conversations.get(past or b""), request
        )
        begun: tuple[int, ...] = ()
        if request.forced:
            begun = await self._context.in_thread(template.forced_call, request.forced)
            conversation.begin_reply(begun)
        return _Prompt(
            conversation=conversation,
            ids=conversation.prompt_ids,
            added=conversation.added_ids,
            continues=None if conversation.new_row else past,
            begun=begun,
        )

    async def _generate(
        self,
        request: ChatRequest,
        name: str,
        prompt: _Prompt,
        sampling: Sampling,
        feed: ReplyFeed | None,
    ) -> Sequence[Generation]:
        """Sample as many replies as the request asks for, at once."""
        template = self._context.template
        tasks = []
        for index in range(request.n):
            # The first reply is the one that a request for a single reply gets.
            seed = sampling.seed if index == 0 else derive_seed("sibling", sampling.seed, index)
            generate = GenerateRequest(
                request_id=f"{name}/{index}",
                prompt_ids=prompt.ids,
                sampling=replace(sampling, seed=seed),
                session=self.name,
            )
            on_token = None
            if feed is not None:
                partial = PartialReply(
                    template,
                    tools=bool(request.tools),
                    stops=request.stops,
                    begun=prompt.begun,
                    stop_ids=sampling.stop_ids,
                    calls_as_text=request.max_calls == 0,
                )
                on_token = feed.follow(index, partial)
            work = generate_until_stop(
                self._context.engine, generate, request.stops, template.codec, on_token
            )
            tasks.append(asyncio.create_task(work))
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _turn(
        self, request: ChatRequest, prompt: _Prompt, generation: Generation, reply: Reply, whole: str
    ) -> Turn:
        continues = prompt.continues is not None and prompt.continues in self.last_keys
        message = reply.message
        action = write_calls(message.tool_calls) if message.tool_calls else message.text
        return Turn(
            observation=request.text,
            action=action,
            response=whole if whole != action else None,
            message=message.to_openai() if request.tools else None,
            prompt_ids=prompt.added if continues else prompt.ids,
            action_ids=generation.token_ids,
            logprobs=generation.logprobs,
            new_row=bool(self.turns) and not continues,
            policy_version=generation.version,
            version_spans=generation.version_spans,
            finish_reason=generation.finish_reason,
            seconds=Seconds(queue=generation.queue_seconds, generate=generation.generate_seconds),
            usage=reply.usage,
            routed_experts=generation.experts_of_turn(
                len(prompt.ids), len(prompt.added if continues else prompt.ids)
            )
            or UNSET,
        )

    def _sampling(
        self, request: ChatRequest, prompt: _Prompt, number: int, record: bool
    ) -> tuple[Sampling, tuple[str, ...]]:
        """Return the sampling of the reply, and the sampling fields of the request that are ignored."""
        options, length = self._context.options, len(prompt.ids)
        room = self._context.engine.context_length - length
        self.context_full = room < 1 if record else self.context_full
        if room < 1:
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
            self._context.notice(
                ignored,
                "replies are sampled with the run's settings "
                f"(temperature {options.temperature:g}, all tokens, one seed per episode)",
            )
        if options.temperature is not None:
            fields["temperature"] = options.temperature
        limits = [value for value in (request.max_tokens, options.max_tokens) if value is not None]
        stream = "serve" if record else "serve-auxiliary"
        sampling = Sampling(
            **fields,
            max_tokens=min([*limits, room]),
            stop_ids=prompt.conversation.stop_ids,
            seed=derive_seed(stream, self.spec.sampling_seed, number) if seed is None else seed,
        )
        return sampling, ignored

    def _keep(self, request: ChatRequest, kept: Kept, number: int, turn: Turn, reply: Reply) -> None:
        keys = [request.key_after(reply.message)]
        if reply.stop is not None and not reply.message.tool_calls:
            # Many clients append the stop string that ended a reply: these are the sampled tokens as well.
            whole = replace(reply.message, content=reply.message.text + reply.stop)
            keys.append(request.key_after(whole))
        results: tuple[dict[str, Any], ...] = ()
        if not self.turns:
            self.instructions, self.tools = request.system, request.tools
        elif request.keys and request.keys[-1] in self.last_keys and request.answers_calls:
            # As an environment with tools reports the results of the calls, in whichever row.
            results = tuple(message.to_openai() for message in request.new_messages)
        if self._context.log is not None and not self.recorded_elsewhere:
            # First: a client whose turn cannot be written gets an error, and the turn is not a part of the
            # episode.
            added = AddedTurn(turn=turn, number=number, keys=tuple(keys), results=results)
            self._context.log.add_turn(self, added)
        if results:
            self.turns[-1] = replace(self.turns[-1], info={"messages": list(results)})
        self.turns.append(turn)
        self.context_full, self.last_error = False, None
        for key in keys:
            self.conversations[key] = kept
            self.conversations.move_to_end(key)
        total = sum(other.num_tokens for other in self.conversations.values())
        most = max(MAX_KEPT_TOKENS, 2 * kept.num_tokens)
        while len(self.conversations) > MAX_CONVERSATIONS or total > most:
            total -= self.conversations.popitem(last=False)[1].num_tokens
        self.last_keys = tuple(keys)
        self._replied = time.perf_counter()

    def keep_history(self, answer: Answer, messages: tuple[Message, ...]) -> None:
        """Remember the messages up to an answer; bounded as the conversations are."""
        latest = answer.head.prompt_tokens + answer.replies[0].usage.completion_tokens
        self.histories[answer.head.id] = KeptHistory(messages=messages, num_tokens=latest)
        total = sum(history.num_tokens for history in self.histories.values())
        while len(self.histories) > MAX_CONVERSATIONS or total > max(MAX_KEPT_TOKENS, latest):
            total -= self.histories.popitem(last=False)[1].num_tokens

    def restore(
        self, turns: Sequence[Turn], last_keys: Sequence[bytes], started: float, next_number: int
    ) -> None:
        """Continue with the turns of an earlier process; the next turn starts a new row.

        Args:
            turns: The turns so far.
            last_keys: Digests of the conversation after the last one.
            started: When the session started, in seconds since the epoch.
            next_number: The number of the next request: ids and seeds of replies derive from it.
        """
        self.turns, self.last_keys, self.started = list(turns), tuple(last_keys), started
        self._numbers = itertools.count(next_number)
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
        turns = self._context.options.max_turns if limits.turns is None else limits.turns
        if len(self.turns) >= turns:
            self.limit = Outcome.TURN_LIMIT
        if limits.tokens is not None:
            tokens = sum(len(turn.prompt_ids) + len(turn.action_ids) for turn in self.turns)
            self.limit = Outcome.TOKEN_LIMIT if tokens >= limits.tokens else self.limit
        if self.limit is not None:
            self.changed.set()
            raise ApiError(
                400, f"Session {self.name} has reached its {self.limit}.", code=str(self.limit.value)
            )

    def reward(self, reward: float, success: bool | None, *, late: bool = False) -> None:
        """Add a reward to the latest turn, and set whether the task succeeded.

        Args:
            reward: The reward.
            success: Whether the task succeeded; ``None`` leaves that as it is.
            late: Whether the session may have ended already.
        """
        if not late:
            self.check_open()
        if not self.turns:
            raise ApiError(409, f"Session {self.name} has no turns to reward.")
        # `Turn` checks the sum, which may be infinite where its parts are not.
        try:
            rewarded = replace(self.turns[-1], reward=self.turns[-1].reward + reward)
        except ValueError as error:
            raise ApiError(400, f"Invalid reward: {error}.", param="reward") from None
        if self._context.log is not None and not self.recorded_elsewhere:
            self._context.log.add_reward(self, reward, success)  # first: where it fails, a client tries again
        self.turns[-1] = rewarded
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
            tools=self.tools,
            reset_info=self.metadata,
            success=None if outcome.failed else self.success,
            error=error,
            started=self.started,
            seconds=time.perf_counter() - self._clock,
        )


def _overruled(request: ChatRequest, options: ServeOptions) -> tuple[str, ...]:
    """Return the sampling fields of a request that differ from fixed sampling."""
    fixed = {"temperature": options.temperature, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    ignored = [name for name, value in request.sampling.items() if value != fixed[name]]
    return tuple(ignored if request.seed is None else [*ignored, "seed"])


def continued(template: ChatTemplate, past: Kept | None, request: ChatRequest) -> BranchingConversation:
    """Return the conversation of a request: the one that it continues, or one rendered from its messages."""
    if past is None:
        return BranchingConversation.begin(template, request.system, request.messages, request.tools)
    conversation = past.conversation.fork()
    conversation.observe(
        [
            replace(message, tool_call_id=past.call_ids.get(message.tool_call_id, message.tool_call_id))
            for message in request.new_messages
        ]
    )
    return conversation
