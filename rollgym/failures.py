"""Exceptions as data."""

from __future__ import annotations

import traceback
from dataclasses import replace

from rollgym.errors import AgentError, EngineLost, EnvError, RewardError, RollgymError, WorkerLost
from rollgym.records import clean_text
from rollgym.types import Failure, Outcome

_OUTCOMES: list[tuple[type[RollgymError], Outcome]] = [
    (WorkerLost, Outcome.WORKER_LOST),
    (AgentError, Outcome.ENGINE_ERROR),
    (EnvError, Outcome.ENV_ERROR),
    (RewardError, Outcome.ENV_ERROR),
]


def failure_of(error: BaseException) -> Failure:
    """An exception as a `Failure`: the type that was raised first, the message, the traceback."""
    infrastructure = is_infrastructure(error)
    known = getattr(error, "failure", None)
    if isinstance(known, Failure):
        return replace(known, infrastructure=True) if infrastructure else known
    origin = error.__cause__ if isinstance(error, RollgymError) and error.__cause__ else error
    return Failure(
        type=type(origin).__name__,
        message=clean_text(str(error)),
        traceback=clean_text("".join(traceback.format_exception(origin))),
        infrastructure=infrastructure,
    )


def is_infrastructure(error: BaseException) -> bool:
    """Whether a worker, engine, server or node was lost through no fault of the episode that reports it."""
    if isinstance(error, WorkerLost):
        return not error.blamed
    return isinstance(error, EngineLost)


def outcome_of(error: RollgymError) -> Outcome:
    """The outcome of an episode that ended with this error; a bad task or setting is the environment's."""
    for kind, outcome in _OUTCOMES:
        if isinstance(error, kind):
            return outcome
    return Outcome.ENV_ERROR
