"""The contract of reset and step: text, a finite reward, Python booleans, an info that is JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import gymnasium as gym

from rollgym.checks.report import RuleFailed
from rollgym.checks.rollout import Transition, short

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
    if actions is not None and not _all_text(actions):
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


def _all_text(actions: Any) -> bool:
    return isinstance(actions, list) and all(isinstance(action, str) for action in actions)


def _is_utf8(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
