"""Recorded episodes in a model's own tokens, so that it can be trained on what others did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rollgym.agents.lm import LmAgent
from rollgym.agents.parsing import form_names
from rollgym.agents.prompting import FORMS
from rollgym.errors import UsageError
from rollgym.types import Episode, Turn

Phrase = Callable[[Turn], str]
"""The reply that a turn's action is to be learnt as."""


def spoken(parser: str) -> Phrase:
    """A turn's reply as it was, or its action in the form that a parser of the ``lm`` agent expects."""
    first = form_names(parser)[0]
    if first not in FORMS:
        raise UsageError(
            f"Actions cannot be put into the form of the parser {parser!r}; imitation knows "
            f"{', '.join(FORMS)}."
        )

    def phrase(turn: Turn) -> str:
        return turn.response if turn.response is not None else FORMS[first].format(turn.action)

    return phrase


def retell(episode: Episode, agent: LmAgent, phrase: Phrase | None = None) -> Episode:
    """The same episode as if the model had said its actions, with log-probs of 0."""
    phrase = phrase or spoken(agent.options.parser)
    dialogue = agent.dialogue(episode.instructions)
    turns: list[Turn] = []
    for turn in episode.turns:
        info = turns[-1].info if turns else episode.reset_info
        prompt_ids, new_row = dialogue.observe(turn.observation, info)
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
