"""Manifests of run folders whose episodes other programs play."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from typing import Any

from rollgym.core.types import SCHEMA_VERSION
from rollgym.core.version import __version__


def make_manifest(
    kind: str,
    *,
    env_id: str,
    env_kwargs: Mapping[str, Any],
    agent: Mapping[str, Any],
    split: str,
    seed: int,
) -> dict[str, Any]:
    """Return the manifest of a run folder.

    Args:
        kind: Kind of the run.
        env_id: Id of the environment.
        env_kwargs: Its arguments.
        agent: Name and options of what plays.
        split: Split of the tasks.
        seed: Seed of the run.
    """
    return {
        "schema": SCHEMA_VERSION,
        "kind": kind,
        "env": {"id": env_id, "version": "", "kwargs": dict(env_kwargs)},
        "agent": dict(agent),
        "split": split,
        "seed": seed,
        "versions": {"rollgym": __version__, "python": platform.python_version()},
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
