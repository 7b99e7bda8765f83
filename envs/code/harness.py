"""Program that the judge runs inside the sandbox, and encoding of values.

Its source is sent as a program, so it imports the standard library only. It has two entry points:

- `answer` runs a solution on inputs and reports what it returned. It never sees a test.
- `decide` runs tests on recorded answers. It never sees a solution.

Only data passes between the two, so a solution can pass only by returning the right values.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

MAX_DEPTH = 200
MAX_ITEMS = 200_000
_MAX_JSON_INT = 1 << 62


class NotData(Exception):
    """A value that is not plain data."""


class Opaque:
    """Placeholder for a returned object: it has a truth value and equals nothing."""

    def __init__(self, kind: str, truth: bool) -> None:
        self.kind, self.truth = kind, truth

    def __bool__(self) -> bool:
        return bool(self.truth)

    def __repr__(self) -> str:
        return f"<an object of type {self.kind}>"


def encode(value: Any, depth: int = MAX_DEPTH) -> Any:
    """Encode a plain value as typed JSON; iterators become lists, subclasses their base type."""
    if depth == 0:
        raise NotData("it is nested too deeply")
    if value is None or value is True or value is False:
        return value
    for kind, convert in _SCALARS:
        if isinstance(value, kind):
            return convert(value)
    if isinstance(value, dict):
        return {"dict": [[encode(k, depth - 1), encode(v, depth - 1)] for k, v in dict.items(value)]}
    for kind, name in _GROUPS:
        if isinstance(value, kind):
            items = [encode(item, depth - 1) for item in _items(value)]
            if name in ("set", "frozenset"):
                items.sort(key=repr)
            return items if name == "list" else {name: items}
    raise NotData(f"it is a {type(value).__name__}")


def decode(data: Any) -> Any:
    """Decode a value written by `encode`."""
    if isinstance(data, list):
        return [decode(item) for item in data]
    if isinstance(data, dict):
        ((name, content),) = data.items()
        return _DECODERS[name](content)
    return data


def _items(value: Any) -> list[Any]:
    items = []
    for item in value:
        items.append(item)
        if len(items) > MAX_ITEMS:
            raise NotData(f"it has more than {MAX_ITEMS:,} items")
    return items


def _encode_int(value: int) -> Any:
    value = int(value)
    # JSON readers refuse long decimal numbers; hexadecimal ones cost nothing.
    return value if -_MAX_JSON_INT < value < _MAX_JSON_INT else {"int": hex(value)}


def _encode_float(value: float) -> Any:
    value = float(value)
    return value if math.isfinite(value) else {"float": repr(value)}


# A subclass may misreport its items.
_PARTS: tuple[Callable[[Any], float], ...] = (complex.real.__get__, complex.imag.__get__)
_SCALARS: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (int, _encode_int),
    (float, _encode_float),
    (str, lambda value: str.__str__(value)),
    (complex, lambda value: {"complex": [_encode_float(part(value)) for part in _PARTS]}),
    (bytes, lambda value: {"bytes": bytes.hex(value)}),
)
_GROUPS: tuple[tuple[Any, str], ...] = (
    (list, "list"),
    (tuple, "tuple"),
    (set, "set"),
    (frozenset, "frozenset"),
    ((range, type({}.keys()), type({}.values()), type({}.items())), "list"),
    (Iterator, "list"),
)
_DECODERS: Mapping[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "float": float,
    "complex": lambda parts: complex(decode(parts[0]), decode(parts[1])),
    "bytes": bytes.fromhex,
    "tuple": lambda items: tuple(decode(items)),
    "set": lambda items: set(decode(items)),
    "frozenset": lambda items: frozenset(decode(items)),
    "object": lambda parts: Opaque(*parts),
    "dict": lambda pairs: {decode(key): decode(value) for key, value in pairs},
}


def answer() -> None:
    """Run a solution: ``{"nonce", "solution", "name", "calls": [[arguments], ...]}`` on stdin.

    After the nonce each line is ``[number, "value", value, arguments afterwards]`` or ``[number, "error",
    sentence]``; number -1 reports a solution that could not be loaded.
    """
    request, write_line = _open_channel()
    names: dict[str, Any] = {"__name__": "solution"}
    try:
        exec(compile(request["solution"], "<solution>", "exec"), names)  # noqa: S102
        function = names[request["name"]]
    except KeyError:
        write_line([-1, "error", f"it does not define {request['name']}"])
    except BaseException as error:
        write_line([-1, "error", _error_text(error)])
    else:
        for number, call in request["calls"]:
            write_line(_run_call(function, number, call))
    _exit()


def _run_call(function: Any, number: int, call: list[Any]) -> list[Any]:
    try:
        arguments = [decode(argument) for argument in call]
        value = _returned(function(*arguments))
        return [number, "value", value, [encode(argument) for argument in arguments]]
    except BaseException as error:
        return [number, "error", _error_text(error)]


def _returned(value: Any) -> Any:
    """Encode a returned value; of non-data only its type and truth value."""
    try:
        return encode(value)
    except NotData:
        return {"object": [type(value).__name__, bool(value)]}


def decide() -> None:
    """Run tests: ``{"nonce", "setup", "name", "tests": [text], "answers": [[arguments, answer], ...]}``.

    ``setup`` is a program of the task's author. If it defines the function, that function answers calls that
    the solution has not answered yet, so that one round collects all calls of most tests.
    A line is ``[number, "passed" | "failed" | "open", sentence]``; the last one is ``[-1, "calls", [...]]``.
    """
    import random  # a tenth of an execution, which `answer` need not pay

    request, write_line = _open_channel()
    answers = {json.dumps(key): reply for key, reply in request["answers"]}
    unanswered: dict[str, Any] = {}
    for number, test in enumerate(request["tests"]):
        # A test that draws at random must make the same calls in every round.
        random.seed(0)
        write_line([number, *_run_test(request, test, answers, unanswered)])
    write_line([-1, "calls", list(unanswered.values())])
    _exit()


class _Unanswered(BaseException):
    """A test requests a call that the solution has not answered yet."""


def _run_test(
    request: Mapping[str, Any], test: str, answers: Mapping[str, Any], unanswered: dict[str, Any]
) -> tuple[str, str]:
    open_calls: list[str] = []
    verdict = "passed", ""
    try:
        # Two copies of the author's program: calls among its own functions are not tests.
        reference = _exec_program(request["setup"], "<setup>").get(request["name"])
        names = _exec_program(request["setup"], "<setup>")
        names[request["name"]] = names["candidate"] = _stand_in(reference, answers, unanswered, open_calls)
        exec(compile(test, "<test>", "exec"), names)  # noqa: S102
    except BaseException as error:
        verdict = "failed", _error_text(error)
    return ("open", "") if open_calls else verdict


def _exec_program(text: str, name: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "tests"}
    exec(compile(text, name, "exec"), names)  # noqa: S102
    return names


def _stand_in(
    reference: Any, answers: Mapping[str, Any], unanswered: dict[str, Any], open_calls: list[str]
) -> Callable[..., Any]:
    """Return a function that replays the solution's answers and records calls without an answer."""

    def candidate(*arguments: Any) -> Any:
        call = [encode(argument) for argument in arguments]
        key = json.dumps(call)
        if key not in answers:
            unanswered[key] = call
            open_calls.append(key)
            if reference is None:
                raise _Unanswered
            return reference(*arguments)
        reply = answers[key]
        if reply[0] == "error":
            raise _as_raised(reply[1])
        for argument, changed in zip(arguments, reply[2], strict=True):
            _apply_changes(argument, decode(changed))
        return decode(reply[1])

    return candidate


