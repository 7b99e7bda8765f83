"""Rules about variety: seeds give different episodes, tasks are reachable by number."""

from __future__ import annotations

from rollgym.checks.report import RuleFailed, RuleSkipped, RuleWarning
from rollgym.checks.rollout import Env, EnvUnderTest, Start, named, reset, snapshot, transitions
from rollgym.core.errors import UsageError
from rollgym.core.tasks import TaskSet

COUNT = 20
TURNS = 10


def seeds(subject: EnvUnderTest) -> str:
    """Different seeds give different episodes."""
    starts = [Start(seed) for seed in range(COUNT)]
    firsts, episodes = _different(subject, starts)
    if firsts > 1:
        return f"{COUNT} seeds gave {firsts} different first observations."
    if episodes > 1:
        return f"{COUNT} seeds start alike, but gave {episodes} different episodes under the same actions."
    if subject.tasks is None or max(subject.tasks.splits.values()) == 1:
        raise RuleWarning(
            f"{COUNT} seeds gave the same episode under the same actions. That is right for a game with one "
            "start and no randomness; otherwise use self.np_random in reset()."
        )
    raise RuleFailed(
        f"{COUNT} seeds gave the same episode under the same actions: the seed has no effect. "
        "Use task.rng() for the content of the task and self.np_random for randomness in the episode."
    )


def _different(subject: EnvUnderTest, starts: list[Start]) -> tuple[int, int]:
    """Number of different first observations and of different episodes, under the same actions."""
    firsts, episodes = set(), set()
    with subject.env() as env:
        for start in starts:
            trace = [snapshot(now) for now in transitions(env, start, subject.player(0), TURNS)]
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
    sizes = ", ".join(f"{split} {size:,}" for split, size in subject.tasks.splits.items())
    return f"the first and last task of every split can be played ({sizes}); others are refused."


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
    count = min(COUNT, size)
    starts = [Start(0, {"task": index, "split": split}) for index in range(count)]

    _, episodes = _different(subject, starts)
    if count > 1 and episodes == 1:
        raise RuleWarning(
            f"with one seed, tasks 0 to {count - 1} of split {split!r} are the same episode under the same "
            "actions, so splits cannot keep training and test apart. Make the content from task.rng()."
        )
