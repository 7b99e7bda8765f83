"""Recorded episodes in a model's own tokens, so that it can be trained on demonstrations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rollgym.agents.parsing import form_names
from rollgym.agents.policy.agent import PolicyAgent
from rollgym.agents.prompting import FORMS
from rollgym.core.errors import UsageError
from rollgym.core.types import Episode, Turn

Phrase = Callable[[Turn], str]
"""The reply from which a turn's action is learned."""


def reply_format(parser: str) -> Phrase:
    """Return a function that gives a turn's reply, or its action in the format that ``parser`` expects."""
    first = form_names(parser)[0]
    if first not in FORMS:
        raise UsageError(f"Imitation does not support the parser {parser!r}: use one of {', '.join(FORMS)}.")

    def phrase(turn: Turn) -> str:
        return turn.response if turn.response is not None else FORMS[first].format(turn.action)

    return phrase


def retokenize(
    episode: Episode, agent: PolicyAgent, phrase: Phrase | None = None, *, recorded: bool = False
) -> Episode:
    """The same episode as if the model had generated its actions, with log-probs of 0.

    Args:
        episode: An episode of any agent.
        agent: Builds the prompts, as it would for the model.
        phrase: The reply from which a turn's action is learned.
        recorded: Use the recorded token ids of the replies instead of tokenizing their text; see
            `recorded_replies`.
    """
    phrase = phrase or reply_format(agent.options.parser)
    builder = agent.prompt_builder(episode.instructions, tools=episode.tools)
    turns: list[Turn] = []
    for turn in episode.turns:
        info = turns[-1].info if turns else episode.reset_info
        prompt_ids, new_row = builder.observe(turn.observation, info)
        calls = builder.encode_calls(turn.action) if episode.tools and turn.response is None else None
        action_ids = turn.action_ids if recorded else calls or builder.encode_reply(phrase(turn))
        builder.reply(action_ids)
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


def recorded_replies(episode: Episode, agent: PolicyAgent) -> bool:
    """Whether all replies have recorded token ids that are tokens of the agent's tokenizer.

    That is so if they decode to the recorded replies and end as replies of this model do.
    """
    codec, stop_ids = agent.chat.codec, agent.chat.facts.stop_ids
    for turn in episode.turns:
        ids = turn.action_ids
        if turn.response is None or not ids or min(ids) < 0:
            return False
        ended = ids[-1] in stop_ids
        if not ended and turn.finish_reason != "length":
            return False
        if codec.decode(ids[:-1] if ended else ids) != turn.response:
            return False
    return bool(episode.turns)
