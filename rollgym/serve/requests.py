"""Strict parsing of requests: a request is either understood as a whole or rejected with an error."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from rollgym.chat.template_probe import Message
from rollgym.core.serialization import clean_text

T = TypeVar("T")
MAX_STOPS = 16
MAX_PRIVATE = 1000
"""Private-use characters in a request: with most of them taken, finding a free one as a mark is slow."""
SESSION_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_PRIVATE = re.compile("[\U000f0000-\U000ffffd]")
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_UNSUPPORTED = (
    "tools", "functions", "logit_bias", "top_logprobs", "frequency_penalty", "presence_penalty"
)  # fmt: skip
_GAP = "\n\n"


class ApiError(Exception):
    """An error response: HTTP status, message, and a code for programs."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None):
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


class _Part(msgspec.Struct):
    type: str
    text: str = ""


class _MessageBody(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None
    tool_calls: Any = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Body(msgspec.Struct):
    model: str
    messages: list[_MessageBody]
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Any = None
    tools: Any = None
    functions: Any = None
    response_format: Any = None


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
    """A parsed chat-completion request."""

    model: str
    system: str
    messages: tuple[Message, ...]
    """User and assistant in alternation, ending with the user; adjacent messages of one role are joined."""
    keys: tuple[bytes, ...]
    """For each assistant message, a digest of the conversation up to it."""
    sampling: dict[str, Any]
    """Those of temperature, top_p, top_k and min_p that were given."""
    max_tokens: int | None
    stops: tuple[str, ...]
    seed: int | None
    stream: bool
    usage: bool
    """Whether a stream ends with the token usage."""
    logprobs: bool

    @property
    def text(self) -> str:
        """The newest message."""
        return self.messages[-1]["content"]

    def key_after(self, reply: str) -> bytes:
        """Return the digest of this conversation with a reply."""
        message = Message(role="assistant", content=reply)
        return _keys(self.system, (*self.messages, message))[-1]


def read_chat(body: bytes) -> ChatRequest:
    """Parse a chat-completion request.

    Raises:
        ApiError: The request is invalid or uses an unsupported feature.
    """
    request = read(body, _Body)
    _reject_unsupported(request)
    system, messages = _conversation(request.messages)
    given = {name: getattr(request, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    sampling = {name: value for name, value in given.items() if value is not None}
    _check_sampling(sampling)
    max_tokens = request.max_completion_tokens or request.max_tokens
    for name in ("max_tokens", "max_completion_tokens"):
        value = getattr(request, name)
        _check(value is None or value >= 1, f"{name} must be at least 1, not {value}.", name)
    stops = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    _check(len(stops) <= MAX_STOPS, f"stop takes at most {MAX_STOPS} texts, not {len(stops)}.", "stop")
    _check(all(stops), "stop holds an empty text.", "stop")
    return ChatRequest(
        model=request.model,
        system=system,
        messages=messages,
        keys=_keys(system, messages),
        sampling=sampling,
        max_tokens=max_tokens,
        stops=stops,
        seed=None if request.seed is None else request.seed % 2**64,
        stream=bool(request.stream),
        usage=bool(request.stream_options and request.stream_options.include_usage),
        logprobs=bool(request.logprobs),
    )


def read(body: bytes, kind: type[T]) -> T:
    """Decode a JSON body into ``kind``; raise an `ApiError` where it does not match."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ApiError(400, f"The request cannot be read: {error}.", code="invalid_json") from None


def check_name(name: str) -> str:
    """Return ``name`` if it is a valid session name."""
    if not SESSION_NAME.fullmatch(name):
        raise ApiError(400, "A session name has 1 to 128 letters, digits, dots, dashes and underscores.")
    return name


def _check(holds: bool, message: str, param: str) -> None:
    if not holds:
        raise ApiError(400, message, code="invalid_value", param=param)


def _reject_unsupported(request: _Body) -> None:
    _check(request.n in (None, 1), f"n must be 1, not {request.n}: send one request per reply.", "n")
    form = request.response_format
    plain_text = isinstance(form, dict) and form.get("type") == "text"
    _check(not form or plain_text, "response_format is not supported: leave it out.", "response_format")
    for name in _UNSUPPORTED:
        _check(not getattr(request, name), f"{name} is not supported: leave it out.", name)


def _check_sampling(sampling: dict[str, Any]) -> None:
    rules: dict[str, tuple[str, Callable[[float], bool]]] = {
        "temperature": ("from 0 to 2", lambda value: 0 <= value <= 2),
        "top_p": ("above 0 and at most 1", lambda value: 0 < value <= 1),
        "top_k": ("at least 0", lambda value: value >= 0),
        "min_p": ("at least 0 and below 1", lambda value: 0 <= value < 1),
    }
    for name, value in sampling.items():
        rule, holds = rules[name]
        _check(math.isfinite(value) and holds(value), f"{name} must be {rule}, not {value}.", name)


def _conversation(bodies: list[_MessageBody]) -> tuple[str, tuple[Message, ...]]:
    """Return the system message, and the others in alternation."""
    system: list[str] = []
    messages: list[Message] = []
    private = 0
    for number, message in enumerate(bodies):
        where = f"messages[{number}]"
        role, text = _ROLES.get(message.role), _text(message, where)
        private += len(_PRIVATE.findall(text)) if not text.isascii() else 0
        _check(role is not None, f"{where} has role {message.role!r}: use system, user or assistant.", where)
        if role == "system":
            _check(not messages, f"{where} is a system message after other messages: put it first.", where)
            system.append(text)
        elif messages and messages[-1]["role"] == role:
            messages[-1]["content"] += _GAP + text
        else:
            messages.append({"role": str(role), "content": text})
    last = messages[-1]["role"] if messages else None
    _check(last == "user", f"The last message must have the role user, not {last}.", "messages")
    _check(private <= MAX_PRIVATE, "The messages hold too many private-use characters.", "messages")
    return _GAP.join(system), tuple(messages)


def _text(message: _MessageBody, where: str) -> str:
    _check(not message.tool_calls, f"{where} has tool calls, which are not supported.", where)
    if isinstance(message.content, list):
        kinds = {part.type for part in message.content} - {"text"}
        _check(
            not kinds, f"{where} holds {', '.join(map(repr, sorted(kinds)))}: only text is supported.", where
        )
        return clean_text("".join(part.text for part in message.content))
    _check(message.content is not None, f"{where} has no content.", where)
    return clean_text(message.content or "")


def _keys(system: str, messages: tuple[Message, ...]) -> tuple[bytes, ...]:
    """Return a digest after each assistant message; white space around it, often trimmed, is ignored."""
    digest, keys = hashlib.sha256(_prefixed(system)), []
    for message in messages:
        is_reply = message["role"] == "assistant"
        digest.update(_prefixed(message["content"].strip() if is_reply else message["content"]))
        if is_reply:
            keys.append(digest.digest())
    return tuple(keys)


def _prefixed(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return len(data).to_bytes(8, "big") + data
