"""Results of a finished or unfinished run as Python values: episodes, metrics, evaluations, config."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rollgym.core.errors import ResultsError, UnknownName, os_reason
from rollgym.core.extras import require
from rollgym.core.files import open_inside, read_bounded
from rollgym.core.renamed import METRICS as RENAMED
from rollgym.core.renamed import renamed
from rollgym.core.serialization import decode_episode
from rollgym.core.types import Episode
from rollgym.io.episode_blocks import episode_line, stored_episodes
from rollgym.io.run_dir import (
    BLOCKS,
    CONFIG,
    EPISODES,
    EVALUATIONS,
    MANIFEST,
    METRICS,
    SUMMARY,
    read_json,
    read_manifest,
)

MAX_LINE_BYTES = 64_000_000
Record = dict[str, Any]
"""A flat dict: nested values have keys such as ``length/p50``."""


class RunResults:
    """The results in one run folder, read on demand; `load_run` makes it.

    Reading imports and runs nothing that the folder names. Links that lead out of the folder are refused. A
    last line that a crash cut off is ignored.

    Attributes:
        path: The folder.
        manifest: The request, seeds and versions, as written when the run started.

    Example:
        >>> run = rollgym.load_run("runs/demo")
        >>> run.metrics_array("return")
        array([0.12, 0.31, 0.55])
        >>> pandas.DataFrame(run.to_records()).groupby("outcome")["return"].mean()
    """

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self.manifest = manifest

    def __repr__(self) -> str:
        return f"RunResults({str(self.path)!r}, kind={self.kind!r})"

    @property
    def kind(self) -> str:
        """The command that wrote the folder: eval, train, sft, dpo, bench or serve."""
        return str(self.manifest.get("kind", "eval"))

    @cached_property
    def summary(self) -> dict[str, Any] | None:
        """The contents of ``summary.json``; ``None`` while the run is unfinished."""
        if not (self.path / SUMMARY).exists():
            return None
        return read_json(self.path / SUMMARY, self.path)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The training settings of ``config.yaml``; empty for other kinds of runs."""
        if not (self.path / CONFIG).exists():
            return {}
        require("Reading config.yaml", "train")
        from rollgym.config.yaml import read_tree

        try:
            text = read_bounded(self.path / CONFIG, folder=self.path).decode()
        except (OSError, UnicodeError) as error:
            raise _unreadable(self.path / CONFIG, error) from None
        return read_tree(text, CONFIG).values

    @cached_property
    def entries(self) -> dict[str, RunResults]:
        """The results of each entry of a suite (``rollgym bench``) by name; empty for other runs."""
        if self.kind != "bench":
            return {}
        names = [name for name in self.manifest.get("entries", ()) if isinstance(name, str)]
        folders = {name: self.path / "entries" / name for name in names if Path(name).name == name}
        return {name: load_run(folder) for name, folder in folders.items() if (folder / MANIFEST).exists()}

    @property
    def episodes(self) -> Iterator[Episode]:
        """All episodes in file order, decoded one at a time; those of a suite entry by entry."""
        return (episode for _, episode, _ in self._episodes())

    def episode_lines(self) -> Iterator[bytes]:
        """All episodes as lines of ``episodes.jsonl``, without newlines."""
        if self.kind == "bench":
            for run in self.entries.values():
                yield from run.episode_lines()
            return
        yield from (line.rstrip(b"\r\n") for _, line in _lines(self.path, EPISODES))
        yield from map(episode_line, stored_episodes(self.path / BLOCKS, self.path))

    def to_records(self) -> list[Record]:
        """One flat record per episode, without its turns: ``pandas.DataFrame(run.to_records())``."""
        return [
            {
                "episode_id": episode.spec.episode_id,
                "entry": entry,
                "step": step,
                "env": episode.spec.env_id,
                "split": episode.spec.split,
                "task": episode.spec.task,
                "group_id": episode.spec.group_id,
                "member": episode.spec.member,
                "outcome": episode.outcome.value,
                "success": episode.scored_success,
                "return": episode.total_reward,
                "length": episode.length,
                "action_tokens": sum(len(turn.action_ids) for turn in episode.turns),
                "seconds": episode.seconds,
                "error": None if episode.error is None else episode.error.message,
            }
            for entry, episode, step in self._episodes()
        ]

    @cached_property
    def metrics(self) -> list[Record]:
        """One record per training step; empty for runs that do not train."""
        return list(_records(self.path, METRICS))

    @cached_property
    def evaluations(self) -> list[Record]:
        """One record per evaluation: during training, of the run, or of each entry of a suite."""
        if self.kind in ("train", "sft", "dpo"):
            return list(_records(self.path, EVALUATIONS))
        if self.kind == "bench":
            return [
                {"entry": name, **record} for name, run in self.entries.items() for record in run.evaluations
            ]
        return [] if self.summary is None else [flatten(self.summary)]

    def metrics_array(self, name: str) -> npt.NDArray[np.float64]:
        """One training metric as an array over steps; NaN where a step has no value.

        Raises:
            UnknownName: No step has this metric; a metric that was renamed is stated with its new name.
        """
        return _column(self.metrics, name)

    def evaluations_array(self, name: str) -> npt.NDArray[np.float64]:
        """One number of the evaluations, such as ``success_rate``, as an array; NaN if one has no value."""
        return _column(self.evaluations, name)

    def _episodes(self) -> Iterator[tuple[str, Episode, int | None]]:
        """Every episode, the entry of the suite that it belongs to, and the step that trained on it."""
        if self.kind == "bench":
            for name, run in self.entries.items():
                yield from ((name, episode, step) for _, episode, step in run._episodes())
            return
        for number, line in _lines(self.path, EPISODES):
            try:
                yield "", decode_episode(line), msgspec.json.decode(line, type=_Step).step
            except (ResultsError, msgspec.DecodeError) as error:
                raise ResultsError(f"{self.path / EPISODES}, line {number}: {error}.") from None
        for stored in stored_episodes(self.path / BLOCKS, self.path):
            yield "", stored.episode, stored.step


