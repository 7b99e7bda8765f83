"""Rules about Gymnasium's contract (its own checker, the order of calls, close()) and about leaks."""

from __future__ import annotations

import gc
import os
import re
import sys
import threading
import time
import tracemalloc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import gymnasium as gym
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env as gymnasium_check

from rollgym.checks.report import RuleFailed, RuleSkipped, RuleWarning
from rollgym.checks.rollout import (
    HERE,
    Env,
    EnvUnderTest,
    Start,
    Transition,
    last_of,
    named,
    plain,
    raising,
    reset,
    step,
    transitions,
)
from rollgym.core.env import text_interface

_START = Start(0)
_HARMLESS = (
    "is different from the unwrapped version",  # an adapter is a wrapper by nature
    "not having a spec",
    "value is -infinity",
    "value is infinity",
    "we recommend using a symmetric and normalized space",
)


def inner(env: Env) -> Env:
    """The text environment itself, inside Gymnasium's wrappers."""
    interface: Any = text_interface(env)
    if not isinstance(interface, gym.Env):
        raise RuleFailed(f"{type(interface).__name__} is not a gymnasium.Env; subclass rollgym.TextEnv.")
    return interface


def runs(subject: EnvUnderTest) -> str:
    """It can be made, reset and stepped."""
    with subject.env() as env:
        inner(env)
        first, second = list(transitions(env, _START, subject.player(0), 1))
    return f"made, reset, and played {second.action!r}."


def gymnasium_rule(subject: EnvUnderTest) -> str:
    """Gymnasium's own checker accepts it."""
    with subject.env() as env, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checked = inner(env)
        modes = set(checked.metadata.get("render_modes") or ())
        checked.action_space.seed(0)  # it draws actions: the same ones in every check
        try:
            # Modes other than ansi open windows; close() has a separate rule.
            gymnasium_check(checked, skip_render_check=bool(modes - {"ansi"}), skip_close_check=True)
        except AssertionError as error:
            raise RuleFailed(f"Gymnasium's check_env: {plain(str(error)).rstrip('.')}.") from error
        except Exception as error:
            raise RuleFailed(f"Gymnasium's check_env raised {named(error)}.") from error
    complaints = [text for text in map(_warning_text, caught) if text]
    if complaints:
        verdict = RuleWarning if subject.adapted else RuleFailed
        raise verdict(f"Gymnasium's check_env warns: {complaints[0]}")
    return "gymnasium.utils.env_checker.check_env reports nothing."


def _warning_text(caught: warnings.WarningMessage) -> str:
    """A warning of Gymnasium's logger without colors; empty for any other or harmless warning."""
    text = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", str(caught.message)).split())
    if not text.startswith(("WARN:", "ERROR:")) or any(phrase in text for phrase in _HARMLESS):
        return ""
    return plain(text.partition(": ")[2])


def before_reset(subject: EnvUnderTest) -> str:
    """A step before the first reset is refused."""
    with subject.env() as env:
        now = reset(env, _START)
        with raising("random_action()"):
            action = subject.player(0)(now.observation, now.info)
    with subject.env() as env:
        _require_refusal(inner(env), action, "before the first reset()")
    return "step() before reset() raises ResetNeeded."


def after_end(subject: EnvUnderTest) -> str:
    """A step after the end is refused, and a reset starts a new episode."""
    with subject.env() as env:
        checked = inner(env)
        last = _play_out(subject, checked)
        assert last.action is not None
        _require_refusal(checked, last.action, f"after the episode ended at turn {last.turn}")
        now = reset(env, _START)
        step(env, subject.player(0)(now.observation, now.info), 1)
    return f"after an end at turn {last.turn}, step() raises ResetNeeded and reset() starts a new episode."


def _play_out(subject: EnvUnderTest, env: Env) -> Transition:
    # Inside Gymnasium's TimeLimit, so an episode may exceed the limit or never end.
    turns = 2 * subject.turn_limit if subject.turn_limit else 2_000
    for start in subject.starts(3):
        last = last_of(transitions(env, start, subject.player(start.seed), turns))
        if last.ends:
            return last
    raise RuleSkipped(
        f"no episode of random actions ended within {turns:,} turns, so a step after it cannot be tested."
    )


def _require_refusal(env: Env, action: str, when: str) -> None:
    try:
        env.step(action)
    except ResetNeeded:
        return
    except Exception as error:
        raise RuleFailed(
            f"step() {when} raised {named(error)}; raise gymnasium.error.ResetNeeded instead."
        ) from error
    raise RuleFailed(
        f"step() {when} was accepted; raise gymnasium.error.ResetNeeded (TextEnv.step does it for you)."
    )


def close(subject: EnvUnderTest) -> str:
    """Closing works before and after a reset, and twice."""
    for resets in (False, True):
        with subject.env() as env:
            if resets:
                reset(env, _START)
            for time in ("once", "twice"):
                try:
                    inner(env).close()
                except Exception as error:
                    raise RuleFailed(
                        f"closing it {time}{'' if resets else ' without a reset'} raised "
                        f"{named(error)}; close() must work at any time, and twice."
                    ) from error
    return "close() works before a reset, after one, and twice."


LEAK_TURNS = 5
LEAK_SECONDS = 6.0
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
        _play_episodes(subject, env, warm)
        with _tracing():
            began = time.perf_counter()
            _play_episodes(subject, env, warm)
            each = (time.perf_counter() - began) / warm
            half = min(4 * warm, max(20, int(LEAK_SECONDS / each / 2)))
            first = _mark()
            _play_episodes(subject, env, half)
            middle = _mark()
            _require_steady(first, middle, half)
            _play_episodes(subject, env, half)
            last = _mark()
            _require_steady(first, last, 2 * half)
            rate = min(middle.bytes - first.bytes, last.bytes - middle.bytes) / half
            if rate > BYTES_PER_EPISODE:
                raise RuleFailed(_memory_sentence(rate, first, last, 2 * half))
    return f"{2 * (warm + half):,} episodes left nothing behind ({max(rate, 0):.0f} bytes an episode)."


def _play_episodes(subject: EnvUnderTest, env: Env, episodes: int) -> None:
    starts = subject.starts(10)
    for number in range(episodes):
        subject.play(env, starts[number % len(starts)], LEAK_TURNS)


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
