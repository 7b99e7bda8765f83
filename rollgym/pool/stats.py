"""Statistics of a pool."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStats:
    """One worker process."""

    number: int
    pid: int | None
    """``None`` while it starts."""
    leases: int
    episodes: int
    """Leases that have ended here."""
    memory_mb: float
    leaving: str | None
    """Why it takes no more leases: ``episodes``, ``memory``, ``idle`` or ``closed``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """Statistics of all workers, past ones included."""

    workers: tuple[WorkerStats, ...] = ()
    leases: int = 0
    """Leases in use."""
    started: int = 0
    """Worker processes so far."""
    ended: dict[str, int] = field(default_factory=dict)
    """Ended workers by reason: ``died``, ``deadline``, ``silent`` or ``memory`` if leases were lost;
    ``episodes``, ``idle``, ``closed`` (or ``memory``) if none were."""
    episodes: int = 0
    """Leases that have ended, including those of lost workers."""
    waiting: int = 0
    """Requests for a lease that wait for capacity."""

    @property
    def memory_mb(self) -> float:
        """Resident memory of all workers; pages they share are counted in each."""
        return sum(worker.memory_mb for worker in self.workers)
