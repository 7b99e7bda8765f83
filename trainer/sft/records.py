"""Records of data files: conversations as messages, and episodes; a record that is unusable has a reason.

A JSONL file has one JSON object per line, of either kind; a Parquet file has the columns of a `RecordFormat`.
A run folder stands for its episodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rollgym.core.errors import ResultsError, UsageError, one_line, os_reason
from rollgym.core.files import open_inside
from rollgym.core.serialization import clean_text, decode_episode
from rollgym.core.types import Episode
from rollgym.io.episode_blocks import stored_episodes
from rollgym.io.row_files import MAX_LINE_BYTES, parquet_batches, read_lines
from rollgym.io.run_dir import BLOCKS, EPISODES, MANIFEST, read_versioned
from rollgym.trainer.imitation.examples import Exchange

DATA, DEMONSTRATIONS = "data.json", "demonstrations.jsonl"
"""Files of a run: the report on its data, and the episodes that were played for it."""
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation: a system message, which may be empty, and exchanges of user and assistant."""

    system: str
    exchanges: tuple[Exchange, ...]


@dataclass(frozen=True, slots=True)
class ChatPair:
    """Two continuations of the same conversation, of which one is preferred."""

    chosen: Chat
    rejected: Chat


@dataclass(frozen=True, slots=True)
class Broken:
    """The reason why a record cannot be used."""

    reason: str


