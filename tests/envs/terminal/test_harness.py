"""Trees of files survive packing, and checks decide as they say."""

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollgym.envs.terminal import harness
from rollgym.envs.terminal.harness import holds, make_entry, pack, read_tree, unpack, verify, write_tree

names = st.text(
    st.characters(blacklist_categories=["Cs"], blacklist_characters="/\0"), min_size=1, max_size=9
)
paths = st.lists(names.filter(lambda name: name not in (".", "..")), min_size=1, max_size=3).map("/".join)
entries = st.builds(
    make_entry,
    st.sampled_from(["file", "folder", "link"]),
    st.integers(0, 0o777),
    st.integers(0, 2**31),
    st.binary(max_size=30),
    names,
)


@given(st.dictionaries(paths, entries, max_size=6))
def test_a_tree_survives_packing(tree: dict[str, Any]) -> None:
    assert unpack(pack(tree)) == tree


@given(st.binary(max_size=200))
def test_what_is_no_tree_is_a_value_error(data: bytes) -> None:
    whole = pack({"a": make_entry("file", 0o644, 0, b"text")})
    for bad in (data, whole[: min(len(data), len(whole) - 1)]):
        with pytest.raises(ValueError, match=r".*"):
            unpack(bad)


@pytest.mark.parametrize("path", ["../a", "/etc/passwd", "a/../b", "", "a//b", "."])
def test_a_path_out_of_the_folder_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="malformed"):
        unpack(pack({path: make_entry("file", 0o644, 0, b"")}))


def test_a_tree_on_disk_keeps_modes_times_links_and_content(tmp_path: Path) -> None:
    tree = {
        "a": make_entry("folder", 0o755, 1_600_000_000),
        "a/run.sh": make_entry("file", 0o750, 1_600_000_001, b"echo\n"),
        "empty": make_entry("folder", 0o700, 1_600_000_002),
        "link": make_entry("link", 0o777, 0, target="/etc/passwd"),
    }
    write_tree(str(tmp_path), tree)
    found = read_tree(str(tmp_path))
    found["link"]["mtime"] = 0
    assert found == tree


def test_reading_follows_no_links_and_skips_what_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    inside = tmp_path / "work"
    inside.mkdir()
    (inside / "to_file").symlink_to(tmp_path / "secret")
    (inside / "to_folder").symlink_to(tmp_path)
    os.mkfifo(inside / "pipe")
    tree = read_tree(str(inside))
    assert set(tree) == {"to_file", "to_folder"}
    assert all(entry["kind"] == "link" and not entry["content"] for entry in tree.values())
    assert not holds({"kind": "text", "path": "to_file", "expected": "secret"}, tree)


def test_too_many_files_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "MAX_TREE_FILES", 3)
    for number in range(4):
        (tmp_path / str(number)).touch()
    with pytest.raises(ValueError, match="files"):
        read_tree(str(tmp_path))


SAME = hashlib.sha256(b"x \ny\n").hexdigest()


@pytest.mark.parametrize(
    ("kind", "path", "expected", "held"),
    [
        ("text", "a/b.txt", "x\ny", True),  # white space at the ends of lines
        ("text", "a/b.txt", "x\ny\n\n", True),
        ("text", "a/b.txt", "x\n\ny", False),
        ("text", "a/b.txt", " x\ny", False),
        ("text", "a", "", False),  # a folder
        ("text", "none", "", False),
        ("same", "a/b.txt", SAME, True),
        ("same", "a/b.txt", SAME.upper(), False),
        ("absent", "none", "", True),
        ("absent", "a", "", False),
        ("mode", "a/b.txt", "640", True),
        ("mode", "a/b.txt", "644", False),
        ("listing", "", "a/b.txt\nlink", True),
        ("listing", "a", "b.txt", True),
        ("listing", "a", "", False),
        ("unknown", "a/b.txt", "", False),
    ],
)
def test_each_check_holds_where_it_should(kind: str, path: str, expected: str, held: bool) -> None:
    tree = {
        "a": make_entry("folder", 0o755, 0),
        "a/b.txt": make_entry("file", 0o640, 0, b"x \ny\n"),
        "link": make_entry("link", 0o777, 0, target="a"),
        "r/.git/HEAD": make_entry("file", 0o644, 0, b""),  # not listed
    }
    assert holds({"kind": kind, "path": path, "expected": expected}, tree) is held


def test_verify_runs_commands_over_the_files_and_more(tmp_path: Path) -> None:
    (tmp_path / "double.sh").write_text("cat $1 $1; rm double.sh; touch mess\n")
    run = {
        "kind": "run",
        "path": "",
        "command": "bash double.sh in",
        "files": {"in": "1\n"},
        "expected": "1\n1",
    }
    absent = {"kind": "absent", "path": "mess", "expected": "", "command": "", "files": {}}
    wrong = {**run, "expected": "1"}
    failing = {**run, "command": "bash double.sh in; exit 3"}
    # Each command starts from the files as they were: the script deletes itself.
    assert verify(str(tmp_path), [run, absent, run, wrong, failing]) == [True, True, True, False, False]
