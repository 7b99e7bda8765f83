"""What a worker process may take: time, memory, episodes."""

from __future__ import annotations

from dataclasses import dataclass, fields

from rollgym.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """Bounds on each worker of a pool. ``None`` means no such limit."""

    start_seconds: float = 120.0
    """Longest start of a worker, its modules' import included."""
    reset_seconds: float = 300.0
    """Longest making and resetting of an environment, before its worker is killed."""
    step_seconds: float = 120.0
    """Longest step (or closing) of an environment, before its worker is killed."""
    silent_seconds: float = 30.0
    """A worker that shows no sign of life for so long (one call holds the interpreter) is killed."""
    soft_memory_mb: float | None = None
    """Above this resident size a worker gets no new leases, and is replaced once it has none left."""
    hard_memory_mb: float | None = None
    """Above this resident size a worker is killed."""
    episodes: int | None = None
    """After this many episodes a worker gets no new leases, and is replaced once it has none left."""
    leases: int | None = None
    """Most leases at once in one worker; further ones wait until there is room."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not value > 0:
                raise UsageError(f"The limit {field.name} of a worker must be positive, not {value}.")
        soft, hard = self.soft_memory_mb, self.hard_memory_mb
        if soft is not None and hard is not None and soft > hard:
            raise UsageError(f"soft_memory_mb ({soft:g}) must not be above hard_memory_mb ({hard:g}).")
