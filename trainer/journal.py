"""What a training run writes while it goes: append-only files that a resumed run continues exactly.

DIR/metrics.jsonl      one line per training step
DIR/evaluations.jsonl  one line per evaluation
DIR/episodes.jsonl     one training episode per line (`rollgym.records`), with the ``step`` it was used in
DIR/tensorboard/       the same numbers for TensorBoard; W&B has them when asked

A line counts once its newline is there. It is with the kernel when the call returns, so it outlives a killed
process; `Journal.marks` makes it outlive the machine.
"""

from __future__ import annotations

import fcntl
import importlib
import math
import operator
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import msgspec

from rollgym.errors import MissingExtra, ResultsError, RollgymError, RunError, UsageError, boundary, os_reason
from rollgym.files import open_append
from rollgym.records import encode_episode, jsonable
from rollgym.store import EPISODES, read_json, write_json
from rollgym.types import Episode

METRICS, EVALUATIONS, BOARD, WANDB = "metrics.jsonl", "evaluations.jsonl", "tensorboard", "wandb.json"
RESERVED = ("step", "time", "not_finite")
"""A line's own fields: no metric may have such a name."""


class Journal:
    """The open journal of one run; one process at a time writes it."""

    def __init__(
        self,
        folder: Path,
        *,
        tensorboard: bool = True,
        wandb: Mapping[str, Any] | None = None,
        episodes: Literal["all", "none"] = "all",
    ) -> None:
        if episodes not in ("all", "none"):
            raise UsageError(f"episodes must be 'all' or 'none', not {episodes!r}.")
        self.folder = folder
        self._keep = episodes == "all"
        self._files: dict[str, _Appended] = {}
        self._board = _Board(folder / BOARD) if tensorboard else None
        self._wandb: Any = None
        with ExitStack() as undo:
            undo.callback(self.close, failed=True)
            self._open()
            self._wandb = None if wandb is None else _start_wandb(folder, wandb)
            undo.pop_all()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        # A full disk must not hide the error that ended the run.
        with suppress(*(() if kind is None else (RunError,))):
            self.close(failed=kind is not None)

    def close(self, *, failed: bool = False) -> None:
        """Flush to the disk and let the files go; W&B shows a run that ``failed`` as such."""
        with ExitStack() as every:  # each is closed, whatever another one says
            for file in self._all():
                every.callback(file.close)
            if self._wandb is not None:
                every.callback(self._wandb.finish, exit_code=int(failed))
            self._files, self._board, self._wandb = {}, None, None

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the numbers of a training step; those that are not finite become null and are named."""
        values = {name: _number(name, value) for name, value in metrics.items()}
        wrong = [name for name, value in values.items() if not math.isfinite(value)]
        self._line(METRICS, step, values | dict.fromkeys(wrong), **({"not_finite": wrong} if wrong else {}))

    def evaluated(self, step: int, summary: Mapping[str, Any]) -> None:
        """Write what an evaluation of the policy after ``step`` found, nested as it may be."""
        self._line(EVALUATIONS, step, jsonable(summary, "summary"))

    def keep(
        self, step: int, episodes: Sequence[Episode], tokens: Sequence[Mapping[str, list[float]]] = ()
    ) -> None:
        """Write the episodes a training step used, all of them or none.

        ``tokens`` are numbers of each episode's action tokens, by what they say.
        """
        head = b'{"step":%d,' % _step(step)
        heads = [head + b'"tokens":' + msgspec.json.encode(one) + b"," for one in tokens]
        if self._keep:
            lines = [
                begin + encode_episode(episode)[1:] + b"\n"
                for begin, episode in zip(heads or [head] * len(episodes), episodes, strict=True)
            ]
            self._files[EPISODES].write(b"".join(lines))

    def marks(self) -> dict[str, int]:
        """Where every file ends, once all of it is on the disk: what a checkpoint stores for `rewind`."""
        for file in self._all():
            file.sync()
        return {name: file.size for name, file in self._files.items()}

    def rewind(self, marks: Mapping[str, int]) -> None:
        """Forget what was written after ``marks``, as if the run had never come further.

        W&B cannot forget: it ignores the repeated steps, which are the same ones.
        """
        for name, file in self._files.items():
            mark = marks.get(name, -1)
            if not 0 <= mark <= file.size or file.line_end(mark) != mark:
                known = f"{file.path} is not the file the checkpoint knows ({file.size} bytes, {mark} marked)"
                raise ResultsError(f"{known}: put that file back, or start a new run.")
        told = [(name, *pair) for name in (METRICS, EVALUATIONS) for pair in _lines(self.folder / name)]
        lines = [(name, line, end <= marks[name]) for name, end, line in told]
        for name, file in self._files.items():
            file.cut(marks[name])
        if self._board is not None:
            # The board may know steps whose lines were lost with the machine, so it forgets at the latest
            # from the first step on that no line is kept of. It forgets whole steps: what stays is retold.
            after = 1 + max((line["step"] for _, line, kept in lines if kept), default=-1)
            first = min([after, *(line["step"] for _, line, kept in lines if not kept)])
            self._board.purge(first)
            for name, line, kept in lines:
                if kept and line["step"] >= first:
                    self._board.write(line, _tags(name, line))

    def _open(self) -> None:
        for name in (METRICS, EVALUATIONS, EPISODES):
            self._files[name] = _Appended(self.folder / name, UsageError)
        try:
            fcntl.flock(self._files[METRICS], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"Another process is writing to {self.folder} right now.") from None
        for file in self._files.values():
            file.cut(file.line_end(file.size))  # a crash in the middle of a line leaves half of it

    def _all(self) -> list[_Appended]:
        return [*self._files.values(), *(self._board.files if self._board is not None else ())]

    def _line(self, name: str, step: int, fields: Mapping[str, Any], **more: Any) -> None:
        if taken := [field for field in RESERVED if field in fields]:
            raise UsageError(f"A metric cannot be called {taken[0]!r}: every line has such a field itself.")
        line = {"step": _step(step), "time": time.time(), **fields, **more}
        self._files[name].write(msgspec.json.encode(line) + b"\n")
        if self._board is not None:
            self._board.write(line, _tags(name, line))
        if self._wandb is not None:
            with boundary(RunError, "W&B did not take the metrics"):
                self._wandb.log(_tags(name, line), step=line["step"])


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics, without a last one that a crash cut off."""
    return [line for _, line in _lines(folder / METRICS)]


