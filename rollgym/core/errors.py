"""The errors of rollgym, in one tree.

    RollgymError                the base class; the message is one sentence for a person
    ├── UsageError              the call was wrong; exit code 2
    │   ├── UnknownName         no such environment, agent or split (suggests the nearest names)
    │   └── MissingExtra        an optional package is not installed (states the pip command)
    └── RunError                the call was right, the work failed; exit code 1
        ├── EnvError            an environment raised or broke its contract
        ├── WorkerLost          the process that hosted an environment died or was killed
        ├── AgentError          the agent, or the engine behind it, could not act
        │   ├── AgentRaised     the agent's own code raised: counts as its failure
        │   └── EngineLost      the inference server or process died or cannot be reached
        ├── Interrupted         a signal ended the run early; exit code 130 or 143
        ├── ContextFull         the conversation no longer fits the model (ends as token_limit)
        ├── RewardError         an episode was played but could not be scored (ends as env_error)
        └── ResultsError        a results file is broken or of a newer schema

Environment and agent authors raise plain Python errors; `boundary` converts them where they enter rollgym.
"""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollgym.core.types import Failure


class RollgymError(Exception):
    """Base class of all rollgym errors; ``str(error)`` is a sentence for a person.

    Example:
        >>> try:
        ...     rollgym.make("rollgym/Sokobann-v0")
        ... except rollgym.RollgymError as error:
        ...     print(error)
        There is no environment called 'rollgym/Sokobann-v0'. Did you mean rollgym/Sokoban-v0?
    """

    exit_code = 1
    failure: Failure | None = None
    """For an error of another process: its type, message and traceback there."""


class UsageError(RollgymError):
    """The request itself was wrong: a bad flag, value, name or file. Exit code 2.

    Example:
        >>> rollgym.evaluate("rollgym/Sokoban-v0", "expert", episodes=0)
        UsageError: --episodes must be at least 1, not 0.
    """

    exit_code = 2


class UnknownName(UsageError):
    """An unknown name; the message suggests the nearest known ones."""

    suggestions: Sequence[str] = ()

    def __init__(self, kind: str, name: str | None = None, known: Iterable[str] = (), hint: str = "") -> None:
        # A single argument is the finished message: pickle and Gymnasium's vector environments pass it so.
        if name is None:
            super().__init__(kind)
            return
        near = nearest(name, known)
        ask = f" Did you mean {' or '.join(near)}?" if near else ""
        super().__init__(f"There is no {kind} called {name!r}.{ask}{' ' + hint if hint else ''}")
        self.suggestions = near


class MissingExtra(UsageError):
    """An optional dependency is needed but not installed."""

    def __init__(self, what: str, extra: str | None = None) -> None:
        # A single argument is the finished message, as above.
        if extra is not None:
            from rollgym.core.extras import install_command  # which imports this module

            what = f"{what} needs the optional dependencies [{extra}]: {install_command(extra)}"
        super().__init__(what)


class RunError(RollgymError):
    """The request was valid, but the work failed. Exit code 1.

    Example:
        >>> rollgym.evaluate("my_module:Broken", "random")
        RunError: All of the first 10 episodes failed: ...
    """


class EnvError(RunError):
    """An environment raised, or returned something that breaks its contract."""


class WorkerLost(RunError):
    """The worker process that hosted an environment died or had to be killed."""

    blamed = False
    """True where the episode that reports the error caused it."""


class AgentError(RunError):
    """The agent, or the engine or endpoint behind it, could not produce an action."""


class AgentRaised(AgentError):
    """The agent's own code raised while it chose an action: this counts as its failure."""


class EngineLost(AgentError):
    """The inference engine died, hangs or cannot be reached; a retry may succeed."""


class Interrupted(RunError):
    """Ctrl-C or SIGTERM ended a run early; finished work is kept."""

    exit_code = 130


class ContextFull(RunError):
    """The conversation is longer than the model can read; the episode ends as ``token_limit``."""


class RewardError(RunError):
    """An episode could not be scored: a reward worker raised, hung, died or returned no number."""


class ResultsError(RunError):
    """A results file cannot be read: broken, incomplete or written by a newer rollgym."""


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The known names closest to a misspelled one, best first; case is ignored."""
    by_key = {k.lower(): k for k in known}
    short = {k.rsplit("/", 1)[-1]: full for k, full in by_key.items()}
    keys = difflib.get_close_matches(name.lower(), [*by_key, *short], n=count * 2, cutoff=0.6)
    names = [by_key.get(key) or short[key] for key in keys]
    return list(dict.fromkeys(names))[:count]


def one_line(error: BaseException) -> str:
    """An exception as ``Type: message`` on one line, for messages and logs."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        text = os_reason(error) + (f" ({error.filename})" if error.filename else "")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def os_reason(error: OSError) -> str:
    """The reason of an `OSError` in words, such as a full disk or a read-only file system."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full"
    if error.errno == errno.EROFS:
        return "the file system is read-only"
    return error.strerror or one_line(error)


@contextmanager
def boundary(kind: type[RollgymError], where: str) -> Iterator[None]:
    """Convert an exception raised inside to ``kind``, with ``where`` in front of its message."""
    try:
        yield
    except RollgymError:
        raise
    except Exception as error:
        raise kind(f"{where}: {one_line(error)}") from error
