"""Writes training episodes in a thread: encoding and compressing them takes longer than the rest of a record.

At most one step is being written. Its episodes can be encoded while the learner trains on them
(`EpisodeWriter.prepare`), and are appended when the step is recorded. A step is written completely or not at
all, unless the process is killed: then `BlockFile` ends with the last complete block.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from rollgym.core.errors import UsageError
from rollgym.core.types import Episode
from rollgym.io.episode_blocks import Values, complete_end, encode_blocks
from rollgym.trainer.tracking.base import AppendOnlyFile


class BlockFile(AppendOnlyFile):
    """``episodes.blocks``, which grows by blocks."""

    def complete_end(self, end: int) -> int:
        """The offset after the last complete block before ``end``."""
        return complete_end(self.path, end)

    def append(self, blocks: Sequence[bytes]) -> int:
        """Append all of these blocks, or none; returns the size after them."""
        before = self.size
        try:
            for block in blocks:
                self.write(block)
        except BaseException:
            self.truncate(before)
            raise
        return self.size


class EpisodeWriter:
    """Encodes and appends the episodes of one step after the other, in its own thread."""

    def __init__(self, folder: Path, name: str) -> None:
        self.file = BlockFile(folder / name, UsageError)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="episodes")
        self._prepared: tuple[int, Sequence[Episode], Future[list[bytes]]] | None = None
        self._writing: Future[int] | None = None

    def prepare(self, step: int, episodes: Sequence[Episode]) -> None:
        """Start to encode the episodes that a later `write` of this step has."""
        self._prepared = (step, episodes, self._thread.submit(_encode, step, episodes, ()))

    def write(self, step: int, episodes: Sequence[Episode], values: Sequence[Values] = ()) -> None:
        """Start to write the episodes of a step, after waiting for those of the step before."""
        self.wait()
        prepared, self._prepared = self._prepared, None
        if prepared is not None and not values and prepared[0] == step and _same(prepared[1], episodes):
            blocks = prepared[2]
        else:
            blocks = self._thread.submit(_encode, step, episodes, values)
        self._writing = self._thread.submit(lambda: self.file.append(blocks.result()))

    def started(self) -> Future[int]:
        """The file's size once everything is written."""
        return self._writing or self._thread.submit(lambda: self.file.size)

    def wait(self) -> None:
        """Return once everything is with the kernel; raises `RunError` where that failed."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """Finish writing, sync and close."""
        try:
            self.wait()
        finally:
            self._thread.shutdown(cancel_futures=True)
            self.file.close()


def _encode(step: int, episodes: Sequence[Episode], values: Sequence[Values]) -> list[bytes]:
    return list(encode_blocks(step, episodes, values))


def _same(prepared: Sequence[Episode], episodes: Sequence[Episode]) -> bool:
    return len(prepared) == len(episodes) and all(map(lambda a, b: a is b, prepared, episodes))
