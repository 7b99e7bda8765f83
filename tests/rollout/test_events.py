"""The event log: in a file, in memory, or merely counted; and what is left of it after a crash."""

from pathlib import Path
from typing import Any

import pytest

from rollgym.core.errors import ResultsError
from rollgym.rollout.events import EventLog, read_events, rotated_files


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_file_and_memory_hold_the_same_events(tmp_path: Path) -> None:
    clock = Clock()
    path = tmp_path / "run" / "events.jsonl"
    with EventLog(path, keep=True, clock=clock) as log:
        log.add("episode_started", episode="a")
        clock.now += 1.25
        log.add("episode_finished", episode="a", outcome="terminated", oldest=None)
    expected = [
        {"t": 0.0, "kind": "episode_started", "episode": "a"},
        {"t": 1.25, "kind": "episode_finished", "episode": "a", "outcome": "terminated", "oldest": None},
    ]
    assert log.events == expected
    assert read_events(path) == expected
    assert log.count == 2
    assert log.now == 1.25


def test_without_file_and_memory_events_are_counted() -> None:
    log = EventLog()
    log.add("episode_started")
    log.flush()
    log.close()
    assert (log.count, log.events) == (1, [])


def test_flush_hands_over_what_is_buffered(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.add("episode_started")
    log.flush()
    assert len(read_events(tmp_path / "events.jsonl")) == 1
    log.close()
    log.close()


def test_a_last_line_cut_off_by_a_crash_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"t":0,"kind":"a"}\n\n{"t":1,"kind":"b"}\n{"t":2,"ki')
    assert [event["kind"] for event in read_events(path)] == ["a", "b"]


@pytest.mark.parametrize("line", [b'{"t":1,"ki', b"[1]", b'{"kind":"b"}', b'{"t":1}', b"\xff\xfe"])
def test_a_broken_line_in_the_middle_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"t":0,"kind":"a"}\n' + line + b'\n{"t":2,"kind":"c"}\n')
    with pytest.raises(ResultsError, match=r"events.jsonl, line 2: not an event"):
        read_events(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match=r"Cannot read .*nothing.jsonl: No such file"):
        read_events(tmp_path / "nothing.jsonl")


def test_an_empty_log_is_a_log(tmp_path: Path) -> None:
    EventLog(tmp_path / "events.jsonl").close()
    assert read_events(tmp_path / "events.jsonl") == []


def test_a_resumed_log_continues_after_its_last_complete_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"t":0,"kind":"a"}\n{"t":7.5,"kind":"b"}\n{"t":9,"ki')
    clock = Clock()
    with EventLog(path, clock=clock) as log:
        clock.now += 1.0
        log.add("c")
    assert [(event["t"], event["kind"]) for event in read_events(path)] == [(0, "a"), (7.5, "b"), (8.5, "c")]


@pytest.mark.parametrize("left", [b"", b'{"t":0,"ki', b"nonsense\n"])
def test_a_log_without_complete_lines_starts_at_zero(tmp_path: Path, left: bytes) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(left)
    with EventLog(path, keep=True, clock=Clock()) as log:
        log.add("a")
    assert log.events == [{"t": 0.0, "kind": "a"}]
    assert path.read_bytes().endswith(b'{"t":0.0,"kind":"a"}\n')


def test_a_cut_in_the_middle_of_a_character_is_a_cut(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.add("ä")
        log.add("ö")
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.rindex("ö".encode()) + 1])
    assert len(read_events(path)) == 1


def numbered(path: Path) -> list[int]:
    return [event["n"] for event in read_events(path)]


def rotating(path: Path, **options: Any) -> EventLog:
    return EventLog(path, clock=Clock(), segment_bytes=200, **options)


def test_a_rotated_log_is_read_as_one(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with rotating(path) as log:
        for n in range(40):
            log.add("a", n=n)
    assert numbered(path) == list(range(40))
    assert path.stat().st_size < 250
    segments = rotated_files(path)
    assert [segment.path.suffix for segment in segments] == [".gz"] * len(segments)
    assert [segment.start for segment in segments][1:] == [segment.end for segment in segments][:-1]
    assert [len(segment.read()) for segment in segments] == [s.end - s.start for s in segments]
    with rotating(path) as log:
        log.add("a", n=40)
    assert numbered(path) == list(range(41))


def test_a_rotated_log_can_be_rewound_to_any_position(tmp_path: Path) -> None:
    for n in range(30):
        path = tmp_path / str(n) / "events.jsonl"
        with rotating(path) as log:
            marks = []
            for k in range(30):
                marks.append(log.size)
                log.add("a", n=k)
        with rotating(path) as log:
            assert log.size > marks[-1]
            log.rewind(marks[n])
            assert log.size == marks[n]
            log.add("a", n=100)
        assert numbered(path) == [*range(n), 100]


def test_a_log_is_bounded_and_loses_its_oldest_events_first(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with rotating(path, max_bytes=700) as log:
        marks = []
        for n in range(300):
            marks.append(log.size)
            log.add("a", n=n)
    kept = numbered(path)
    assert kept == list(range(kept[0], 300))
    assert 200 < kept[0] < 290
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 1_000
    with rotating(path) as log:
        log.rewind(marks[3])
        log.add("a", n=3)
        assert log.size > marks[3]
    assert numbered(path) == [3]


def test_a_log_killed_while_it_is_rotated_loses_nothing(tmp_path: Path) -> None:
    """The file has its new name, or is there both compressed and not, or has no successor yet."""
    path = tmp_path / "events.jsonl"
    with rotating(path) as log:
        for n in range(20):
            log.add("a", n=n)
    segments = rotated_files(path)
    plain = segments[0].path.with_suffix("")
    plain.write_bytes(segments[0].read())
    assert numbered(path) == list(range(20))
    with rotating(path) as log:
        end = log.size
    path.rename(path.with_name(f"events-{segments[-1].end:015d}-{end:015d}.jsonl"))
    with rotating(path) as log:
        assert log.size == end
        log.add("a", n=20)
    assert numbered(path) == list(range(21))
