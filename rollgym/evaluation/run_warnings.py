"""Warnings about a run's numbers: a name, a sentence and a figure each, stored with the run.

A score of zero has many causes besides a lack of skill: invalid actions, empty or truncated replies, failed
episodes. Each warning is shown on the console as soon as it is detected, and in the viewer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from rollgym.core.types import Episode

FEW_VALID = 0.05
"""A share of valid actions below this points to wrong settings, not to a lack of skill."""
MANY = 0.5
"""A share of empty or truncated replies above this points to wrong settings, too."""
_THINKING = "<think>"


class RunWarning(msgspec.Struct, frozen=True, kw_only=True):
    """One warning.

    Example:
        >>> RunWarning(name="all_failed", sentence="All 3 episodes failed.", figure=1.0).name
        'all_failed'
    """

    name: str
    sentence: str
    figure: float


def warnings_of(episodes: Sequence[Episode]) -> list[RunWarning]:
    """Warnings about these episodes."""
    found: list[RunWarning] = []
    if episodes and all(episode.outcome.failed for episode in episodes):
        scored = any(not episode.excluded for episode in episodes)
        why = "and count as failures of the agent" if scored else "so no score exists"
        found.append(
            RunWarning(
                name="all_failed",
                sentence=f"All {len(episodes)} episodes were ended by errors, {why}: see their messages.",
                figure=1.0,
            )
        )
    turns = [turn for episode in episodes if not episode.outcome.failed for turn in episode.turns]
    if not turns:
        return found
    valid = sum(bool(turn.info.get("valid", True)) for turn in turns) / len(turns)
    if valid < FEW_VALID:
        found.append(
            RunWarning(
                name="few_valid_actions",
                sentence=f"Only {valid:.1%} of the actions were valid: check the agent's parser, template "
                "and max_tokens against what the environment expects.",
                figure=valid,
            )
        )
    replies = [turn for turn in turns if turn.response is not None]
    if not replies:
        return found
    empty = sum(not (turn.response or "").strip() for turn in replies) / len(replies)
    thought = sum(_only_thinks(turn.response or "") for turn in replies) / len(replies)
    cut = sum(turn.finish_reason == "length" for turn in replies) / len(replies)
    if empty > MANY:
        found.append(
            RunWarning(
                name="empty_replies",
                sentence=f"{empty:.0%} of the replies were empty: check the model's name and chat template.",
                figure=empty,
            )
        )
    if thought > MANY:
        found.append(
            RunWarning(
                name="reasoning_without_content",
                sentence=f"{thought:.0%} of the replies hold reasoning and no answer: raise max_tokens, or "
                "turn the model's reasoning off.",
                figure=thought,
            )
        )
    if cut > MANY and valid < MANY:
        found.append(
            RunWarning(
                name="cut_replies",
                sentence=f"{cut:.0%} of the replies were cut off at max_tokens: raise it.",
                figure=cut,
            )
        )
    return found


def long_demonstrations(lengths: Sequence[int], max_tokens: int) -> list[RunWarning]:
    """Warn if demonstrated replies are longer than the policy's ``max_tokens``."""
    longer = sum(length > max_tokens for length in lengths)
    if not longer:
        return []
    return [
        RunWarning(
            name="long_demonstrations",
            sentence=f"{longer} of {len(lengths)} demonstrated replies are longer than agent.max_tokens "
            f"({max_tokens}): the policy cannot generate them. Set it to at least {max(lengths)}.",
            figure=longer / len(lengths),
        )
    ]


def as_json(warnings: Sequence[RunWarning]) -> list[dict[str, Any]]:
    """The warnings as plain values."""
    return [msgspec.to_builtins(one) for one in warnings]


def _only_thinks(reply: str) -> bool:
    text = reply.strip()
    return text.startswith(_THINKING) and not text.partition("</think>")[2].strip()
