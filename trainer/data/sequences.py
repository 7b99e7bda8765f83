"""Episodes as token sequences: the exact tokens the model read and sampled, and which ones it sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollgym.core.errors import UsageError
from rollgym.core.routed_experts import ExpertArray, RoutedExperts, missing_expert
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
    experts: ExpertArray | None = None
    """[tokens, layers, choices] Experts that the engine chose for every token but the last, or for none;
    single tokens may lack them (`missing_expert`)."""

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
        experts = b"" if self.experts is None else self.experts[: len(self.inputs)].tobytes()
        return self.inputs.tobytes(), self.action_positions.tobytes() + experts


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
    experts: list[list[tuple[int, RoutedExperts]]] = []
    for number, turn in enumerate(episode.turns):
        if len(turn.logprobs) != len(turn.action_ids) or not (turn.prompt_ids or (ids and not turn.new_row)):
            raise UsageError(
                f"Episode {name} cannot be trained on: turn {number} has no token ids and log-probs. "
                "Only agents that record them (such as 'lm') can be trained."
            )
        if turn.new_row or not ids:
            ids.append([])
            positions.append([])
            experts.append([])
        ids[-1].extend(turn.prompt_ids)
        positions[-1].extend(range(len(ids[-1]), len(ids[-1]) + len(turn.action_ids)))
        ids[-1].extend(turn.action_ids)
        behavior.extend(turn.logprobs)
        if turn.routed_experts:
            experts[-1].append((len(ids[-1]) - 1, turn.routed_experts))
    final_ids = None
    if episode.outcome.cut_short and ids:
        final_ids = _ints([*([] if episode.final_row else ids[-1]), *episode.final_ids])
    return TokenEpisode(
        name=name,
        sequences=tuple(
            TokenSequence(_ints(tokens), _ints(actions), experts=_experts(len(tokens) - 1, recorded))
            for tokens, actions, recorded in zip(ids, positions, experts, strict=True)
            if actions
        ),
        behavior=np.array(behavior, dtype=np.float64),
        tokens_per_turn=_ints([len(turn.action_ids) for turn in episode.turns]),
        final_ids=final_ids,
    )


def _experts(count: int, recorded: Sequence[tuple[int, RoutedExperts]]) -> ExpertArray | None:
    """Join the experts of turns, each with its end; where they overlap, the first counts."""
    if not recorded:
        return None
    parts = [(end, experts.to_array()) for end, experts in recorded]
    if len({(part.shape[1:], part.dtype) for _, part in parts}) > 1:
        raise UsageError("The turns of an episode report experts of different models.")
    first = parts[0][1]
    joined: ExpertArray = np.full((count, *first.shape[1:]), missing_expert(first.dtype), dtype=first.dtype)
    for end, part in reversed(parts):
        joined[max(end - len(part), 0) : end] = part[max(len(part) - end, 0) :]
    return joined


def _ints(values: Sequence[int]) -> IntArray:
    return np.array(values, dtype=np.int64)
