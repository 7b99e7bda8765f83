"""Whatever waits can say for what: the report of a run in which nothing moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rollgym.errors import RunError

if TYPE_CHECKING:
    from rollgym.scheduler.board import GroupBoard
    from rollgym.scheduler.places import Places

WAITS_FOR = {
    "queued": "a turn of the event loop",
    "opening": "an environment from the pool",
    "resetting": "the environment's reset()",
    "generating": "the agent or its engine",
    "stepping": "the environment's step()",
    "closing": "the environment to be given back",
    "scoring": "its reward",
    "done": "nothing",
}


class Stalled(RunError):
    """Nothing moved for too long; the message says what everything waited for."""


def waiting_report(places: Places, queued: int, board: GroupBoard, notes: Iterable[str], now: float) -> str:
    """What everything waits for, the longest waits first."""
    waits = sorted(places.lives.values(), key=lambda live: live.since)
    kinds = Counter(live.life.state.value for live in waits)
    lines = [
        f"{len(waits)} of {places.limit} places in use, {queued} episodes queued, "
        + ", ".join([f"{len(board.open)} groups open", *notes])
    ]
    if not board.may_hand_out():
        lines.append(
            f"  no group may start: {len(board.open)} are open, {board.unreleased} are taken but not "
            f"released, and there may be {board.config.ahead} in all"
        )
    lines += [f"  {count} wait for {WAITS_FOR[kind]}" for kind, count in kinds.most_common()]
    for live in waits[:10]:
        spec, state = live.life.spec, live.life.state.value
        lines.append(
            f"  {spec.episode_id} ({spec.env_id}, turn {len(live.life.turns)}): {state} for "
            f"{now - live.since:.1f} s, waits for {WAITS_FOR[state]}"
        )
    return "\n".join(lines)
