"""Run folders: incomplete lines are removed, complete ones are kept, and one process writes at a time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rollgym.core.errors import ResultsError, UsageError
from rollgym.core.serialization import encode_episode
from rollgym.core.types import Episode, EpisodeSpec, Outcome
from rollgym.io.run_dir import (
    EPISODES,
    MANIFEST,
    SUMMARY,
    RunFolder,
    read_json,
    read_run,
    set_failed_aside,
    write_json,
)

MANIFEST_1 = {"schema": 1, "env": {"id": "a/B-v0", "kwargs": {"size": (2, 3)}}, "seed": 7, "note": "x"}
IDENTITY = ("env", "seed")


def episode(name):
    return Episode(spec=EpisodeSpec(episode_id=name, env_id="a/B-v0"), outcome=Outcome.TURN_LIMIT)


@pytest.fixture
def run(tmp_path):
    """A folder with the episodes one and two, closed."""
    folder = RunFolder.create(tmp_path / "deep" / "run", MANIFEST_1)
    folder.append(episode("one"))
    folder.append(episode("two"))
    folder.close()
    return folder.path


def resume(path, **changes):
    return RunFolder.resume(path, MANIFEST_1 | changes, IDENTITY)


def names(folder):
    return [done.spec.episode_id for done in folder.done]


def test_what_was_written_is_read_back(run):
    manifest, episodes = read_run(run)
    assert manifest == json.loads(json.dumps(MANIFEST_1))
    assert episodes == [episode("one"), episode("two")]


def test_an_episode_is_in_the_file_as_soon_as_it_is_appended(tmp_path):
    folder = RunFolder.create(tmp_path, MANIFEST_1)
    folder.append(episode("one"))
    assert (tmp_path / EPISODES).read_bytes() == encode_episode(episode("one")) + b"\n"
    assert names(folder) == ["one"]
    folder.close()
    folder.close()


def test_a_run_is_continued_where_it_ended(run):
    folder = resume(run, note="later")
    assert (names(folder), folder.repaired) == (["one", "two"], False)
    folder.append(episode("three"))
    folder.finish({"episodes": 3})
    folder.close()
    assert [e.spec.episode_id for e in read_run(run)[1]] == ["one", "two", "three"]
    assert read_json(run / SUMMARY) == {"episodes": 3}
    assert read_json(run / MANIFEST)["note"] == "later"


@pytest.mark.parametrize("kept", [1, 40, -1])
def test_a_half_written_last_line_is_removed_and_reported(run, kept):
    whole = (run / EPISODES).read_bytes()
    (run / EPISODES).write_bytes(whole + encode_episode(episode("three"))[:kept])
    folder = resume(run)
    assert (names(folder), folder.repaired) == (["one", "two"], True)
    folder.append(episode("four"))
    folder.close()
    assert (run / EPISODES).read_bytes() == whole + encode_episode(episode("four")) + b"\n"


def test_a_line_cut_inside_a_character_is_half_written_too(run):
    with open(run / EPISODES, "ab") as file:
        file.write('{"schema":1,"x":"√'.encode()[:-1])
    folder = resume(run)
    folder.close()
    assert (names(folder), folder.repaired) == (["one", "two"], True)


def test_a_complete_last_line_without_its_newline_is_kept(run):
    with open(run / EPISODES, "ab") as file:
        file.write(encode_episode(episode("three")))
    folder = resume(run)
    assert (names(folder), folder.repaired) == (["one", "two", "three"], False)
    folder.append(episode("four"))
    folder.close()
    assert len(read_run(run)[1]) == 4


def test_a_complete_last_line_that_cannot_be_read_is_named_and_never_removed(run):
    with open(run / EPISODES, "ab") as file:
        file.write(encode_episode(episode("three")).replace(b'"schema":2', b'"schema":9'))
    with pytest.raises(ResultsError, match=r"line 3: written with schema 9, but this rollgym reads up to 2"):
        resume(run)
    assert b'"schema":9' in (run / EPISODES).read_bytes()


def test_a_broken_line_in_the_middle_is_named_by_its_number(run):
    lines = (run / EPISODES).read_bytes().splitlines(keepends=True)
    (run / EPISODES).write_bytes(lines[0] + b"{oops\n" + lines[1])
    for read in (resume, read_run):
        with pytest.raises(ResultsError, match=r"episodes\.jsonl, line 2: not valid JSON"):
            read(run)
    assert len((run / EPISODES).read_bytes().splitlines()) == 3


def test_an_episode_that_is_there_twice_cannot_be_resumed(run):
    data = (run / EPISODES).read_bytes()
    (run / EPISODES).write_bytes(data + data)
    with pytest.raises(ResultsError, match="contains an episode twice"):
        resume(run)


def test_a_failed_resume_lets_the_folder_go(run):
    good = (run / EPISODES).read_bytes()
    (run / EPISODES).write_bytes(b"{oops\n" + good)
    with pytest.raises(ResultsError) as kept:
        resume(run)
    (run / EPISODES).write_bytes(good)
    resume(run).close()
    assert kept.tb is not None  # the traceback was alive meanwhile, and kept no lock


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 8}, "was created with seed = 7, but now it is 8: resume with the same settings"),
        ({"env": {"id": "a/C-v0"}}, 'but now it is "a/C-v0"'),
        ({"seed": None}, "seed = 7, but now it is null"),
    ],
)
def test_a_different_identity_is_refused_with_the_field(run, change, message):
    with pytest.raises(UsageError) as caught:
        resume(run, **change)
    assert message in str(caught.value)


def test_a_long_value_is_cut_in_the_sentence(run):
    with pytest.raises(UsageError) as caught:
        resume(run, seed="9" * 500)
    assert len(str(caught.value)) < 300 + len(str(run))


def test_tuples_in_the_settings_are_the_lists_they_become_in_json(run):
    resume(run, env={"id": "a/B-v0", "kwargs": {"size": [2, 3]}}).close()


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (3, "was written with schema 3, but this rollgym reads up to 2: upgrade"),
        ("1", "has no schema version"),
    ],
)
def test_a_manifest_of_another_schema_is_refused(run, schema, message):
    write_json(run / MANIFEST, MANIFEST_1 | {"schema": schema})
    for read in (resume, read_run):
        with pytest.raises(ResultsError, match=message):
            read(run)


def test_only_one_process_writes_at_a_time(run):
    code = f"""
