"""How a scheduler behaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from rollgym.errors import UsageError
from rollgym.scheduler.groups import GroupPolicy
from rollgym.types import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Settings of a `Scheduler`."""

    max_in_flight: int = 64
    """Episodes played at once, evaluation included."""
    groups: GroupPolicy = field(default_factory=GroupPolicy)
    order: Literal["strict", "ready"] = "strict"
    """How groups are taken. ``strict``: in the order they were handed out, so that the same seed gives the
    same batches. ``ready``: the earliest of those that are ready, so that a slow one holds up nobody."""
    max_overtakes: int | None = None
    """With ``ready``: how often a group may be overtaken before everybody waits for it."""
    max_ahead: int | None = None
    """Groups handed out and not yet released. The default keeps every place in flight busy."""
    max_staleness: int | None = None
    """How many versions old the oldest token of a taken group may be; older groups are played again."""
    under_way: Literal["finish", "restart"] = "finish"
    """What becomes of episodes that play while the weights change: they go on, under both versions, or they
    begin again. Groups that are too old already (``max_staleness``) are played again either way."""
    skip_equal_returns: bool = False
    """Leave out groups whose members all have the same return: they teach a group baseline nothing."""
    zero_variance: Callable[[Group], bool] | None = None
    """Says of a group whether its members are equal, for ``skip_equal_returns``. A trainer gives the rule of
    its estimator and its shaped rewards; default: the environment's returns, within ``equal_tolerance``."""
    equal_tolerance: float = 1e-6
    max_skipped: int = 32
    """After this many groups were left out in a row, the next one is taken as it is."""
    give_up_after: int = 20
    """When this many groups in a row could not be filled, the run ends with the error they met."""
    evaluation_share: float = 0.5
    """The share of places that evaluation may use while training goes on."""
    stall_seconds: float = 600.0
    """When nothing has moved for this long, the run ends with a report of what everything waits for."""

    def __post_init__(self) -> None:
        rules = {
            "max_in_flight >= 1": self.max_in_flight >= 1,
            "max_ahead >= 1": self.max_ahead is None or self.max_ahead >= 1,
            "max_overtakes >= 0": self.max_overtakes is None or self.max_overtakes >= 0,
            "max_staleness >= 0": self.max_staleness is None or self.max_staleness >= 0,
            "max_skipped >= 0": self.max_skipped >= 0,
            "give_up_after >= 1": self.give_up_after >= 1,
            "0 < evaluation_share <= 1": 0 < self.evaluation_share <= 1,
            "stall_seconds > 0": self.stall_seconds > 0,
        }
        for rule, holds in rules.items():
            if not holds:
                raise UsageError(f"The scheduler needs {rule}.")

    @property
    def ahead(self) -> int:
        """The groups that may be under way or waiting to be taken."""
        if self.max_ahead is not None:
            return self.max_ahead
        members = self.groups.size + self.groups.extra
        return 2 * -(-self.max_in_flight // members) + 1
