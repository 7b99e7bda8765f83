"""Timeline of scheduler events: engine slots, workers and longest waits."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import msgspec

from rollgym.rollout.events import Event, rotated_files
from rollgym.rollout.trace import chrome_trace, is_event, summary
from rollgym.rollout.watchdog import WAITS_FOR
from rollgym.view.reader import Tail

MOST_EVENTS = 200_000
FINE = 4_000
"""Spans shorter than this fraction of the total are merged with their neighbors."""
MOST_SPANS = 20_000
MOST_LANES = 200
"""Maximum lanes per kind."""
_MARKS = {"weights_updated", "paused", "resumed", "stalled", "group_cancelled"}


class Timeline:
    """Events read so far; only the newest ones of long runs."""

    def __init__(self, tail: Tail) -> None:
        self._tail = tail
        self._begun = False
        self._events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self._seen = 0

    def read(self, *, final: bool = False) -> dict[str, Any]:
        """Read new events and return lanes and longest waits."""
        if self._tail.changed() or not self._begun:
            self._begun = True
            self._events.clear()
            self._seen = 0
            self._add_rotated()
        for event in self._tail.objects(final=final):
            if is_event(event):
                self._events.append(event)
                self._seen += 1
        return lanes(list(self._events)) | {"left_out": self._seen - len(self._events)}

    def _add_rotated(self) -> None:
        """Read the newest rotated file: it holds more events than are shown."""
        for segment in rotated_files(self._tail.path)[-1:]:
            try:
                lines = segment.read(self._tail.folder).split(b"\n")[-MOST_EVENTS:]
            except OSError as error:
                self._tail.skipped.add(0, f"{segment.path.name}: {error.strerror}")
                return
            for line in lines:
                try:
                    event = msgspec.json.decode(line, type=dict[str, Any])
                except (msgspec.DecodeError, UnicodeError, RecursionError):
                    continue
                if is_event(event):
                    self._events.append(event)
                    self._seen += 1


def lanes(events: Sequence[Event]) -> dict[str, Any]:
    """Return lanes with spans ``[start, seconds, state, episode, turn, count]`` and wait reasons."""
    rows = chrome_trace(events)["traceEvents"]
    names = {(r["pid"], r["tid"]): r["args"]["name"] for r in rows if r["name"] == "thread_name"}
    spans_by_lane: dict[tuple[int, int], list[list[Any]]] = {key: [] for key in _first(sorted(names))}
    for row in rows:
        if row["ph"] == "X" and (row["pid"], row["tid"]) in spans_by_lane:
            start, seconds = row["ts"] / 1e6, row["dur"] / 1e6
            span = [start, seconds, row["cat"], row["args"]["episode"], row["args"]["turn"], 1]
            spans_by_lane[(row["pid"], row["tid"])].append(span)
    totals = summary(events)
    for wait in totals["longest_waits"]:
        wait["for"] = WAITS_FOR.get(wait["state"], wait["state"])
    begin = min((event["t"] for event in events), default=0.0)
    many = sum(map(len, spans_by_lane.values())) > MOST_SPANS
    shortest = totals["seconds"] / FINE if many else 0.0
    return {
        **totals,
        "begin": begin,
        "lanes": [
            {"role": key[0], "name": names[key], "spans": _joined(spans, shortest)}
            for key, spans in spans_by_lane.items()
        ],
        "lanes_left_out": len(names) - len(spans_by_lane),
        "marks": _marks(events),
    }


def _first(keys: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Limit the number of lanes per kind."""
    counts: Counter[int] = Counter()
    kept = []
    for key in keys:
        counts[key[0]] += 1
        if counts[key[0]] <= MOST_LANES:
            kept.append(key)
    return kept


def _joined(spans: list[list[Any]], shortest: float) -> list[list[Any]]:
    """Merge neighboring short spans of the same state."""
    joined: list[list[Any]] = []
    for span in spans:
        last = joined[-1] if joined else None
        if last is not None and last[2] == span[2] and max(last[1] / last[5], span[1]) < shortest:
            gap = span[0] - last[0] - last[1]
            if gap < shortest:
                last[1] = span[0] + span[1] - last[0]
                last[5] += 1
                continue
        joined.append(list(span))
    return [[round(s[0], 5), round(s[1], 5), *s[2:]] for s in joined]


def _marks(events: Sequence[Event], most: int = 500) -> list[list[Any]]:
    marks = [event for event in events if event["kind"] in _MARKS]
    every = max(1, len(marks) // most)
    return [[event["t"], _mark(event)] for event in marks[::every]]


def _mark(event: Event) -> str:
    return f"weights {event.get('version')}" if event["kind"] == "weights_updated" else str(event["kind"])
