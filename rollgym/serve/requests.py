"""Requests as the core understands them, whatever dialect they arrive in: messages, tools and sampling.

A request is either understood as a whole or rejected with an error. The dialects (`rollgym.serve.dialects`)
read the bodies of their API into a `ChatRequest`; bodies of the session routes are defined here.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec

from rollgym.core.messages import ImagePart, Message, ToolCall, ToolSpec
from rollgym.core.serialization import clean_text, jsonable

T = TypeVar("T")
MAX_STOPS = 16
MAX_REPLIES = 16
"""Replies to one request (``n``)."""
MAX_TOOLS = 128
MAX_PRIVATE = 1000
"""Private-use characters in a request: with most of them taken, finding a free one as a mark is slow."""
SESSION_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_PRIVATE = re.compile("[\U000f0000-\U000ffffd]")
_GAP = "\n\n"


class ApiError(Exception):
    """An error response: HTTP status, message, and a code for programs."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None):
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


class RewardBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of a reward."""

    reward: float
    success: bool | None = None
    done: bool = False


class EndBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of a request to end a session."""

    reward: float = 0.0
    success: bool | None = None
    truncated: bool = False


class OpenBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of a request to open a session."""

    id: str | None = None
    env_id: str | None = None
    env_kwargs: dict[str, Any] = {}
    task: int | None = None
    split: str | None = None
    env_seed: int = 0
    sampling_seed: int | None = None
    group_id: str = ""
    member: int = 0
    max_turns: int | None = None
    max_tokens: int | None = None
    metadata: dict[str, Any] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A parsed request for replies of the model."""

    model: str
    system: str
    messages: tuple[Message, ...]
    """Without system messages, ending with the user or a tool; adjacent ones of one role are joined."""
    keys: tuple[bytes, ...]
    """For each assistant message, a digest of the conversation up to it."""
    tools: tuple[ToolSpec, ...] = ()
    max_calls: int | None = None
    """Tool calls shown to the client: ``None`` for all, 0 for a reply that is only text."""
    forced: tuple[str, ...] = ()
    """Names of tools one of which the reply must call; empty where it need not call any."""
    sampling: Mapping[str, Any]
    """Those of temperature, top_p, top_k and min_p that were given."""
    max_tokens: int | None
    stops: tuple[str, ...]
    seed: int | None
    n: int = 1
    """Number of replies."""
    logprobs: bool = False
    ignored: tuple[str, ...] = ()
    """Fields of the request without effect, which are reported to the client."""

    @property
    def new_messages(self) -> tuple[Message, ...]:
        """The messages after the last one of the assistant."""
        index = len(self.messages)
        while index and self.messages[index - 1].role != "assistant":
            index -= 1
        return self.messages[index:]

    @property
    def answers_calls(self) -> bool:
        """Whether the newest messages have results of tools."""
        return any(message.role == "tool" for message in self.new_messages)

    @property
    def text(self) -> str:
        """The text of the newest messages."""
        return _GAP.join(message.text for message in self.new_messages)

    def key_after(self, reply: Message) -> bytes:
        """Return the digest of this conversation with a reply."""
        return _keys(self.system, self.tools, (*self.messages, reply))[-1]

    def is_auxiliary(self, pattern: re.Pattern[str] | None, max_tokens: int) -> bool:
        """Return whether this request is auxiliary: its texts match, or its token limit is below."""
        if self.max_tokens is not None and self.max_tokens < max_tokens:
            return True
        users = [message.text for message in self.messages if message.role == "user"]
        return pattern is not None and any(pattern.search(text) for text in (self.system, *users[-1:]))