class _Step(msgspec.Struct):
    step: int | None = None


def load_run(path: str | Path) -> RunResults:
    """Open the results in a folder of ``rollgym eval``, ``train``, ``bench run`` or ``serve``.

    Args:
        path: The folder that was given as ``--out``.

    Returns:
        Episodes, metrics, evaluations, manifest and config. No code that the folder names is run.

    Raises:
        UsageError: The folder does not exist or has no manifest.
        ResultsError: A file is broken, or was written by a newer rollgym.

    Example:
        >>> run = rollgym.load_run("runs/sokoban")
        >>> run.kind, run.summary["success_rate"]
        ('eval', 0.94)
        >>> [episode.total_reward for episode in run.episodes][:2]
        [1.0, 0.0]
    """
    folder = Path(path)
    return RunResults(folder, read_manifest(folder, folder))


def flatten(record: Mapping[str, Any]) -> Record:
    """A nested record as a flat one: ``{"length": {"p50": 3}}`` becomes ``{"length/p50": 3}``."""
    return dict(_leaves(record.items(), ""))


def _leaves(items: Iterable[tuple[Any, Any]], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in items:
        if isinstance(value, Mapping):
            yield from _leaves(value.items(), f"{prefix}{key}/")
        elif isinstance(value, list):
            yield from _leaves(enumerate(value), f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def _records(folder: Path, name: str) -> Iterator[Record]:
    for number, line in _lines(folder, name):
        try:
            values = msgspec.json.decode(line, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise ResultsError(f"{folder / name}, line {number}: {error}.") from None
        not_finite = values.pop("not_finite", ())
        yield flatten(values) | dict.fromkeys(not_finite, math.nan)


def _column(records: list[Record], name: str) -> npt.NDArray[np.float64]:
    numeric = {key for record in records for key, value in record.items() if isinstance(value, (int, float))}
    if name not in numeric:
        hint = f"{renamed(name, RENAMED[name])}." if name in RENAMED else ""
        raise UnknownName("metric", name, [] if hint else numeric, hint)
    values = (record.get(name) for record in records)
    return np.array([value if isinstance(value, (int, float)) else math.nan for value in values], np.float64)


def _lines(folder: Path, name: str) -> Iterator[tuple[int, bytes]]:
    """Whole lines of a file in the folder with their numbers; none if the file does not exist."""
    path = folder / name
    try:
        with open_inside(path, folder) as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise ResultsError(f"{path}, line {number}: longer than {MAX_LINE_BYTES:,} bytes.")
                if not line.endswith(b"\n"):
                    return  # a crash cut it off, or it is being written
                if line.strip():
                    yield number, line
    except FileNotFoundError:
        return
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError | UnicodeError) -> ResultsError:
    return ResultsError(f"Cannot read {path}: {os_reason(error) if isinstance(error, OSError) else error}.")
