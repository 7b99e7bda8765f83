"""Python functions as tools: JSON schemas of their arguments, checked calls, and calls as text.

The plain-text form of a turn with tools is JSON: one call ``{"name": ..., "arguments": {...}}`` or a list of
calls. `read_calls` reads it; `Tool` makes the schema of a function with pydantic and checks arguments.
"""

from __future__ import annotations

import inspect
import itertools
import json
import re
import string
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints, overload

import numpy as np

from rollgym.core.errors import UsageError, nearest, one_line
from rollgym.core.messages import ToolCall, ToolSpec

if TYPE_CHECKING:
    from pydantic import BaseModel

__all__ = [
    "BadCall", "Tool", "find_tools", "list_calls", "list_tools", "random_arguments", "read_calls",
    "text_tool", "tool", "typed_call", "unknown_tool", "with_ids", "write_calls",
]  # fmt: skip

MAX_LISTED_CALLS = 64
"""Calls are listed as ``info["actions"]`` where there are at most this many."""
_MARK = "_rollgym_tool"
_FORM = '{"name": ..., "arguments": {...}}'
_Function = TypeVar("_Function", bound=Callable[..., Any])


def text_tool(name: str, description: str, argument: str, meaning: str) -> ToolSpec:
    """Return a tool with one argument, a text.

    Example:
        >>> text_tool("submit", "Submit the answer.", "answer", "The answer.").parameters["required"]
        ['answer']
    """
    return ToolSpec(
        name=name,
        description=description,
        parameters={
            "type": "object",
            "properties": {argument: {"type": "string", "description": meaning}},
            "required": [argument],
            "additionalProperties": False,
        },
    )


class BadCall(ValueError):
    """Text or arguments that are not a valid call; the message is a sentence for the agent."""


@overload
def tool(function: _Function) -> _Function: ...
@overload
def tool(*, name: str | None = None) -> Callable[[_Function], _Function]: ...
def tool(function: _Function | None = None, *, name: str | None = None) -> Any:
    """Mark a method of a `ToolEnv` as a tool: the agent may call it by its name.

    The type hints become the JSON schema of the arguments. The docstring becomes the description, and its
    ``Args:`` section the descriptions of the arguments.

    Args:
        function: The method.
        name: Name of the tool where it is not the method's name.

    Example:
        >>> class Door(ToolEnv):
        ...     @tool
        ...     def turn(self, key: Literal["left", "right"]) -> str:
        ...         '''Turn the key.'''
        ...         return f"You turned the key {key}."
    """

    def mark(function: _Function) -> _Function:
        setattr(function, _MARK, name or function.__name__)
        return function

    return mark if function is None else mark(function)


def find_tools(cls: type) -> dict[str, str]:
    """Return the tools of a class: the tool's name and the method's, base classes first.

    A method that overrides a tool is a tool as well, decorated or not.
    """
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        for method, value in vars(base).items():
            if callable(value) and hasattr(value, _MARK):
                found = {tool: other for tool, other in found.items() if other != method}
                found[getattr(value, _MARK)] = method
    return {name: method for name, method in found.items() if callable(getattr(cls, method))}


class Tool:
    """A function with a schema: made once per class, shared by all instances.

    Args:
        name: Name of the tool.
        cls: The class that has the method.
        method: Name of the method.
    """

    def __init__(self, name: str, cls: type, method: str) -> None:
        from pydantic import ConfigDict, create_model
        from pydantic.errors import PydanticUserError

        function = getattr(cls, method)
        if inspect.iscoroutinefunction(function):
            raise UsageError(f"The tool {name} is an async function: define it without async.")
        self.name, self.method = name, method
        description, texts = _read_docstring(inspect.getdoc(function) or "")
        try:
            hints = get_type_hints(function, include_extras=True)
            fields = _fields(name, function, hints, texts)
            model = create_model(
                name, __config__=ConfigDict(extra="forbid", protected_namespaces=()), **fields
            )
            schema = model.model_json_schema()
        except (NameError, TypeError, PydanticUserError) as error:
            raise UsageError(f"The tool {name} has no JSON schema: {one_line(error)}.") from error
        self._model: type[BaseModel] = model
        self.spec = ToolSpec(name=name, description=description, parameters=_without_titles(schema))

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments as the function takes them; raise `BadCall` where they break the schema."""
        from pydantic import ValidationError

        try:
            # As JSON and not as Python values: a list is a valid tuple, but "3" is not a number.
            text = json.dumps(dict(arguments), allow_nan=False)
            values = self._model.model_validate_json(text, strict=True)
        except ValidationError as error:
            raise BadCall(f"The arguments of {self.name} are invalid: {_explain(error.errors())}") from None
        except (ValueError, TypeError, RecursionError):
            raise BadCall(f"The arguments of {self.name} are not valid JSON.") from None
        # Attributes and not model_dump(): arguments that are models stay models.
        return {key: getattr(values, key) for key in type(values).model_fields}


def _fields(
    name: str, function: Callable[..., Any], hints: Mapping[str, Any], texts: Mapping[str, str]
) -> dict[str, Any]:
    from pydantic import Field

    fields: dict[str, Any] = {}
    for parameter in list(inspect.signature(function).parameters.values())[1:]:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UsageError(f"The tool {name} takes {parameter}: declare each argument by its name.")
        if parameter.name not in hints:
            raise UsageError(f"The argument {parameter.name!r} of the tool {name} needs a type hint.")
        default = ... if parameter.default is parameter.empty else parameter.default
        text = texts.get(parameter.name)
        fields[parameter.name] = (hints[parameter.name], Field(default, description=text))
    return fields


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the description, and the descriptions of arguments in the section ``Args:``."""
    head, _, rest = re.sub(r"^Args:\s*$", "\0", text, flags=re.MULTILINE).partition("\0")
    section = re.split(r"^\S", rest.strip("\n"), maxsplit=1, flags=re.MULTILINE)[0]
    arguments: dict[str, str] = {}
    current = ""
    for line in section.splitlines():
        start = re.match(r"\s+(\w+)(?: \([^)]*\))?:\s*(.*)", line)
        if start and len(line) - len(line.lstrip()) <= 4:
            current = start[1]
            arguments[current] = start[2].strip()
        elif current and line.strip():
            arguments[current] = f"{arguments[current]} {line.strip()}".strip()
    head = re.split(r"^(?:Returns|Raises|Example|Examples):\s*$", head, maxsplit=1, flags=re.MULTILINE)[0]
    return " ".join(head.split()), arguments