def make_request(
    *,
    model: str,
    messages: Iterable[Message],
    tools: Sequence[ToolSpec] = (),
    max_calls: int | None = None,
    forced: Sequence[str] = (),
    sampling: Mapping[str, Any] | None = None,
    max_tokens: int | None = None,
    stops: Sequence[str] = (),
    seed: int | None = None,
    n: int | None = None,
    logprobs: bool = False,
    ignored: Sequence[str] = (),
) -> ChatRequest:
    """Check and join what a dialect has read.

    Raises:
        ApiError: The request is invalid.
    """
    system, conversation = _conversation(messages)
    given = {name: value for name, value in (sampling or {}).items() if value is not None}
    check_sampling(given)
    check(
        max_tokens is None or max_tokens >= 1,
        f"max_tokens must be at least 1, not {max_tokens}.",
        "max_tokens",
    )
    check(len(stops) <= MAX_STOPS, f"stop takes at most {MAX_STOPS} texts, not {len(stops)}.", "stop")
    check(all(stops), "stop holds an empty text.", "stop")
    number = 1 if n is None else n
    check(1 <= number <= MAX_REPLIES, f"n must be from 1 to {MAX_REPLIES}, not {n}.", "n")
    check(len(tools) <= MAX_TOOLS, f"tools takes at most {MAX_TOOLS} tools, not {len(tools)}.", "tools")
    names = [tool.name for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    check(twice is None, f"tools holds {twice!r} twice.", "tools")
    return ChatRequest(
        model=model,
        system=system,
        messages=conversation,
        keys=_keys(system, tools, conversation),
        tools=tuple(tools),
        max_calls=max_calls,
        forced=tuple(forced),
        sampling=given,
        max_tokens=max_tokens,
        stops=tuple(stops),
        seed=None if seed is None else seed % 2**64,
        n=number,
        logprobs=logprobs,
        ignored=tuple(ignored),
    )


def read(body: bytes, kind: type[T]) -> T:
    """Decode a JSON body into ``kind``; raise an `ApiError` where it does not match."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ApiError(400, f"The request cannot be read: {error}.", code="invalid_json") from None


def convert(value: Any, kind: type[T], where: str) -> T:
    """Convert a part of a JSON body into ``kind``; raise an `ApiError` where it does not match."""
    try:
        return msgspec.convert(value, kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ApiError(400, f"{where} cannot be read: {error}.", code="invalid_value", param=where) from None


def read_fields(
    body: bytes,
    kind: type[T],
    *,
    harmless: frozenset[str] = frozenset(),
    ignored: frozenset[str] = frozenset(),
    rejected: Mapping[str, str] | None = None,
) -> tuple[T, tuple[str, ...]]:
    """Decode a body whose fields are all known.

    Args:
        body: The JSON text.
        kind: Struct of the supported fields.
        harmless: Further fields that cannot change the reply.
        ignored: Fields that are accepted without effect; those given are returned.
        rejected: Fields that would change the reply, with a word of advice for each.
    """
    value = read(body, dict[str, Any])
    supported = {field.name for field in msgspec.structs.fields(kind)}  # type: ignore[arg-type]
    for name, given in value.items():
        if name in supported or name in harmless or name in ignored:
            continue
        if name in (rejected or {}):
            # A client library may send a field with the value that has no effect.
            neutral = given in (None, False, "", 0) or given == [] or given == {}
            check(neutral, f"{name} is not supported: {(rejected or {})[name]}.", name)
        elif given is not None:
            raise ApiError(
                400,
                f"{shown(name)} is not a field that this endpoint knows: leave it out.",
                code="unknown_parameter",
                param=name,
            )
    without_effect = tuple(name for name in value if name in ignored and value[name] is not None)
    return read(body, kind), without_effect


def check_name(name: str) -> str:
    """Return ``name`` if it is a valid session name."""
    if not SESSION_NAME.fullmatch(name):
        raise ApiError(400, "A session name has 1 to 128 letters, digits, dots, dashes and underscores.")
    return name


def check(holds: bool, message: str, param: str) -> None:
    """Raise an `ApiError` where a condition does not hold."""
    if not holds:
        raise ApiError(400, message, code="invalid_value", param=param)


def shown(value: Any) -> str:
    """Return a value of a client for an error message, shortened."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def check_sampling(sampling: Mapping[str, Any]) -> None:
    """Check temperature, top_p, top_k and min_p."""
    rules: dict[str, tuple[str, Callable[[float], bool]]] = {
        "temperature": ("from 0 to 2", lambda value: 0 <= value <= 2),
        "top_p": ("above 0 and at most 1", lambda value: 0 < value <= 1),
        "top_k": ("at least 0", lambda value: value >= 0),
        "min_p": ("at least 0 and below 1", lambda value: 0 <= value < 1),
    }
    for name, value in sampling.items():
        rule, holds = rules[name]
        check(math.isfinite(value) and holds(value), f"{name} must be {rule}, not {value}.", name)


def make_tool(name: Any, description: Any, parameters: Any, where: str) -> ToolSpec:
    """Return a tool that a client offers."""
    check(
        isinstance(name, str) and bool(_TOOL_NAME.fullmatch(name)),
        f"{where} needs a name of 1 to 128 letters, digits, underscores and dashes.",
        where,
    )
    check(description is None or isinstance(description, str), f"{where}.description must be text.", where)
    check(
        parameters is None or isinstance(parameters, dict),
        f"{where}.parameters must be a JSON schema.",
        where,
    )
    schema = parameters if parameters is not None else {"type": "object", "properties": {}}
    return ToolSpec(name=name, description=clean_text(description or ""), parameters=jsonable(schema))


def make_call(call_id: Any, name: Any, arguments: Any, where: str) -> ToolCall:
    """Return a tool call in the history that a client sends."""
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}")
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            raise ApiError(400, f"{where}: the arguments of a tool call must be JSON.", param=where) from None
    check(isinstance(arguments, dict), f"{where}: the arguments of a tool call must be a JSON object.", where)
    check(isinstance(name, str) and bool(name), f"{where}: a tool call needs the name of a tool.", where)
    check(call_id is None or isinstance(call_id, str), f"{where}: the id of a tool call must be text.", where)
    return ToolCall(id=clean_text(call_id or ""), name=clean_text(name), arguments=jsonable(arguments))


