"""Episodes as token rows: what the model read and wrote, verbatim, and which of it was its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollgym.errors import UsageError
from rollgym.types import Episode

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A stretch of conversation that only ever grew at its end."""

    ids: IntArray
    """Every token, as the engine read and wrote it."""
    places: IntArray
    """Where in ``ids`` the policy's own tokens are. The mask says who wrote, never what was written."""

    @property
    def inputs(self) -> IntArray:
        """What the model must read to predict all of ``places``: nothing follows the last one."""
        return self.ids[: int(self.places[-1])]

    @property
    def key(self) -> tuple[bytes, bytes]:
        """Equal for rows that a model reads alike, whatever their last token is."""
        return self.inputs.tobytes(), self.places.tobytes()


@dataclass(frozen=True, slots=True, eq=False)
class TokenEpisode:
    """The tokens of one episode; the arrays are over its action tokens, in the order of play."""

    name: str
    rows: tuple[Row, ...]
    behaviour: FloatArray
    """Log-probs that the engine reported."""
    per_turn: IntArray
    """How many action tokens each turn has."""
    final: IntArray | None = None
    """What a critic reads to value the state after the last turn; ``None`` where the task itself ended."""

    @property
    def count(self) -> int:
        """How many action tokens there are."""
        return len(self.behaviour)


def token_episode(episode: Episode) -> TokenEpisode:
    """The rows of an episode that a token agent played. `UsageError` for any other."""
    name = episode.spec.episode_id
    ids: list[list[int]] = []
    places: list[list[int]] = []
    behaviour: list[float] = []
    for number, turn in enumerate(episode.turns):
        if len(turn.logprobs) != len(turn.action_ids) or not (turn.prompt_ids or (ids and not turn.new_row)):
            raise UsageError(
                f"Episode {name} cannot be trained on: turn {number} has no token ids and log-probs. "
                "Only agents that report them (such as 'lm') can be trained."
            )
        if turn.new_row or not ids:
            ids.append([])
            places.append([])
        ids[-1].extend(turn.prompt_ids)
        places[-1].extend(range(len(ids[-1]), len(ids[-1]) + len(turn.action_ids)))
        ids[-1].extend(turn.action_ids)
        behaviour.extend(turn.logprobs)
    final = None
    if episode.outcome.cut_short and ids:
        final = _ints([*([] if episode.final_row else ids[-1]), *episode.final_ids])
    return TokenEpisode(
        name=name,
        rows=tuple(Row(_ints(row), _ints(at)) for row, at in zip(ids, places, strict=True) if at),
        behaviour=np.array(behaviour, dtype=np.float64),
        per_turn=_ints([len(turn.action_ids) for turn in episode.turns]),
        final=final,
    )


def _ints(values: Sequence[int]) -> IntArray:
    return np.array(values, dtype=np.int64)
