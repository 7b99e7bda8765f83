"""Episodes as token sequences: the exact tokens the model read and sampled, and which ones it sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollgym.core.errors import UsageError
from rollgym.core.types import Episode

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class TokenSequence:
    """A part of a conversation that only ever grew at its end; one sequence of a forward pass."""

    ids: IntArray
    """Every token, as the engine read or sampled it."""
    action_positions: IntArray
    """Indices into ``ids`` of the tokens the policy sampled."""
    targets: IntArray | None = None
    """Tokens whose log-probs are computed at these positions, where they are not those in ``ids``. Positions
    then repeat, one entry for each target, in ascending order."""

    @property
    def inputs(self) -> IntArray:
        """The tokens the model must read to predict all actions: everything before the last action token."""
        return self.ids[: int(self.action_positions[-1])]

    @property
    def predicted(self) -> IntArray:
        """The tokens whose log-probs are computed, one for each action position."""
        return self.ids[self.action_positions] if self.targets is None else self.targets

    @property
    def key(self) -> tuple[bytes, bytes]:
        """Equal for sequences with the same forward pass, whatever their last token is."""
        return self.inputs.tobytes(), self.action_positions.tobytes()


@dataclass(frozen=True, slots=True, eq=False)
class TokenEpisode:
    """The tokens of one episode. Arrays are over its action tokens, in order of play."""

    name: str
    sequences: tuple[TokenSequence, ...]
    behavior: FloatArray
    """Log-probs the engine reported."""
    tokens_per_turn: IntArray
    """[turns] Number of action tokens of each turn."""
    final_ids: IntArray | None = None
    """Tokens a critic reads to value the state after the last turn; ``None`` if the task itself ended."""

    @property
    def num_tokens(self) -> int:
        """Number of action tokens."""
        return len(self.behavior)


def token_episode(episode: Episode) -> TokenEpisode:
    """Return the token sequences of an episode.

    Raises:
        UsageError: The agent recorded no token ids and log-probs.
    """
    name = episode.spec.episode_id
    ids: list[list[int]] = []
    positions: list[list[int]] = []
    behavior: list[float] = []
    for number, turn in enumerate(episode.turns):
        if len(turn.logprobs) != len(turn.action_ids) or not (turn.prompt_ids or (ids and not turn.new_row)):
            raise UsageError(
                f"Episode {name} cannot be trained on: turn {number} has no token ids and log-probs. "
                "Only agents that record them (such as 'lm') can be trained."
            )
        if turn.new_row or not ids:
            ids.append([])
            positions.append([])
        ids[-1].extend(turn.prompt_ids)
        positions[-1].extend(range(len(ids[-1]), len(ids[-1]) + len(turn.action_ids)))
        ids[-1].extend(turn.action_ids)
        behavior.extend(turn.logprobs)
    final_ids = None
    if episode.outcome.cut_short and ids:
        final_ids = _ints([*([] if episode.final_row else ids[-1]), *episode.final_ids])
    return TokenEpisode(
        name=name,
        sequences=tuple(
            TokenSequence(_ints(tokens), _ints(actions))
            for tokens, actions in zip(ids, positions, strict=True)
            if actions
        ),
        behavior=np.array(behavior, dtype=np.float64),
        tokens_per_turn=_ints([len(turn.action_ids) for turn in episode.turns]),
        final_ids=final_ids,
    )


def _ints(values: Sequence[int]) -> IntArray:
    return np.array(values, dtype=np.int64)
