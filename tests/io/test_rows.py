"""Rows of data files: every format gives the same rows, by index and in order; bad files say where."""

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgym.core.errors import UsageError
from rollgym.io import row_files
from rollgym.io.atomic import cache_root
from rollgym.io.rows import Rows, dataset_splits, open_rows

pa: Any = pytest.importorskip("pyarrow")
pq: Any = pytest.importorskip("pyarrow.parquet")

ROWS = [{"question": f"How much is {i} + {i}?", "answer": str(2 * i), "meta": {"id": i}} for i in range(700)]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def write_gzip(path: Path, rows: list[dict[str, Any]]) -> None:
    middle = len(rows) // 2  # two members, as concatenated files have
    parts = ["".join(f"{json.dumps(row)}\n" for row in part) for part in (rows[:middle], rows[middle:])]
    path.write_bytes(b"".join(gzip.compress(part.encode()) for part in parts))


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=300)


def write_stream(path: Path, rows: list[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=100)


def write_arrow_file(path: Path, rows: list[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def write_dataset(folder: Path, rows: list[dict[str, Any]]) -> None:
    """The layout of ``datasets.Dataset.save_to_disk``; test_real_datasets compares it with the package's."""
    folder.mkdir(parents=True)
    names = [f"data-0000{number}-of-00002.arrow" for number in range(2)]
    write_stream(folder / names[0], rows[:400])
    write_stream(folder / names[1], rows[400:])
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))


FORMATS: dict[str, Callable[[Path, list[dict[str, Any]]], None]] = {
    "rows.jsonl": write_jsonl,
    "rows.jsonl.gz": write_gzip,
    "rows.parquet": write_parquet,
    "rows.arrow": write_stream,
    "file.arrow": write_arrow_file,
    "dataset": write_dataset,
}


@pytest.fixture(params=[False, True], ids=["in memory", "in the cache"])
def cached(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param:
        monkeypatch.setattr(row_files, "SMALL_BYTES", 0)
    return bool(request.param)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_rows(tmp_path: Path, name: str, cached: bool) -> None:
    FORMATS[name](tmp_path / name, ROWS)
    for _ in range(2):  # the second time from the cache
        rows = open_rows(tmp_path / name)
        assert len(rows) == len(ROWS)
        assert list(rows) == ROWS
        for index in (0, 699, 255, 256, 399, 400, -1):
            assert rows[index] == ROWS[index]
        assert rows[3:5] == ROWS[3:5]
        with pytest.raises(IndexError):
            rows[700]


@pytest.mark.parametrize("name", FORMATS)
def test_columns_are_renamed_and_nested(tmp_path: Path, name: str) -> None:
    FORMATS[name](tmp_path / name, ROWS)
    rows = open_rows(tmp_path / name, columns={"prompt": "question", "number": "meta.id"})
    assert rows[5] == {"prompt": "How much is 5 + 5?", "number": 5}
    assert [row["number"] for row in rows] == list(range(700))


@pytest.mark.parametrize("name", FORMATS)
def test_a_missing_column_is_named(tmp_path: Path, name: str) -> None:
    FORMATS[name](tmp_path / name, ROWS)
    with pytest.raises(UsageError, match=r"no column 'solution'; the columns are question, answer, meta"):
        open_rows(tmp_path / name, columns={"answer": "solution"})
    with pytest.raises(UsageError, match=r":1: there is no column 'meta\.key'"):
        open_rows(tmp_path / name, columns={"answer": "meta.key"})


def test_a_column_missing_from_a_late_line_is_found_on_opening(tmp_path: Path, cached: bool) -> None:
    path = tmp_path / "rows.jsonl"
    write_jsonl(path, [*ROWS, {"question": "?"}])
    with pytest.raises(UsageError, match=r"rows\.jsonl:701: there is no column 'answer'"):
        open_rows(path, columns={"answer": "answer"})
    assert len(open_rows(path, columns={"prompt": "question"})) == 701


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{broken", "not valid JSON"),
        ("[1, 2]", "expected a JSON object with named columns, not a list"),
        ('"text"', "not a str"),
        ('{"a": "\\ud800"}x', "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"a": 1}}\n\n{line}\n')
    with pytest.raises(UsageError, match=reason) as caught:
        open_rows(path)
    assert str(caught.value).startswith(f"{path}:3: ")


@pytest.mark.parametrize("content", [b"", b"\n \n"])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "rows.arrow", "rows.jsonl.gz"])
def test_files_without_rows_are_refused(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=r"is empty: expected at least one row|Cannot read|is not gzip"):
        open_rows(tmp_path / name)
    pq.write_table(pa.table({"a": pa.array([], pa.int64())}), tmp_path / "none.parquet")
    with pytest.raises(UsageError, match="is empty"):
        open_rows(tmp_path / "none.parquet")


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow", "file.arrow", "rows.jsonl.gz"])
def test_a_file_that_was_cut_off_is_one_sentence(tmp_path: Path, name: str) -> None:
    FORMATS[name](tmp_path / name, ROWS)
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(UsageError, match=r"Cannot read .*rows|Cannot read .*file|cut off"):
        open_rows(tmp_path / name)


def test_other_paths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Data file not found"):
        open_rows(tmp_path / "none.jsonl")
    with pytest.raises(UsageError, match="No data file matches"):
        open_rows(f"{tmp_path}/*.jsonl")
    with pytest.raises(UsageError, match="is not a data set: expected state.json"):
        open_rows(tmp_path)
    (tmp_path / "rows.csv").write_text("a,b\n")
    with pytest.raises(UsageError, match="unknown format"):
        open_rows(tmp_path / "rows.csv")
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(UsageError, match="Cannot read"):
        open_rows(tmp_path / "pipe.jsonl")
    with pytest.raises(UsageError, match="No data file given"):
        open_rows([])


def test_a_dataset_names_only_files_inside_it(tmp_path: Path) -> None:
    write_dataset(tmp_path / "data", ROWS)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": "../data/data-00000-of-00002.arrow"}]})
    )
    with pytest.raises(UsageError, match="expected _data_files, a list of file names"):
        open_rows(tmp_path / "outside")


def test_splits_of_a_dataset_dict(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_dataset(tmp_path / split, ROWS)
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    assert dataset_splits(tmp_path) == {"train": tmp_path / "train", "test": tmp_path / "test"}
    assert dataset_splits(tmp_path / "train") == {}
    with pytest.raises(UsageError, match="several splits"):
        open_rows(tmp_path)


def test_several_files_are_one_set_of_rows(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ROWS[:10])
    write_parquet(tmp_path / "b.parquet", ROWS[10:20])
    rows = open_rows([tmp_path / "a.jsonl", tmp_path / "b.parquet"], columns={"answer": "answer"})
    assert [row["answer"] for row in rows] == [row["answer"] for row in ROWS[:20]]
    assert rows[12]["answer"] == "24"
    assert rows.place(12) == f"{tmp_path / 'b.parquet'}:3"
    write_jsonl(tmp_path / "c.jsonl", ROWS[10:20])
    assert len(open_rows(f"{tmp_path}/*.jsonl")) == 20


def test_the_fingerprint_is_that_of_the_content(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        write_jsonl(tmp_path / name, ROWS)
    write_jsonl(tmp_path / "c.jsonl", ROWS[::-1])
    prints = [open_rows(tmp_path / name).fingerprint for name in ("a.jsonl", "b.jsonl", "c.jsonl")]
    assert prints[0] == prints[1] != prints[2]
    assert open_rows([tmp_path / "a.jsonl", tmp_path / "c.jsonl"]).fingerprint not in prints


def test_the_cache_knows_content_not_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "SMALL_BYTES", 0)
    path = tmp_path / "rows.parquet"
    write_parquet(path, ROWS)
    first = open_rows(path)
    write_parquet(path, ROWS[::-1])  # the same path and size: the index of the old content must not be used
    assert list(open_rows(path)) == ROWS[::-1]
    assert list(first) == ROWS
    assert any((cache_root() / "rows").rglob("rows.arrow"))


def test_derived_arrays_depend_on_name_and_columns(tmp_path: Path, cached: bool) -> None:
    path = tmp_path / "rows.jsonl"
    write_jsonl(path, ROWS)

    def lengths(rows: Rows) -> Any:
        return rows.derived("lengths", lambda: np.array([len(str(row["x"])) for row in rows], np.uint64))

    prompts = open_rows(path, columns={"x": "question"})
    answers = open_rows(path, columns={"x": "answer"})
    for _ in range(2):
        assert lengths(prompts)[:2].tolist() == [18, 18]
        assert lengths(answers)[:2].tolist() == [1, 1]


def test_a_file_that_shrinks_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write_jsonl(path, ROWS)
    rows = open_rows(path)
    os.truncate(path, 10)
    with pytest.raises(UsageError, match="became shorter"):
        rows[600]


def test_without_pyarrow_the_package_to_install_is_named(tmp_path: Path) -> None:
    write_parquet(tmp_path / "rows.parquet", ROWS)
    code = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from rollgym.io.rows import open_rows\n"
        "try: open_rows('rows.parquet')\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stdout.startswith(
        "MissingExtra Reading rows.parquet needs the optional dependencies [parquet]"
    )


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.dictionaries(st.text(max_size=4), json_values, max_size=4), min_size=1, max_size=12),
    blanks=st.lists(st.sampled_from(["", " ", "\t"]), max_size=12),
    ends=st.sampled_from(["\n", "\r\n"]),
    last=st.booleans(),
)
def test_any_json_lines_are_read_back(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[dict[str, Any]],
    blanks: list[str],
    ends: str,
    last: bool,
) -> None:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    lines: list[str] = []
    for number, row in enumerate(rows):
        lines += [json.dumps(row), *blanks[number : number + 1]]
    text = ends.join(lines) + (ends if last else "")
    path.write_bytes(text.encode())
    read = open_rows(path)
    assert list(read) == rows == [read[index] for index in range(len(rows))]


def test_real_datasets_folders(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the package datasets is not installed")
    made = datasets.Dataset.from_list(ROWS)
    made.save_to_disk(str(tmp_path / "one"), num_shards=3)
    datasets.DatasetDict(train=made, test=made.select([5, 3])).save_to_disk(str(tmp_path / "dict"))
    assert list(open_rows(tmp_path / "one")) == ROWS
    assert list(open_rows(dataset_splits(tmp_path / "dict")["test"])) == [ROWS[5], ROWS[3]]