def read_evaluations(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's evaluations, without a last one that a crash cut off."""
    return [line for _, line in _lines(folder / EVALUATIONS)]


class _Appended:
    """A file that only grows at its end, or is cut back to where it was; never half a write stays in it."""

    def __init__(self, path: Path, blame: type[RollgymError] = RunError) -> None:
        self.path = path
        with _naming(path, blame):
            with suppress(FileExistsError):
                path.parent.mkdir(parents=True)
            self._file = open_append(path, buffering=0)
        self.fileno = self._file.fileno

    @property
    def size(self) -> int:
        return os.fstat(self.fileno()).st_size

    def write(self, data: bytes) -> None:
        before, left = self.size, memoryview(data)
        with _naming(self.path):
            try:
                while left:
                    left = left[os.write(self.fileno(), left) :]
            except BaseException:
                with suppress(OSError):
                    self._file.truncate(before)
                raise

    def cut(self, size: int) -> None:
        with _naming(self.path):
            self._file.truncate(size)

    def sync(self) -> None:
        with _naming(self.path):
            os.fsync(self.fileno())

    def close(self) -> None:
        with self._file:
            self.sync()

    def line_end(self, end: int, block: int = 1 << 16) -> int:
        """Where the last whole line before ``end`` stops."""
        while end:
            start = max(0, end - block)
            found = os.pread(self.fileno(), end - start, start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            end = start
        return 0


class _Board:
    """TensorBoard's event files: a new one each time the run goes on."""

    def __init__(self, folder: Path) -> None:
        try:
            self._events = importlib.import_module("tensorboard.compat.proto.event_pb2")
            self._summary = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary
            self._writer = importlib.import_module("tensorboard.summary.writer.record_writer").RecordWriter
        except ImportError:
            raise MissingExtra("Logging to TensorBoard", "train") from None
        self._folder = folder
        self.files: list[_Appended] = []
        """One, once there is something to write."""

    def write(self, line: Mapping[str, Any], tags: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in tags.items()]
        self._put(step=line["step"], wall_time=line["time"], summary=self._summary(value=values))

    def purge(self, step: int) -> None:
        """Have TensorBoard forget, of the files before this one, ``step`` and all that comes after it."""
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._put(step=step, wall_time=time.time(), session_log=start)

    def _put(self, **fields: Any) -> None:
        if not self.files:
            # TensorBoard reads files in order of their names: a clock can be set back, a count cannot.
            name, count = "events.out.tfevents.", "[0-9]" * 6
            last = max((int(path.suffix[1:]) for path in self._folder.glob(name + count)), default=0)
            self.files.append(_Appended(self._folder / f"{name}{last + 1:06d}"))
            self._put(wall_time=time.time(), file_version="brain.Event:2")
        self._writer(self.files[0]).write(self._events.Event(**fields).SerializeToString())


def _start_wandb(folder: Path, settings: Mapping[str, Any]) -> Any:
    """A run at Weights & Biases, found again by the id it got the first time."""
    try:
        init = importlib.import_module("wandb").init
    except (ImportError, AttributeError):  # any folder called wandb imports as an empty package
        raise MissingExtra("Logging to W&B needs the package wandb: pip install wandb") from None
    path = folder / WANDB
    known = {"id": read_json(path).get("id"), "resume": "allow"} if path.exists() else {}
    with boundary(RunError, "W&B could not be started"):
        run = init(**{"dir": str(folder), **known, **settings})
        write_json(path, {"id": run.id})
    return run


def _tags(name: str, line: Mapping[str, Any]) -> dict[str, float]:
    """A line's numbers as trackers name them; evaluations stay apart from training."""
    place = "train/" if name == METRICS else "eval/"
    found = dict(_leaves(((field, line[field]) for field in line if field not in RESERVED), place))
    return found | {place + field: math.nan for field in line.get("not_finite", ())}


def _leaves(items: Iterable[tuple[str, Any]], place: str) -> Iterator[tuple[str, float]]:
    for name, item in items:
        if isinstance(item, Mapping):
            yield from _leaves(item.items(), f"{place}{name}/")
        elif isinstance(item, (int, float)):
            yield place + name, float(item)


def _step(step: int) -> int:
    if operator.index(step) < 0:
        raise UsageError(f"A step is a whole number from 0 on, not {step}.")
    return operator.index(step)


def _number(name: str, value: Any) -> float:
    try:
        return float(operator.pos(value))  # a str has no sign, so "1" is not taken for a number
    except (TypeError, ValueError, OverflowError):
        raise UsageError(f"The metric {name!r} must be a number, not {value!r}.") from None


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every whole line and where it ends."""
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


@contextmanager
def _naming(path: Path, blame: type[RollgymError] = RunError) -> Iterator[None]:
    """Say which file could not be written, and why."""
    try:
        yield
    except OSError as error:
        raise blame(f"Cannot write {path}: {os_reason(error)}.") from error
