"""Task sets from rows: questions checked once, in splits that share no prompt."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollgym.core.errors import UsageError
from rollgym.core.seeding import stable_digest
from rollgym.core.tasks import TaskSet
from rollgym.core.text import normalize_answer
from rollgym.envs.arguments import check_choice
from rollgym.envs.data.judges import LETTERS, Judge, Question, make_judge
from rollgym.io.rows import Rows, data_files, dataset_splits, open_rows

COLUMNS = ("prompt", "answer", "choices", "split")
"""Names that the environment reads; a judge that is a function may map more."""
_ORDER = ("train", "dev", "validation", "test")
"""Order of named splits; the first is the default."""

Paths = str | Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Settings that decide what the tasks are."""

    data: Paths | Mapping[str, Paths] | Sequence[Mapping[str, Any]]
    columns: Mapping[str, str] = field(default_factory=dict)
    splits: Mapping[str, float] = field(default_factory=dict)
    split_seed: int = 0
    overlap: str = "error"
    judge: str = "exact"
    answer_pattern: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.columns, Mapping):
            raise UsageError(f"columns must map names to columns of the data, not {self.columns!r}.")
        for name, column in self.columns.items():
            if not isinstance(column, str):
                raise UsageError(f"columns.{name} must be the name of a column, not {column!r}.")
        if ":" not in self.judge:
            for name in self.columns:
                check_choice("column of the environment", name, COLUMNS)
        check_choice("overlap", self.overlap, ("error", "drop"))
        shares = list(self.splits.values())
        if not all(isinstance(share, (int, float)) and share > 0 for share in shares):
            raise UsageError(f"splits must give each split a share above 0, not {dict(self.splits)}.")
        if shares and not 0.999 < sum(shares) < 1.001:
            raise UsageError(f"The shares of splits must add up to 1, not {sum(shares):g}.")
        if self.answer_pattern is not None:
            try:
                re.compile(self.answer_pattern)
            except re.error as error:
                raise UsageError(f"answer_pattern is not a regular expression: {error}.") from None


