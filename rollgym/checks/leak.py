"""The rule that many episodes on one instance do not leak memory, files or threads."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePath

from rollgym.checks.report import RuleFailed
from rollgym.checks.rollout import HERE, Env, EnvUnderTest

TURNS = 5
SECONDS = 6.0
"""Time limit of the measured part; slow environments play fewer episodes."""
BYTES_PER_EPISODE = 64
_THEIRS = (
    tracemalloc.DomainFilter(True, 0),  # without numpy's own cache of small arrays
    tracemalloc.Filter(False, tracemalloc.__file__),
    tracemalloc.Filter(False, f"{HERE}{os.sep}*"),
)


@dataclass(frozen=True, slots=True)
class Mark:
    """Resources of the process at one moment."""

    memory: tracemalloc.Snapshot
    files: int
    threads: int

    @property
    def bytes(self) -> int:
        """Bytes allocated since tracing started and not freed."""
        return sum(trace.size for trace in self.memory.traces)


def leak(subject: EnvUnderTest) -> str:
    """Memory, open files and threads do not grow with the number of episodes.

    The same few episodes are played repeatedly, so that caches fill up before the measurement. Memory must
    grow in both halves to count as a leak: a table that doubles once does not.
    """
    warm = 10 if subject.quick else 100
    with subject.env() as env:
        _play(subject, env, warm)
        with _tracing():
            began = time.perf_counter()
            _play(subject, env, warm)
            each = (time.perf_counter() - began) / warm
            half = min(4 * warm, max(20, int(SECONDS / each / 2)))
            first = _mark()
            _play(subject, env, half)
            middle = _mark()
            _require_steady(first, middle, half)
            _play(subject, env, half)
            last = _mark()
            _require_steady(first, last, 2 * half)
            rate = min(middle.bytes - first.bytes, last.bytes - middle.bytes) / half
            if rate > BYTES_PER_EPISODE:
                raise RuleFailed(_memory_sentence(rate, first, last, 2 * half))
    return f"{2 * (warm + half):,} episodes left nothing behind ({max(rate, 0):.0f} bytes an episode)."


def _play(subject: EnvUnderTest, env: Env, episodes: int) -> None:
    starts = subject.starts(10)
    for number in range(episodes):
        subject.play(env, starts[number % len(starts)], TURNS)


@contextmanager
def _tracing() -> Iterator[None]:
    traced = tracemalloc.is_tracing()
    if not traced:
        tracemalloc.start()
    try:
        yield
    finally:
        if not traced:
            tracemalloc.stop()


def _mark() -> Mark:
    gc.collect()
    # Python caches the names of attributes that C code looked up: that cache fills slowly.
    sys._clear_type_cache()
    memory = tracemalloc.take_snapshot().filter_traces(_THEIRS)
    files = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    return Mark(memory=memory, files=files, threads=threading.active_count())


def _require_steady(first: Mark, now: Mark, episodes: int) -> None:
    for resource, grew in (("open files", now.files - first.files), ("threads", now.threads - first.threads)):
        if grew > 2:
            raise RuleFailed(
                f"{episodes} episodes left {grew} more {resource} behind. Reuse what is open, or close it "
                "when the next episode begins and in close()."
            )


def _memory_sentence(rate: float, first: Mark, last: Mark, episodes: int) -> str:
    growth = last.memory.compare_to(first.memory, "lineno")
    frame = max(growth, key=lambda statistic: statistic.size_diff).traceback[0]
    return (
        f"memory grew by {rate:,.0f} bytes with each of {episodes} episodes, mostly allocated at "
        f"{PurePath(frame.filename).name} line {frame.lineno}. Reset all state in begin(); keep nothing that "
        "grows from episode to episode."
    )
