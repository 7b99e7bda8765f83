"""Rules about Gymnasium's contract: its checker, the order of calls, steps, returned values, ends, leaks."""

from __future__ import annotations

import gc
import json
import math
import os
import re
import sys
import threading
import time
import tracemalloc
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import gymnasium as gym
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env as gymnasium_check

from rollgym.checks.agents import scores
from rollgym.checks.report import EnvRaised, RuleFailed, RuleSkipped, RuleWarning
from rollgym.checks.rollout import (
    HERE,
    MAX_TURNS,
    Env,
    EnvUnderTest,
    Start,
    Transition,
    last_of,
    named,
    plain,
    raising,
    reset,
    short,
    step,
    transitions,
)
from rollgym.core.env import text_interface
from rollgym.core.registry import env_info
from rollgym.core.seeding import derive_rng

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


_TOLERANCE = 1e-9


def require_contract(now: Transition, space: gym.Space[Any], reward_range: tuple[float, float]) -> None:
    """Raise `RuleFailed` with the first problem of a transition."""
    for problem in _problems(now, space, reward_range):
        raise RuleFailed(f"{now.call} at turn {now.turn} {problem}")


def _problems(now: Transition, space: gym.Space[Any], reward_range: tuple[float, float]) -> Iterator[str]:
    yield from _observation(now.observation, space)
    yield from _reward(now.reward, reward_range)
    for name, flag in (("terminated", now.terminated), ("truncated", now.truncated)):
        if type(flag) is not bool:
            yield f"gave {name}={short(flag)} ({type(flag).__name__}); make it a Python bool."
    yield from _info(now.info)


def _observation(observation: Any, space: gym.Space[Any]) -> Iterator[str]:
    if not isinstance(observation, str):
        yield f"gave a {type(observation).__name__} as observation; a text environment returns str."
    elif observation not in space:
        yield f"gave an observation of {len(observation):,} characters, outside {space}; shorten it."
    elif not _is_utf8(observation):
        yield (
            "gave an observation with lone surrogates; pass it through "
            "rollgym.core.serialization.clean_text()."
        )


def _reward(reward: Any, reward_range: tuple[float, float]) -> Iterator[str]:
    least, greatest = reward_range
    if isinstance(reward, bool) or not isinstance(reward, (int, float)):
        yield f"gave the reward {short(reward)} ({type(reward).__name__}); make it a float."
    elif not math.isfinite(reward):
        yield f"gave the reward {reward}; a reward must be finite."
    elif not least - _TOLERANCE <= reward <= greatest + _TOLERANCE:
        yield f"gave the reward {reward}, outside reward_range {reward_range}; correct one of the two."


def _info(info: Any) -> Iterator[str]:
    if not isinstance(info, dict):
        yield f"gave a {type(info).__name__} as info; it must be a dict."
        return
    yield from _json(info)
    if "success" not in info or info["success"] not in (True, False, None):
        yield f"gave info['success']={short(info.get('success', 'missing'))}; it must be a bool (or None)."
    if not isinstance(info.get("valid"), bool):
        yield f"gave info['valid']={short(info.get('valid', 'missing'))}; it must be a bool."
    actions = info.get("actions")
    is_text_list = isinstance(actions, list) and all(isinstance(action, str) for action in actions)
    if actions is not None and not is_text_list:
        yield "gave info['actions'] that is not a list of str; list the valid actions as text."


def _json(info: dict[str, Any]) -> Iterator[str]:
    fix = "use str keys and plain lists, dicts, str, int, float, bool or None."
    for key, value in info.items():
        try:
            text = json.dumps({key: value}, ensure_ascii=False, allow_nan=False)
            text.encode("utf-8")
        except (TypeError, ValueError, RecursionError) as error:
            yield f"gave info[{key!r}], which is not JSON ({error}); {fix}"
        else:
            if json.loads(text) != {key: value}:
                yield f"gave info[{key!r}], which changes in a round trip through JSON; {fix}"


