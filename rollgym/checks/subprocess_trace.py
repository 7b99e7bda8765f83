"""Subprocess that plays episodes and prints their traces: ``python -m rollgym.checks.subprocess_trace``.

It reads a request as JSON from stdin: ``{"env": ID, "kwargs": {}, "modules": [], "starts": [[seed, options]],
"turns": N}``, and prints the traces as JSON, or ``{"error": ...}``.
"""

from __future__ import annotations

import json
import sys
import warnings
from contextlib import redirect_stdout
from typing import Any

from rollgym.checks.env_under_test import EnvUnderTest
from rollgym.checks.report import EnvRaised
from rollgym.checks.rollout import Start
from rollgym.core.errors import RollgymError


def traces(request: dict[str, Any]) -> dict[str, Any]:
    """The requested traces, or the error that stopped them."""
    subject = EnvUnderTest(request["env"], request["kwargs"], request["modules"], quick=False)
    try:
        assert subject.copy
        with subject.env() as env:
            starts = [Start(seed, options) for seed, options in request["starts"]]
            return {"traces": [subject.play(env, start, request["turns"]) for start in starts]}
    except (RollgymError, EnvRaised) as error:
        return {"error": str(error)}
    finally:
        subject.close()


if __name__ == "__main__":
    # Output of the environment must not mix with the answer.
    with redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        answer = traces(json.load(sys.stdin))
    print(json.dumps(answer))
