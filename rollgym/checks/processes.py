"""The rule that other processes with other hash seeds play the same episodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from rollgym.checks.env_under_test import EnvUnderTest
from rollgym.checks.report import RuleFailed, RuleSkipped
from rollgym.checks.rollout import Trace, difference, plain
from rollgym.core.local_objects import is_local

HASH_SEEDS = (1, 2)
TURNS = 20
SECONDS = 120.0


def processes(subject: EnvUnderTest) -> str:
    """The same seed gives the same episode in another process, where hash() of a text differs."""
    if is_local(subject.name):
        raise RuleSkipped("other processes cannot import it: put it into a module.")
    starts = subject.starts(3 if subject.quick else 8)
    request = {
        "env": subject.name,
        "kwargs": subject.kwargs,
        "modules": subject.modules,
        "starts": [(start.seed, start.options) for start in starts],
        "turns": TURNS,
    }
    try:
        text = json.dumps(request)
    except TypeError as error:
        raise RuleSkipped(f"the arguments cannot be sent to another process ({error}).") from None
    one, other = _answers(text)
    for start, left, right in zip(starts, one, other, strict=True):
        _require_equal(left, right, str(start))
    return f"{len(starts)} episodes were the same in two processes with different hash seeds."


def _require_equal(left: Trace, right: Trace, start: str) -> None:
    found = difference(left, right)
    if found:
        raise RuleFailed(
            f"the episode from {start} differs in another process: {found}. Python salts hash() and the "
            "order of sets in each process: use rollgym.core.seeding.derive_seed, and sort sets."
        )


def _answers(request: str) -> list[list[Trace]]:
    children = [_start(seed) for seed in HASH_SEEDS]
    try:
        return [_answer(child, request) for child in children]
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
                child.communicate()


def _start(hash_seed: int) -> subprocess.Popen[str]:
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "rollgym.checks.subprocess_trace"],
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )


def _answer(child: subprocess.Popen[str], request: str) -> list[Trace]:
    try:
        out, err = child.communicate(request, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise RuleFailed(f"a fresh process did not play the episodes within {SECONDS:.0f} seconds.") from None
    if child.returncode != 0:
        last = (err.strip().splitlines() or ["no output"])[-1]
        raise RuleFailed(f"a fresh process could not play it (exit code {child.returncode}: {plain(last)}).")
    answer: dict[str, Any] = json.loads(out)
    if "error" in answer:
        raise RuleFailed(
            f"it does not work in a fresh process: {answer['error']} Register it in a module that the "
            "process can import (--env-module)."
        )
    traces: list[Trace] = answer["traces"]
    return traces
