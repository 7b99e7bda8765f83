"""What is in the file, and what stays out of it."""

import base64
import gzip
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_runs import failed_episode, line_of, make_episode

from rollgym.core.errors import UsageError
from rollgym.view import export
from rollgym.view.export import choose
from rollgym.view.page import blocks, pack, policy
from rollgym.view.reader import Row

MakeRun = Callable[..., Path]


def parts(page: Path) -> dict[str, Any]:
    found = re.findall(r'<script type="text/plain" id="([\w-]+)">([^<]*)</script>', page.read_text())
    return {name: json.loads(gzip.decompress(base64.b64decode(text))) for name, text in found}


def row(n: int, group: str) -> Row:
    return Row(n, f"e{n}", "A", n // 40, "", 0, group, 0, "terminated", True, 1.0, 1, 1, 0.1, 1.0, "")


def test_everything_is_in_the_file(make_run: MakeRun, tmp_path: Path) -> None:
    folder = make_run([make_episode(0), failed_episode(1, "no door")])
    done = export(folder, tmp_path / "page.html")
    held = parts(done.path)
    assert (done.shown, done.episodes) == (2, 2)
    assert [cells[1] for cells in held["rows"]["rows"]] == ["e0", "e1"]
    assert held["rows"]["blocks"] == [2]
    assert [body["id"] for body in held["block-0"]] == ["e0", "e1"]
    assert held["overview"]["about"]["agent"] == "tester"


def test_nothing_that_was_written_is_markup(make_run: MakeRun, tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><!--"
    folder = make_run(
        [make_episode(0, env=evil, turn={"observation": evil}), failed_episode(1, evil)],
        name="<script>alert(1)<script>",
        manifest={"name": evil, "success_means": evil},
    )
    export(folder, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "<script>alert" not in text
    assert text.count("alert(1)") == text.count("&lt;script&gt;alert(1)&lt;script&gt;") == 1  # the title


def test_the_page_may_load_nothing() -> None:
    for rule in ("default-src 'none'", "connect-src 'none'", "script-src 'sha256-", "base-uri 'none'"):
        assert rule in policy(live=False)
    assert "unsafe" not in policy(live=True)


def test_of_many_episodes_whole_groups_are_taken_from_all_over() -> None:
    rows = [row(n, f"g{n // 8}") for n in range(800)]
    chosen = choose(rows, [10] * 800, 100)
    assert 80 <= len(chosen) <= 100
    groups = [rows[n].group for n in chosen]
    assert all(groups.count(name) == 8 for name in set(groups))
    assert chosen[0] < 80
    assert chosen[-1] > 700
    assert choose(rows, [10] * 800, 800) == list(range(800))
    assert choose(rows, [10] * 800, 0) == []


def test_very_large_episodes_are_fewer() -> None:
    rows = [row(n, "") for n in range(100)]
    assert len(choose(rows, [1_000] * 100, 100, most_bytes=25_000)) == 25


def test_what_was_left_out_is_said(make_run: MakeRun, tmp_path: Path) -> None:
    folder = make_run([make_episode(n) for n in range(20)])
    done = export(folder, tmp_path / "page.html", episodes=5)
    assert done.shown == 5
    assert done.notes[0].startswith("This file holds 5 of 20 episodes")
    assert parts(done.path)["overview"]["totals"]["episodes"] == 20  # the numbers count all


def test_blocks_hold_everything_once() -> None:
    made = list(blocks(({"n": n, "text": "x" * 100} for n in range(50)), 1_000))
    assert sum(count for count, _ in made) == 50
    assert len(made) > 3


def test_the_same_run_gives_the_same_bytes() -> None:
    assert pack({"a": [1.5, None]}) == pack({"a": [1.5, None]})


def test_numbers_that_are_none_become_null(make_run: MakeRun, tmp_path: Path) -> None:
    (last,) = make_episode(0, turn={"reward": 1.7e308}).turns
    twice = make_episode(1, turns=(replace(last, terminated=False), last))
    export(make_run([twice]), tmp_path / "page.html")
    assert parts(tmp_path / "page.html")["block-0"][0]["return"] is None


def test_the_command_writes_into_the_runs_folder(make_run: MakeRun, rollgym_command: Any) -> None:
    folder = make_run([make_episode(0), b"half"])
    ran = rollgym_command("view", folder)
    assert ran.code == 0
    assert ran.out.splitlines()[0].startswith("note: 1 line of episodes.jsonl could not be read")
    assert f"{folder / 'report.html'} (" in ran.out
    assert (folder / "report.html").exists()
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "Folder not found: nowhere"),
        (["{run}", "--episodes", "-1"], "--episodes must be at least 0"),
        (["{run}", "--live", "--export", "a.html"], "pass one of the two"),
        (["{run}", "--live", "--port", "70000"], "--port must be from 0 to 65535"),
        (["{run}", "--export", "missing/a.html"], "Cannot write missing/a.html"),
    ],
)
def test_a_wrong_call_is_one_sentence(
    make_run: MakeRun, rollgym_command: Any, words: list[str], message: str
) -> None:
    folder = make_run([line_of(make_episode(0))])
    ran = rollgym_command("view", *[word.format(run=folder) for word in words])
    assert ran.code == 2
    assert message in ran.err


def test_a_page_that_cannot_be_written_leaves_nothing(make_run: MakeRun, tmp_path: Path) -> None:
    (tmp_path / "page.html").mkdir()
    with pytest.raises(UsageError, match="Cannot write"):
        export(make_run([make_episode(0)]), tmp_path / "page.html")
    assert {path.name for path in tmp_path.iterdir()} == {"run", "page.html"}
