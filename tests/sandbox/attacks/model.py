"""What an attack is, and how it is judged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

from rollgym.sandbox.types import Ended, Level, Limits, Ran

if TYPE_CHECKING:
    from .stage import Stage

LIMITS = Limits(seconds=5, memory_mb=256, processes=16, open_files=128, file_mb=32, disk_mb=32)
IDLE = 100
"""What a session may get done before it is stopped: a machine may be busy."""
BRIEF = Limits(seconds=1, memory_mb=256, processes=16, open_files=128, file_mb=32, disk_mb=32)


class Verdict(StrEnum):
    """What came of an attack."""

    SUCCEEDED = "SUCCEEDED"
    BLOCKED = "blocked"
    UNJUDGED = "unjudged"
    """Neither the program nor the host can tell: never to be taken for blocked."""
    NOT_TRIED = "not tried"
    """It would harm the host behind such weak walls."""


@dataclass(frozen=True, slots=True)
class Step:
    """One call to the sandbox. ``text`` is the program, the name of a file, or the seconds of a pause."""

    call: Literal["exec", "run", "read", "write", "reset", "pause"]
    text: str = ""
    stdin: str = ""
    files: tuple[tuple[str, bytes], ...] = ()


@dataclass(slots=True)
class Evidence:
    """What an attack left behind, inside and on the host."""

    stage: Stage
    limits: Limits
    ran: list[Ran] = field(default_factory=list)
    fetched: list[bytes] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """Calls to `read` and `write` that raised, as they may."""
    peak_mb: float = 0.0
    """Memory of the attack's processes, and of files in memory, over what there was before."""
    peak_processes: int = 0

    @property
    def output(self) -> str:
        """All it wrote."""
        return "\n".join(ran.stdout + ran.stderr for ran in self.ran)

    def lines(self, word: str) -> list[str]:
        """What it said after a word."""
        return [line[len(word) :].strip() for line in self.output.splitlines() if line.startswith(word)]


Finding = tuple[Verdict, str]
Judge = Callable[[Evidence], Finding]


def told(evidence: Evidence) -> Finding:
    """The program knows: it says PWNED, or HELD where it was refused."""
    if won := evidence.lines("PWNED"):
        return Verdict.SUCCEEDED, won[0]
    if lost := evidence.lines("HELD"):
        return Verdict.BLOCKED, lost[-1]
    last = evidence.ran[-1] if evidence.ran else None
    return Verdict.UNJUDGED, f"the program did not answer: {last}"


def told_or_killed(evidence: Evidence) -> Finding:
    """As `told`, but a program that began and was killed on the way was stopped by a wall."""
    verdict, why = told(evidence)
    last = evidence.ran[-1]
    killed = last.ended is not Ended.EXIT or (last.exit_code or 0) not in (0, 1)
    if verdict is Verdict.UNJUDGED and evidence.lines("TRIED") and killed:
        return Verdict.BLOCKED, f"stopped: {last.ended} {last.exit_code or ''}".strip()
    return verdict, why


def survived(evidence: Evidence) -> Finding:
    """It was tried; that the sandbox and the host are well is looked at for every attack."""
    if won := evidence.lines("PWNED"):
        return Verdict.SUCCEEDED, won[0]
    if evidence.lines("TRIED"):
        return Verdict.BLOCKED, "the sandbox goes on"
    return Verdict.UNJUDGED, f"the program never began: {evidence.ran}"


def stopped(evidence: Evidence) -> Finding:
    """It wants to run for ever: whatever ended it must not have been itself."""
    first = evidence.ran[0]
    if won := evidence.lines("PWNED"):
        return Verdict.SUCCEEDED, won[0]
    if evidence.lines("TRIED") and (first.ended is not Ended.EXIT or (first.exit_code or 0) < 0):
        return Verdict.BLOCKED, str(first.ended)
    return Verdict.UNJUDGED, f"it ended by itself: {first}"


def bounded(evidence: Evidence) -> Finding:
    """However much it wrote, what is kept is small and is text."""
    first = evidence.ran[0]
    room = evidence.limits.output_chars + 500
    if max(len(first.stdout), len(first.stderr)) > room:
        return Verdict.SUCCEEDED, f"{len(first.stdout)} and {len(first.stderr)} characters were kept"
    try:
        (first.stdout + first.stderr).encode()
    except UnicodeEncodeError as error:
        return Verdict.SUCCEEDED, f"the output cannot be written down: {error}"
    if not (first.stdout + first.stderr):
        return Verdict.UNJUDGED, f"nothing was written: {first}"
    return Verdict.BLOCKED, f"{first.ended}, {len(first.stdout + first.stderr)} characters kept"


def truthful(evidence: Evidence) -> Finding:
    """The program ends with exit code 7 and wants to be seen otherwise."""
    last = evidence.ran[-1]
    if "TRIED" not in last.stdout:
        return Verdict.UNJUDGED, f"the program never began: {last}"
    if last.exit_code == 7 and last.ended is Ended.EXIT:
        return Verdict.BLOCKED, "exit code 7, as it was"
    if last.exit_code is None or last.exit_code < 0:
        return Verdict.BLOCKED, f"{last.ended}: not taken for a result"
    return Verdict.SUCCEEDED, f"exit code {last.exit_code} instead of 7"


def unfetched(evidence: Evidence) -> Finding:
    """A call to `read` or `write` was led astray, or was refused."""
    if evidence.refused:
        return Verdict.BLOCKED, evidence.refused[-1]
    if lost := evidence.lines("HELD"):
        return Verdict.BLOCKED, lost[-1]
    if evidence.fetched:
        return Verdict.BLOCKED, f"{len(evidence.fetched[-1])} bytes, none of them the host's"
    if evidence.lines("TRIED"):
        return Verdict.BLOCKED, "it stayed inside"
    return Verdict.UNJUDGED, f"nothing was read: {evidence.ran}"


def idle(evidence: Evidence) -> Finding:
    """A file counts what was done (milliseconds or megabytes) while no call was made."""
    if not evidence.fetched or not evidence.lines("TRIED"):
        return Verdict.UNJUDGED, f"nothing was counted: {evidence.ran} {evidence.refused}"
    done = int(evidence.fetched[-1] or b"0")
    return (Verdict.SUCCEEDED if done > IDLE else Verdict.BLOCKED), f"{done} between two calls"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """A named attempt to get out, to break something, or to cheat."""

    name: str
    family: str
    gain: str
    """What it would gain, for the table."""
    steps: tuple[Step, ...]
    judge: Judge = told
    limits: Limits = LIMITS
    needs: Level = Level.NONE
    """The weakest walls behind which it may be tried: behind weaker ones it could harm the host."""
    slow: bool = False
    control: bool = False
    """Whether it must succeed without walls: so one sees that the attack and its judge are real."""


def attack(family: str, name: str, gain: str, *programs: str | Step, **more: object) -> Attack:
    """An attack by fresh executions, one for each program, or by the steps given."""
    steps = tuple(p if isinstance(p, Step) else Step("exec", p) for p in programs)
    return Attack(name=name, family=family, gain=gain, steps=steps, **more)  # type: ignore[arg-type]


def run(program: str) -> Step:
    """A turn of the session."""
    return Step("run", program)
