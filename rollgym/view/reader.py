"""Incremental reader of a run folder for the viewer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path
from typing import Any

import msgspec

from rollgym.core.errors import ResultsError, UsageError
from rollgym.core.files import open_inside, read_bounded
from rollgym.core.serialization import decode_episode
from rollgym.core.types import Episode
from rollgym.io.episode_blocks import Block, read_blocks
from rollgym.io.run_dir import (
    BLOCKS,
    CONFIG,
    EPISODES,
    EVALUATIONS,
    EVENTS,
    MANIFEST,
    METRICS,
    SUMMARY,
    read_json,
    read_versioned,
)

LONGEST = 64_000_000
"""Maximum bytes of a line; an episode of 1,000 turns has a few million."""
_PIECE = 1 << 20
_CHECK = 64
"""Bytes before the read position that are compared to detect a replaced file."""


@dataclass(slots=True)
class Skipped:
    """Skipped lines of a file with the reason of the first."""

    count: int = 0
    first: str = ""
    half: int = 0
    """Skipped lines without newline."""

    def add(self, number: int, reason: str, half: bool = False) -> None:
        """Count a skipped line."""
        self.count += 1
        self.half += half
        self.first = self.first or f"line {number}: {reason}"


@dataclass(frozen=True, slots=True)
class Line:
    """A line and its position in the file."""

    number: int
    start: int
    data: bytes
    whole: bool
    """False for a last line without its newline."""


@dataclass(slots=True)
class Tail:
    """Reads the lines added to a file since the last call."""

    path: Path
    folder: Path | None = None
    """Folder that must contain the file: links out of it are not followed."""
    longest: int = LONGEST
    """Maximum bytes of a line; longer ones are skipped and counted."""
    skipped: Skipped = field(default_factory=Skipped)
    again: int = 0
    """Number of times the file was truncated and read from the start."""
    _at: int = 0
    _number: int = 0
    _before: bytes = b""

    def changed(self) -> bool:
        """Restart from the beginning if the file was truncated or replaced."""
        if not self._at:
            return False
        try:
            with open_inside(self.path, self.folder) as file:
                file.seek(max(0, self._at - _CHECK))
                same = file.read(min(_CHECK, self._at)) == self._before
        except OSError:
            same = False
        if not same:
            self.restart()
            self.again += 1
        return not same

    def restart(self) -> None:
        """Read the file from its start."""
        self._at, self._number, self._before, self.skipped = 0, 0, b"", Skipped()

    def new(self, *, final: bool = False) -> Iterator[Line]:
        """Return complete new lines; with ``final`` also a last one without newline."""
        try:
            file = open_inside(self.path, self.folder)
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            if not self.skipped.count:
                self.skipped.add(0, str(getattr(error, "strerror", None) or error))
            return
        with file:
            file.seek(self._at)
            while data := file.readline(self.longest + 1):
                size, too_long = len(data), len(data) > self.longest
                before = (self._before + data)[-_CHECK:]
                while too_long and not data.endswith(b"\n") and (data := file.readline(_PIECE)):
                    size += len(data)
                    before = (before + data)[-_CHECK:]
                whole = before.endswith(b"\n")
                if not whole and not final:
                    return
                line = Line(self._number + 1, self._at, data.rstrip(b"\r\n"), whole)
                self._number += 1
                self._at += size
                self._before = before
                if too_long:
                    self.skipped.add(line.number, f"longer than {self.longest:,} bytes", not whole)
                elif line.data.strip():
                    yield line

    def objects(self, *, final: bool = False) -> Iterator[dict[str, Any]]:
        """Return new lines that are JSON objects; others are skipped and counted."""
        for line in self.new(final=final):
            try:
                yield msgspec.json.decode(line.data, type=dict[str, Any])
            except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
                self.skipped.add(line.number, str(error), not line.whole)


@dataclass(slots=True)
class BlockTail:
    """Reads the blocks added to ``episodes.blocks`` since the last call; like `Tail`, for blocks."""

    path: Path
    folder: Path | None = None
    skipped: Skipped = field(default_factory=Skipped)
    again: int = 0
    """Number of times the file was truncated and read from the start."""
    _at: int = 0
    _last: tuple[int, str] = (0, "")
    """Position of the last block and the ids in it."""

    def changed(self) -> bool:
        """Restart from the beginning if the file was truncated or replaced."""
        if not self._at:
            return False
        try:
            same = (
                self._name(next(read_blocks(self.path, self._last[0], self._at, self.folder))) == self._last
            )
        except (ResultsError, StopIteration):
            same = False
        if not same:
            self.restart()
            self.again += 1
        return not same

    def restart(self) -> None:
        """Read the file from its start."""
        self._at, self._last, self.skipped = 0, (0, ""), Skipped()

    def new(self) -> Iterator[Block]:
        """Return complete new blocks."""
        if not (self.path.exists() or self.path.is_symlink()):
            return
        try:
            for block in read_blocks(self.path, self._at, None, self.folder):
                self._at, self._last = block.end, self._name(block)
                yield block
        except ResultsError as error:
            if not self.skipped.count:
                self.skipped.add(0, str(error))

    @staticmethod
    def _name(block: Block) -> tuple[int, str]:
        return block.start, f"{block.step} {block.end} {' '.join(block.ids)}"


def read_at(path: Path, folder: Path, start: int, size: int) -> bytes:
    """Read a line by its position."""
    with open_inside(path, folder) as file:
        file.seek(start)
        return file.read(size)


MESSAGE = 300
"""Maximum characters of an error message or name in the list of episodes."""
MOST_CONFIG = 1_000_000
LONGEST_NUMBERS = 4_000_000
"""Maximum bytes of a line of metrics, evaluations or events."""
MOST_NUMBERS = 200_000
"""Maximum lines of metrics or evaluations."""
MOST_EPISODES = 2_000_000
MOST_ENTRIES = 1_000
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")


@dataclass(frozen=True, slots=True)
class Row:
    """Row of the episode list."""

    n: int
    id: str
    env: str
    step: int | None
    split: str
    task: int | None
    group: str
    member: int
    outcome: str
    success: bool | None
    total: float
    turns: int
    tokens: int
    seconds: float
    valid: float | None
    error: str
    entry: str = ""
    """Suite entry it belongs to."""

    def values(self) -> tuple[Any, ...]:
        """Its cells, in the order of `COLUMNS`."""
        return astuple(self)


COLUMNS = tuple(one.name for one in fields(Row))


class Extra(msgspec.Struct):
    """Extra fields of an episode line in a training run."""

    step: int | None = None
    tokens: dict[str, list[float | None]] = {}
    """Values of its action tokens in the order of play, by name: ``advantages``, ``ratios``."""


class RunView:
    """A run as read so far."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        self.metrics: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []
        self.rows: list[Row] = []
        self.places: list[tuple[str, int, int]] = []
        """Position of each row's line: file, offset and size. In blocks: the offset of the block, and minus
        the number of the episode in it."""
        self.sizes: list[int] = []
        """Approximate bytes of each row's episode as a line."""
        self.by_step: dict[int, list[int]] = {}
        self.version = 0
        """Incremented with every line read."""
        self._files = _episode_files(self.manifest)
        numbers = {name: Tail(folder / name, folder, LONGEST_NUMBERS) for name in (METRICS, EVALUATIONS)}
        self._tails = numbers | {name: Tail(folder / name, folder) for name in self._files if name != BLOCKS}
        self._blocks = BlockTail(folder / BLOCKS, folder)
        self.events = Tail(folder / EVENTS, folder, LONGEST_NUMBERS)

    @property
    def epoch(self) -> int:
        """Incremented when the run was rewound: earlier rows may no longer exist."""
        return self._blocks.again + sum(self._tails[name].again for name in self._files if name != BLOCKS)

    @property
    def summary(self) -> dict[str, Any] | None:
        """Summary of the run once written."""
        try:
            return read_json(self.folder / SUMMARY, self.folder)
        except ResultsError:
            return None

    @property
    def config(self) -> str:
        """Configuration as text; empty if there is none."""
        try:
            text = read_bounded(self.folder / CONFIG, MOST_CONFIG, self.folder)
        except FileNotFoundError:
            return ""
        except OSError as error:
            return f"{CONFIG} is not shown: {error.strerror}."
        return text.decode("utf-8", "replace")

    @property
    def skipped(self) -> dict[str, Skipped]:
        """Skipped lines by file."""
        every: dict[str, Tail | BlockTail] = {**self._tails, BLOCKS: self._blocks, EVENTS: self.events}
        return {name: tail.skipped for name, tail in every.items() if tail.skipped.count}

    def follow(self, *, final: bool = False) -> int:
        """Read new lines and return their number. ``final`` also reads a last line without newline."""
        before = self.version
        for name, records in ((METRICS, self.metrics), (EVALUATIONS, self.evaluations)):
            if self._tails[name].changed():
                records.clear()
                self.version += 1
            for line in self._tails[name].objects(final=final):
                if len(records) < MOST_NUMBERS:
                    records.append(line)
                    self.version += 1
                else:
                    self._tails[name].skipped.add(MOST_NUMBERS + 1, f"only {MOST_NUMBERS:,} lines are read")
        changed = [self._tails[name].changed() for name in self._files if name != BLOCKS]
        if self._blocks.changed() or any(changed):
            self._forget()
        for name in self._files:
            if name == BLOCKS:
                self._add_blocks()
                continue
            for new_line in self._tails[name].new(final=final):
                self._add(name, new_line)
        return self.version - before

    def _forget(self) -> None:
        """A file was truncated: read all episodes again."""
        self.rows.clear()
        self.places.clear()
        self.sizes.clear()
        self.by_step.clear()
        for name in self._files:
            (self._blocks if name == BLOCKS else self._tails[name]).restart()
        self.version += 1

    def episode(self, n: int) -> tuple[Episode, Extra]:
        """Read an episode and its extra fields from the file."""
        name, start, size = self.places[n]
        if name == BLOCKS:
            block = next(read_blocks(self.folder / BLOCKS, start, None, self.folder), None)
            if block is None:
                raise ResultsError(f"{self.folder / BLOCKS} has no block at byte {start} any more.")
            stored = block.read_one(-size)
            return stored.episode, Extra(
                stored.step, {name: list(own) for name, own in stored.values.items()}
            )
        data = read_at(self.folder / name, self.folder, start, size)
        return decode_episode(data), _extra(data)

    def _add(self, name: str, line: Line) -> None:
        if len(self.rows) >= MOST_EPISODES:
            self._tails[name].skipped.add(line.number, f"only {MOST_EPISODES:,} episodes are read")
            return
        try:
            episode = decode_episode(line.data)
        except ResultsError as error:
            self._tails[name].skipped.add(line.number, str(error), not line.whole)
            return
        row = make_row(len(self.rows), episode, _extra(line.data).step, self._files[name])
        self._append(row, (name, line.start, len(line.data)), len(line.data))

    def _add_blocks(self) -> None:
        for block in self._blocks.new():
            try:
                episodes = block.read(tokens=False)
            except ResultsError as error:
                self._blocks.skipped.add(block.start, str(error))
                continue
            for number, stored in enumerate(episodes):
                if len(self.rows) >= MOST_EPISODES:
                    self._blocks.skipped.add(block.start, f"only {MOST_EPISODES:,} episodes are read")
                    return
                row = make_row(len(self.rows), stored.episode, stored.step, "", stored.action_tokens)
                # As lines of JSON they would take about four times the room.
                self._append(
                    row, (BLOCKS, block.start, -number), 4 * (block.end - block.start) // len(episodes)
                )

    def _append(self, row: Row, place: tuple[str, int, int], size: int) -> None:
        if row.step is not None:
            self.by_step.setdefault(row.step, []).append(row.n)
        self.rows.append(row)
        self.places.append(place)
        self.sizes.append(size)
        self.version += 1


