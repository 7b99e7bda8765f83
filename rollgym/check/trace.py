"""Plays episodes in a process of its own and prints them: ``python -m rollgym.check.trace``.

It reads a request as JSON from its input: ``{"env": ID, "kwargs": {}, "modules": [], "starts": [[seed,
options]], "turns": N}``, and prints the traces as JSON, or ``{"error": ...}``.
"""

from __future__ import annotations

import json
import sys
import warnings
from contextlib import redirect_stdout
from typing import Any

import rollgym  # noqa: F401  (registers the environments)
from rollgym.check.play import Start
from rollgym.check.report import Raised
from rollgym.check.subject import Subject
from rollgym.errors import RollgymError


def traces(request: dict[str, Any]) -> dict[str, Any]:
    """The traces that were asked for, or the error that stopped them."""
    subject = Subject(request["env"], request["kwargs"], request["modules"], quick=False)
    try:
        assert subject.copy
        with subject.env() as env:
            starts = [Start(seed, options) for seed, options in request["starts"]]
            return {"traces": [subject.play(env, start, request["turns"]) for start in starts]}
    except (RollgymError, Raised) as error:
        return {"error": str(error)}
    finally:
        subject.close()


if __name__ == "__main__":
    # Whatever the environment prints must not mix with the answer.
    with redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        answer = traces(json.load(sys.stdin))
    print(json.dumps(answer))
