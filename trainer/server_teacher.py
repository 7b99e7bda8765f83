"""A teacher of distillation on a running vLLM or SGLang server. Imports no torch."""

from __future__ import annotations

import numpy as np

from rollgym.core.errors import AgentError
from rollgym.engines.servers.scoring import ScoredTokens, TokenScorer
from rollgym.trainer.data.batch import Batch
from rollgym.trainer.data.sequences import FloatArray, IntArray


class ServerTeacher:
    """Scores batches with the model of a server.

    Args:
        scorer: The connection to the server.
        vocabulary: Number of tokens of its model.
    """

    def __init__(self, scorer: TokenScorer, vocabulary: int) -> None:
        self._scorer, self._vocabulary = scorer, vocabulary

    def logprobs(self, batch: Batch) -> FloatArray:
        """Return the teacher's log-probs of all action tokens, at temperature 1."""
        scored = self._score(batch, 0)
        parts = [
            row.logprobs[sequence.action_positions - 1]
            for row, sequence in zip(scored, batch.sequences, strict=True)
        ]
        return np.concatenate(parts) if parts else np.zeros(0)

    def top_logprobs(self, batch: Batch, k: int) -> tuple[IntArray, FloatArray]:
        """Return the ``k`` most likely tokens at each action position: ids and log-probs, both [k, N].

        With a smaller vocabulary than ``k``, all of it.
        """
        scored = self._score(batch, min(k, self._vocabulary))
        spots = [sequence.action_positions - 1 for sequence in batch.sequences]
        ids = [row.top_ids[spot] for row, spot in zip(scored, spots, strict=True)]
        logprobs = [row.top_logprobs[spot] for row, spot in zip(scored, spots, strict=True)]
        return np.concatenate(ids).T, np.concatenate(logprobs).T

    def _score(self, batch: Batch, top: int) -> list[ScoredTokens]:
        """Score each sequence up to its last action token."""
        rows = [sequence.ids[: sequence.action_positions[-1] + 1].tolist() for sequence in batch.sequences]
        try:
            return self._scorer.score(rows, top)
        except AgentError as error:
            raise AgentError(f"The teacher at {self._scorer.url} could not score a batch: {error}") from None