def make_row(n: int, episode: Episode, step: int | None, entry: str = "", tokens: int | None = None) -> Row:
    """Return the list row of an episode, whose number of action tokens is given if they were not read."""
    spec, turns = episode.spec, episode.turns
    valid = [bool(turn.info.get("valid", True)) for turn in turns]
    return Row(
        n=n,
        id=spec.episode_id[:MESSAGE],
        env=spec.env_id[:MESSAGE],
        step=step,
        split=spec.split[:MESSAGE],
        task=spec.task,
        group=spec.group_id[:MESSAGE],
        member=spec.member,
        outcome=episode.outcome.value,
        success=episode.scored_success,
        total=episode.total_reward,
        turns=len(turns),
        tokens=sum(len(turn.action_ids) for turn in turns) if tokens is None else tokens,
        seconds=round(episode.seconds, 4),
        valid=round(sum(valid) / len(valid), 4) if valid else None,
        error="" if episode.error is None else episode.error.message[:MESSAGE],
        entry=entry,
    )


def _episode_files(manifest: dict[str, Any]) -> dict[str, str]:
    """Return episode files with their suite entry: one per entry for a suite, otherwise those of the run."""
    entries = manifest.get("entries")
    if manifest.get("kind") != "bench" or not isinstance(entries, list):
        return {EPISODES: "", BLOCKS: ""}
    # Names come from a file: paths that leave the run folder are skipped.
    names = [name for name in entries[:MOST_ENTRIES] if isinstance(name, str) and _NAME.fullmatch(name)]
    return {f"entries/{name}/{EPISODES}": name for name in names}


def _extra(line: bytes) -> Extra:
    try:
        return msgspec.json.decode(line, type=Extra)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return Extra()


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a run.

    Raises:
        RollgymError: The folder is not a readable run.
    """
    if not folder.is_dir():
        raise UsageError(f"Folder not found: {folder}. Pass the output folder of a run (--out).")
    if not (folder / MANIFEST).exists():
        inside = sorted(path.parent.name for path in folder.glob(f"*/{MANIFEST}"))
        shown = ", ".join(inside[:5]) + (" …" if len(inside) > 5 else "")
        hint = (
            f"its folders {shown} are runs: pass one of them."
            if inside
            else "pass the --out folder of `rollgym train` or `rollgym eval`."
        )
        raise UsageError(f"{folder} is not a run: it has no {MANIFEST}; {hint}")
    return read_versioned(folder / MANIFEST, folder)