def _as_raised(sentence: str) -> Exception:
    """Rebuild a solution's error, as the same builtin type if there is one: a test may expect it."""
    name, _, text = sentence.partition(": ")
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        with contextlib.suppress(TypeError):
            return kind(text)
    return RuntimeError(sentence)


def _apply_changes(argument: Any, changed: Any) -> None:
    """Change an argument in place as the solution changed its copy."""
    if isinstance(argument, list) and argument != changed:
        argument[:] = changed
    elif isinstance(argument, (dict, set)) and argument != changed:
        argument.clear()
        argument.update(changed)


def _open_channel() -> tuple[dict[str, Any], Callable[[list[Any]], None]]:
    """Return the request and a writer on a private descriptor, apart from anything printed."""
    request: dict[str, Any] = json.loads(sys.stdin.read())
    nonce = request.pop("nonce")
    output_fd = os.dup(1)
    devnull = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(devnull, descriptor)
    # The streams may be buffers without descriptors.
    sys.stdin, sys.stdout, sys.stderr = io.StringIO(), io.StringIO(), io.StringIO()
    dumps, write = json.dumps, os.write

    def write_line(line: list[Any]) -> None:
        data = f"{nonce} {dumps(line)}\n".encode()
        while data:
            data = data[write(output_fd, data) :]

    return request, write_line


def _error_text(error: BaseException) -> str:
    name = type(error).__name__
    try:
        text = " ".join(str(error).split())[:200]
    except BaseException:
        text = ""
    return f"{name}: {text}" if text else name


def _exit() -> None:
    """Exit at once, without waiting for threads or exit handlers."""
    os._exit(0)
