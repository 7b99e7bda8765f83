"""Regular expressions with a limit of CPU time.

Python's ``re`` has none, and some patterns take exponential time on some texts: ``(a+)+b`` on a row of a's.
An agent that is trained could find such a text, so matches run in a helper process whose main thread can
interrupt them. The limit counts CPU time: a busy machine does not change a score.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading

from rollgym.core.errors import EnvError

CPU_SECONDS = 2.0
"""CPU time for one match; without a result by then the text does not match."""

_HELPER = """
import json, re, signal, sys

class Slow(Exception):
    pass

def stop(signum, frame):
    raise Slow

signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGVTALRM, stop)
for line in sys.stdin:
    pattern, text, seconds = json.loads(line)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        found = re.fullmatch(pattern, text) is not None
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    except Slow:
        found = None
    except (RecursionError, MemoryError):
        found = None
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    print(json.dumps(found), flush=True)
"""

_lock = threading.Lock()
_helpers: dict[int, subprocess.Popen[str]] = {}
"""The helper of each process: a forked worker must not share its parent's."""


def matches(pattern: str, text: str) -> bool:
    """True where the whole text matches; False also where that takes more than `CPU_SECONDS`.

    Example:
        >>> matches("(a+)+b", "a" * 40)
        False
    """
    with _lock:
        helper = _helpers.get(os.getpid())
        if helper is None or helper.poll() is not None:
            _end()
            helper = _helpers[os.getpid()] = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _HELPER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                encoding="utf-8",
            )
        assert helper.stdin is not None
        assert helper.stdout is not None
        try:
            helper.stdin.write(json.dumps([pattern, text, CPU_SECONDS]) + "\n")
            helper.stdin.flush()
            answer = helper.stdout.readline()
        except OSError:
            answer = ""
        if not answer:
            raise EnvError("The process that matches regular expressions ended.")
        return json.loads(answer) is True


@atexit.register
def _end() -> None:
    """End the helper of this process."""
    helper = _helpers.pop(os.getpid(), None)
    if helper is not None:
        helper.kill()
        helper.communicate()
