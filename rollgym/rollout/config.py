"""Settings of the scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from rollgym.core.errors import UsageError
from rollgym.core.types import Group
from rollgym.rollout.group_state import GroupPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Settings of a `Scheduler`.

    Example:
        >>> SchedulerConfig(max_in_flight=32, groups=GroupPolicy(size=8), order="ready", max_staleness=2)
    """

    max_in_flight: int = 64
    """Episodes that run at once, evaluation included."""
    groups: GroupPolicy = field(default_factory=GroupPolicy)
    order: Literal["strict", "ready"] = "strict"
    """Order in which groups are taken. ``strict``: in the order they were started, so that the same seed
    gives the same batches. ``ready``: the earliest ready group, so that a slow group delays no other."""
    max_overtakes: int | None = None
    """With ``ready``: later groups that may be taken before a slow one; then `take` waits for it."""
    max_ahead: int | None = None
    """Groups started and not yet released. The default keeps ``max_in_flight`` episodes running."""
    max_staleness: int | None = None
    """Largest age, in policy versions, of the tokens that are trained on; see ``on_stale``."""
    on_stale: Literal["replay", "wait", "mask"] = "replay"
    """Handling of groups that outlive ``max_staleness``. ``replay``: they are stopped and started again, and
    the second attempt is waited for. ``wait``: `take` waits for a group whose tokens the next update would
    make too old. ``mask``: they are taken once they are ready, and the caller trains only on tokens within
    the bound; a group without such a token is played again, and then waited for."""
    pace_slow_groups: bool = False
    """Start groups that are expected to be slow (by earlier groups of the same task or source) together, at
    most half a batch of them, so that `take` waits for several at once."""
    on_weight_update: Literal["finish", "restart"] = "finish"
    """On a weight update: finish in-flight episodes under mixed versions, or restart them. ``restart``
    requires ``on_stale`` replay: a restarted episode keeps no token that one could wait for or mask."""
    filter_zero_variance: bool = False
    """Discard groups whose returns are all equal: their group-relative advantages are zero."""
    zero_variance: Callable[[Group], bool] | None = None
    """Test for equal returns, for ``filter_zero_variance``. A trainer passes the rule of its estimator with
    shaped rewards. Default: the environment's returns are equal within ``equal_tolerance``."""
    equal_tolerance: float = 1e-6
    max_skipped: int = 32
    """Groups discarded in a row by ``filter_zero_variance``; the next one is taken as it is."""
    give_up_after: int = 20
    """Consecutive groups that could not be filled before the run ends with their last error."""
    evaluation_share: float = 0.5
    """Share of ``max_in_flight`` that evaluation may use."""
    stall_seconds: float = 600.0
    """Seconds without any event, while a caller waits, before the run ends with a report."""

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
            "on_weight_update=finish with on_stale=wait or mask": (
                self.on_weight_update == "finish" or self.on_stale == "replay"
            ),
        }
        for rule, holds in rules.items():
            if not holds:
                raise UsageError(f"The scheduler needs {rule}.")

    @property
    def ahead(self) -> int:
        """The number of groups that may be started and not yet released."""
        if self.max_ahead is not None:
            return self.max_ahead
        members = self.groups.size + self.groups.oversample
        return 2 * -(-self.max_in_flight // members) + 1
