"""The report of a run without progress: what everything waits for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rollgym.core.errors import RunError

if TYPE_CHECKING:
    from rollgym.rollout.group_buffer import GroupBuffer
    from rollgym.rollout.inflight import InFlight

WAITS_FOR = {
    "queued": "its turn on the event loop",
    "opening": "an environment from the pool",
    "resetting": "the environment's reset()",
    "generating": "the agent or its engine",
    "stepping": "the environment's step()",
    "closing": "the environment to close",
    "scoring": "its reward",
    "done": "nothing",
}


class Stalled(RunError):
    """The run made no progress for too long; the message lists what everything waited for."""


def waiting_report(
    in_flight: InFlight, queued: int, buffer: GroupBuffer, notes: Iterable[str], now: float
) -> str:
    """What everything waits for, the longest waits first."""
    waits = sorted(in_flight.running.values(), key=lambda running: running.since)
    kinds = Counter(running.runner.state.value for running in waits)
    lines = [
        f"{len(waits)} of {in_flight.limit} episodes in flight, {queued} queued, "
        + ", ".join([f"{len(buffer.open)} groups open", *notes])
    ]
    if not buffer.can_start_group():
        lines.append(
            f"  no group may start: {len(buffer.open)} open + {buffer.unreleased} taken but not released "
            f">= max_ahead ({buffer.config.ahead})"
        )
    lines += [f"  {count} waiting for {WAITS_FOR[kind]}" for kind, count in kinds.most_common()]
    for running in waits[:10]:
        spec, state = running.runner.spec, running.runner.state.value
        lines.append(
            f"  {spec.episode_id} ({spec.env_id}, turn {len(running.runner.turns)}): {state} for "
            f"{now - running.since:.1f} s, waiting for {WAITS_FOR[state]}"
        )
    return "\n".join(lines)