def _is_utf8(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


# Each has broken a parser somewhere: int() refuses "²" and long numbers, formats choke on "{0}",
# recursive parsers on deep brackets, files on NUL, UTF-8 on lone surrogates.
CORPUS: tuple[str, ...] = (
    *("", " ", "\n", "\t\r\n", "\x00", "a\x00b", "\x1b[31mred", "\x7f\x08", "\ufeff", "\u2028"),
    *("a" * 100_000, "up " * 20_000, "9" * 5_000, "(" * 5_000, "[" * 5_000, "-" * 5_000),
    *("naïve café", "向上", "🙂🙃", "e\u0301", "\u202eabc", "²", "٣", "Ⅳ", "\ud800", "x\udfffy"),
    "[", "]", "[]", "[[]]", "search[", "search[]", "click[", "search[x]]", "move(", "(1,",
    "1 2 3 4 5 6 7 8 9", "0", "-1", "007", "1.5", "1e309", "nan", "inf", "1/0", "0x10", "1_000",
    "99999999999999999999", "a1", "1a", "{}", '{"action": null}', '{"a": [1, 2', "null", "None", "True",
    '"', "'", "`", "```", "\\", "\\n", "%s%n", "{0}", "' OR 1=1; --", "<script>alert(1)</script>",
    "<answer></answer>", "../../etc/passwd", "$(id)", "__import__('os')",
    '{"name": "no_such_tool", "arguments": {}}', '{"name": null, "arguments": []}', '[{"name": ""}]',
    *("help", "I think I should first look around.", "?", "...", ",", ";", "||", "==", "#"),
)  # fmt: skip


def _texts(valid: str, count: int) -> Iterator[str]:
    """The corpus, distortions of a valid action, and random text."""
    yield from CORPUS
    yield from (
        valid * 2,
        f"{valid}\x00",
        f"{valid} {valid}",
        f"  {valid.upper()}  ",
        valid[:-1],
        valid[::-1],
    )
    rng = derive_rng("nonsense")
    for _ in range(count):
        codes = rng.choice([0x60, 0x250, 0x3000, 0xD7FF], size=int(rng.integers(1, 40)))
        yield "".join(chr(int(rng.integers(code))) for code in codes)


def nonsense(subject: EnvUnderTest) -> str:
    """Any text is handled, and nonsense is reported as invalid."""
    played = refused = 0
    with subject.env() as env:
        first = reset(env, Start(0))
        valid = subject.player(0)(first.observation, first.info)
        now: Transition | None = None
        for played, text in enumerate(_texts(valid, 20 if subject.quick else 100), 1):
            if now is None or now.ends:
                now = reset(env, Start(played))
            now = _play_nonsense(subject, env, text, now.turn + 1)
            refused += now.info["valid"] is False
    if not refused:
        raise RuleWarning(
            f"all {played} nonsense actions were accepted as valid. That is right if any text is an action; "
            "otherwise return valid=False for them, so that an agent's mistakes can be counted."
        )
    return f"{played} nonsense actions were handled, {refused} of them with valid=False."


def _play_nonsense(subject: EnvUnderTest, env: Env, text: str, turn: int) -> Transition:
    try:
        now = step(env, text, turn)
    except EnvRaised as error:
        raise RuleFailed(
            f"{error} Agents write any text: return valid=False and a helpful observation."
        ) from error
    require_contract(now, env.observation_space, subject.interface.reward_range)
    return now


def in_range(subject: EnvUnderTest) -> str:
    """Rewards, flags, observations and infos keep the contract throughout an episode."""
    reward_range = subject.interface.reward_range
    rewards: list[float] = []
    with subject.env() as env:
        for episode in _episodes(subject, env):
            achieved = False
            for now in episode:
                require_contract(now, env.observation_space, reward_range)
                if achieved and not now.info["success"]:
                    raise RuleFailed(
                        f"success was True and then False after {now.call} at turn {now.turn}. Success must "
                        "be final: report it only once it cannot be lost, or end the episode."
                    )
                achieved = bool(now.info["success"])
                rewards += [now.reward] if now.action is not None else []
    declared = f"within {reward_range}" if reward_range[1] < float("inf") else "reward_range is not declared"
    seen = f"rewards from {min(rewards):g} to {max(rewards):g} ({declared})"
    return f"{len(rewards):,} turns; {seen}."


def _episodes(subject: EnvUnderTest, env: Env) -> Iterator[Iterable[Transition]]:
    """Episodes of random actions and of the expert, which reaches rewards that random actions do not."""
    for start in subject.starts(4 if subject.quick else 12):
        yield transitions(env, start, subject.player(start.seed), 200)
    if env_info(subject.name).expert:
        # An expert that raises is checked by another rule.
        with suppress(EnvRaised):
            yield from [score.episode for score in scores(subject, "expert")]


def ends(subject: EnvUnderTest) -> str:
    """An episode of random actions ends."""
    limit = subject.turn_limit or MAX_TURNS
    lengths = []
    with subject.env() as env:
        for start in subject.starts(1 if subject.quick else 3):
            last = last_of(transitions(env, start, subject.player(start.seed), limit))
            if not last.ends:
                verdict = RuleWarning if subject.adapted else RuleFailed
                raise verdict(
                    f"an episode from {start} was not over after {limit:,} random actions (the last: "
                    f"{short(last.action)}). Give it a limit: truncate in step(), or set max_turns= when "
                    "registering it (max_episode_steps= when making it)."
                )
            lengths.append(last.turn)
    return f"random episodes ended after {', '.join(f'{length:,}' for length in lengths)} turns."


def forgeable(subject: EnvUnderTest) -> str:
    """No reset says ``info["forgeable"]``: that the agent may be able to write its reward itself."""
    starts = subject.starts(3 if subject.quick else 10)
    with subject.env() as env:
        infos = [(start, reset(env, start).info) for start in starts]
    stated = [(start, info) for start, info in infos if isinstance(info, dict) and info.get("forgeable")]
    if stated:
        start, info = stated[0]
        details = info.get("weaknesses")
        why = f": {plain(str(details[-1]))}" if isinstance(details, list) and details else "."
        raise RuleWarning(
            f"it states that {len(stated)} of {len(starts)} episodes, such as {start}, have a "
            f"reward that the agent may be able to forge{why}"
        )
    return f"none of {len(starts)} episodes states that its reward can be forged."