class RowTasks:
    """The tasks of an environment: a task set, and the questions of each task."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._judge: Judge = make_judge(options.judge)
        self._pattern = None if options.answer_pattern is None else re.compile(options.answer_pattern)
        self._columns = {"prompt": "prompt", "answer": "answer", **options.columns}
        sources = _sources(options.data, self._columns)
        named = list(sources) != [""]
        if named and (options.splits or "split" in options.columns):
            raise UsageError("The data are already in splits: remove splits and columns.split.")
        if options.splits and "split" in options.columns:
            raise UsageError("splits and columns.split cannot be combined: make splits, or name them.")
        keys = {name: self._keys(rows) for name, rows in sources.items()}
        self._parts: dict[str, tuple[Sequence[Any], NDArray[Any] | None]]
        if named:
            self._parts = self._disjoint({name: (sources[name], None) for name in _ordered(sources)}, keys)
        elif "split" in options.columns:
            parts = _by_column(sources[""])
            self._parts = self._disjoint(
                parts, {name: keys[""][numbers] for name, (_, numbers) in parts.items()}
            )
        else:
            self._parts = _made(sources[""], keys[""], options)
        prints = {name: _fingerprint(rows) for name, rows in sources.items()}
        content = [prints, sorted(self._columns.items()), options.answer_pattern, options.overlap]
        made = [options.splits, options.split_seed]
        digest = stable_digest("data", json.dumps([content, made])).hex()[:16]
        self.tasks = TaskSet(f"Data-{digest}", {name: self._size(name) for name in self._parts})

    def questions(self, split: str, index: int) -> list[Question]:
        """The questions of a task, in order."""
        return self._questions(*self._row(split, index))

    def row_number(self, split: str, index: int) -> int:
        """The row of a task in its file, counted from 0."""
        numbers = self._parts[split][1]
        return index if numbers is None else int(numbers[index])

    def _row(self, split: str, index: int) -> tuple[Sequence[Any], int]:
        return self._parts[split][0], self.row_number(split, index)

    def _size(self, split: str) -> int:
        rows, numbers = self._parts[split]
        return len(rows) if numbers is None else len(numbers)

    def _questions(self, rows: Sequence[Any], number: int) -> list[Question]:
        return list(self._parse(rows[number], lambda: _place(rows, number)))

    def _parse(self, row: Mapping[str, Any], place: Any) -> Iterator[Question]:
        """Check a row and return its questions: one, or one per prompt where the prompts are a list."""
        try:
            prompts, answers = _prompts(row["prompt"]), [row["answer"]]
            if isinstance(row["prompt"], list) and len(prompts) > 1:
                answers = row["answer"] if isinstance(row["answer"], list) else []
                if len(answers) != len(prompts):
                    raise ValueError(f"{len(prompts)} prompts need a list of as many answers")
            choices = _choices(row.get("choices"))
            for prompt, answer in zip(prompts, answers, strict=True):
                question = Question(_with_choices(prompt, choices), self._accepted(answer), choices, row)
                self._judge.check(question)
                yield question
        except ValueError as error:
            raise UsageError(f"{place()}: {error}.") from None

    def _accepted(self, answer: Any) -> tuple[str, ...]:
        values = answer if isinstance(answer, list) else [answer]
        if not values or not all(isinstance(value, (str, int, float)) for value in values):
            raise ValueError(f"the answer is {answer!r}; expected text, a number, or a list of them")
        texts = [str(value).strip() for value in values]
        if self._pattern is None:
            return tuple(texts)
        found = [self._pattern.search(text) for text in texts]
        if not all(found):
            raise ValueError(f"the answer does not match answer_pattern {self._pattern.pattern!r}")
        return tuple(match[match.re.groups and 1].strip() for match in found if match)

    def _keys(self, rows: Sequence[Any]) -> NDArray[np.uint64]:
        """A hash of the prompts of each row, without case and white space; checks every row on the way."""

        def make() -> NDArray[np.uint64]:
            keys = np.empty(len(rows), np.uint64)
            for number, row in enumerate(rows):
                questions = self._parse(row, lambda number=number: _place(rows, number))
                keys[number] = _hash(*(normalize_answer(question.prompt) for question in questions))
            return keys

        options = self._options
        return (
            rows.derived(f"prompts {options.judge} {options.answer_pattern}", make)
            if isinstance(rows, Rows)
            else make()
        )

    def _disjoint(
        self,
        parts: dict[str, tuple[Sequence[Any], NDArray[Any] | None]],
        keys: Mapping[str, NDArray[np.uint64]],
    ) -> dict[str, tuple[Sequence[Any], NDArray[Any] | None]]:
        """Refuse prompts that are in two splits, or drop them from the first of the two."""
        names = list(parts)
        for position, name in enumerate(names):
            later = [np.unique(keys[other]) for other in names[position + 1 :]]
            shared = np.isin(keys[name], np.concatenate(later)) if later else np.zeros(0, bool)
            if not shared.any():
                continue
            rows, numbers = parts[name]
            numbers = np.arange(len(rows), dtype=np.uint32) if numbers is None else numbers
            if self._options.overlap == "error":
                first = _place(rows, int(numbers[int(np.argmax(shared))]))
                raise UsageError(
                    f"{int(shared.sum())} prompts of the split {name!r} are also in another split (the first "
                    f"at {first}): remove them, or set overlap=drop to leave them out of {name!r}."
                )
            if shared.all():
                raise UsageError(f"Every prompt of the split {name!r} is also in another split.")
            parts[name] = (rows, numbers[~shared])
        return parts


def open_tasks(options: Options) -> RowTasks:
    """The tasks of these settings; shared by all environments of a process while the files do not change."""
    try:
        text = json.dumps(_plain(options), sort_keys=True)
    except (TypeError, ValueError) as error:
        raise UsageError(f"data must be files, or rows of plain JSON values: {error}.") from None
    return _open_tasks(text, _stamp(options.data))


@lru_cache(maxsize=8)
def _open_tasks(options: str, stamp: tuple[Any, ...]) -> RowTasks:
    return RowTasks(Options(**json.loads(options)))


def _plain(options: Options) -> dict[str, Any]:
    return {one.name: getattr(options, one.name) for one in fields(options)}


def _stamp(data: Any) -> tuple[Any, ...]:
    """Sizes and times of the data files: a change makes the tasks be read again."""
    stamps = []
    for name in _all_paths(data):
        folders = dataset_splits(name).values() if isinstance(name, str) else ()
        for path in data_files([str(folder) for folder in folders] or name):
            state = path.stat()
            stamps.append((str(path.resolve()), state.st_size, state.st_mtime_ns, state.st_ino))
    return tuple(stamps)


def _all_paths(data: Any) -> list[Any]:
    if isinstance(data, str):
        return [data]
    values = list(data.values()) if isinstance(data, Mapping) else list(data)
    return [path for value in values if not isinstance(value, Mapping) for path in _all_paths(value)]


def _sources(data: Any, columns: Mapping[str, str]) -> dict[str, Sequence[Any]]:
    """Rows by named split, or under the empty name where the data are one set; `RowTasks` checks them."""
    if isinstance(data, str) and (folders := dataset_splits(data)):
        return {name: open_rows(folder, columns=columns, check=False) for name, folder in folders.items()}
    if isinstance(data, Mapping):
        if not data:
            raise UsageError("data names no file: expected at least one split with its file.")
        return {str(name): open_rows(paths, columns=columns, check=False) for name, paths in data.items()}
    if isinstance(data, str) or (data and all(isinstance(item, str) for item in data)):
        return {"": open_rows(data, columns=columns, check=False)}
    rows = list(data)
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        raise UsageError("data must be a file, several files, files by split, or a list of rows.")
    picked = []
    for number, row in enumerate(rows):
        if missing := [column for column in columns.values() if column not in row]:
            names = ", ".join(row) or "none"
            raise UsageError(f"data[{number}]: there is no column {missing[0]!r}; the columns are {names}.")
        picked.append({name: row[column] for name, column in columns.items()})
    return {"": picked}


def _ordered(names: Sequence[str] | Mapping[str, Any]) -> list[str]:
    known = [name for name in _ORDER if name in names]
    return known + [name for name in names if name not in known]


def _by_column(rows: Sequence[Any]) -> dict[str, tuple[Sequence[Any], NDArray[Any] | None]]:
    """Rows by the value of the column ``split``."""

    def make() -> NDArray[np.uint64]:
        return np.array([_hash(str(row["split"])) for row in rows], np.uint64)

    hashes = rows.derived("split names", make) if isinstance(rows, Rows) else make()
    _, firsts, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    names = [str(rows[int(first)]["split"]) for first in firsts]
    found = {name: np.flatnonzero(inverse == k).astype(np.uint32) for k, name in enumerate(names)}
    return {name: (rows, found[name]) for name in _ordered(found)}


def _made(
    rows: Sequence[Any], keys: NDArray[np.uint64], options: Options
) -> dict[str, tuple[Sequence[Any], NDArray[Any] | None]]:
    """Splits by a hash of the prompts, so equal prompts are in the same split whatever their order."""
    shares = options.splits or {"train": 0.8, "dev": 0.1, "test": 0.1}
    position = _mixed(keys, options.split_seed).astype(np.float64) / 2.0**64
    bounds = np.cumsum([0.0, *shares.values()])
    bounds[-1] = np.inf
    parts: dict[str, tuple[Sequence[Any], NDArray[Any] | None]] = {}
    for number, name in enumerate(shares):
        numbers = np.flatnonzero((position >= bounds[number]) & (position < bounds[number + 1]))
        if not len(numbers):
            raise UsageError(
                f"The split {name!r} would be empty: there are only {len(rows)} rows. Set splits with "
                "fewer or larger shares, such as splits={train: 0.5, test: 0.5}, or name splits by files."
            )
        parts[name] = (rows, numbers.astype(np.uint32))
    return parts


def _mixed(keys: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """Mix hashes with a seed (the finalizer of splitmix64)."""
    mixed = keys ^ np.uint64(_hash("split seed", str(seed)))
    with np.errstate(over="ignore"):
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


def _hash(*texts: str) -> int:
    return int.from_bytes(stable_digest(*texts)[:8], "big")


def _fingerprint(rows: Sequence[Any]) -> str:
    if isinstance(rows, Rows):
        return rows.fingerprint
    return stable_digest("rows", json.dumps(rows, sort_keys=True, default=str)).hex()


def _place(rows: Sequence[Any], number: int) -> str:
    return rows.place(number) if isinstance(rows, Rows) else f"data[{number}]"


def _prompts(value: Any) -> list[str]:
    """The prompts of a row: text, messages in OpenAI's form, or a list of texts that are asked in order."""
    if isinstance(value, str) and value.strip():
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(item, str) and item.strip() for item in value):
            return list(value)
        if all(isinstance(item, Mapping) and isinstance(item.get("content"), str) for item in value):
            if len(value) == 1:
                return [str(value[0]["content"])]
            return ["\n\n".join(f"{str(m.get('role', 'user')).capitalize()}: {m['content']}" for m in value)]
    raise ValueError(f"the prompt is {value!r}; expected text, messages, or a list of texts"[:300])


def _choices(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, Mapping) and isinstance(value.get("text"), list):  # as in ARC: text and label
        value = value["text"]
    if not isinstance(value, list) or not 2 <= len(value) <= len(LETTERS):
        raise ValueError(f"the choices are {value!r}; expected a list of 2 to {len(LETTERS)} texts"[:300])
    return tuple(str(item) for item in value)


def _with_choices(prompt: str, choices: Sequence[str]) -> str:
    lines = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=False)]
    return "\n".join([prompt.strip(), *lines])


def sums() -> list[dict[str, str]]:
    """The embedded data: sums of two numbers, for a first look and for tests."""
    return [
        {"prompt": f"How much is {a} + {b}?", "answer": str(a + b)}
        for a in range(10, 60)
        for b in range(10, 60)
    ]


def resolved(data: Any) -> Any:
    """The data argument in a form that JSON can represent."""
    if data is None:
        return sums()
    if isinstance(data, Path):
        return str(data)
    if isinstance(data, Mapping):
        return {str(name): resolved(value) for name, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [str(item) if isinstance(item, Path) else item for item in data]
    return data
