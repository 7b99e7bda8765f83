"""Tasks from files: splits by column, by file or by hash, and what is wrong with a row."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollgym.core.errors import UsageError
from rollgym.envs.task_files import FileTasks, Row, load_tasks, text_of
from rollgym.io.rows import Rows


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def text(row: Row) -> str:
    return text_of(row, "text")


def load(files: str | dict[str, str]) -> FileTasks[str]:
    return load_tasks("Texts", files, text, str)


def test_rows_without_a_split_are_assigned_by_their_content(tmp_path: Path) -> None:
    rows = [{"text": f"row {number}"} for number in range(300)]
    loaded = load(write(tmp_path / "a.jsonl", rows))
    assert list(loaded.tasks.splits) == ["train", "dev", "test"]
    assert sum(loaded.tasks.splits.values()) == 300
    assert loaded.tasks.size("train") > 200
    again = load(write(tmp_path / "b.jsonl", rows[::-1]))
    for split in loaded.contents:
        assert set(again.contents[split]) == set(loaded.contents[split])
    assert again.tasks.name != loaded.tasks.name


def test_a_column_or_files_name_the_splits(tmp_path: Path) -> None:
    rows = [{"text": "one", "split": "test"}, {"text": "two", "split": "train"}]
    loaded = load(write(tmp_path / "a.jsonl", rows))
    assert loaded.contents == {"train": ("two",), "test": ("one",)}
    assert loaded.content(loaded.tasks.task("test", 0)) == "one"
    files = {
        "train": write(tmp_path / "t.jsonl", [{"text": "three"}]),
        "test": write(tmp_path / "u.jsonl", [{"text": "four"}]),
    }
    assert load(files).contents == {"train": ("three",), "test": ("four",)}


def test_the_same_content_in_two_splits_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "one", "split": "train"}, {"text": "one", "split": "test"}])
    with pytest.raises(UsageError, match=r"a\.jsonl:2 is in the split 'test'.*a\.jsonl:1"):
        load(path)


def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "one"}, {"text": 7}])
    with pytest.raises(UsageError, match=r"a\.jsonl:2: its column 'text' is 7; text was expected"):
        load(path)
    with pytest.raises(UsageError, match="not found"):
        load(str(tmp_path / "missing.jsonl"))
    with pytest.raises(UsageError, match="No data file given"):
        load({})


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "one", "split": "train"}])
    before = load(path)
    assert load(path) is before
    write(tmp_path / "a.jsonl", [{"text": "other", "split": "train"}])
    assert load(path).contents == {"train": ("other",)}


def test_rows_without_a_fault_are_not_located(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding a place reads the file: for every row, that would take time with the square of the rows."""
    monkeypatch.setattr(Rows, "place", None)
    loaded = load(write(tmp_path / "a.jsonl", [{"text": str(number)} for number in range(50)]))
    assert sum(loaded.tasks.splits.values()) == 50
