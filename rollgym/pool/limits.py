"""Limits on a worker process: time, memory, episodes."""

from __future__ import annotations

from dataclasses import dataclass, fields

from rollgym.core.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """Limits on each worker of a pool. ``None`` means unlimited."""

    start_seconds: float = 120.0
    """Maximum seconds for the start of a worker, including module imports."""
    reset_seconds: float = 300.0
    """Maximum seconds for making and resetting an environment; then its worker is killed."""
    step_seconds: float = 120.0
    """Maximum seconds for a step or close of an environment; then its worker is killed."""
    silent_seconds: float = 30.0
    """Maximum seconds without a heartbeat (a call holds the interpreter lock); then it is killed."""
    soft_memory_mb: float | None = None
    """Resident MB above which a worker takes no new leases and is replaced when its last one ends."""
    hard_memory_mb: float | None = None
    """Resident MB above which a worker is killed."""
    episodes: int | None = None
    """Episodes after which a worker takes no new leases and is replaced when its last one ends."""
    leases: int | None = None
    """Maximum concurrent leases per worker; further requests wait."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not value > 0:
                raise UsageError(f"The limit {field.name} of a worker must be positive, not {value}.")
        soft, hard = self.soft_memory_mb, self.hard_memory_mb
        if soft is not None and hard is not None and soft > hard:
            raise UsageError(f"soft_memory_mb ({soft:g}) must not be above hard_memory_mb ({hard:g}).")
