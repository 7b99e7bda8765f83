"""What clients ask for, read strictly: a request is either understood whole or refused with a sentence."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from rollgym.chat.facts import Message
from rollgym.records import clean_text

T = TypeVar("T")
MAX_STOPS = 16
MAX_PRIVATE = 1000
"""Characters for private use in a request: finding one that does not occur takes long where most do."""
SESSION_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_PRIVATE = re.compile("[\U000f0000-\U000ffffd]")
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_GAP = "\n\n"


class Refused(Exception):
    """A request that is answered with an error: its status, a sentence, and a code for programs."""

    def __init__(self, status: int, sentence: str, *, code: str | None = None, param: str | None = None):
        super().__init__(sentence)
        self.status = status
        self.code = code
        self.param = param


class _Part(msgspec.Struct):
    type: str
    text: str = ""


class _Said(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None
    tool_calls: Any = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Body(msgspec.Struct):
    model: str
    messages: list[_Said]
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
    """What a conversation was worth."""

    reward: float
    success: bool | None = None
    done: bool = False


class EndBody(msgspec.Struct, forbid_unknown_fields=True):
    """How a conversation ends."""

    reward: float = 0.0
    success: bool | None = None
    truncated: bool = False


class OpenBody(msgspec.Struct, forbid_unknown_fields=True):
    """What a conversation is about."""

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
    """One reply that a client wants."""

    model: str
    system: str
    messages: tuple[Message, ...]
    """User and assistant by turns, the user's last; messages of one role in a row are joined."""
    keys: tuple[bytes, ...]
    """For each assistant message: a digest of the conversation up to it."""
    sampling: dict[str, Any]
    """Of temperature, top_p, top_k and min_p what was given."""
    max_tokens: int | None
    stops: tuple[str, ...]
    seed: int | None
    stream: bool
    usage: bool
    """Whether a stream ends with what it cost."""
    logprobs: bool

    @property
    def text(self) -> str:
        """The newest message."""
        return self.messages[-1]["content"]

    def key_after(self, reply: str) -> bytes:
        """The digest of this conversation with a reply."""
        said = Message(role="assistant", content=reply)
        return _keys(self.system, (*self.messages, said))[-1]


def read_chat(body: bytes) -> ChatRequest:
    """A request for a chat completion."""
    asked = read(body, _Body)
    _refuse_unsupported(asked)
    system, messages = _conversation(asked.messages)
    given = {name: getattr(asked, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    sampling = {name: value for name, value in given.items() if value is not None}
    _check_sampling(sampling)
    max_tokens = asked.max_completion_tokens or asked.max_tokens
    for name in ("max_tokens", "max_completion_tokens"):
        value = getattr(asked, name)
        _check(value is None or value >= 1, f"{name} must be at least 1, not {value}.", name)
    stops = (asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ())
    _check(len(stops) <= MAX_STOPS, f"stop takes at most {MAX_STOPS} texts, not {len(stops)}.", "stop")
    _check(all(stops), "stop holds an empty text.", "stop")
    return ChatRequest(
        model=asked.model,
        system=system,
        messages=messages,
        keys=_keys(system, messages),
        sampling=sampling,
        max_tokens=max_tokens,
        stops=stops,
        seed=None if asked.seed is None else asked.seed % 2**64,
        stream=bool(asked.stream),
        usage=bool(asked.stream_options and asked.stream_options.include_usage),
        logprobs=bool(asked.logprobs),
    )


def read(body: bytes, kind: type[T]) -> T:
    """A body as a value of this kind; `Refused` says what is wrong with it."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise Refused(400, f"The request cannot be read: {error}.", code="invalid_json") from None


def check_name(name: str) -> str:
    """The name of a session, if it is one."""
    if not SESSION_NAME.fullmatch(name):
        raise Refused(400, "A session's name is 1 to 128 letters, digits, dots, dashes and underscores.")
    return name


def _check(holds: bool, sentence: str, param: str) -> None:
    if not holds:
        raise Refused(400, sentence, code="invalid_value", param=param)


def _refuse_unsupported(asked: _Body) -> None:
    _check(asked.n in (None, 1), f"n must be 1, not {asked.n}: ask again for another reply.", "n")
    form = asked.response_format
    if isinstance(form, dict) and form.get("type") == "text":
        form = None
    unsupported = {
        "tools": asked.tools,
        "functions": asked.functions,
        "response_format": form,
        "logit_bias": asked.logit_bias,
        "top_logprobs": asked.top_logprobs,
        "frequency_penalty": asked.frequency_penalty,
        "presence_penalty": asked.presence_penalty,
    }
    for name, value in unsupported.items():
        _check(not value, f"{name} is not supported here: leave it out.", name)


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


def _conversation(said: list[_Said]) -> tuple[str, tuple[Message, ...]]:
    """The system message, and the others by turns."""
    system: list[str] = []
    messages: list[Message] = []
    private = 0
    for number, one in enumerate(said):
        where = f"messages[{number}]"
        role, text = _ROLES.get(one.role), _text(one, where)
        private += len(_PRIVATE.findall(text)) if not text.isascii() else 0
        _check(role is not None, f"{where} has the role {one.role!r}: use system, user or assistant.", where)
        if role == "system":
            _check(not messages, f"{where} is a system message: those come first.", where)
            system.append(text)
        elif messages and messages[-1]["role"] == role:
            messages[-1]["content"] += _GAP + text
        else:
            messages.append({"role": str(role), "content": text})
    last = messages[-1]["role"] if messages else "nobody"
    _check(last == "user", f"The last message must be the user's, but it is {last}'s.", "messages")
    _check(private <= MAX_PRIVATE, "The messages hold too many characters for private use.", "messages")
    return _GAP.join(system), tuple(messages)


def _text(one: _Said, where: str) -> str:
    _check(not one.tool_calls, f"{where} has tool calls, which are not supported here.", where)
    if isinstance(one.content, list):
        kinds = {part.type for part in one.content} - {"text"}
        _check(not kinds, f"{where} holds {', '.join(map(repr, sorted(kinds)))}: only text is read.", where)
        return clean_text("".join(part.text for part in one.content))
    _check(one.content is not None, f"{where} has no content.", where)
    return clean_text(one.content or "")


def _keys(system: str, messages: tuple[Message, ...]) -> tuple[bytes, ...]:
    """A digest after each assistant message. White space around it does not count: many programs trim it."""
    digest, found = hashlib.sha256(_length(system)), []
    for message in messages:
        own = message["role"] == "assistant"
        digest.update(_length(message["content"].strip() if own else message["content"]))
        if own:
            found.append(digest.digest())
    return tuple(found)


def _length(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return len(data).to_bytes(8, "big") + data
