"""Check the targets of rewards before a run starts: imports, addresses, keys, judge models.

This imports the modules that the settings name, so it is for settings that the user trains with; validating
settings imports nothing (see `rollgym.core.trust`).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from urllib.parse import urlsplit

from rollgym.core.errors import RollgymError, UsageError, one_line
from rollgym.rewards.settings import RewardSettings, check_names, make_scorer
from rollgym.utils.urls import is_loopback

CONNECT_SECONDS = 5.0
"""Seconds for the one attempt to connect to a service."""


def resolve_rewards(rewards: Sequence[RewardSettings], key: str = "rewards") -> None:
    """Check every target of ``rewards``; raise a `UsageError` with the key of the first invalid one.

    Imports functions, connects to services once, reads the variables of their headers, and reads the folder
    and tokenizer of judges. No model is loaded and no episode is sent.
    """
    check_names(rewards)
    for number, reward in enumerate(rewards):
        try:
            if reward.kind == "function":
                _resolve_function(reward)
            elif reward.kind == "http":
                _resolve_service(reward)
            else:
                _resolve_judge(reward)
        except RollgymError as error:
            raise UsageError(f"{key}.{number} ({reward.called}): {error}") from error


def check_reachable(url: str, what: str) -> None:
    """Connect to a service once; raise a `UsageError` where nothing listens. ``what`` names the service."""
    import httpx

    # No header is sent: any response shows that something listens there.
    try:
        with httpx.Client(timeout=CONNECT_SECONDS, trust_env=not is_loopback(url)) as client:
            client.head(url)
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError, httpx.UnsupportedProtocol) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(
            f"{urlsplit(url).netloc} cannot be reached ({reason}): start {what} first, or correct the "
            "address."
        ) from None
    except httpx.RequestError:
        return  # connected; requests have their own timeouts and retries


def _resolve_function(reward: RewardSettings) -> None:
    from rollgym.rewards.function import check_target
    from rollgym.rewards.reward_env import find_function

    target = reward.target or ""
    check_target(target)
    function = find_function(target)
    try:
        inspect.signature(function).bind(None)
    except ValueError:
        return  # a function written in C may have no signature
    except TypeError as error:
        raise UsageError(
            f"{target} cannot be called with one Episode ({one_line(error)}): a reward function takes the "
            "episode as its only required argument."
        ) from None


def _resolve_service(reward: RewardSettings) -> None:
    from rollgym.rewards.http import Headers, check_url

    url = check_url(reward.url, bool(reward.allow_plain_http))
    Headers(reward.header_env or {})  # reads the variables
    check_reachable(url, "the reward service")


def _resolve_judge(reward: RewardSettings) -> None:
    from rollgym.models.zoo import check_model
    from rollgym.rewards.judge import check_judge

    check_judge(**{name: value for name, value in reward.given.items() if name != "model"})
    if reward.model is not None:
        check_model(reward.model, "judge")
        make_scorer(reward)  # reads the tokenizer and its chat template; the model is loaded for a score