import sys
from pathlib import Path
from rollgym.io.run_dir import RunFolder
folder = RunFolder.resume(Path({str(run)!r}), {MANIFEST_1!r}, {IDENTITY!r})
print("open", flush=True)
sys.stdin.read()
"""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout.readline() == "open\n"
        message = f"Another process is writing to {run} right now: wait until it ends, or use another folder"
        with pytest.raises(UsageError, match=message):
            resume(run)
        with pytest.raises(UsageError, match=message):
            set_failed_aside(run)
        other.stdin.close()
        assert other.wait(30) == 0
    resume(run).close()


def test_existing_results_are_refused_and_left_alone(run):
    before = {file.name: file.read_bytes() for file in run.iterdir()}
    with pytest.raises(
        UsageError, match="already contains results: pass --resume to finish them, or another --out"
    ):
        RunFolder.create(run, MANIFEST_1 | {"seed": 1})
    assert {file.name: file.read_bytes() for file in run.iterdir()} == before


@pytest.mark.parametrize("name", [MANIFEST, EPISODES])
def test_either_file_alone_counts_as_results(run, name):
    (run / ({MANIFEST, EPISODES} - {name}).pop()).unlink()
    with pytest.raises(UsageError, match="already contains results"):
        RunFolder.create(run, MANIFEST_1)


def test_a_start_that_failed_before_its_manifest_can_be_started_again(tmp_path):
    with pytest.raises(TypeError):
        RunFolder.create(tmp_path, {"schema": 1, "bad": object()})
    assert not (tmp_path / MANIFEST).exists()
    RunFolder.create(tmp_path, MANIFEST_1).close()


def test_a_folder_that_cannot_be_written_is_a_usage_error(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UsageError, match=f"Cannot write results to {path}: "):
            RunFolder.create(path, MANIFEST_1)


def test_there_must_be_something_to_resume_or_to_load(tmp_path):
    with pytest.raises(UsageError, match="Nothing to resume in .*: it has no manifest.json"):
        resume(tmp_path)
    with pytest.raises(UsageError, match="Run folder .* does not exist"):
        read_run(tmp_path / "none")
    with pytest.raises(UsageError, match="is not a run folder: it has no manifest.json"):
        read_run(tmp_path)


def test_json_files_are_replaced_whole_and_leave_no_other_file(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    write_json(path, {"a": "√"})
    write_json(path, {"a": "new"})
    with pytest.raises(TypeError):
        write_json(path, {"a": [1, object()]})
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_json(path, {"a": "lost"})
    assert read_json(path) == {"a": "new"}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("text", "message"),
    [(b"{", "is not valid JSON"), (b"[]", "does not contain a JSON object"), (b"\xff", "is not valid JSON")],
)
def test_a_bad_json_file_is_a_sentence(tmp_path: Path, text, message):
    path = tmp_path / "x.json"
    with pytest.raises(ResultsError, match=r"Cannot read .*x\.json: No such file"):
        read_json(path)
    path.write_bytes(text)
    with pytest.raises(ResultsError, match=message):
        read_json(path)
