"""Detects failed workers and the leases at fault, from the shared status page."""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rollgym.pool.errors import LeaseLost, Reason
from rollgym.pool.limits import WorkerLimits

if TYPE_CHECKING:
    from rollgym.pool.worker_handle import LocalSession, WorkerHandle

_EXIT_GRACE = 1.0
"""Maximum seconds between the end of a connection and the report of the worker's exit."""


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """Why a worker failed."""

    reason: Reason
    text: str
    guilty: Mapping[int, str] = field(default_factory=dict)
    """Reason per lease that broke a limit. Empty: every lease with a running call is suspected."""

    def errors(
        self, sessions: Mapping[int, LocalSession], running: Collection[int], output: str
    ) -> dict[int, LeaseLost]:
        """Return the error for each lease of the worker."""
        guilty = dict(self.guilty) or {
            lease: f"{self.text} during {sessions[lease].op}()" for lease in running if lease in sessions
        }
        culprits = [sessions[lease].episode for lease in guilty if lease in sessions]
        others = f"{self.text} during a call of {_names(culprits)}" if culprits else self.text
        return {
            lease: LeaseLost(
                guilty.get(lease, others),
                reason=self.reason,
                guilty=lease in guilty,
                culprits=culprits,
                output=output,
            )
            for lease in sessions
        }

    def error(self, output: str) -> LeaseLost:
        """Return the error for callers that waited for the worker to start."""
        when = " before it was ready" if self.reason == "died" else ""
        return LeaseLost(self.text + when, reason=self.reason, output=output)


def _names(episodes: list[str]) -> str:
    shown = ", ".join(episodes[:3])
    more = f" and {len(episodes) - 3} more" if len(episodes) > 3 else ""
    return f"{'episode' if len(episodes) == 1 else 'episodes'} {shown}{more}"


def exit_failure(code: int) -> WorkerFailure:
    """Return the failure of a worker that exited without an order of the pool."""
    if code >= 0:
        return WorkerFailure("died", f"a worker process died with exit code {code}")
    try:
        name = f" ({signal.Signals(-code).name})"
    except ValueError:
        name = ""
    return WorkerFailure("died", f"a worker process died by signal {-code}{name}")


def find_failure(worker: WorkerHandle, limits: WorkerLimits) -> WorkerFailure | None:
    """Return why a worker must be killed, or ``None``."""
    return (
        _too_slow(worker, limits)
        or _silent(worker, limits)
        or _too_large(worker, limits)
        or _not_answering(worker, limits)
    )


def _limit(session: LocalSession, limits: WorkerLimits) -> float:
    return limits.reset_seconds if session.op == "reset" else limits.step_seconds


def _too_slow(worker: WorkerHandle, limits: WorkerLimits) -> WorkerFailure | None:
    guilty = {}
    for call in worker.status.running():
        session = worker.sessions.get(call.lease)
        if session is not None and call.seconds > _limit(session, limits):
            guilty[call.lease] = f"{session.op}() took longer than {_limit(session, limits):g} s"
    if not guilty:
        return None
    first = next(iter(guilty.values()))
    return WorkerFailure(
        "deadline",
        f"the worker was killed because {first}",
        {lease: f"{text}; the worker was killed" for lease, text in guilty.items()},
    )


def _silent(worker: WorkerHandle, limits: WorkerLimits) -> WorkerFailure | None:
    # On the pool's clock, since the last change: a pool that was suspended must not blame its workers.
    if worker.status.last_beat != worker.beat or not worker.beat:
        worker.beat, worker.beat_seen = worker.status.last_beat, worker.clock
    limit = limits.silent_seconds
    if worker.beat and worker.clock - worker.beat_seen > limit:
        return WorkerFailure("silent", f"the worker sent no heartbeat for {limit:g} s and was killed")
    if worker.disconnected_at is not None and worker.clock - worker.disconnected_at > _EXIT_GRACE:
        return WorkerFailure("died", "the worker closed its connection and was killed")
    return None


def _too_large(worker: WorkerHandle, limits: WorkerLimits) -> WorkerFailure | None:
    if limits.hard_memory_mb is None:
        return None
    used = worker.memory_mb()
    if used <= limits.hard_memory_mb:
        return None
    text = f"the worker held {used:,.0f} MB, over its limit of {limits.hard_memory_mb:g} MB, and was killed"
    return WorkerFailure(
        "memory",
        text,
        dict.fromkeys(_growing_leases(worker, used), f"{text}; it grew in this episode's calls"),
    )


def _growing_leases(worker: WorkerHandle, used: float) -> list[int]:
    """Return the leases whose calls caused most of the worker's memory growth."""
    grown = {lease: session.grown_mb for lease, session in worker.sessions.items()}
    for call in worker.status.running():
        if call.lease in grown:
            grown[call.lease] += max(used - call.mb_before, 0.0)
    most = max(grown.values(), default=0.0)
    return [lease for lease, mb in grown.items() if mb > max(most / 2, used / 10)]


def _not_answering(worker: WorkerHandle, limits: WorkerLimits) -> WorkerFailure | None:
    """Find calls that wait although none is running: a lost message or an internal error of the worker."""
    if not worker.ready.done():
        if worker.clock - worker.since > limits.start_seconds:
            text = f"the worker did not start within {limits.start_seconds:g} s and was killed"
            return WorkerFailure("silent", text)
        return None
    patience = limits.silent_seconds
    for session in worker.sessions.values():
        if (
            session.asked_at is not None
            and worker.clock - session.asked_at > _limit(session, limits) + patience
        ):
            return WorkerFailure("silent", f"the worker did not answer a {session.op}() and was killed")
    return None
