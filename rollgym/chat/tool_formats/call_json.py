"""Tool calls as JSON: the part that most formats share."""

from __future__ import annotations

import json
import re
from typing import Any

from rollgym.chat.tool_formats.base import MalformedCall
from rollgym.core.messages import ToolCall
from rollgym.core.serialization import jsonable

__all__ = ["MAX_DEPTH", "call_object", "calls_of", "json_at", "looks_like_a_call", "may_start_as_call"]

MAX_DEPTH = 64
"""Nesting of arguments; deeper ones are malformed."""


def _refuse_constant(name: str) -> Any:
    raise MalformedCall(f"{name} is not JSON")


_decoder = json.JSONDecoder(parse_constant=_refuse_constant)


def json_at(text: str, position: int) -> tuple[Any, int]:
    """Return the JSON value at a position, after white space, and where it ends."""
    while position < len(text) and text[position].isspace():
        position += 1
    return _decoder.raw_decode(text, position)


def _depth(value: Any) -> int:
    """Return the nesting of a value; stops counting above the limit."""
    level, depth = [value], 0
    while level and depth <= MAX_DEPTH:
        inner: list[Any] = []
        for part in level:
            inner += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        level, depth = inner, depth + 1
    return depth


def calls_of(value: Any) -> list[ToolCall]:
    """Return the calls of a JSON value: an object, or a list of objects."""
    if _depth(value) > MAX_DEPTH:
        raise MalformedCall(f"it is nested more than {MAX_DEPTH} levels deep")
    return [_call_of(item) for item in (value if isinstance(value, list) else [value])]


def _call_of(value: Any) -> ToolCall:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = {**value["function"], "id": value.get("id")}
    if not isinstance(value, dict):
        raise MalformedCall("a call must be a JSON object")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise MalformedCall("the name of a tool is missing")
    arguments: Any = next(
        (value[key] for key in ("arguments", "parameters") if value.get(key) is not None), {}
    )
    if isinstance(arguments, str):
        arguments = _decoder.decode(arguments) if arguments.strip() else {}
        if _depth(arguments) > MAX_DEPTH:
            raise MalformedCall(f"it is nested more than {MAX_DEPTH} levels deep")
    if not isinstance(arguments, dict):
        raise MalformedCall(f"the arguments of {name[:80]!r} must be a JSON object")
    identifier = value.get("id")
    return ToolCall(
        name=jsonable(name),
        arguments=jsonable(arguments),
        id=jsonable(identifier) if isinstance(identifier, str) else "",
    )


def looks_like_a_call(text: str) -> bool:
    """Return whether a text is meant as a call in bare JSON, or as a list of calls."""
    return re.match(r"\s*\[?\s*\{", text) is not None and '"name"' in text


_JSON_START = re.compile(r"\s*(?:\[?\s*\{|\[?\s*\Z)")


def may_start_as_call(text: str) -> bool:
    """Whether an unfinished text may turn out to be a call as bare JSON."""
    return _JSON_START.match(text) is not None


def call_object(call: ToolCall, key: str = "arguments") -> str:
    """Return a call as a JSON object, with its arguments under ``key``."""
    return json.dumps({"name": call.name, key: call.arguments}, ensure_ascii=False)
