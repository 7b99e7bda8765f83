"""Warnings about a run's numbers: a name, a sentence and a figure each, stored with the run.

A score of zero has many causes besides a lack of skill: invalid actions, empty or truncated replies, failed
episodes. Each warning is shown on the console as soon as it is detected, and in the viewer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    return [RunWarning(name=name, sentence=text, figure=figure) for name, figure, text in _warnings(episodes)]


def _warnings(episodes: Sequence[Episode]) -> Iterator[tuple[str, float, str]]:
    if episodes and all(episode.outcome.failed for episode in episodes):
        scored = any(not episode.excluded for episode in episodes)
        why = "and count as failures of the agent" if scored else "so no score exists"
        yield (
            "all_failed",
            1.0,
            f"All {len(episodes)} episodes were ended by errors, {why}: see their messages.",
        )
    forgeable = sum(bool(episode.reset_info.get("forgeable")) for episode in episodes)
    if forgeable:
        yield (
            "forgeable_reward",
            forgeable / len(episodes),
            f"In {forgeable} of {len(episodes)} episodes the agent may be able to forge the reward: see "
            "info['weaknesses'] of their resets, and look at episodes that succeed.",
        )
    turns = [turn for episode in episodes if not episode.outcome.failed for turn in episode.turns]
    if not turns:
        return
    valid = sum(bool(turn.info.get("valid", True)) for turn in turns) / len(turns)
    if valid < FEW_VALID:
        yield (
            "few_valid_actions",
            valid,
            f"Only {valid:.1%} of the actions were valid: check the agent's parser, template and max_tokens "
            "against what the environment expects.",
        )
    replies = [turn for turn in turns if turn.response is not None]
    if not replies:
        return
    empty = sum(not (turn.response or "").strip() for turn in replies) / len(replies)
    thought = sum(_only_thinks(turn.response or "") for turn in replies) / len(replies)
    cut = sum(turn.finish_reason == "length" for turn in replies) / len(replies)
    if empty > MANY:
        text = f"{empty:.0%} of the replies were empty: check the model's name and chat template."
        yield "empty_replies", empty, text
    if thought > MANY:
        text = (
            f"{thought:.0%} of the replies hold reasoning and no answer: raise max_tokens, or turn the "
            "model's reasoning off."
        )
        yield "reasoning_without_content", thought, text
    if cut > MANY and valid < MANY:
        yield "cut_replies", cut, f"{cut:.0%} of the replies were cut off at max_tokens: raise it."


def long_demonstrations(lengths: Sequence[int], max_tokens: int) -> list[RunWarning]:
    """Warn if demonstrated replies are longer than the policy's ``max_tokens``.

    Each ends with the token that ends a turn, which does not count: a reply that is cut before it is whole.
    """
    longer = sum(length - 1 > max_tokens for length in lengths)
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
    return [msgspec.to_builtins(warning) for warning in warnings]


def _only_thinks(reply: str) -> bool:
    text = reply.strip()
    return text.startswith(_THINKING) and not text.partition("</think>")[2].strip()
