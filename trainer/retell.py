"""Recorded episodes in a model's own tokens, so that it can be trained on what others did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rollgym.agents.lm import LmAgent
from rollgym.errors import UsageError
from rollgym.types import Episode, Turn

Phrase = Callable[[Turn], str]
"""The reply that a turn's action is to be learnt as."""


def spoken(parser: str) -> Phrase:
    """A turn's reply as it was, or its action in the form that a parser of the ``lm`` agent expects."""
    forms = {
        "raw": "{}",
        "last_line": "{}",
        "answer": "<answer>{}</answer>",
        "action": "<action>{}</action>",
        "boxed": "\\boxed{{{}}}",
    }
    if parser not in forms:
        raise UsageError(
            f"Actions cannot be put into the form of the parser {parser!r}; imitation knows "
            f"{', '.join(forms)}."
        )

    def phrase(turn: Turn) -> str:
        return turn.response if turn.response is not None else forms[parser].format(turn.action)

    return phrase


def retell(episode: Episode, agent: LmAgent, phrase: Phrase | None = None) -> Episode:
    """The same episode as if the model had said its actions, with log-probs of 0."""
    phrase = phrase or spoken(agent.options.parser)
    dialogue = agent.dialogue(episode.instructions)
    turns = []
    for turn in episode.turns:
        prompt_ids, new_row = dialogue.observe(turn.observation)
        action_ids = dialogue.spell(phrase(turn))
        dialogue.reply(action_ids)
        turns.append(
            replace(
                turn,
                prompt_ids=prompt_ids,
                new_row=new_row,
                action_ids=action_ids,
                logprobs=(0.0,) * len(action_ids),
                version_spans=(),
                policy_version=None,
            )
        )
    return replace(episode, turns=tuple(turns), final_ids=(), final_row=False)
