"""Rules about Gymnasium's contract: its own checker, the order of calls, close()."""

from __future__ import annotations

import re
import warnings
from typing import Any

import gymnasium as gym
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env as gymnasium_check

from rollgym.checks.report import RuleFailed, RuleSkipped, RuleWarning
from rollgym.checks.rollout import (
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
