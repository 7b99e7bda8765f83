"""Rules about steps: any text is handled, all returned values are in range, episodes end."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import gymnasium as gym

from rollgym.checks.agents import scores
from rollgym.checks.report import EnvRaised, RuleFailed, RuleWarning
from rollgym.checks.rollout import (
    MAX_TURNS,
    Env,
    EnvUnderTest,
    Start,
    Transition,
    last_of,
    reset,
    short,
    step,
    transitions,
)
from rollgym.core.registry import env_info
from rollgym.core.seeding import derive_rng

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
