"""Formats execution results for the agent: plain, truncated and deterministic."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from rollgym.envs.code.judge import Result
from rollgym.sandbox.types import Ended, Limits, Ran

_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}\b")


def format_run(ran: Ran, limits: Limits, chars: int) -> str:
    """Format the output of a block and how it ended."""
    lines = []
    for name, output in (("stdout", ran.stdout), ("stderr", ran.stderr)):
        if output.strip():
            lines.append(f"{name}:\n{cut(masked(output.rstrip()), chars)}")
    if not lines and ran.ok:
        lines.append("It ran and printed nothing.")
    if not ran.ok:
        lines.append(_ending(ran, limits))
    return "\n".join(lines)


def masked(text: str) -> str:
    """Remove memory addresses, which differ between runs."""
    return _ADDRESS.sub("0x...", text)


def cut(text: str, chars: int) -> str:
    """Return head and tail of a text that is too long."""
    if len(text) <= chars:
        return text
    head = chars * 2 // 3
    tail = chars - head
    return f"{text[:head]}\n... {len(text) - chars} characters left out ...\n{text[-tail:]}"


def _ending(ran: Ran, limits: Limits) -> str:
    reasons: Mapping[Ended, str] = {
        Ended.TIMEOUT: f"It was stopped after {limits.seconds:g} seconds.",
        Ended.CPU: "It was stopped: it used too much processor time.",
        Ended.OUTPUT: f"It was stopped: it wrote more than {limits.output_mb} MB.",
        Ended.MEMORY: f"It was stopped: it needed more than {limits.memory_mb} MB of memory.",
        Ended.LOST: "It ended the session's process.",
    }
    sentence = reasons.get(ran.ended) or f"It ended with exit code {ran.exit_code}."
    return f"{sentence}{_STATES.get(ran.state, '')}"


_STATES: Mapping[str, str] = {
    "rolled_back": " The session is as it was before this block.",
    "lost": " The session is lost: the next block begins with nothing.",
}


def format_test_results(tests: Sequence[str], results: Sequence[Result]) -> str:
    """Format the public test results: count and failures."""
    passed = sum(result.passed for result in results)
    lines = [f"Public tests: {passed} of {len(results)} passed."]
    notes = [(text, result.note) for text, result in zip(tests, results, strict=True) if not result.passed]
    if len(notes) > 1 and len({note for _, note in notes}) == 1 and len(notes) == len(results):
        return f"{lines[0]} Each failed: {masked(notes[0][1])}."
    lines += [f"failed: {text}: {masked(note)}" for text, note in notes]
    return "\n".join(lines)
