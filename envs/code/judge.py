"""Whether a program does what is asked: tests and solution never meet in one execution."""

from __future__ import annotations

import functools
import json
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollgym.envs.code.compare import same, shown
from rollgym.envs.code.types import Asserts, Cases, Tests
from rollgym.sandbox.types import Ended, Limits, Ran, Sandbox

RESTARTS = 3
"""How often a solution that dies on an input is started again for the inputs after it."""
ROUNDS = 8
"""How often tests may ask for calls that depend on earlier answers."""
SPOKEN = (64_000, 4_000_000)
"""Characters that a solution may answer with; room for more costs time, so it is tried only when needed."""
_WHY: Mapping[Ended, str] = {
    Ended.TIMEOUT: "it took too long",
    Ended.CPU: "it took too long",
    Ended.OUTPUT: "it wrote too much",
    Ended.MEMORY: "it needed too much memory",
}

Answer = list[Any]
"""``["value", value, arguments afterwards]`` or ``["error", sentence]``, as `inside.answer` says it."""


@dataclass(frozen=True, slots=True)
class Result:
    """How one test went."""

    passed: bool
    note: str = ""
    """Where it failed: what the solution did instead."""


def judge(
    sandbox: Sandbox, solution: str, name: str, tests: Tests, limits: Limits | None = None
) -> list[Result]:
    """One result for each test, from fresh executions."""
    limits = limits or Limits()
    if isinstance(tests, Cases):
        return _by_cases(sandbox, solution, name, tests, limits)
    return _by_asserts(sandbox, solution, name, tests, limits)


def _by_cases(sandbox: Sandbox, solution: str, name: str, tests: Cases, limits: Limits) -> list[Result]:
    answers = answers_of(sandbox, solution, name, [case.arguments for case in tests.cases], limits)
    results = []
    for case, found in zip(tests.cases, answers, strict=True):
        if found[0] == "error":
            results.append(Result(False, found[1]))
        elif same(found[1], case.expected):
            results.append(Result(True))
        else:
            results.append(Result(False, f"it returned {shown(found[1])}"))
    return results


def _by_asserts(sandbox: Sandbox, solution: str, name: str, tests: Asserts, limits: Limits) -> list[Result]:
    answers: list[tuple[list[Any], Answer]] = []
    verdicts: dict[int, tuple[str, str]] = {}
    for _ in range(ROUNDS):
        request = {"setup": tests.setup, "name": name, "tests": tests.tests, "answers": answers}
        said, ran = _spoken(sandbox, "decide", request, limits)
        verdicts = {number: (verdict, text) for number, verdict, text in said if number >= 0}
        calls: list[list[Any]] = next((line[2] for line in said if line[0] == -1), [])
        if not calls:
            break
        found = answers_of(sandbox, solution, name, calls, limits)
        answers += zip(calls, found, strict=True)
    missing = ("failed", f"the test did not end: {_why(ran)}")
    results = []
    for number in range(len(tests)):
        verdict, text = verdicts.get(number, missing)
        results.append(Result(verdict == "passed", text or ("" if verdict == "passed" else verdict)))
    return results


def answers_of(
    sandbox: Sandbox, solution: str, name: str, calls: list[list[Any]], limits: Limits
) -> list[Answer]:
    """What a solution answers to each call. One that dies is started again for the calls after."""
    answers: dict[int, Answer] = {}
    left = list(enumerate(calls))
    for _ in range(1 + RESTARTS):
        if not left:
            break
        said, ran = _spoken(sandbox, "answer", {"solution": solution, "name": name, "calls": left}, limits)
        known = {number for number, _ in left}
        for number, *found in said:
            if number == -1 and found[0] == "error":
                return [found] * len(calls)
            if number in known and found[0] in ("value", "error"):
                answers.setdefault(number, found)
        died = next((number for number, _ in left if number not in answers), None)
        if died is not None:
            answers[died] = ["error", _why(ran)]
        left = [(number, call) for number, call in left if number not in answers]
    return [
        answers.get(number, ["error", "it was not asked: it had died too often"])
        for number in range(len(calls))
    ]


def _why(ran: Ran) -> str:
    return _WHY.get(ran.ended, "it ended the program instead of returning")


def _spoken(
    sandbox: Sandbox, program: str, request: Mapping[str, Any], limits: Limits
) -> tuple[list[Any], Ran]:
    """Run a program of `inside` and read its lines; what does not carry the nonce is not its own."""
    nonce = secrets.token_hex(16)
    stdin = json.dumps({"nonce": nonce, **request})
    for chars in SPOKEN:
        wide = replace(limits, output_chars=chars)
        ran = sandbox.exec(f"{_program()}\n\n{program}()\n", stdin=stdin, limits=wide)
        if not ran.truncated:
            break
    return list(_lines(ran.stdout, nonce)), ran


def _lines(text: str, nonce: str) -> Iterator[Any]:
    for line in text.split("\n"):
        start, _, data = line.partition(" ")
        if start != nonce:
            continue
        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            continue
        if _well_formed(found):
            yield found


def _well_formed(line: Any) -> bool:
    """Whether a line is one that `inside` writes: a solution that finds the way out may write others."""
    if not isinstance(line, list) or len(line) < 3 or type(line[0]) is not int:
        return False
    if line[1] in ("passed", "failed", "open", "error"):
        return len(line) == 3 and isinstance(line[2], str)
    if line[1] == "calls":
        return len(line) == 3 and isinstance(line[2], list)
    return line[1] == "value" and len(line) == 4 and isinstance(line[3], list)


@functools.cache
def _program() -> str:
    return (Path(__file__).parent / "inside.py").read_text(encoding="utf-8")