def _without_titles(schema: Any) -> Any:
    """Return a schema without the titles that pydantic generates: a model reads every token of it."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: _without_titles(part) for name, part in value.items()}
        if key in ("properties", "$defs") and isinstance(value, dict)
        else _without_titles(value)
        for key, value in schema.items()
        if not (key == "title" and isinstance(value, str))
    }


def _explain(errors: Sequence[Mapping[str, Any]]) -> str:
    parts = []
    for error in errors[:3]:
        where = ".".join(str(part) for part in error["loc"])
        parts.append(f"{where}: {error['msg']}" if where else str(error["msg"]))
    return "; ".join(parts) + "."


def read_calls(text: str) -> tuple[ToolCall, ...]:
    """Read the plain-text form of a turn: one call as JSON, or a list of calls.

    Raises:
        BadCall: It is not; the message states what was expected.

    Example:
        >>> read_calls('{"name": "move", "arguments": {"direction": "up"}}')[0].name
        'move'
    """
    try:
        value = json.loads(_unfenced(text), parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise BadCall(f"That is not a tool call. Answer with JSON: {_FORM}.") from None
    calls = value if isinstance(value, list) else [value]
    if not calls:
        raise BadCall(f"The list of tool calls is empty. Answer with JSON: {_FORM}.")
    return tuple(_read_call(call) for call in calls)


def write_calls(calls: Sequence[ToolCall]) -> str:
    """Return the calls of a turn in their plain-text form: JSON, a list where they are several.

    Example:
        >>> write_calls([ToolCall(name="move", arguments={"direction": "up"})])
        '{"name": "move", "arguments": {"direction": "up"}}'
    """
    texts = [call.to_json() for call in calls]
    return texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"


def typed_call(line: str, tools: Sequence[ToolSpec]) -> str:
    """Return a call that a person typed as words, in order of the arguments, as JSON.

    A line that does not start with the name of a tool is returned unchanged.

    Example:
        >>> typed_call("turn right 3", Safe().tools)
        '{"name": "turn", "arguments": {"direction": "right", "steps": 3}}'
    """
    name, _, rest = line.strip().partition(" ")
    spec = next((spec for spec in tools if spec.name == name), None)
    if spec is None:
        return line
    properties = spec.parameters.get("properties", {})
    words = rest.strip().split(None, len(properties) - 1) if properties else []
    arguments: dict[str, Any] = {}
    for (key, schema), word in zip(properties.items(), words, strict=False):
        arguments[key] = word
        if schema.get("type") != "string":
            with suppress(ValueError, RecursionError):
                arguments[key] = json.loads(word)
    return ToolCall(name=name, arguments=arguments).to_json()


def list_tools(tools: Sequence[ToolSpec]) -> str:
    """Return the tools for a person, a line each: name, arguments and description."""
    lines = [
        f"{spec.name}({', '.join(spec.parameters.get('properties', {}))}): {spec.description}"
        for spec in tools
    ]
    return "\n".join(["Tools (type the name and the arguments, or JSON):", *lines]) if lines else ""


def _unfenced(text: str) -> str:
    """Return the text without a Markdown code fence around it."""
    fenced = re.fullmatch(r"\s*```\w*\n(.*?)\n?```\s*", text, re.DOTALL)
    return fenced[1] if fenced else text


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _read_call(value: Any) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise BadCall(f"A tool call needs the name of a tool. Answer with JSON: {_FORM}.")
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        raise BadCall(f"The arguments of {value['name']} must be a JSON object.")
    identifier = value.get("id", "")
    return ToolCall(
        name=value["name"], arguments=arguments, id=identifier if isinstance(identifier, str) else ""
    )


def unknown_tool(name: str, tools: Sequence[ToolSpec]) -> str:
    """Return the sentence for a call of a tool that does not exist."""
    names = [spec.name for spec in tools]
    near = nearest(name[:80], names)
    ask = f" Did you mean {' or '.join(near)}?" if near else ""
    return f"There is no tool called {name[:80]!r}.{ask} The tools are: {', '.join(names)}."


def list_calls(tools: Sequence[ToolSpec]) -> list[str] | None:
    """Return every call of these tools as text; ``None`` where they are many or not countable."""
    calls: list[str] = []
    for spec in tools:
        properties = spec.parameters.get("properties", {})
        values = [_values(part) for part in properties.values()]
        known = [choices for choices in values if choices is not None]
        if len(known) < len(values):
            return None
        for choice in itertools.islice(itertools.product(*known), MAX_LISTED_CALLS + 1):
            arguments = dict(zip(properties, choice, strict=True))
            calls.append(ToolCall(name=spec.name, arguments=arguments).to_json())
        if len(calls) > MAX_LISTED_CALLS:
            return None
    return calls


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return all values that a schema allows, if they are few."""
    if "const" in schema:
        return [schema["const"]]
    if isinstance(schema.get("enum"), list):
        return list(schema["enum"])
    if schema.get("type") == "boolean":
        return [False, True]
    if schema.get("type") == "integer":
        low, high = _range(schema, None, None)
        if low is not None and high is not None and 0 <= high - low < MAX_LISTED_CALLS:
            return list(range(low, high + 1))
    return None


