"""Structured messages: what passes between environment, agent, chat template and endpoint.

A `Message` has text, reasoning, tool calls or the result of one. Plain-text environments need none of this:
their observations and actions stay strings. `Message.to_openai` and `Message.from_openai` convert to the form
of OpenAI's chat completions, which chat templates read too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["ContentPart", "ImagePart", "Message", "Role", "TextPart", "ToolCall", "ToolSpec", "text_of"]

Role = Literal["system", "user", "assistant", "tool"]
_ROLES = ("system", "user", "assistant", "tool")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """A tool that an agent may call.

    Example:
        >>> ToolSpec(name="move", description="Move the player.", parameters={"type": "object"}).to_openai()
        {'type': 'function', 'function': {'name': 'move', 'description': 'Move the player.', ...}}
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    """JSON schema of the arguments, an object."""

    def __post_init__(self) -> None:
        _require(bool(self.name), "a tool needs a name")

    def to_openai(self) -> dict[str, Any]:
        """Return the tool as an entry of ``tools`` in a chat completion request."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call of a tool by the agent. Text that is not a valid call never becomes a `ToolCall`.

    Example:
        >>> ToolCall(id="call_0", name="move", arguments={"direction": "up"}).to_json()
        '{"name": "move", "arguments": {"direction": "up"}}'
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    id: str = ""
    """Matches a call with its result; may be empty while there is one call per turn."""

    def __post_init__(self) -> None:
        _require(bool(self.name), "a tool call needs the name of a tool")
        _require(isinstance(self.arguments, dict), "the arguments of a tool call must be a JSON object")

    def to_json(self) -> str:
        """Return the call as plain text: the form of an action in Gymnasium's interface."""
        return json.dumps({"name": self.name, "arguments": self.arguments}, ensure_ascii=False)

    def to_openai(self) -> dict[str, Any]:
        """Return the call as an entry of ``tool_calls`` in an assistant message."""
        arguments = json.dumps(self.arguments, ensure_ascii=False)
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": arguments}}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPart:
    """Text in the content of a message."""

    text: str
    type: Literal["text"] = "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePart:
    """An image in the content of a message, as a URL or a ``data:`` URL."""

    url: str
    type: Literal["image"] = "image"


ContentPart = TextPart | ImagePart


def text_of(content: str | Sequence[ContentPart]) -> str:
    """Return the text of a message's content; parts are joined by newlines, images left out."""
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in content if isinstance(part, TextPart))


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation.

    Example:
        >>> Message(role="tool", content="It is locked.", tool_call_id="call_0").text
        'It is locked.'
    """

    role: Role
    content: str | tuple[ContentPart, ...] = ""
    reasoning: str = ""
    """Reasoning of the assistant, which chat templates render or drop by their own rules."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls of the assistant, in order."""
    tool_call_id: str = ""
    """The call that a message of role ``tool`` answers."""
    name: str = ""
    """The tool that a message of role ``tool`` comes from."""

    def __post_init__(self) -> None:
        _require(self.role in _ROLES, f"role must be one of {', '.join(_ROLES)}, not {self.role!r}")
        _require(
            self.role == "assistant" or not (self.tool_calls or self.reasoning),
            f"only the assistant calls tools and reasons, not the role {self.role!r}",
        )
        _require(
            self.role == "tool" or not self.tool_call_id,
            f"only a message of role tool answers a call, not one of {self.role!r}",
        )

    @property
    def text(self) -> str:
        """The text of the content, without images."""
        return text_of(self.content)

    def to_openai(self) -> dict[str, Any]:
        """Return the message in the form of OpenAI's chat completions."""
        content: Any = self.content
        if not isinstance(content, str):
            content = [_part_to_openai(part) for part in content]
        message: dict[str, Any] = {"role": self.role, "content": content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.to_openai() for call in self.tool_calls]
        if self.tool_call_id:
            message["tool_call_id"] = self.tool_call_id
        if self.name:
            message["name"] = self.name
        return message

    @classmethod
    def from_openai(cls, message: Mapping[str, Any]) -> Message:
        """Read a message in the form of OpenAI's chat completions.

        Raises:
            ValueError: It is not such a message; the text states what is wrong.
        """
        role = {"developer": "system"}.get(message.get("role", ""), message.get("role", ""))
        calls = message.get("tool_calls") or ()
        _require(isinstance(calls, (list, tuple)), "tool_calls must be a list")
        return cls(
            role=role,
            content=_content(message.get("content")),
            reasoning=str(message.get("reasoning_content") or message.get("reasoning") or ""),
            tool_calls=tuple(_call(call) for call in calls),
            tool_call_id=str(message.get("tool_call_id") or ""),
            name=str(message.get("name") or ""),
        )


def _part_to_openai(part: ContentPart) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    return {"type": "image_url", "image_url": {"url": part.url}}


def _content(content: Any) -> str | tuple[ContentPart, ...]:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    _require(isinstance(content, (list, tuple)), "content must be a string or a list of parts")
    parts = tuple(_part(part) for part in content)
    if all(isinstance(part, TextPart) for part in parts):
        return text_of(parts)
    return parts


def _part(part: Any) -> ContentPart:
    _require(isinstance(part, Mapping), "a content part must be an object")
    kind = part.get("type")
    if kind in ("text", "input_text", "output_text"):
        _require(isinstance(part.get("text"), str), f"a content part of type {kind} needs a text")
        return TextPart(text=part["text"])
    if kind == "image_url":
        image = part.get("image_url")
        url = image.get("url") if isinstance(image, Mapping) else image
        _require(isinstance(url, str), "a content part of type image_url needs a url")
        return ImagePart(url=str(url))
    raise ValueError(f"content parts of type {kind!r} are not supported: text and image_url are")


def _call(call: Any) -> ToolCall:
    _require(isinstance(call, Mapping), "a tool call must be an object")
    function = call.get("function")
    _require(isinstance(function, Mapping), "a tool call needs a function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise ValueError("the arguments of a tool call must be JSON") from None
    _require(isinstance(arguments, dict), "the arguments of a tool call must be a JSON object")
    name = function.get("name")
    _require(isinstance(name, str) and bool(name), "a tool call needs the name of a tool")
    return ToolCall(id=str(call.get("id") or ""), name=name, arguments=arguments)
