"""The append-only files of a training run; a resumed run continues them exactly.

DIR/metrics.jsonl      one line per training step
DIR/evaluations.jsonl  one line per evaluation
DIR/steps.jsonl        what each step was trained on (`rollgym.trainer.step_log`)
DIR/episodes.blocks    the training episodes with the step that trained on them, in compressed blocks
DIR/tensorboard/       the same numbers for TensorBoard (and for other trackers, if configured)

A line is complete once its newline is written. It is with the kernel when the call returns, so it survives a
killed process; after `RunLogger.marks` it also survives a crash of the machine. Episodes are written in a
thread, and are with the kernel once `RunLogger.written` returns. A folder whose first steps an older version
wrote also has an ``episodes.jsonl`` with them, which only shrinks.
"""

from __future__ import annotations

import asyncio
import fcntl
import math
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Literal

import msgspec

from rollgym.core.errors import ResultsError, RunError, UsageError, boundary, os_reason
from rollgym.core.serialization import jsonable
from rollgym.core.types import Episode
from rollgym.io.run_dir import BLOCKS, EPISODES, STEPS, folder_in_use
from rollgym.trainer.tracking.base import AppendOnlyFile, Tracker
from rollgym.trainer.tracking.episode_writer import EpisodeWriter
from rollgym.trainer.tracking.tensorboard import TensorBoardTracker
from rollgym.trainer.tracking.wandb import WandbTracker

METRICS, EVALUATIONS, BOARD = "metrics.jsonl", "evaluations.jsonl", "tensorboard"
RESERVED = ("step", "time", "not_finite")
"""Fields of every line: a metric cannot have such a name."""


class RunLogger:
    """Writes metrics, evaluations and episodes of one run; a lock allows one process at a time.

    Args:
        folder: The run folder.
        tensorboard: Also write TensorBoard event files.
        wandb: Arguments of ``wandb.init``, to also log to W&B.
        others: Functions that make other trackers, each called with the run folder.
        episodes: ``all`` writes training episodes to ``episodes.blocks``, ``none`` does not.
    """

    def __init__(
        self,
        folder: Path,
        *,
        tensorboard: bool = True,
        wandb: Mapping[str, Any] | None = None,
        others: Sequence[Callable[[Path], Tracker]] = (),
        episodes: Literal["all", "none"] = "all",
    ) -> None:
        if episodes not in ("all", "none"):
            raise UsageError(f"episodes must be 'all' or 'none', not {episodes!r}.")
        self.folder = folder
        self._keep_episodes = episodes == "all"
        self._files: dict[str, AppendOnlyFile] = {}
        self._trackers: list[Tracker] = []
        with ExitStack() as undo:
            undo.callback(self.close, failed=True)
            if tensorboard:
                self._trackers.append(TensorBoardTracker(folder / BOARD))
            self._open()
            if wandb is not None:
                self._trackers.append(WandbTracker(folder, wandb))
            for make in others:
                self._trackers.append(make(folder))
            undo.pop_all()

    def __enter__(self) -> RunLogger:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        # A full disk must not hide the error that ended the run.
        with suppress(*(() if kind is None else (RunError,))):
            self.close(failed=kind is not None)

    def close(self, *, failed: bool = False) -> None:
        """Flush to disk and close everything; ``failed`` marks the run as failed in trackers."""
        with ExitStack() as stack:  # an error of one does not keep another open
            for name, file in self._files.items():
                stack.callback(self._episodes.close if name == BLOCKS else file.close)
            for tracker in self._trackers:
                stack.callback(tracker.close, failed=failed)
            self._files, self._trackers = {}, []

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a training step; non-finite ones become null and are listed by name."""
        values = {name: _number(name, value) for name, value in metrics.items()}
        wrong = [name for name, value in values.items() if not math.isfinite(value)]
        self._line(METRICS, step, values | dict.fromkeys(wrong), **({"not_finite": wrong} if wrong else {}))

    def log_evaluation(self, step: int, summary: Mapping[str, Any]) -> None:
        """Write the result of an evaluation after ``step``; it may be nested."""
        self._line(EVALUATIONS, step, jsonable(summary, "summary"))

    def log_step(self, fields: Mapping[str, Any]) -> None:
        """Write what a step was trained on (`rollgym.trainer.step_log.step_fields`)."""
        self._files[STEPS].write(msgspec.json.encode(fields) + b"\n")

    def log_episodes(
        self, step: int, episodes: Sequence[Episode], tokens: Sequence[Mapping[str, list[float]]] = ()
    ) -> None:
        """Start to write the episodes of a training step, all of them or none (see `written`).

        ``tokens``: for each episode, values of its action tokens by name.
        """
        if self._keep_episodes and episodes:
            self._episodes.write(_step(step), episodes, tokens)

    def prepare_episodes(self, step: int, episodes: Sequence[Episode]) -> None:
        """Start to encode the episodes that `log_episodes` will get for a step, so that it has less to do."""
        if self._keep_episodes and episodes:
            self._episodes.prepare(_step(step), episodes)

    async def written(self) -> None:
        """Return once all episodes are with the kernel; the event loop is free meanwhile."""
        writing = asyncio.wrap_future(self._episodes.started())
        await asyncio.wait([writing])  # to cancel this wait does not cancel the writing
        writing.exception()
        self._episodes.wait()

    def marks(self) -> dict[str, int]:
        """Sync all files and return their sizes; a checkpoint stores them for `rewind`."""
        self._episodes.wait()
        for file in self._files.values():
            file.sync()
        for tracker in self._trackers:
            tracker.flush()
        return self.sizes()

    def sizes(self) -> dict[str, int]:
        """The sizes of all files, which need not be on disk yet."""
        self._episodes.wait()
        return {name: file.size for name, file in self._files.items()}

    def rewind(self, marks: Mapping[str, int]) -> None:
        """Forget everything written after ``marks``."""
        self._episodes.wait()
        marks = with_new_files(marks)
        for name, file in self._files.items():
            mark = marks.get(name, -1)
            if not 0 <= mark <= file.size or file.complete_end(mark) != mark:
                raise ResultsError(
                    f"{file.path} is not the file that the checkpoint belongs to ({file.size} bytes, "
                    f"{mark} expected): restore that file, or start a new run."
                )
        lines = [
            (name, line, end <= marks[name])
            for name in (METRICS, EVALUATIONS)
            for end, line in _lines(self.folder / name)
        ]
        for name, file in self._files.items():
            file.truncate(marks[name])
        # A tracker may hold steps whose lines were lost in a crash, so it forgets from the first step without
        # a kept line at the latest. It forgets whole steps: kept lines of these steps are logged again.
        after = 1 + max((line["step"] for _, line, kept in lines if kept), default=-1)
        first = min([after, *(line["step"] for _, line, kept in lines if not kept)])
        again = [(line, _tags(name, line)) for name, line, kept in lines if kept and line["step"] >= first]
        for tracker in self._trackers:
            tracker.rewind(first, again)

    def _open(self) -> None:
        for name in (METRICS, EVALUATIONS, STEPS):
            self._files[name] = AppendOnlyFile(self.folder / name, UsageError)
        self._episodes = EpisodeWriter(self.folder, BLOCKS)
        self._files[BLOCKS] = self._episodes.file
        if (self.folder / EPISODES).exists():
            self._files[EPISODES] = AppendOnlyFile(self.folder / EPISODES, UsageError)
        try:
            fcntl.flock(self._files[METRICS], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise folder_in_use(self.folder) from None
        for file in self._files.values():
            with suppress(ResultsError):  # damage before the end: `rewind` reports or drops it
                file.truncate(file.complete_end(file.size))  # a crash leaves half a line or block

    def _line(self, name: str, step: int, fields: Mapping[str, Any], **more: Any) -> None:
        if taken := [field for field in RESERVED if field in fields]:
            raise UsageError(f"A metric cannot be called {taken[0]!r}: every line has a field of that name.")
        line = {"step": _step(step), "time": time.time(), **fields, **more}
        self._files[name].write(msgspec.json.encode(line) + b"\n")
        tags = _tags(name, line)
        for tracker in self._trackers:
            tracker.log(line, tags)


def with_new_files(marks: Mapping[str, int]) -> dict[str, int]:
    """The marks of a checkpoint; one of an older version has none for the files that are new."""
    return {**({BLOCKS: 0, STEPS: 0} if EPISODES in marks else {}), **marks}


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """All complete lines of a run's ``metrics.jsonl``."""
    return [line for _, line in _lines(folder / METRICS)]


