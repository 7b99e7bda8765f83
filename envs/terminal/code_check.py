"""Program of exported Code tasks: judges ``solution.py`` as `rollgym.envs.code.judge` does.

Its source is written beside those of `harness` and `compare`. The solution runs in separate processes that
see the arguments of calls only; expected values and tests stay in this one and in those that run tests.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from typing import Any

from rollgym.envs.code import compare

RESTARTS = 4
ROUNDS = 8
SECONDS = 20.0


def ask(entry: str, request: dict[str, Any]) -> list[list[Any]]:
    """Run an entry point of the harness in a process; return the well-formed lines of its answer."""
    nonce = secrets.token_hex(16)
    folder = os.path.dirname(os.path.abspath(__file__))
    program = f"import sys; sys.path.insert(0, {folder!r}); import harness, untrusted\n"
    if entry == "answer":  # this runs the solution
        program += "import tempfile; untrusted.drop_rights(tempfile.mkdtemp())\n"
    program += f"harness.{entry}()"
    try:
        ran = subprocess.run(
            [sys.executable, "-I", "-c", program],
            input=json.dumps({"nonce": nonce, **request}).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=SECONDS,
            check=False,
        )
        text = ran.stdout.decode("utf-8", "replace")
    except subprocess.TimeoutExpired as late:
        text = (late.stdout or b"").decode("utf-8", "replace")
    lines = []
    for line in text.split("\n"):
        head, _, data = line.partition(" ")
        if head == nonce:
            try:
                lines.append(json.loads(data))
            except (ValueError, RecursionError):
                continue
    return [line for line in lines if isinstance(line, list) and len(line) > 2 and type(line[0]) is int]


def answers_of(solution: str, name: str, calls: list[Any]) -> list[Any]:
    """Return the solution's answer to each call, restarting it after a crash."""
    answers: dict[int, Any] = {}
    for _ in range(RESTARTS):
        pending = [(number, call) for number, call in enumerate(calls) if number not in answers]
        if not pending:
            break
        for number, *answer in ask("answer", {"solution": solution, "name": name, "calls": pending}):
            if number == -1:
                return [["error", "it cannot be loaded"]] * len(calls)
            if answer[0] == "value" and compare.is_well_formed(answer[1]) or answer[0] == "error":
                answers.setdefault(number, answer)
        crashed = next((number for number, _ in pending if number not in answers), None)
        if crashed is not None:
            answers[crashed] = ["error", "it ended the program"]
    return [answers.get(number, ["error", "it was not asked"]) for number in range(len(calls))]


def by_cases(solution: str, tests: dict[str, Any]) -> list[bool]:
    """Compare what the solution returns with what is expected."""
    answers = answers_of(solution, tests["name"], [case["arguments"] for case in tests["cases"]])
    return [
        answer[0] == "value" and compare.values_equal(answer[1], case["expected"])
        for answer, case in zip(answers, tests["cases"], strict=True)
    ]


def by_asserts(solution: str, tests: dict[str, Any]) -> list[bool]:
    """Run the author's tests on recorded answers, in rounds."""
    answers: list[Any] = []
    passed: dict[int, bool] = {}
    for _ in range(ROUNDS):
        request = {
            "setup": tests["setup"],
            "name": tests["name"],
            "tests": tests["tests"],
            "answers": answers,
        }
        lines = ask("decide", request)
        passed = {line[0]: line[1] == "passed" for line in lines if line[0] >= 0}
        calls: list[Any] = next((line[2] for line in lines if line[0] == -1), [])
        if not calls:
            break
        answers += [
            list(pair) for pair in zip(calls, answers_of(solution, tests["name"], calls), strict=True)
        ]
    return [passed.get(number, False) for number in range(len(tests["tests"]))]


def main() -> int:
    """Judge a solution from the command line: ``check.py SOLUTION TESTS``."""
    with open(sys.argv[2], encoding="utf-8") as file:
        tests = json.load(file)
    try:
        with open(sys.argv[1], encoding="utf-8", errors="replace") as file:
            solution = f"{tests['prelude']}\n{file.read()}"
    except OSError as error:
        print(f"the solution cannot be read: {error}")
        return 1
    results = by_cases(solution, tests) if "cases" in tests else by_asserts(solution, tests)
    print(f"{sum(results)} of {len(results)} hidden tests pass")
    return 0 if all(results) else 1
