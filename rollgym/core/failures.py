"""Exceptions as data."""

from __future__ import annotations

import traceback
from dataclasses import replace

from rollgym.core.errors import AgentError, EngineLost, EnvError, RewardError, RollgymError, WorkerLost
from rollgym.core.serialization import clean_text
from rollgym.core.types import Failure, Outcome

_OUTCOMES: list[tuple[type[RollgymError], Outcome]] = [
    (WorkerLost, Outcome.WORKER_LOST),
    (AgentError, Outcome.ENGINE_ERROR),
    (EnvError, Outcome.ENV_ERROR),
    (RewardError, Outcome.ENV_ERROR),
]


def failure_of(error: BaseException) -> Failure:
    """Convert an exception to a `Failure`: the type that was raised first, the message, the traceback."""
    infrastructure = is_infrastructure(error)
    failure = getattr(error, "failure", None)
    if isinstance(failure, Failure):
        return replace(failure, infrastructure=True) if infrastructure else failure
    origin = error.__cause__ if isinstance(error, RollgymError) and error.__cause__ else error
    return Failure(
        type=type(origin).__name__,
        message=clean_text(str(error)),
        traceback=clean_text("".join(traceback.format_exception(origin))),
        infrastructure=infrastructure,
    )


def is_infrastructure(error: BaseException) -> bool:
    """True where a worker, engine, server or node was lost and the reporting episode did not cause it."""
    if isinstance(error, WorkerLost):
        return not error.blamed
    return isinstance(error, EngineLost)


def outcome_of(error: RollgymError) -> Outcome:
    """The outcome of an episode that ended with this error; a bad task or setting is ``env_error``."""
    for kind, outcome in _OUTCOMES:
        if isinstance(error, kind):
            return outcome
    return Outcome.ENV_ERROR
