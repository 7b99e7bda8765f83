"""Episodes and lines of runs, made by hand."""

import json
from typing import Any

from rollgym.core.serialization import encode_episode
from rollgym.core.types import Episode, EpisodeSpec, Failure, Outcome, Seconds, Turn

MANIFEST = {
    "schema": 1, "kind": "eval", "env": {"id": "rollgym/Made-v0", "version": "v0", "kwargs": {}},
    "agent": {"name": "tester", "options": {}}, "split": "test", "seed": 0, "episodes": 3, "per_task": 1,
    "success_means": "the door is open", "versions": {"rollgym": "0.1.0"}, "created": "2026-01-01T00:00:00Z",
}  # fmt: skip


def make_episode(number: int, *, group: str = "", member: int = 0, **given: Any) -> Episode:
    """An episode of one turn; ``turn`` changes the turn, ``env`` the environment."""
    success = given.pop("success", number % 3 == 0)
    turn = {
        "observation": f"The door {number} is shut.",
        "action": "open",
        "reward": float(success or 0),
        "terminated": True,
        "seconds": Seconds(generate=0.25, step=0.5),
    } | given.pop("turn", {})
    spec = EpisodeSpec(
        episode_id=f"e{number}",
        env_id=given.pop("env", "rollgym/Made-v0"),
        task=number if not group else 7,
        split="test",
        group_id=group,
        member=member,
    )
    fields = {"outcome": Outcome.TERMINATED, "turns": (Turn(**turn),), "seconds": 0.75, "success": success}
    return Episode(spec=spec, **(fields | given))


def failed_episode(number: int, message: str) -> Episode:
    """An episode that an environment's error ended."""
    return make_episode(
        number,
        outcome=Outcome.ENV_ERROR,
        turns=(),
        success=None,
        error=Failure(type="ValueError", message=message, traceback="Traceback: here"),
    )


def line_of(episode: Episode, **extra: Any) -> bytes:
    """An episode's line, with more fields in front, as a training run writes it."""
    head = json.dumps(extra)[1:-1]
    return (b"{" + head.encode() + b"," if head else b"{") + encode_episode(episode)[1:] + b"\n"
