"""Every error a user can meet, in one tree.

    RollgymError                the base: its message is one clear sentence for a person
    ├── UsageError              the call was wrong; exit code 2
    │   ├── UnknownName         no such environment, agent or split (suggests the nearest)
    │   └── MissingExtra        an optional package is not installed (says the pip command)
    └── RunError                the call was right, the work failed; exit code 1
        ├── EnvError            an environment raised or broke its contract
        ├── WorkerLost          the process that hosted an environment died or was killed
        ├── AgentError          the agent (or the engine behind it) could not act
        │   ├── AgentRaised     the agent's own code raised: counts as its failure
        │   └── EngineLost      the server or process that generates has died or cannot be reached
        ├── Interrupted         a signal ended the run early; exit code 130 or 143
        ├── ContextFull         the conversation no longer fits the model (ends as token_limit)
        ├── RewardError         an episode was played but could not be scored (ends as env_error)
        └── ResultsError        a results file is broken or of a newer schema

Environment and agent authors raise plain Python errors; `boundary` names them once, where they cross
into rollgym.
"""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollgym.types import Failure


class RollgymError(Exception):
    """Base of all rollgym errors; ``str(error)`` is a sentence meant for a person."""

    exit_code = 1
    failure: Failure | None = None
    """Where the error came from another process: what it said there, traceback included."""


class UsageError(RollgymError):
    """The request itself was wrong: a bad flag, value, name or file."""

    exit_code = 2


class UnknownName(UsageError):
    """A name nobody registered, with the nearest ones that exist."""

    suggestions: Sequence[str] = ()

    def __init__(self, kind: str, name: str | None = None, known: Iterable[str] = (), hint: str = "") -> None:
        # A lone argument is the finished message: so pickle and Gymnasium's vector environments remake it.
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
        # A lone argument is the finished message, as above.
        if extra is not None:
            from rollgym.extras import install_command  # which imports this module

            what = f"{what} needs an optional part of rollgym: {install_command(extra)}"
        super().__init__(what)


class RunError(RollgymError):
    """The request was fine, but the work failed."""


class EnvError(RunError):
    """An environment raised, or returned something that breaks its contract."""


class WorkerLost(RunError):
    """The worker process that hosted an environment died or had to be killed."""

    blamed = False
    """Whether the episode that reports it did this to its worker."""


class AgentError(RunError):
    """The agent, or the engine or endpoint behind it, could not produce an action."""


class AgentRaised(AgentError):
    """The agent's own code raised while it chose an action: this counts as its failure."""


class EngineLost(AgentError):
    """What generates has died, hangs or cannot be reached: another try may find it back, or another."""


class Interrupted(RunError):
    """Ctrl-C or SIGTERM ended a run early; what it had finished is kept."""

    exit_code = 130


class ContextFull(RunError):
    """The conversation is longer than the model can read; the episode ends as ``token_limit``."""


class RewardError(RunError):
    """An episode could not be scored: a reward worker raised, hung, died or said no number."""


class ResultsError(RunError):
    """A results file cannot be read: broken, incomplete or written by a newer rollgym."""


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The known names closest to a misspelt one, best first, blind to case."""
    by_key = {k.lower(): k for k in known}
    short = {k.rsplit("/", 1)[-1]: full for k, full in by_key.items()}
    found = difflib.get_close_matches(name.lower(), [*by_key, *short], n=count * 2, cutoff=0.6)
    names = [by_key.get(k) or short[k] for k in found]
    return list(dict.fromkeys(names))[:count]


def one_line(error: BaseException) -> str:
    """An exception as ``Type: message`` on one line, for messages and logs."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        place = f" ({error.filename})" if error.filename else ""
        text = f"{os_reason(error)}{place}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def os_reason(error: OSError) -> str:
    """Why the system refused something, in words: a full disk and a read-only place are named as such."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full"
    if error.errno == errno.EROFS:
        return "the file system is read-only"
    return error.strerror or one_line(error)


@contextmanager
def boundary(kind: type[RollgymError], where: str) -> Iterator[None]:
    """Name whatever goes wrong inside as ``kind``, saying where it happened."""
    try:
        yield
    except RollgymError:
        raise
    except Exception as error:
        raise kind(f"{where}: {one_line(error)}") from error
