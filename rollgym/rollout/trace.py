"""Event log to Chrome/Perfetto trace, with utilization and the longest waits.

Lanes: one per engine slot (generating), one per environment of a worker (resetting, stepping), and some for
episodes that wait for an environment (opening).
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

from rollgym.rollout.events import Event
from rollgym.rollout.inflight import TraceLanes

_LATEST = 1e9
"""Seconds: no run is that long, and times beyond it break the arithmetic."""
_NEEDED: dict[str, dict[str, Any]] = {
    "episode_state": {"episode": str, "state": str, "turn": int, "worker": str, "engine": (int, NoneType)},
    "episode_started": {"episode": str},
    "episode_finished": {"episode": str},
}
"""Required fields, with types, of the events that are drawn."""
_BUSY = {"resetting": "environment", "stepping": "environment", "generating": "engine"}


def is_event(event: Event) -> bool:
    """Return whether an event from an untrusted file has all fields that a trace needs."""
    time, kind = event.get("t"), event.get("kind")
    if not isinstance(time, (int, float)) or not 0 <= time <= _LATEST or not isinstance(kind, str):
        return False
    fields = _NEEDED.get(kind, {})
    return all(key in event and isinstance(event[key], types) for key, types in fields.items())


@dataclass(frozen=True, slots=True)
class Span:
    """One episode in one state."""

    episode: str
    state: str
    start: float
    end: float
    turn: int
    worker: str
    engine: int | None

    @property
    def seconds(self) -> float:
        """The duration."""
        return self.end - self.start


def spans(events: Sequence[Event]) -> list[Span]:
    """The states of every episode, with start and end."""
    result: list[Span] = []
    current: dict[str, Event] = {}
    for event in events:
        if event["kind"] == "episode_started":
            # Left unfinished by a killed run, and played again by the resumed one.
            current.pop(event["episode"], None)
        if event["kind"] not in ("episode_state", "episode_finished"):
            continue
        before = current.pop(event["episode"], None)
        if before is not None and before["state"] != "done":
            result.append(
                Span(
                    event["episode"],
                    before["state"],
                    before["t"],
                    event["t"],
                    before["turn"],
                    before["worker"],
                    before["engine"],
                )
            )
        if event["kind"] == "episode_state":
            current[event["episode"]] = event
    return result


def summary(events: Sequence[Event], longest: int = 10) -> dict[str, Any]:
    """Utilization, time by state and the longest waits."""
    all_spans = spans(events)
    times = [event["t"] for event in events]
    # If only the newest part of a log was read, it does not begin at 0.
    duration = max(times, default=0.0) - min(times, default=0.0)
    by_state: dict[str, float] = defaultdict(float)
    for span in all_spans:
        by_state[span.state] += span.seconds
    engines = {span.engine for span in all_spans if span.engine is not None}
    return {
        "seconds": duration,
        "episodes": sum(event["kind"] == "episode_finished" for event in events),
        "time_by_state": {state: round(seconds, 6) for state, seconds in sorted(by_state.items())},
        "engine_slots": len(engines),
        "engine_busy": _covered(all_spans, "engine") / duration if duration else 0.0,
        "environment_busy": _covered(all_spans, "environment") / duration if duration else 0.0,
        "longest_waits": [
            {"episode": s.episode, "state": s.state, "turn": s.turn, "seconds": s.seconds, "at": s.start}
            for s in sorted(all_spans, key=lambda s: -s.seconds)[:longest]
        ],
    }


def _covered(all_spans: Sequence[Span], role: str) -> float:
    """Seconds in which at least one episode was in the role: the union of its spans."""
    total, until = 0.0, 0.0
    for span in sorted((s for s in all_spans if _BUSY.get(s.state) == role), key=lambda s: s.start):
        total += max(0.0, span.end - max(until, span.start))
        until = max(until, span.end)
    return total


def chrome_trace(events: Sequence[Event]) -> dict[str, Any]:
    """The log in Chrome's trace format: open it in Perfetto or chrome://tracing."""
    rows = list(_trace_rows(events))
    return {"traceEvents": rows, "displayTimeUnit": "ms"}


def _trace_rows(events: Sequence[Event]) -> Iterator[dict[str, Any]]:
    lanes = {2: _WorkerLanes(), 3: _WorkerLanes()}
    names: dict[tuple[int, int], str] = {}
    for span in sorted(spans(events), key=lambda span: span.start):
        if span.state == "generating" and span.engine is not None:
            process, lane, label = 1, span.engine, f"engine slot {span.engine}"
        elif span.state in ("resetting", "stepping"):
            process = 2
            lane, index = lanes[2].lane(span)
            label = f"worker {span.worker or '0'} #{index}"
        elif span.state == "opening":
            process = 3
            lane, index = lanes[3].lane(span)
            label = f"waiting #{index}"
        else:
            continue
        names[(process, lane)] = label
        yield {
            "name": f"{span.episode} {span.state} {span.turn}",
            "cat": span.state,
            "ph": "X",
            "ts": round(span.start * 1e6),
            "dur": round(span.end * 1e6) - round(span.start * 1e6),
            "pid": process,
            "tid": lane,
            "args": {"episode": span.episode, "turn": span.turn},
        }
    for process, title in ((1, "engine"), (2, "environments"), (3, "waiting for an environment")):
        yield {"name": "process_name", "ph": "M", "pid": process, "tid": 0, "args": {"name": title}}
    for (process, lane), label in sorted(names.items()):
        yield {"name": "thread_name", "ph": "M", "pid": process, "tid": lane, "args": {"name": label}}


class _WorkerLanes:
    """Allocates lanes to the spans of a worker; a lane is reused after its last span has ended."""

    def __init__(self) -> None:
        self._lanes: dict[str, TraceLanes] = {}
        self._busy: dict[str, list[tuple[float, int]]] = defaultdict(list)
        self._numbers: dict[tuple[str, int], int] = {}

    def lane(self, span: Span) -> tuple[int, int]:
        """The lowest free lane of the span's worker: its overall number and its index in the worker."""
        lanes = self._lanes.setdefault(span.worker, TraceLanes())
        busy = self._busy[span.worker]
        while busy and busy[0][0] <= span.start:
            lanes.give_back(heapq.heappop(busy)[1])
        lane = lanes.take()
        heapq.heappush(busy, (span.end, lane))
        return self._numbers.setdefault((span.worker, lane), len(self._numbers)), lane
