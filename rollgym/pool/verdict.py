"""Why a worker is lost and who is to blame: by the shared page, not by guessing."""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rollgym.pool.limits import WorkerLimits
from rollgym.pool.lost import LeaseLost, Reason

if TYPE_CHECKING:
    from rollgym.pool.link import Worker
    from rollgym.pool.session import LocalSession

_DEAF = 1.0
"""Seconds between the end of a connection and the news of its worker's death, at most."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What happened to a worker."""

    reason: Reason
    text: str
    guilty: Mapping[int, str] = field(default_factory=dict)
    """Per lease that broke a limit, how. Empty: whoever had a call running is suspected."""

    def errors(
        self, sessions: Mapping[int, LocalSession], running: Collection[int], output: str
    ) -> dict[int, LeaseLost]:
        """What to tell each lease of the worker."""
        guilty = dict(self.guilty) or {
            lease: f"{self.text} during {sessions[lease].op}()" for lease in running if lease in sessions
        }
        culprits = [sessions[lease].episode for lease in guilty if lease in sessions]
        told_others = f"{self.text} during a call of {_names(culprits)}" if culprits else self.text
        return {
            lease: LeaseLost(
                guilty.get(lease, told_others),
                reason=self.reason,
                guilty=lease in guilty,
                culprits=culprits,
                output=output,
            )
            for lease in sessions
        }

    def error(self, output: str) -> LeaseLost:
        """What to tell those who waited for the worker to start."""
        when = " before it was ready" if self.reason == "died" else ""
        return LeaseLost(self.text + when, reason=self.reason, output=output)


def _names(episodes: list[str]) -> str:
    shown = ", ".join(episodes[:3])
    more = f" and {len(episodes) - 3} more" if len(episodes) > 3 else ""
    return f"{'episode' if len(episodes) == 1 else 'episodes'} {shown}{more}"


def death(code: int) -> Verdict:
    """The verdict on a worker that died by itself, or by a hand that is not the pool's."""
    if code >= 0:
        return Verdict("died", f"a worker process died with exit code {code}")
    try:
        name = f" ({signal.Signals(-code).name})"
    except ValueError:
        name = ""
    return Verdict("died", f"a worker process died by signal {-code}{name}")


def judge(worker: Worker, limits: WorkerLimits) -> Verdict | None:
    """The verdict on a worker that must be killed, if it must."""
    return (
        _too_slow(worker, limits)
        or _silent(worker, limits)
        or _too_large(worker, limits)
        or _not_answering(worker, limits)
    )


def _limit(session: LocalSession, limits: WorkerLimits) -> float:
    return limits.reset_seconds if session.op == "reset" else limits.step_seconds


def _too_slow(worker: Worker, limits: WorkerLimits) -> Verdict | None:
    guilty = {}
    for call in worker.board.running():
        session = worker.sessions.get(call.lease)
        if session is not None and call.seconds > _limit(session, limits):
            guilty[call.lease] = f"{session.op}() took longer than {_limit(session, limits):g} s"
    if not guilty:
        return None
    first = next(iter(guilty.values()))
    return Verdict(
        "deadline",
        f"the worker was killed because {first}",
        {lease: f"{text}; the worker was killed" for lease, text in guilty.items()},
    )


def _silent(worker: Worker, limits: WorkerLimits) -> Verdict | None:
    # By the pool's clock, and since the last change: a pool that was itself stopped accuses nobody.
    if worker.board.last_beat != worker.beat or not worker.beat:
        worker.beat, worker.beat_seen = worker.board.last_beat, worker.clock
    limit = limits.silent_seconds
    if worker.beat and worker.clock - worker.beat_seen > limit:
        return Verdict("silent", f"the worker gave no sign of life for {limit:g} s and was killed")
    if worker.deaf is not None and worker.clock - worker.deaf > _DEAF:
        return Verdict("died", "the worker closed its connection and was killed")
    return None


def _too_large(worker: Worker, limits: WorkerLimits) -> Verdict | None:
    if limits.hard_memory_mb is None:
        return None
    used = worker.memory_mb()
    if used <= limits.hard_memory_mb:
        return None
    text = f"the worker held {used:,.0f} MB, over its limit of {limits.hard_memory_mb:g} MB, and was killed"
    return Verdict(
        "memory",
        text,
        dict.fromkeys(_growers(worker, used), f"{text}; it grew in this episode's calls"),
    )


def _growers(worker: Worker, used: float) -> list[int]:
    """The leases in whose calls most of a worker's growth happened."""
    grown = {lease: session.grown_mb for lease, session in worker.sessions.items()}
    for call in worker.board.running():
        if call.lease in grown:
            grown[call.lease] += max(used - call.mb_before, 0.0)
    most = max(grown.values(), default=0.0)
    return [lease for lease, mb in grown.items() if mb > max(most / 2, used / 10)]


def _not_answering(worker: Worker, limits: WorkerLimits) -> Verdict | None:
    """Calls that wait although nothing says that they run: a lost message, or a worker that broke inside."""
    if not worker.ready.done():
        if worker.clock - worker.since > limits.start_seconds:
            text = f"the worker did not start within {limits.start_seconds:g} s and was killed"
            return Verdict("silent", text)
        return None
    patience = limits.silent_seconds
    for session in worker.sessions.values():
        if session.asked is not None and worker.clock - session.asked > _limit(session, limits) + patience:
            return Verdict("silent", f"the worker did not answer a {session.op}() and was killed")
    return None
