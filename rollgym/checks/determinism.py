"""Rules about seeds and tasks.

The same seed gives the same episode, whatever ran before or elsewhere; different seeds give different
episodes; tasks are reachable by number.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

import numpy as np

from rollgym.checks.report import EnvRaised, RuleFailed, RuleSkipped, RuleWarning
from rollgym.checks.rollout import (
    Env,
    EnvUnderTest,
    Start,
    Trace,
    difference,
    frame_difference,
    named,
    plain,
    replay,
    reset,
    snapshot,
    transitions,
)
from rollgym.core.errors import RollgymError, UsageError
from rollgym.core.local_objects import is_local
from rollgym.core.tasks import TaskSet

TURNS = 50
HASH_SEEDS = (1, 2)
PROCESS_TURNS = 20
PROCESS_SECONDS = 120.0
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
    if changed := difference(first, again):
        raise RuleFailed(f"the same actions from {start} gave a different episode {where}: {changed}. {_FIX}")


def siblings(subject: EnvUnderTest) -> str:
    """Members of a group start from the same state, on any instance and after any other episodes."""
    starts = subject.starts(4 if subject.quick else 10)
    others = subject.starts(len(starts), first=101)
    with subject.env() as env_a, subject.env() as env_b:
        for start, other in zip(starts, others, strict=True):
            first = [snapshot(reset(env_a, start))]
            for env, where in ((env_b, "another instance"), (env_a, "the same instance")):
                subject.play(env, other, 10)
                if changed := difference(first, [snapshot(reset(env, start))]):
                    raise RuleFailed(
                        f"{start} started differently on {where} after an episode from {other}: {changed}. "
                        "Reset all state in begin(), and keep nothing in class or module variables."
                    )
    return f"{len(starts)} starts were equal on two instances, with other episodes in between."


def copies(subject: EnvUnderTest) -> str:
    """Returned values do not change later, and changing them does not change the episode."""
    with subject.env() as env:
        played = [(subject.play(env, start, TURNS), start) for start in subject.starts(5)]
        longest, start = max(played, key=lambda pair: len(pair[0]))
        frames = _play_again(env, start, longest)
        kept = list(transitions(env, start, replay(frames), len(frames) - 1))
        reset(env, start)
        for now, frame in zip(kept, frames, strict=False):
            if snapshot(now) != frame:
                raise RuleFailed(
                    f"what {now.call} returned at turn {now.turn} changed later: "
                    f"{frame_difference(frame, snapshot(now))}. Return a new dict, list or array each time."
                )
        changed = difference(frames, list(_scrambled(env, start, frames)))
    if changed:
        raise RuleFailed(
            f"emptying each info after reading it changed the episode: {changed}. "
            "Return copies, never the environment's own state."
        )
    return f"{len(frames)} returned infos shared nothing with the environment."


def _scrambled(env: Env, start: Start, frames: Trace) -> Iterator[Any]:
    for now in transitions(env, start, replay(frames), len(frames) - 1):
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
        first, same, other = (_with_global_seed(subject, start, seed) for seed in (1, 1, 2))
    # If the same global seed gives two episodes, something else is random: `deterministic` reports it.
    changed = difference(first, other) if first == same else None
    if changed:
        raise RuleFailed(
            f"seeding the global generators differently changed the episode from {start}: {changed}. "
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


def processes(subject: EnvUnderTest) -> str:
    """The same seed gives the same episode in another process, where hash() of a text differs."""
    if is_local(subject.name):
        raise RuleSkipped("other processes cannot import it: put it into a module.")
    starts = subject.starts(3 if subject.quick else 8)
    request = {
        "env": subject.name,
        "kwargs": subject.kwargs,
        "modules": subject.modules,
        "starts": [(start.seed, start.options) for start in starts],
        "turns": PROCESS_TURNS,
    }
    try:
        text = json.dumps(request)
    except TypeError as error:
        raise RuleSkipped(f"the arguments cannot be sent to another process ({error}).") from None
    for start, left, right in zip(starts, *_answers(text), strict=True):
        if changed := difference(left, right):
            raise RuleFailed(
                f"the episode from {start} differs in another process: {changed}. Python salts hash() and "
                "the order of sets in each process: use rollgym.core.seeding.derive_seed, and sort sets."
            )
    return f"{len(starts)} episodes were the same in two processes with different hash seeds."


def _answers(request: str) -> list[list[Trace]]:
    children = [_start(seed) for seed in HASH_SEEDS]
    try:
        return [_answer(child, request) for child in children]
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
                child.communicate()


def _start(hash_seed: int) -> subprocess.Popen[str]:
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return subprocess.Popen(
        [sys.executable, "-P", "-c", "from rollgym.checks.determinism import play_request; play_request()"],
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )


def _answer(child: subprocess.Popen[str], request: str) -> list[Trace]:
    try:
        out, err = child.communicate(request, timeout=PROCESS_SECONDS)
    except subprocess.TimeoutExpired:
        raise RuleFailed(
            f"a fresh process did not play the episodes within {PROCESS_SECONDS:.0f} seconds."
        ) from None
    if child.returncode != 0:
        last = (err.strip().splitlines() or ["no output"])[-1]
        raise RuleFailed(f"a fresh process could not play it (exit code {child.returncode}: {plain(last)}).")
    answer: dict[str, Any] = json.loads(out)
    if "error" in answer:
        raise RuleFailed(
            f"it does not work in a fresh process: {answer['error']} Register it in a module that the "
            "process can import (--env-module)."
        )
    traces: list[Trace] = answer["traces"]
    return traces


def play_request() -> None:
    """In a subprocess: play the episodes of a request on stdin; print their traces or ``{"error": ...}``."""
    # Output of the environment must not mix with the answer.
    with redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        answer = _traces(json.load(sys.stdin))
    print(json.dumps(answer))


def _traces(request: dict[str, Any]) -> dict[str, Any]:
    subject = EnvUnderTest(request["env"], request["kwargs"], request["modules"], quick=False)
    try:
        assert subject.copy
        with subject.env() as env:
            starts = [Start(seed, options) for seed, options in request["starts"]]
            return {"traces": [subject.play(env, start, request["turns"]) for start in starts]}
    except (RollgymError, EnvRaised) as error:
        return {"error": str(error)}
    finally:
        subject.close()


NUM_SEEDS = 20
SEED_TURNS = 10


def seeds(subject: EnvUnderTest) -> str:
    """Different seeds give different episodes."""
    starts = [Start(seed) for seed in range(NUM_SEEDS)]
    firsts, episodes = _different(subject, starts)
    if firsts > 1:
        return f"{NUM_SEEDS} seeds gave {firsts} different first observations."
    if episodes > 1:
        return (
            f"{NUM_SEEDS} seeds start alike, but gave {episodes} different episodes under the same actions."
        )
    if subject.tasks is None or max(subject.tasks.splits.values()) == 1:
        raise RuleWarning(
            f"{NUM_SEEDS} seeds gave the same episode under the same actions. That is right for a game with "
            "one start and no randomness; otherwise use self.np_random in reset()."
        )
    raise RuleFailed(
        f"{NUM_SEEDS} seeds gave the same episode under the same actions: the seed has no effect. "
        "Use task.rng() for the content of the task and self.np_random for randomness in the episode."
    )


def _different(subject: EnvUnderTest, starts: list[Start]) -> tuple[int, int]:
    """Number of different first observations and of different episodes, under the same actions."""
    firsts, episodes = set(), set()
    with subject.env() as env:
        for start in starts:
            trace = [snapshot(now) for now in transitions(env, start, subject.player(0), SEED_TURNS)]
            for frame in trace:
                # Every task has its own number: that alone does not make its content different.
                frame["info"] = {key: v for key, v in frame["info"].items() if key not in ("task", "split")}
            firsts.add(repr(trace[0]["observation"]))
            episodes.add(repr(trace))
    return len(firsts), len(episodes)


def tasks(subject: EnvUnderTest) -> str:
    """The tasks of every split can be requested by number, and no others."""
    if subject.tasks is None:
        raise RuleSkipped("it has no task set: episodes differ by seed alone.")
    with subject.env() as env:
        for split, size in subject.tasks.splits.items():
            for index in sorted({0, size - 1}):
                _require_reached(env, Start(0, {"task": index, "split": split}))
        _require_refusals(env, subject.tasks)
    _require_effect(subject, subject.tasks)
    if subject.adapted:
        _require_disjoint(subject, subject.tasks)
    sizes = ", ".join(f"{split} {size:,}" for split, size in subject.tasks.splits.items())
    return f"the first and last task of every split can be played ({sizes}); others are refused."


def _require_disjoint(subject: EnvUnderTest, task_set: TaskSet) -> None:
    """Warn where splits that an adapter made start alike: the library may have too few different tasks."""
    home: dict[str, str] = {}
    with subject.env() as env:
        for split, size in task_set.splits.items():
            for index in range(min(NUM_SEEDS // 2, size)):
                first = reset(env, Start(0, {"task": index, "split": split}))
                other = home.setdefault(str(first.observation), split)
                if other != split:
                    raise RuleWarning(
                        f"splits {other!r} and {split!r} share a first observation: the library has few "
                        "different starts, so a test score says nothing about unseen ones."
                    )


def _require_reached(env: Env, start: Start) -> None:
    first = snapshot(reset(env, start))
    for key, wanted in (start.options or {}).items():
        if first["info"].get(key) != wanted:
            raise RuleFailed(
                f"reset() to {start} reported info[{key!r}]={first['info'].get(key)!r}, not {wanted!r}. "
                "Take the task from options, and report it in info (TextEnv.reset does both)."
            )
    if snapshot(reset(env, start)) != first:
        raise RuleFailed(
            f"{start} was a different task the second time; make its content from task.rng() only."
        )


def _require_refusals(env: Env, task_set: TaskSet) -> None:
    split, size = next(iter(task_set.splits.items()))
    for options in (
        {"task": size, "split": split},
        {"task": -1, "split": split},
        {"task": 0, "split": "no-such-split"},
    ):
        start = Start(0, options)
        try:
            env.reset(seed=0, options=options)
        except UsageError:
            continue
        except Exception as error:
            raise RuleFailed(
                f"reset() to {start} raised {named(error)}; "
                "raise UsageError with a message that states the valid range."
            ) from error
        raise RuleFailed(
            f"reset() to {start} was accepted, though split {split!r} has tasks 0 to {size - 1}; "
            "refuse it with UsageError (TaskSet.task does it for you)."
        )


def _require_effect(subject: EnvUnderTest, task_set: TaskSet) -> None:
    split, size = next(iter(task_set.splits.items()))
    count = min(NUM_SEEDS, size)
    starts = [Start(0, {"task": index, "split": split}) for index in range(count)]

    _, episodes = _different(subject, starts)
    if count > 1 and episodes == 1:
        raise RuleWarning(
            f"with one seed, tasks 0 to {count - 1} of split {split!r} are the same episode under the same "
            "actions, so splits cannot keep training and test apart. Make the content from task.rng()."
        )
