"""Judges solutions: tests and solution never run in one execution."""

from __future__ import annotations

import functools
import json
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollgym.core.errors import RunError
from rollgym.envs.code.compare import format_value, is_well_formed, values_equal
from rollgym.envs.code.types import Asserts, Cases, Tests
from rollgym.sandbox.types import Ended, Limits, Sandbox

RESTARTS = 3
"""Maximum restarts of a solution that dies on an input."""
ROUNDS = 8
"""Maximum rounds of calls that depend on earlier answers."""
SPOKEN = (64_000, 4_000_000)
"""Characters that a solution may answer with; room for more costs time, so it is tried only when needed."""
PATIENCE = 10
"""Total judging time as a multiple of the limit of one execution."""
NOTE_CHARS = 300
UNREADABLE = "its answer cannot be read"
NO_TIME = "there was no time left to judge it"
_SOON = 0.05
"""Minimum seconds left to start another execution."""
_END_REASONS: Mapping[Ended, str] = {
    Ended.TIMEOUT: "it took too long",
    Ended.CPU: "it took too long",
    Ended.OUTPUT: "it wrote too much",
    Ended.MEMORY: "it needed too much memory",
}

Answer = list[Any]
"""``["value", value, arguments afterwards]`` or ``["error", sentence]``, as `harness.answer` writes it."""


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one test."""

    passed: bool
    note: str = ""
    """After a failure: the solution's actual behavior."""


class SolutionJudge:
    """A sandbox, the limits of each execution in it, and the time that all of them together may take."""

    def __init__(self, sandbox: Sandbox, limits: Limits, seconds: float | None = None) -> None:
        self._sandbox, self._limits = sandbox, limits
        self._until = time.monotonic() + min(PATIENCE * limits.seconds, seconds or float("inf"))

    def ask(self, program: str, request: Mapping[str, Any]) -> tuple[list[Any], str]:
        """Run a harness program; return its well-formed lines and why they end.

        Lines before the nonce are not from the harness.
        """
        nonce = secrets.token_hex(16)
        stdin = json.dumps({"nonce": nonce, **request})
        output, reason = "", NO_TIME
        for chars in SPOKEN:
            seconds = self._until - time.monotonic()
            if seconds < _SOON:
                break
            limits = replace(self._limits, output_chars=chars, seconds=min(self._limits.seconds, seconds))
            ran = self._sandbox.exec(f"{_program()}\n\n{program}()\n", stdin=stdin, limits=limits)
            output = ran.stdout
            reason = _END_REASONS.get(ran.ended, "it ended the program instead of returning")
            if not ran.truncated:
                break
        return list(_lines(output, nonce)), reason


def judge(
    sandbox: Sandbox,
    solution: str,
    name: str,
    tests: Tests,
    limits: Limits | None = None,
    seconds: float | None = None,
) -> list[Result]:
    """Return one result per test, from fresh executions.

    A test fails if the answer cannot be read, compared or shown, or if judging takes longer than ``seconds``
    (by default `PATIENCE` executions) in total. Only a broken sandbox raises, `RunError`: retry in another.
    """
    judge_run = SolutionJudge(sandbox, limits or Limits(), seconds)
    try:
        if isinstance(tests, Cases):
            return _by_cases(judge_run, solution, name, tests)
        return _by_asserts(judge_run, solution, name, tests)
    except (RunError, OSError):
        raise
    except Exception as error:
        return [Result(False, f"it could not be judged: {type(error).__name__}")] * len(tests)


def _by_cases(judge_run: SolutionJudge, solution: str, name: str, tests: Cases) -> list[Result]:
    answers = answers_of(judge_run, solution, name, [case.arguments for case in tests.cases])
    return [_compared(answer, case.expected) for case, answer in zip(tests.cases, answers, strict=True)]


def _compared(answer: Answer, expected: Any) -> Result:
    if answer[0] == "error":
        return Result(False, answer[1])
    try:
        passed = values_equal(answer[1], expected)
        return Result(passed, "" if passed else f"it returned {format_value(answer[1])}")
    except Exception:
        # `is_well_formed` excludes this case; judging must not depend on it.
        return Result(False, UNREADABLE)


def _by_asserts(judge_run: SolutionJudge, solution: str, name: str, tests: Asserts) -> list[Result]:
    answers: list[tuple[list[Any], Answer]] = []
    verdicts: dict[int, tuple[str, str]] = {}
    reason = NO_TIME
    for _ in range(ROUNDS):
        request = {"setup": tests.setup, "name": name, "tests": tests.tests, "answers": answers}
        lines, reason = judge_run.ask("decide", request)
        verdicts = {number: (verdict, text) for number, verdict, text in lines if number >= 0}
        calls: list[list[Any]] = next((line[2] for line in lines if line[0] == -1), [])
        if not calls:
            break
        new_answers = answers_of(judge_run, solution, name, calls)
        answers += zip(calls, new_answers, strict=True)
    missing = ("failed", f"the test did not end: {reason}")
    results = []
    for number in range(len(tests)):
        verdict, text = verdicts.get(number, missing)
        results.append(Result(verdict == "passed", text or ("" if verdict == "passed" else verdict)))
    return results


def answers_of(judge_run: SolutionJudge, solution: str, name: str, calls: list[list[Any]]) -> list[Answer]:
    """Return the solution's answer to each call, restarting it after a crash."""
    answers: dict[int, Answer] = {}
    pending = list(enumerate(calls))
    reason = ""
    for _ in range(1 + RESTARTS):
        if not pending or reason == NO_TIME:
            break
        lines, reason = judge_run.ask("answer", {"solution": solution, "name": name, "calls": pending})
        pending_numbers = {number for number, _ in pending}
        for number, *answer in lines:
            if number == -1 and answer[0] == "error":
                return [answer] * len(calls)
            if number in pending_numbers and answer[0] in ("value", "error"):
                answers.setdefault(number, answer)
        crashed = next((number for number, _ in pending if number not in answers), None)
        if crashed is not None:
            answers[crashed] = ["error", reason]
        pending = [(number, call) for number, call in pending if number not in answers]
    missing_reason = NO_TIME if reason == NO_TIME else "it was not asked: it had died too often"
    return [answers.get(number, ["error", missing_reason]) for number in range(len(calls))]


def _lines(text: str, nonce: str) -> Iterator[Any]:
    for line in text.split("\n"):
        prefix, _, data = line.partition(" ")
        if prefix != nonce:
            continue
        try:
            message = _well_formed(json.loads(data, parse_constant=_refuse))
        except (ValueError, RecursionError):
            continue
        if message is not None:
            yield message


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _well_formed(line: Any) -> list[Any] | None:
    """Return a line of `harness`, or None: a solution may write forged ones.

    An unreadable value counts as a wrong answer.
    """
    if not isinstance(line, list) or len(line) < 3 or type(line[0]) is not int:
        return None
    number, kind, content, *extra = line
    if kind in ("passed", "failed", "open", "error") and not extra and isinstance(content, str):
        return [number, kind, content[:NOTE_CHARS]]
    if kind == "calls" and not extra and isinstance(content, list):
        calls_ok = all(isinstance(call, list) and all(map(is_well_formed, call)) for call in content)
        return line if calls_ok else None
    if kind == "value" and len(extra) == 1 and isinstance(extra[0], list):
        return line if all(map(is_well_formed, (content, *extra[0]))) else [number, "error", UNREADABLE]
    return None


@functools.cache
def _program() -> str:
    return (Path(__file__).parent / "harness.py").read_text(encoding="utf-8")