def read_evaluations(folder: Path) -> list[dict[str, Any]]:
    """All complete lines of a run's ``evaluations.jsonl``."""
    return [line for _, line in _lines(folder / EVALUATIONS)]


def _tags(name: str, line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line by their name in trackers: ``train/...`` or ``eval/...``."""
    prefix = "train/" if name == METRICS else "eval/"
    tags = dict(_flatten(((field, line[field]) for field in line if field not in RESERVED), prefix))
    return tags | {prefix + field: math.nan for field in line.get("not_finite", ())}


def _flatten(items: Iterable[tuple[str, Any]], prefix: str) -> Iterator[tuple[str, float]]:
    for name, item in items:
        if isinstance(item, Mapping):
            yield from _flatten(item.items(), f"{prefix}{name}/")
        elif isinstance(item, (int, float)):
            yield prefix + name, float(item)


def _step(step: int) -> int:
    if operator.index(step) < 0:
        raise UsageError(f"A step must be an integer >= 0, not {step}.")
    return operator.index(step)


def _number(name: str, value: Any) -> float:
    try:
        return float(operator.pos(value))  # a str has no sign, so "1" is not taken for a number
    except (TypeError, ValueError, OverflowError):
        raise UsageError(f"The metric {name!r} must be a number, not {value!r}.") from None


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every complete line and the offset of its end."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise ResultsError(f"Cannot read {path}: {os_reason(error)}.") from None
    end = 0
    for number, line in enumerate(lines, 1):
        end += len(line) + 1
        with boundary(ResultsError, f"{path}, line {number}"):
            value = msgspec.json.decode(line, type=dict[str, Any])
        yield end, value
