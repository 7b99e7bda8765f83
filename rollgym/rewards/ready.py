"""Reward functions that suit any environment, for `FunctionScorer` and as examples to write others by."""

from __future__ import annotations

from rollgym.types import Episode


def valid_actions(episode: Episode) -> float:
    """The share of turns whose action the environment knew."""
    return sum(bool(turn.info.get("valid", True)) for turn in episode.turns) / max(episode.length, 1)


def few_turns(episode: Episode) -> dict[str, object]:
    """1 for success with the first turn, less with each further one, 0 without success."""
    reward = 1.0 / max(episode.length, 1) if episode.success else 0.0
    return {"reward": reward, "parts": {"turns": episode.length}}