@dataclass(frozen=True, slots=True)
class Record:
    """One line of a JSONL file, or one row of a Parquet file."""

    place: str
    """``FILE:LINE``, counted from 1."""
    content: Chat | ChatPair | Episode | Broken
    erred: tuple[bool, ...] = ()
    """For a demonstration: a flag per turn, True for turns that are not learned."""


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """The keys of a record that is not an episode."""

    keys: tuple[str, ...]
    """Keys of a JSON object, or columns of a Parquet file, that a record must have."""
    optional: tuple[str, ...]
    parse: Callable[[dict[str, Any]], Chat | ChatPair]
    """Read a record with these keys; raises `UsageError` if it is unusable."""

    def read(self, value: Any) -> Chat | ChatPair | Broken:
        """Read a record, or return the reason why it is unusable."""
        missing = [key for key in self.keys if not isinstance(value, dict) or key not in value]
        if missing:
            expected = f"expected a JSON object with {' and '.join(self.keys)}, or an episode of rollgym"
            some = len(missing) < len(self.keys)
            return Broken(f"{' and '.join(missing)} missing: {expected}" if some else expected)
        try:
            return self.parse(value)
        except UsageError as error:
            return Broken(str(error))


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file to read."""

    path: Path
    folder: Path | None = None
    """The run folder that it must be inside of."""


def data_files(names: Sequence[str]) -> list[DataFile]:
    """The files that these names stand for: files, and the episodes of run folders.

    Raises:
        UsageError: A file does not exist, or a folder is not a run folder.
    """
    found: list[DataFile] = []
    for name in names:
        path = Path(name)
        if path.is_dir():
            found += _episode_files(path)
        elif path.is_file():
            found.append(DataFile(path))
        else:
            raise UsageError(f"Data file not found: {name}.")
    return found


def _episode_files(folder: Path) -> list[DataFile]:
    if not (folder / MANIFEST).is_file():
        raise UsageError(
            f"{folder} is not a run folder: it has no {MANIFEST}. Pass a run folder, or a JSONL or Parquet "
            "file."
        )
    manifest = read_versioned(folder / MANIFEST, folder)
    entries = manifest.get("entries") if manifest.get("kind") == "bench" else None
    names = [name for name in entries if isinstance(name, str)] if isinstance(entries, list) else []
    paths = [folder / "entries" / name / EPISODES for name in names] or [folder / EPISODES, folder / BLOCKS]
    files = [DataFile(path, folder) for path in paths if path.is_file()]
    if not files:
        raise UsageError(f"The run folder {folder} has no {EPISODES} and no {BLOCKS}.")
    return files


def read_records(file: DataFile, form: RecordFormat | None = None) -> Iterator[Record]:
    """Read all records of a file, one at a time: episodes, and records of a format (default: conversations).

    Raises:
        UsageError: The file cannot be read at all.
    """
    form = form or CHATS
    if file.path.suffix == ".parquet":
        for number, value in enumerate(_parquet_rows(file.path, form), 1):
            yield Record(f"{file.path}:{number}", form.read(value))
        return
    if file.path.suffix == Path(BLOCKS).suffix:
        try:
            for number, stored in enumerate(stored_episodes(file.path, file.folder), 1):
                yield Record(f"{file.path}:{number}", stored.episode)
        except ResultsError as error:
            raise UsageError(str(error)) from None
        return
    try:
        with open_inside(file.path, file.folder) as lines:
            for number, line in enumerate(read_lines(lines), 1):
                if line.strip():
                    yield _record(f"{file.path}:{number}", line, form)
    except OSError as error:
        raise UsageError(f"Cannot read {file.path}: {os_reason(error)}.") from None


def _record(place: str, line: bytes, form: RecordFormat) -> Record:
    if len(line) > MAX_LINE_BYTES:
        return Record(place, Broken(f"longer than {MAX_LINE_BYTES:,} bytes"))
    try:
        value = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        return Record(place, Broken(f"not valid JSON ({error})"))
    if isinstance(value, dict) and "spec" in value and not any(key in value for key in form.keys):
        try:
            episode = decode_episode(line)
        except ResultsError as error:
            return Record(place, Broken(str(error)))
        erred = value.get("erred")
        return Record(place, episode, tuple(map(bool, erred)) if isinstance(erred, list) else ())
    return Record(place, form.read(value))


def _parquet_rows(path: Path, form: RecordFormat) -> Iterator[Any]:
    for batch in parquet_batches(path, form.keys, form.optional):
        yield from batch.to_pylist()


def parse_messages(value: Any) -> Chat:
    """Check messages in OpenAI's format: an optional system message, then user and assistant in turn.

    An assistant message with ``"weight": 0`` is context that is not learned. A user message after the last
    reply is ignored.

    Raises:
        UsageError: The messages cannot be trained on; the message says which one and why.

    Example:
        >>> parse_messages([{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}])
        Chat(system='', exchanges=(Exchange(user='2+2?', reply='4', learned=True),))
    """
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise UsageError(f"messages are text that is not valid JSON ({one_line(error)})") from None
    if not isinstance(value, list) or not value:
        raise UsageError("messages must be a list with at least one message")
    system, user = "", None
    exchanges: list[Exchange] = []
    for number, message in enumerate(value):
        role, content = _message(number, message)
        if role == "system":
            if number:
                raise UsageError(f"messages[{number}]: only the first message can have the role system")
            system = content
        elif role == "user":
            if user is not None:
                raise UsageError(f"messages[{number}]: two user messages in a row")
            user = content
        elif user is None:
            before = (
                "two assistant messages in a row" if exchanges else "a reply without a user message before it"
            )
            raise UsageError(f"messages[{number}]: {before}")
        else:
            if not content.strip():
                raise UsageError(f"messages[{number}]: the assistant's message is empty")
            exchanges.append(Exchange(user, content, learned=_learned(number, message)))
            user = None
    if not any(exchange.learned for exchange in exchanges):
        raise UsageError("no assistant message to learn")
    return Chat(system, tuple(exchanges))


def _message(number: int, message: Any) -> tuple[str, str]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise UsageError(f"messages[{number}]: expected an object with role and content")
    role, content = message["role"], message.get("content")
    if role not in ROLES:
        raise UsageError(f"messages[{number}]: the role {role!r} is not supported (only {', '.join(ROLES)})")
    if message.get("tool_calls") or message.get("function_call"):
        raise UsageError(f"messages[{number}]: tool calls are not supported")
    if isinstance(content, list):
        content = _text_parts(number, content)
    if not isinstance(content, str):
        raise UsageError(f"messages[{number}]: the content must be text, not {type(content).__name__}")
    return role, clean_text(content)


def _text_parts(number: int, parts: list[Any]) -> str:
    texts = []
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise UsageError(f"messages[{number}]: content of type {kind!r} is not supported, only text")
        texts.append(part["text"])
    return "".join(texts)


def _learned(number: int, message: dict[str, Any]) -> bool:
    weight = message.get("weight")
    if weight is not None and weight not in (0, 1):
        raise UsageError(f"messages[{number}]: weight must be 0 or 1, not {weight!r}")
    return weight is None or bool(weight)


CHATS = RecordFormat(("messages",), (), lambda record: parse_messages(record["messages"]))
"""Conversations in OpenAI's format."""
