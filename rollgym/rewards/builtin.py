"""Reward functions for any environment, for `FunctionScorer` and as examples."""

from __future__ import annotations

from rollgym.core.types import Episode


def valid_actions(episode: Episode) -> float:
    """Return the fraction of turns with a valid action."""
    return sum(bool(turn.info.get("valid", True)) for turn in episode.turns) / max(episode.length, 1)


def few_turns(episode: Episode) -> dict[str, object]:
    """Return 1 / turns for success, 0 without success."""
    reward = 1.0 / max(episode.length, 1) if episode.success else 0.0
    return {"reward": reward, "parts": {"turns": episode.length}}