def _range(schema: Mapping[str, Any], low: int | None, high: int | None) -> tuple[int | None, int | None]:
    if "minimum" in schema:
        low = int(np.ceil(schema["minimum"]))
    elif "exclusiveMinimum" in schema:
        low = int(np.floor(schema["exclusiveMinimum"])) + 1
    if "maximum" in schema:
        high = int(np.floor(schema["maximum"]))
    elif "exclusiveMaximum" in schema:
        high = int(np.ceil(schema["exclusiveMaximum"])) - 1
    return low, high


def random_arguments(spec: ToolSpec, rng: np.random.Generator) -> dict[str, Any]:
    """Return random arguments by a tool's schema: enums, numbers, short strings, lists and objects.

    Patterns and formats of strings are not followed.
    """
    return _draw_object(spec.parameters, rng, spec.parameters.get("$defs", {}), 0)


def _draw(schema: Mapping[str, Any], rng: np.random.Generator, defs: Mapping[str, Any], depth: int) -> Any:
    if "$ref" in schema:
        schema = defs.get(str(schema["$ref"]).rpartition("/")[2], {})
    for key in ("anyOf", "oneOf", "allOf"):
        options = schema.get(key)
        if options:
            # The last option is usually null: it ends types that contain themselves.
            option = options[-1] if depth > 4 else options[int(rng.integers(len(options)))]
            return _draw(option, rng, defs, depth + 1)
    values = _values(schema)
    if values:
        return values[int(rng.integers(len(values)))]
    kind = schema.get("type", "string")
    kind = kind[int(rng.integers(len(kind)))] if isinstance(kind, list) else kind
    if kind == "object":
        return _draw_object(schema, rng, defs, depth)
    if kind == "array":
        count = int(schema.get("minItems", 1 if depth < 4 else 0))
        parts = schema.get("prefixItems") or [schema.get("items") or {}] * count
        return [_draw(part, rng, defs, depth + 1) for part in parts]
    return _draw_scalar(kind, schema, rng)


def _draw_object(
    schema: Mapping[str, Any], rng: np.random.Generator, defs: Mapping[str, Any], depth: int
) -> dict[str, Any]:
    required = schema.get("required", ())
    drawn = {}
    for name, part in schema.get("properties", {}).items():
        if name in required or (depth < 4 and rng.random() < 0.5):
            drawn[name] = _draw(part, rng, defs, depth + 1)
    return drawn


def _draw_scalar(kind: str, schema: Mapping[str, Any], rng: np.random.Generator) -> Any:
    if kind == "integer":
        low, high = _range(schema, None, None)
        if low is None:
            low = 0 if high is None or high >= 0 else high - 10
        return int(rng.integers(low, max(low, low + 10 if high is None else high) + 1))
    if kind == "number":
        low_value = float(schema.get("minimum", schema.get("exclusiveMinimum", 0.0)))
        high_value = float(schema.get("maximum", schema.get("exclusiveMaximum", low_value + 1.0)))
        return round(float(rng.uniform(min(low_value, high_value), high_value)), 6)
    if kind == "null":
        return None
    length = int(np.clip(6, schema.get("minLength", 1), schema.get("maxLength", 24)))
    return "".join(rng.choice(list(string.ascii_lowercase), size=length))


def with_ids(calls: Sequence[ToolCall]) -> tuple[ToolCall, ...]:
    """Return the calls of a turn with ids: their own, or ``call_0``, ``call_1`` and so on."""
    return tuple(
        call if call.id else ToolCall(name=call.name, arguments=call.arguments, id=f"call_{number}")
        for number, call in enumerate(calls)
    )
