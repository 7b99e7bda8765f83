"""Run folders: a manifest, one line per episode, a summary. Whole files are replaced atomically.

DIR/manifest.json    the request, with everything needed to verify or repeat it
DIR/episodes.jsonl   one episode per line, appended when it ends
DIR/summary.json     the results, written last

Training runs have ``episodes.blocks`` (`rollgym.io.episode_blocks`) instead of ``episodes.jsonl``, or beside
it where an older version wrote the first steps.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import msgspec

from rollgym.core.errors import ResultsError, UsageError, os_reason
from rollgym.core.files import open_append, read_bounded, refuse_links, replacing
from rollgym.core.serialization import decode_episode, encode_episode, read_episodes
from rollgym.core.text import shorten
from rollgym.core.types import SCHEMA_VERSION, Episode
from rollgym.io.atomic import removed_unless, written
from rollgym.io.episode_blocks import stored_episodes

MANIFEST, EPISODES, SUMMARY, EVENTS = "manifest.json", "episodes.jsonl", "summary.json", "events.jsonl"
BLOCKS, STEPS = "episodes.blocks", "steps.jsonl"
METRICS, EVALUATIONS, CONFIG = "metrics.jsonl", "evaluations.jsonl", "config.yaml"
"""Written by training runs."""
FAILED = "failed.jsonl"
"""Failed episodes that were played again."""
MAY_CHANGE = frozenset(
    {
        "base_url", "api_key_env", "timeout", "retries", "requests_per_minute", "tokens_per_minute",
        "price_in", "price_out", "device", "max_batch", "threads", "limits.seconds",
    }
)  # fmt: skip
"""Settings that may differ when results are resumed: URLs, timeouts, retries and speed."""


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically: readers see the old one or the new one."""
    with replacing(path) as file:
        file.write(json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n")


def read_json(path: Path, folder: Path | None = None) -> dict[str, Any]:
    """Read a JSON object from a file; raises `ResultsError` with the reason.

    With ``folder``, the file must be inside it: a link that leads out is not followed.
    """
    try:
        value = json.loads(read_bounded(path, folder=folder))
    except OSError as error:
        raise ResultsError(f"Cannot read {path}: {os_reason(error)}.") from None
    except RecursionError:
        raise ResultsError(f"{path} is nested too deeply.") from None
    except ValueError as error:
        raise ResultsError(f"{path} is not valid JSON ({error}).") from None
    if not isinstance(value, dict):
        raise ResultsError(f"{path} does not contain a JSON object.")
    return value


class RunFolder:
    """An open run folder, locked for one writing process."""

    def __init__(self, path: Path, lock: IO[bytes]) -> None:
        self.path = path
        self.done: list[Episode] = []
        self.repaired = False
        """True where a last line that a crash cut off was removed."""
        self._file = lock

    @classmethod
    def create(cls, path: Path, manifest: dict[str, Any]) -> RunFolder:
        """Create a new folder, or use an empty one; a folder with results is refused."""
        # A crash between the two files leaves an empty episodes file.
        episodes = path / EPISODES
        if (path / MANIFEST).exists() or (episodes.exists() and episodes.stat().st_size):
            raise UsageError(
                f"{path} already contains results: pass --resume to finish them, or another --out."
            )
        with removed_unless(path, lambda: False):
            folder = cls._open(path)
            with folder._closed_on_error(), written(path / MANIFEST):
                write_json(path / MANIFEST, manifest)
        return folder

    @classmethod
    def resume(cls, path: Path, manifest: dict[str, Any], identity: tuple[str, ...]) -> RunFolder:
        """Open an existing folder whose manifest agrees in the fields that make episodes comparable."""
        cls.check(path, manifest, identity)
        folder = cls._open(path)
        with folder._closed_on_error():
            folder._load()
            write_json(path / MANIFEST, manifest)
        return folder

    @classmethod
    def check(cls, path: Path, manifest: dict[str, Any], identity: tuple[str, ...]) -> None:
        """Refuse a folder that cannot be resumed with these settings."""
        if not (path / MANIFEST).exists():
            raise UsageError(f"Nothing to resume in {path}: it has no {MANIFEST}.")
        refuse_links(path)
        before = read_versioned(path / MANIFEST)
        now = json.loads(json.dumps(manifest))  # as it would be read back: tuples are lists
        refuse_change(path, before, now, identity)

    @classmethod
    def _open(cls, path: Path) -> RunFolder:
        try:
            path.mkdir(parents=True, exist_ok=True)
            file = open_append(path / EPISODES)
        except OSError as error:
            raise UsageError(f"Cannot write results to {path}: {os_reason(error)}.") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise folder_in_use(path) from None
        return cls(path, file)

    def append(self, episode: Episode) -> None:
        """Append a finished episode; the kernel has it when this returns."""
        with written(self.path / EPISODES):
            self._file.write(encode_episode(episode) + b"\n")
            self._file.flush()
        self.done.append(episode)

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the summary."""
        with written(self.path / SUMMARY):
            write_json(self.path / SUMMARY, summary)

    def close(self) -> None:
        """Flush to disk and release the folder."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()

    @contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._file.close()
            raise

    def _load(self) -> None:
        path = self.path / EPISODES
        data = path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            try:
                msgspec.json.decode(data[whole:])
            except (msgspec.DecodeError, UnicodeDecodeError):
                # The process died while writing this line.
                self._file.truncate(whole)
                self.repaired = True
            else:
                self._file.write(b"\n")
                self._file.flush()
        self.done = read_episodes(path)
        ids = [episode.spec.episode_id for episode in self.done]
        if len(set(ids)) != len(ids):
            raise ResultsError(f"{path} contains an episode twice: it cannot be resumed.")


def read_manifest(folder: Path, inside: Path | None = None) -> dict[str, Any]:
    """The manifest of a run folder; with ``inside``, a link that leads out of that folder is not followed."""
    if not folder.is_dir():
        raise UsageError(f"Run folder {folder} does not exist.")
    if not (folder / MANIFEST).exists():
        raise UsageError(f"{folder} is not a run folder: it has no {MANIFEST}.")
    return read_versioned(folder / MANIFEST, inside)


def read_run(folder: Path) -> tuple[dict[str, Any], list[Episode]]:
    """The manifest and the episodes of a finished or unfinished run."""
    manifest = read_manifest(folder)
    trained = [stored.episode for stored in stored_episodes(folder / BLOCKS)]
    if trained and not (folder / EPISODES).exists():
        return manifest, trained
    return manifest, read_episodes(folder / EPISODES) + trained


def read_versioned(path: Path, folder: Path | None = None) -> dict[str, Any]:
    """Read a JSON file with a schema version; one that is newer than this rollgym is refused."""
    values = read_json(path, folder)
    schema = values.get("schema")
    if type(schema) is not int:
        raise ResultsError(f"{path} has no schema version.")
    if schema > SCHEMA_VERSION:
        raise ResultsError(
            f"{path} was written with schema {schema}, but this rollgym reads up to {SCHEMA_VERSION}: "
            "upgrade rollgym to read it."
        )
    return values


def refuse_change(path: Path, before: Any, now: Any, identity: tuple[str, ...]) -> None:
    """Refuse to resume results with other settings, stating the first difference.

    Settings that do not affect an episode may change: timeouts, retries, rates, threads, URLs (`MAY_CHANGE`).
    """
    pairs = {field: (before.get(field), now.get(field)) for field in identity}
    for key, (old, new) in _differences(pairs):
        if key.rpartition(".")[2] not in MAY_CHANGE and key not in MAY_CHANGE:
            raise UsageError(
                f"{path} was created with {key} = {_short(old)}, but now it is {_short(new)}: resume with "
                "the same settings, or pass another --out."
            )


def _differences(
    pairs: dict[str, tuple[Any, Any]], prefix: str = ""
) -> Iterator[tuple[str, tuple[Any, Any]]]:
    for name, (then, now) in pairs.items():
        key = f"{prefix}{name}"
        if isinstance(then, dict) and isinstance(now, dict):
            inner = {name: (then.get(name), now.get(name)) for name in {**then, **now}}
            yield from _differences(inner, f"{key}.")
        elif then != now:
            yield key, (then, now)


def folder_in_use(folder: Path) -> UsageError:
    """Return the error for a run folder that another process has locked."""
    return UsageError(
        f"Another process is writing to {folder} right now: wait until it ends, or use another folder."
    )


def set_failed_aside(folder: Path) -> int:
    """Move excluded episodes to a separate file, so that they are played again; returns their number.

    A failure that the agent caused is a result and stays: resuming must not give it a second attempt.
    """
    path = folder / EPISODES
    with open_append(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise folder_in_use(folder) from None
        lines = path.read_bytes().splitlines(keepends=True)
        failed = {number for number, line in enumerate(lines) if _failed(line)}
        if failed:
            with open_append(folder / FAILED) as aside:
                aside.writelines(lines[number] for number in sorted(failed))
            with replacing(path) as kept:
                kept.writelines(line for number, line in enumerate(lines) if number not in failed)
    return len(failed)


def _failed(line: bytes) -> bool:
    try:
        return decode_episode(line).excluded
    except ResultsError:
        return False  # the next reader reports the error


def _short(value: Any) -> str:
    return shorten(json.dumps(value, ensure_ascii=False), 80)
