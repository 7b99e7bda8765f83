"""The scheduler's settings of a training config. Imports no torch: simulations need them too."""

from __future__ import annotations

from rollgym.rollout.config import SchedulerConfig
from rollgym.rollout.group_state import GroupPolicy
from rollgym.trainer.config import TrainConfig


def scheduler_settings(config: TrainConfig) -> SchedulerConfig:
    """Settings of the scheduler.

    With staleness 0 no episode starts between `take` and the next weight sync. With more, up to that many
    batches are started ahead, and groups are taken in the order in which they finish.
    """
    rollout = config.rollout
    return SchedulerConfig(
        max_in_flight=rollout.max_in_flight,
        groups=GroupPolicy(
            size=rollout.group_size,
            oversample=rollout.oversample,
            max_retries_per_group=rollout.max_retries_per_group,
            max_infra_retries=rollout.max_infra_retries_per_group,
            incomplete_groups=rollout.incomplete_groups,
        ),
        order="ready" if rollout.max_staleness else "strict",
        max_ahead=rollout.groups * (1 + rollout.max_staleness),
        max_staleness=rollout.max_staleness,
        on_stale=rollout.on_stale,
        pace_slow_groups=rollout.pace_slow_groups,
        on_weight_update=rollout.on_weight_update,
        filter_zero_variance=rollout.filter_zero_variance,
        equal_tolerance=rollout.equal_tolerance,
        max_skipped=rollout.max_skipped,
        stall_seconds=rollout.stall_seconds,
        evaluation_share=1.0,
    )
