"""Examples of supervised training: token sequences with the positions to learn, and batches of them.

A reply is learned in the tokens that the policy would have to sample, after the prompt that it would read at
inference: messages and episodes go through the same `Conversation` as a playing policy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rollgym.chat import ChatTemplate, Conversation
from rollgym.core.seeding import derive_rng
from rollgym.core.types import Episode
from rollgym.trainer.data.batch import Batch, make_batch
from rollgym.trainer.data.sequences import FloatArray, TokenEpisode, TokenSequence


@dataclass(frozen=True, slots=True)
class TokenTurn:
    """A prompt and the reply to it, as token ids."""

    prompt_ids: tuple[int, ...]
    """The ids that this turn adds before the reply; all of the prompt where a new sequence starts."""
    action_ids: tuple[int, ...]
    """The reply, with the token that ends it."""
    new_row: bool = False
    """Whether this turn starts a new sequence because the chat template rewrote earlier messages."""
    learned: bool = True
    """Whether the reply is learned; otherwise it is only context."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """A user message and the assistant's reply to it."""

    user: str
    reply: str
    learned: bool = True


def message_turns(template: ChatTemplate, system: str, exchanges: Sequence[Exchange]) -> list[TokenTurn]:
    """Tokenize a conversation as a policy with this chat template would read and continue it.

    Raises:
        UsageError: The template refuses the messages, or a reply contains the token that ends replies.
    """
    conversation = Conversation(template, system=system)
    turns = []
    for exchange in exchanges:
        conversation.observe(exchange.user)
        action_ids = template.encode_reply(exchange.reply)
        turns.append(
            TokenTurn(conversation.added_ids, action_ids, conversation.new_row, learned=exchange.learned)
        )
        conversation.reply(action_ids)
    return turns


def episode_turns(episode: Episode, learned: Sequence[bool] = ()) -> list[TokenTurn]:
    """The turns of an episode with token ids; ``learned`` has a flag per turn, empty for all."""
    flags = learned[: len(episode.turns)] or [True] * len(episode.turns)
    return [
        TokenTurn(turn.prompt_ids, turn.action_ids, turn.new_row, learned=flag)
        for turn, flag in zip(episode.turns, flags, strict=True)
    ]


def fitting_turns(turns: Sequence[TokenTurn], max_tokens: int) -> list[TokenTurn]:
    """The turns before the first one with which a sequence would have more than ``max_tokens`` tokens."""
    length = 0
    for number, turn in enumerate(turns):
        if turn.new_row:
            length = 0
        length += len(turn.prompt_ids) + len(turn.action_ids)
        if length > max_tokens:
            return list(turns[:number])
    return list(turns)


def longest_sequence(turns: Sequence[TokenTurn]) -> int:
    """Tokens of the longest sequence of these turns."""
    length = longest = 0
    for turn in turns:
        length = (0 if turn.new_row else length) + len(turn.prompt_ids) + len(turn.action_ids)
        longest = max(longest, length)
    return longest


def token_example(name: str, turns: Sequence[TokenTurn]) -> TokenEpisode:
    """The sequences of a conversation, in which only the learned replies are action tokens."""
    rows: list[tuple[list[int], list[int]]] = []
    for turn in turns:
        if turn.new_row or not rows:
            rows.append(([], []))
        ids, positions = rows[-1]
        ids.extend(turn.prompt_ids)
        if turn.learned:
            positions.extend(range(len(ids), len(ids) + len(turn.action_ids)))
        ids.extend(turn.action_ids)
    return TokenEpisode(
        name=name,
        sequences=tuple(
            TokenSequence(np.array(ids, dtype=np.int64), np.array(positions, dtype=np.int64))
            for ids, positions in rows
            if positions
        ),
        behavior=np.zeros(sum(len(positions) for _, positions in rows)),
        tokens_per_turn=np.array([len(turn.action_ids) for turn in turns if turn.learned], dtype=np.int64),
    )


def epoch_batches(count: int, batch_size: int, epochs: int, seed: int) -> Iterator[list[int]]:
    """The examples of each batch, as indices: all of them in each epoch, newly shuffled."""
    for epoch in range(epochs):
        order = derive_rng("imitation", seed, epoch).permutation(count).tolist()
        for first in range(0, count, batch_size):
            yield order[first : first + batch_size]


def supervised_batch(examples: Sequence[TokenEpisode], weights: Sequence[FloatArray] | None = None) -> Batch:
    """A batch for `imitation_loss`: the loss weight of each action token (default 1) is its advantage."""
    if weights is None:
        weights = [np.ones(example.num_tokens) for example in examples]
    return make_batch(examples, advantages=weights, old=[example.behavior for example in examples])
