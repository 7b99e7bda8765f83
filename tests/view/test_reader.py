"""A run's folder is read line by line: what is broken is skipped and counted, and nothing else is lost."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_runs import failed_episode, line_of, make_episode

from rollgym.core.errors import ResultsError, UsageError
from rollgym.view import RunView
from rollgym.view.overview import overview
from rollgym.view.reader import Tail

MakeRun = Callable[..., Path]


def read(folder: Path) -> RunView:
    run = RunView(folder)
    run.follow(final=True)
    return run


def test_rows_say_what_the_episodes_were(make_run: MakeRun) -> None:
    run = read(
        make_run([line_of(make_episode(3, group="g", member=2), step=5), failed_episode(4, "no door")])
    )
    first, second = run.rows
    assert (first.id, first.step, first.group, first.member, first.success, first.total) == (
        "e3", 5, "g", 2, True, 1.0,
    )  # fmt: skip
    assert (second.outcome, second.error, second.success, second.turns) == ("env_error", "no door", None, 0)
    assert run.by_step == {5: [0]}
    assert run.episode(1)[0].spec.episode_id == "e4"


def test_a_broken_line_is_skipped_and_counted(make_run: MakeRun) -> None:
    lines = [make_episode(0), b"{nonsense\n", b'{"schema":1}\n', b"\xff\xfe\n", b"\n", make_episode(1)]
    run = read(make_run(lines))
    assert [row.id for row in run.rows] == ["e0", "e1"]
    assert run.skipped["episodes.jsonl"].count == 3
    (note,) = overview(run)["notes"]
    assert note.startswith(
        "3 lines of episodes.jsonl could not be read and are left out; line 2: not valid JSON"
    )


def test_a_half_written_line_waits_for_its_end(make_run: MakeRun) -> None:
    whole = line_of(make_episode(1))
    folder = make_run([make_episode(0), whole[:50]])
    run = RunView(folder)
    run.follow()
    assert [row.id for row in run.rows] == ["e0"]
    assert run.skipped == {}
    with open(folder / "episodes.jsonl", "ab") as file:
        file.write(whole[50:])
    assert run.follow() == 1
    assert [row.id for row in run.rows] == ["e0", "e1"]
    assert run.follow() == 0


def test_a_run_that_ended_in_half_a_line_says_so(make_run: MakeRun) -> None:
    run = read(make_run([make_episode(0), line_of(make_episode(1))[:50]]))
    assert [row.id for row in run.rows] == ["e0"]
    (note,) = overview(run)["notes"]
    assert note.startswith(
        "1 line of episodes.jsonl could not be read (half written) and is left out; line 2:"
    )


def test_a_last_line_that_lacks_only_its_newline_counts(make_run: MakeRun) -> None:
    run = read(make_run([make_episode(0), line_of(make_episode(1))[:-1]]))
    assert [row.id for row in run.rows] == ["e0", "e1"]


def test_an_episode_of_a_newer_schema_is_skipped_and_named(make_run: MakeRun) -> None:
    newer = line_of(make_episode(1)).replace(b'"schema":2', b'"schema":9')
    run = read(make_run([make_episode(0), newer]))
    assert len(run.rows) == 1
    assert "written with schema 9" in run.skipped["episodes.jsonl"].first


def test_a_run_that_went_back_is_read_anew(make_run: MakeRun) -> None:
    folder = make_run([make_episode(n) for n in range(3)], metrics=[{"step": 1, "return": 0.5}])
    run = RunView(folder)
    run.follow()
    kept = [line_of(make_episode(n)) for n in (0, 8, 9, 10)]  # longer than before: the size says nothing
    (folder / "episodes.jsonl").write_bytes(b"".join(kept))
    (folder / "metrics.jsonl").write_text("")
    run.follow()
    assert [row.id for row in run.rows] == ["e0", "e8", "e9", "e10"]
    assert run.metrics == []
    assert run.epoch == 1
    assert run.episode(3)[0].spec.episode_id == "e10"


def test_a_file_that_is_not_there_yet_has_no_lines(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "later.jsonl")
    assert list(tail.objects()) == []
    tail.path.write_text('{"a": 1}\n[2]\n')
    assert list(tail.objects()) == [{"a": 1}]
    assert tail.skipped.count == 1


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda path: None, "Folder not found"),
        (lambda path: path.mkdir(), "is not a run: it has no manifest.json; pass the --out folder"),
        (lambda path: write(path / "a" / "manifest.json", {}), "its folders a are runs: pass one of them"),
        (lambda path: write(path / "manifest.json", {"schema": 99}), "schema 99.*upgrade rollgym"),
        (lambda path: write(path / "manifest.json", {}), "has no schema version"),
        (lambda path: write(path / "manifest.json", [1]), "does not contain a JSON object"),
    ],
)
def test_what_is_no_run_is_one_sentence(tmp_path: Path, prepare: Any, message: str) -> None:
    prepare(tmp_path / "run")
    with pytest.raises((UsageError, ResultsError), match=message):
        RunView(tmp_path / "run")


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def test_the_entries_of_a_suite_are_read_together(make_run: MakeRun) -> None:
    folder = make_run(
        manifest={"kind": "bench", "entries": ["easy", "hard", "../out"], "suite": {"name": "s"}}
    )
    for name, number in (("easy", 0), ("hard", 1)):
        (folder / "entries" / name).mkdir(parents=True)
        (folder / "entries" / name / "episodes.jsonl").write_bytes(line_of(make_episode(number)))
    run = read(folder)
    assert [(row.id, row.entry) for row in run.rows] == [("e0", "easy"), ("e1", "hard")]
    assert run.episode(1)[0].spec.episode_id == "e1"
    assert [one["env"] for one in overview(run)["envs"]] == ["easy", "hard"]
