"""From a log to a picture: spans, lanes, busy times, Chrome's format, and the command that shows them."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollgym.cli.trace import trace
from rollgym.core.errors import ResultsError, UsageError
from rollgym.rollout.events import EventLog
from rollgym.rollout.inflight import TraceLanes
from rollgym.rollout.trace import Span, chrome_trace, spans, summary


def state(
    t: float, episode: str, name: str, turn: int = 0, worker: str = "", engine: int | None = None
) -> dict[str, Any]:
    return {
        "t": t,
        "kind": "episode_state",
        "episode": episode,
        "state": name,
        "turn": turn,
        "worker": worker,
        "engine": engine,
    }


def emitted(t: float, episode: str) -> dict[str, Any]:
    return {"t": t, "kind": "episode_finished", "episode": episode, "group": "g", "outcome": "terminated"}


TWO = [
    {"t": 0.0, "kind": "group_started", "group": "g", "members": 2},
    {"t": 0.0, "kind": "episode_started", "episode": "a", "group": "g"},
    state(0.0, "a", "opening"),
    state(1.0, "a", "resetting", 0, "w1"),
    state(2.0, "b", "opening"),
    state(3.0, "a", "generating", 0, "w1", 0),
    state(3.0, "b", "resetting", 0, "w0"),
    state(4.0, "b", "generating", 0, "w0", 1),
    state(6.0, "a", "stepping", 0, "w1"),
    state(7.0, "a", "closing", 1, "w1"),
    state(7.5, "a", "done", 1, "w1"),
    emitted(7.5, "a"),
    state(9.0, "b", "stepping", 0, "w0"),
    state(9.5, "b", "closing", 1, "w0"),
    state(9.5, "b", "done", 1, "w0"),
    emitted(10.0, "b"),
    state(10.0, "c", "opening"),
]


def test_spans_are_what_lies_between_two_states() -> None:
    assert [s for s in spans(TWO) if s.episode == "a"] == [
        Span("a", "opening", 0.0, 1.0, 0, "", None),
        Span("a", "resetting", 1.0, 3.0, 0, "w1", None),
        Span("a", "generating", 3.0, 6.0, 0, "w1", 0),
        Span("a", "stepping", 6.0, 7.0, 0, "w1", None),
        Span("a", "closing", 7.0, 7.5, 1, "w1", None),
    ]
    assert [s.state for s in spans(TWO) if s.episode == "b"] == [
        "opening",
        "resetting",
        "generating",
        "stepping",
        "closing",
    ]
    assert not [s for s in spans(TWO) if s.episode == "c"], "its end is unknown"


def test_what_a_killed_run_left_unfinished_is_not_a_span_of_the_continued_one() -> None:
    log = [
        state(1.0, "a", "generating", 0, "w", 0),
        {"t": 50.0, "kind": "episode_started", "episode": "a", "group": "g"},
        state(50.0, "a", "opening"),
        emitted(51.0, "a"),
    ]
    assert [(s.state, s.start, s.end) for s in spans(log)] == [("opening", 50.0, 51.0)]


def test_busy_times_are_unions_not_sums() -> None:
    told = summary(TWO, longest=2)
    assert told["seconds"] == 10.0
    assert told["episodes"] == 2
    assert told["engine_slots"] == 2
    assert told["engine_busy"] == pytest.approx(0.6), "3 to 6 and 4 to 9"
    assert told["environment_busy"] == pytest.approx(0.45), "1 to 3, 3 to 4, 6 to 7, 9 to 9.5"
    assert told["time_by_state"] == {
        "closing": 0.5,
        "generating": 8.0,
        "opening": 2.0,
        "resetting": 3.0,
        "stepping": 1.5,
    }
    assert [(w["episode"], w["state"], w["seconds"], w["at"]) for w in told["longest_waits"]] == [
        ("b", "generating", 5.0, 4.0),
        ("a", "generating", 3.0, 3.0),
    ]


def test_a_log_without_events_can_be_summed_up() -> None:
    told = summary([])
    assert (told["seconds"], told["engine_busy"], told["environment_busy"]) == (0.0, 0.0, 0.0)
    assert json.dumps(chrome_trace([]))


def bars(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in chrome_trace(events)["traceEvents"] if row["ph"] == "X"]


def test_the_trace_has_the_shape_chrome_and_perfetto_read() -> None:
    made = json.loads(json.dumps(chrome_trace(TWO)))
    assert made["displayTimeUnit"] == "ms"
    rows = made["traceEvents"]
    assert {row["ph"] for row in rows} == {"X", "M"}
    for row in rows:
        assert isinstance(row["name"], str)
        assert isinstance(row["pid"], int)
        assert isinstance(row["tid"], int)
        if row["ph"] == "X":
            assert isinstance(row["ts"], int)
            assert isinstance(row["dur"], int)
            assert row["dur"] >= 0
    lanes = {(row["pid"], row["tid"]) for row in rows if row["ph"] == "X"}
    named = {(row["pid"], row["tid"]): row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    assert named.keys() == lanes
    processes = {row["pid"]: row["args"]["name"] for row in rows if row["name"] == "process_name"}
    assert processes == {1: "engine", 2: "environments", 3: "waiting for an environment"}


def test_each_engine_slot_and_each_worker_has_its_lane() -> None:
    names = {
        (row["pid"], row["tid"]): row["args"]["name"]
        for row in chrome_trace(TWO)["traceEvents"]
        if row["name"] == "thread_name"
    }
    shown = {
        (row["args"]["episode"], row["cat"]): names[(row["pid"], row["tid"])]
        for row in bars(TWO)
        if row["cat"] != "opening"
    }
    assert shown == {
        ("a", "generating"): "engine slot 0",
        ("b", "generating"): "engine slot 1",
        ("a", "resetting"): "worker w1 #0",
        ("a", "stepping"): "worker w1 #0",
        ("b", "resetting"): "worker w0 #0",
        ("b", "stepping"): "worker w0 #0",
    }
    assert (bars(TWO)[0]["ts"], bars(TWO)[0]["dur"]) == (0, 1_000_000)


def test_a_worker_that_turns_up_late_takes_no_lane_of_another() -> None:
    log = [
        state(0.0, "a", "stepping", 0, "w9"),
        state(1.0, "b", "stepping", 0, "w1"),
        state(2.0, "c", "stepping", 0, "w1"),
        emitted(5.0, "b"),
        emitted(6.0, "c"),
        emitted(9.0, "a"),
    ]
    lanes = {row["args"]["episode"]: row["tid"] for row in bars(log)}
    assert len(set(lanes.values())) == 3


def test_a_lane_is_used_again_and_spans_without_length_do_not_overlap() -> None:
    log = [
        state(0.0, "a", "stepping", 0, "w"),
        state(0.0, "b", "stepping", 0, "w"),
        emitted(0.0, "a"),
        emitted(0.000001, "b"),
        state(0.000001, "c", "stepping", 0, "w"),
        emitted(2.0, "c"),
    ]
    rows = bars(log)
    assert [row["dur"] for row in rows] == [0, 1, 1_999_999]
    assert len({row["tid"] for row in rows}) == 1


def test_lanes_are_given_lowest_first() -> None:
    lanes = TraceLanes()
    assert [lanes.take() for _ in range(3)] == [0, 1, 2]
    lanes.give_back(1)
    lanes.give_back(0)
    assert [lanes.take() for _ in range(3)] == [0, 1, 3]


def written(folder: Path) -> Path:
    path = folder / "events.jsonl"
    with EventLog(path) as log:
        log.add("episode_started", episode="a", group="g")
        log.add("episode_state", episode="a", state="opening", turn=0, worker="", engine=None)
        log.add("episode_state", episode="a", state="generating", turn=0, worker="w[0]", engine=0)
        log.add("episode_finished", episode="a", group="g", outcome="terminated")
    return path


def test_the_command_writes_a_trace_and_reports_its_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path)
    trace(tmp_path)
    shown = capsys.readouterr().out
    assert "1 episodes in" in shown
    assert "the agent or its engine" in shown
    assert "trace.json" in shown
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) == 2 + 3 + 2


def test_the_command_takes_a_file_and_a_target_and_speaks_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "there.json"
    trace(written(tmp_path), out=target, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert (told["episodes"], told["trace"]) == (1, str(target))
    assert target.exists()


def test_the_command_reports_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no events.jsonl"):
        trace(tmp_path)
    with pytest.raises(UsageError, match="has no events"):
        trace(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="Cannot write"):
        trace(written(tmp_path), out=tmp_path / "no" / "such" / "folder.json")
    (tmp_path / "events.jsonl").write_text("nonsense\n{}\n")
    with pytest.raises(ResultsError, match="line 1"):
        trace(tmp_path)
