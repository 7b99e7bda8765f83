"""Rules about determinism: the same seed gives the same episode, whatever ran before or elsewhere."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from rollgym.checks.env_under_test import EnvUnderTest
from rollgym.checks.report import RuleFailed
from rollgym.checks.rollout import (
    Env,
    Start,
    Trace,
    difference,
    frame_difference,
    replay,
    reset,
    snapshot,
    transitions,
)

TURNS = 50
_FIX = "Take everything random from self.np_random or task.rng(), and nothing from clocks, ids or counters."


def deterministic(subject: EnvUnderTest) -> str:
    """The same seed and actions give the same episode: twice on one instance, and on a fresh one."""
    starts = subject.starts(3 if subject.quick else 6)
    turns = 0
    with subject.env() as env:
        for start in starts:
            first = subject.play(env, start, TURNS)
            turns += len(first) - 1
            _require_equal(first, _play_again(env, start, first), start, "on the same instance")
            with subject.env() as fresh:
                _require_equal(first, _play_again(fresh, start, first), start, "on a fresh instance")
    return f"{len(starts)} episodes ({turns:,} turns) came out the same three times."


def _play_again(env: Env, start: Start, trace: Trace) -> Trace:
    # An episode that does not end where it did must not run out of actions.
    return [snapshot(now) for now in transitions(env, start, replay(trace), len(trace) - 1)]


def _require_equal(first: Trace, again: Trace, start: Start, where: str) -> None:
    found = difference(first, again)
    if found:
        raise RuleFailed(f"the same actions from {start} gave a different episode {where}: {found}. {_FIX}")


def siblings(subject: EnvUnderTest) -> str:
    """Members of a group start from the same state, on any instance and after any other episodes."""
    starts = subject.starts(4 if subject.quick else 10)
    others = subject.starts(len(starts), first=101)
    with subject.env() as one, subject.env() as two:
        for start, other in zip(starts, others, strict=True):
            first = [snapshot(reset(one, start))]
            for env, where in ((two, "another instance"), (one, "the same instance")):
                subject.play(env, other, 10)
                found = difference(first, [snapshot(reset(env, start))])
                if found:
                    raise RuleFailed(
                        f"{start} started differently on {where} after an episode from {other}: {found}. "
                        "Reset all state in begin(), and keep nothing in class or module variables."
                    )
    return f"{len(starts)} starts were equal on two instances, with other episodes in between."


def copies(subject: EnvUnderTest) -> str:
    """Returned values do not change later, and changing them does not change the episode."""
    with subject.env() as env:
        played = [(subject.play(env, start, TURNS), start) for start in subject.starts(5)]
        longest, start = max(played, key=lambda found: len(found[0]))
        plain = _play_again(env, start, longest)
        kept = list(transitions(env, start, replay(plain), len(plain) - 1))
        reset(env, start)
        for now, frame in zip(kept, plain, strict=False):
            if snapshot(now) != frame:
                raise RuleFailed(
                    f"what {now.call} returned at turn {now.turn} changed later: "
                    f"{frame_difference(frame, snapshot(now))}. Return a new dict, list or array each time."
                )
        found = difference(plain, list(_scrambled(env, start, plain)))
    if found:
        raise RuleFailed(
            f"emptying each info after reading it changed the episode: {found}. "
            "Return copies, never the environment's own state."
        )
    return f"{len(plain)} returned infos shared nothing with the environment."


def _scrambled(env: Env, start: Start, plain: Trace) -> Iterator[Any]:
    for now in transitions(env, start, replay(plain), len(plain) - 1):
        yield snapshot(now)
        _empty(now.info)


def _empty(value: Any) -> None:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in list(items):
        _empty(item)
    if isinstance(value, (dict, list)):
        value.clear()
    elif isinstance(value, np.ndarray) and value.flags.writeable:
        value.fill(0)


def global_rng(subject: EnvUnderTest) -> str:
    """The global generators of Python and numpy are neither changed nor used."""
    (start,) = subject.starts(1)
    with global_state_kept():
        _require_untouched(subject, start)
        one, same, other = (_with_global_seed(subject, start, seed) for seed in (1, 1, 2))
    # If the same global seed gives two episodes, something else is random: `deterministic` reports it.
    found = difference(one, other) if one == same else None
    if found:
        raise RuleFailed(
            f"seeding the global generators differently changed the episode from {start}: {found}. "
            "Use self.np_random instead of random.* and np.random.*."
        )
    return "random and np.random were left alone by making, reset() and step(), and had no effect."


@contextmanager
def global_state_kept() -> Iterator[None]:
    """Restore the global generators at the end, also after an error."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _seed_globals(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)


def _states() -> dict[str, str]:
    numpy = np.random.get_state(legacy=False)
    return {"random": repr(random.getstate()), "np.random": repr((numpy["state"]["key"].tobytes(), numpy))}


def _require_untouched(subject: EnvUnderTest, start: Start) -> None:
    _seed_globals(1)
    before = _states()
    with subject.env() as env:
        _compare_states(before, "making it")
        for now in transitions(env, start, subject.player(start.seed), TURNS):
            _compare_states(before, now.call)


def _compare_states(before: dict[str, str], call: str) -> None:
    touched = [name for name, state in _states().items() if state != before[name]]
    if touched:
        raise RuleFailed(
            f"{call} changed the state of the global generator of {' and '.join(touched)}, which everything "
            "in the process shares. Use self.np_random, and never seed the global ones."
        )


def _with_global_seed(subject: EnvUnderTest, start: Start, seed: int) -> Trace:
    _seed_globals(seed)
    with subject.env() as env:
        return subject.play(env, start, TURNS)