def _conversation(messages: Iterable[Message]) -> tuple[str, tuple[Message, ...]]:
    """Return the system message, and the others with adjacent messages of one role joined."""
    system: list[str] = []
    joined: list[Message] = []
    calls: dict[str, str] = {}
    private = 0
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        private += 0 if message.text.isascii() else len(_PRIVATE.findall(message.text))
        images = not isinstance(message.content, str) and any(
            isinstance(part, ImagePart) for part in message.content
        )
        check(not images, f"{where} holds an image: only text is supported.", where)
        calls |= {call.id: call.name for call in message.tool_calls if call.id}
        if message.role == "system":
            check(not joined, f"{where} is a system message after other messages: put it first.", where)
            system.append(message.text)
        elif message.role == "tool":
            known = calls.get(message.tool_call_id, "")
            check(
                bool(joined) and joined[-1].role in ("tool", "assistant") and bool(known or message.name),
                f"{where} answers a tool call, but no assistant message before it makes a call with the id "
                f"{shown(message.tool_call_id)}.",
                where,
            )
            joined.append(message if message.name else replace(message, name=known))
        elif joined and joined[-1].role == message.role:
            joined[-1] = _join(joined[-1], message)
        else:
            joined.append(message)
    last = joined[-1].role if joined else None
    check(
        last in ("user", "tool"), f"The last message must have the role user or tool, not {last}.", "messages"
    )
    check(private <= MAX_PRIVATE, "The messages hold too many private-use characters.", "messages")
    return _GAP.join(system), tuple(joined)


def _join(first: Message, second: Message) -> Message:
    texts = [text for text in (first.text, second.text) if text] if second.role == "assistant" else None
    return replace(
        first,
        content=_GAP.join((first.text, second.text) if texts is None else texts),
        reasoning=_GAP.join(text for text in (first.reasoning, second.reasoning) if text),
        tool_calls=first.tool_calls + second.tool_calls,
    )


def _keys(system: str, tools: Sequence[ToolSpec], messages: Sequence[Message]) -> tuple[bytes, ...]:
    """Return a digest after each assistant message.

    Clients trim replies, drop reasoning, and change the ids of calls: none of that enters the digest.
    """
    digest, keys = hashlib.sha256(_prefixed(system)), []
    digest.update(_prefixed(_canonical([tool.to_openai() for tool in tools])))
    for message in messages:
        if message.role != "assistant":
            digest.update(_prefixed(f"{message.role} {message.text}"))
            continue
        digest.update(_prefixed(f"assistant {message.text.strip()}"))
        digest.update(_prefixed(_canonical([[call.name, call.arguments] for call in message.tool_calls])))
        keys.append(digest.digest())
    return tuple(keys)


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True) if value else ""


def _prefixed(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return len(data).to_bytes(8, "big") + data
