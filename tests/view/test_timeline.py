"""Lanes and waits from an event log."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollgym.view.reader import Tail
from rollgym.view.timeline import MOST_LANES, Timeline, lanes


def state(t: float, episode: str, name: str, turn: int = 0, engine: int | None = None) -> dict[str, Any]:
    return {
        "t": t,
        "kind": "episode_state",
        "episode": episode,
        "state": name,
        "turn": turn,
        "worker": "w",
        "engine": engine,
    }


EVENTS = [
    {"t": 0.0, "kind": "episode_started", "episode": "a", "group": "g"},
    state(0.0, "a", "resetting"),
    state(1.0, "a", "generating", engine=0),
    {"t": 2.0, "kind": "weights_updated", "version": 3},
    state(6.0, "a", "stepping"),
    state(6.5, "a", "done"),
    {"t": 7.0, "kind": "episode_finished", "episode": "a"},
]


def test_spans_lie_in_the_lanes_of_who_was_busy() -> None:
    made = lanes(EVENTS)
    engine, worker = made["lanes"]
    assert (engine["name"], engine["spans"]) == ("engine slot 0", [[1.0, 5.0, "generating", "a", 0, 1]])
    assert [span[:3] for span in worker["spans"]] == [[0.0, 1.0, "resetting"], [6.0, 0.5, "stepping"]]
    assert made["marks"] == [[2.0, "weights 3"]]


def test_the_longest_wait_says_what_it_was_for() -> None:
    first = lanes(EVENTS)["longest_waits"][0]
    assert (first["seconds"], first["for"]) == (5.0, "the agent or its engine")


def test_very_many_spans_are_drawn_together() -> None:
    events: list[dict[str, Any]] = []
    for n in range(21_000):
        events += [state(n / 10, f"e{n}", "generating", engine=0), state(n / 10 + 0.05, f"e{n}", "done")]
    (lane,) = lanes(events)["lanes"]
    assert len(lane["spans"]) < 5_000
    assert sum(span[5] for span in lane["spans"]) == 21_000


def test_of_very_many_lanes_some_are_drawn() -> None:
    events = [state(0.0, f"e{n}", "generating", engine=n) for n in range(300)]
    events += [state(1.0, f"e{n}", "done") for n in range(300)]
    made = lanes(events)
    assert (len(made["lanes"]), made["lanes_left_out"]) == (MOST_LANES, 300 - MOST_LANES)


def test_damage_is_counted_and_the_rest_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    lines = [json.dumps(event) for event in EVENTS]
    lines[3:3] = [
        "{half",
        '{"t": "soon", "kind": "episode_state"}',
        '{"t": 1, "kind": "episode_state", "episode": "b"}',
    ]
    path.write_text("\n".join(lines) + "\n")
    tail = Tail(path)
    assert len(Timeline(tail).read()["lanes"]) == 2
    assert tail.skipped.count == 1


def test_no_events_are_no_lanes(tmp_path: Path) -> None:
    made = Timeline(Tail(tmp_path / "none.jsonl")).read()
    assert made["lanes"] == []
    assert made["longest_waits"] == []


def test_busy_shares_are_of_the_time_that_was_read() -> None:
    later = [{**event, "t": event["t"] + 93.0} for event in EVENTS]
    whole, newest = lanes(EVENTS), lanes(later)
    assert whole["engine_busy"] == pytest.approx(5 / 7)
    assert newest["engine_busy"] == pytest.approx(5 / 7)  # not 5 of 100 seconds
    assert newest["environment_busy"] == pytest.approx(1.5 / 7)
    assert (newest["begin"], newest["seconds"]) == (93.0, pytest.approx(7.0))
