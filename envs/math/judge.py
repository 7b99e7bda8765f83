r"""Judges of answers: exact for numbers, math-verify for everything else.

The exact judge reads whole numbers, decimals, fractions (``3/4``, ``\frac{3}{4}``, ``1 1/2``), percentages
only where the expected answer is one, and a unit or ``x =`` around the number. It computes nothing: ``3 + 4``
is not the number 7, so an echo of the question is never an answer. Where the expected answer is a number,
the given one must be such a number, too, whichever judge is chosen.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import threading
from fractions import Fraction

from rollgym.core.env import bare
from rollgym.core.errors import RollgymError
from rollgym.core.extras import require

JUDGES = ("auto", "exact", "math_verify")
MAX_CHARS = 500
"""Longest answer that is read."""
_WHOLE = r"\d{1,3}(?:(?:,|\{,\}|\\,|_| )\d{3})+|\d+"
_NUMBER = re.compile(rf"(?P<sign>[-+−]?) ?(?:(?P<whole>{_WHOLE})(?:\.(?P<rest>\d+))?|\.(?P<only>\d+))")
_RATIO = re.compile(r"(?P<sign>[-+−]?) ?(?:(?P<whole>\d+) )?(?P<top>\d+) ?/ ?(?P<bottom>\d+)")
_FRACTION = re.compile(r"\\[dt]?frac ?\{ ?([-+−]?\d+) ?\} ?\{ ?(\d+) ?\}")
_SHORT_FRACTION = re.compile(r"\\[dt]?frac ?(\d) ?(\d)")
_BEFORE = re.compile(r"(?:[A-Za-z]{1,2} ?= ?)?(?:\\?[$€£]|\\\()? ?")
_AFTER = re.compile(
    r" ?(?:\\?[$€£]|\\\))? ?(?:\\text\{([^{}]{0,40})\}|([A-Za-z°²³\\^]{0,20}(?: [A-Za-z]{1,20}){0,3}))"
)


def read_number(text: str) -> Fraction | None:
    r"""The number that a text is, exactly, or ``None``.

    Example:
        >>> read_number("x = \\frac{3}{4}"), read_number("1,200 coins"), read_number("3 + 4")
        (Fraction(3, 4), Fraction(1200, 1), None)
    """
    text = " ".join(bare(text).split())
    if not text or len(text) > MAX_CHARS:
        return None
    text = _FRACTION.sub(r"\1/\2", text)
    text = _SHORT_FRACTION.sub(r"\1/\2", text)
    start = _BEFORE.match(text)
    position = start.end() if start else 0
    for pattern in (_RATIO, _NUMBER):
        match = pattern.match(text, position)
        if match is not None and _is_unit(text[match.end() :]):
            return _value(match)
    return None


def _is_unit(rest: str) -> bool:
    """Whether what follows a number may be a unit: words, not another number."""
    return _AFTER.fullmatch(rest) is not None


def _value(match: re.Match[str]) -> Fraction | None:
    parts = match.groupdict()
    if "bottom" in parts:
        if not int(parts["bottom"]):
            return None
        value = Fraction(int(parts["top"]), int(parts["bottom"])) + int(parts["whole"] or 0)
    else:
        whole = re.sub(r"\D", "", parts["whole"] or "0")
        decimals = parts["rest"] or parts["only"] or ""
        value = Fraction(int(whole + decimals), 10 ** len(decimals))
    return value if parts["sign"] in ("", "+") else -value


class Judge:
    """Compares an answer with the expected one.

    Args:
        kind: ``exact``, ``math_verify``, or ``auto``: exact where the expected answer is a number,
            math-verify where it is anything else.
        seconds: Time limit of math-verify for one answer, after which the answer is wrong.
    """

    def __init__(self, kind: str = "auto", seconds: float = 10.0) -> None:
        if kind == "math_verify":
            require("Judging answers with math-verify", "math")
        self.kind = kind
        self._seconds = seconds
        self._verifier: Verifier | None = None

    def used_for(self, expected: str) -> str:
        """The judge of answers to a problem with this expected answer; `UsageError` where it is missing."""
        if self.kind != "auto":
            return self.kind
        if read_number(expected) is not None:
            return "exact"
        require(f"The expected answer {expected[:60]!r} is not a number; judging it", "math")
        return "math_verify"

    def right(self, answer: str, expected: str) -> bool:
        """Whether an answer equals the expected one."""
        number, wanted = read_number(answer), read_number(expected)
        if wanted is not None or self.used_for(expected) == "exact":
            return number is not None and number == wanted
        if len(answer) > MAX_CHARS:
            return False
        if self._verifier is None:
            self._verifier = Verifier(self._seconds)
        return self._verifier.equal(expected, answer)

    def close(self) -> None:
        """End the process of math-verify."""
        if self._verifier is not None:
            self._verifier.close()
            self._verifier = None


class Verifier:
    """math-verify in a child process, which is killed where it takes too long.

    Its own time limits need the main thread of a process and cannot stop every computation; an answer such as
    a tower of powers must not block a worker.
    """

    def __init__(self, seconds: float) -> None:
        require("Judging answers with math-verify", "math")
        self._seconds = seconds
        self._child: subprocess.Popen[str] | None = None

    def equal(self, expected: str, answer: str) -> bool:
        """Whether math-verify finds both equal; False where it fails or takes too long."""
        child = self._start()
        assert child.stdin is not None
        assert child.stdout is not None
        timer = threading.Timer(self._seconds, child.kill)
        timer.start()
        try:
            child.stdin.write(json.dumps([expected, answer]) + "\n")
            child.stdin.flush()
            line = child.stdout.readline()
        except OSError:
            line = ""
        finally:
            timer.cancel()
        if not line.strip():
            self.close()
            return False
        return bool(json.loads(line))

    def close(self) -> None:
        """End the child."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):  # the child is gone, with a request unread
                        pipe.close()
            child.wait()

    def _start(self) -> subprocess.Popen[str]:
        if self._child is None or self._child.poll() is not None:
            self.close()
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            # The first line says that the package is loaded, so that loading does not count as judging.
            assert self._child.stdout is not None
            if self._child.stdout.readline().strip() != "ready":
                self.close()
                raise RollgymError("math-verify cannot be loaded: reinstall the package math-verify.")
        return self._child


_PROGRAM = """
import json, logging, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (2_000_000_000, 2_000_000_000))
logging.disable(logging.CRITICAL)
from math_verify import parse, verify
print("ready", flush=True)
for line in sys.stdin:
    expected, answer = json.loads(line)
    try:
        texts = ["$" + text.strip("$") + "$" for text in (expected, answer)]
        gold, given = (parse(text, parsing_timeout=None) for text in texts)
        equal = bool(gold) and bool(given) and bool(verify(gold, given, timeout_seconds=None))
    except Exception:
        equal = False
    print(json.dumps(equal), flush=True)
"""
