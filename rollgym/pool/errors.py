"""Errors raised by sessions whose worker failed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from rollgym.core.errors import WorkerLost
from rollgym.core.types import Failure

Reason = Literal["deadline", "memory", "silent", "died", "closed"]


class LeaseLost(WorkerLost):
    """The worker that hosted this episode died or was killed; the message gives the reason."""

    def __init__(
        self,
        message: str,
        *,
        reason: Reason = "died",
        guilty: bool = False,
        culprits: Iterable[str] = (),
        output: str = "",
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.guilty = guilty
        """True where this episode broke a limit, or had a call running when the worker died."""
        self.culprits = tuple(culprits)
        """Ids of all such episodes of the worker: one of them caused it. Empty if none is suspected."""
        # Of several suspects of a crash all but one are innocent.
        self.blamed = guilty and (reason != "died" or len(self.culprits) <= 1)
        self.failure = Failure(type="LeaseLost", message=message, traceback=output)
