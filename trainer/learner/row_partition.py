"""The division of a batch's rows between ranks, and into the micro-batches of each.

Every rank computes the division of all ranks from the lengths of the rows alone, so that they agree without a
message. A rank with fewer micro-batches than another gets empty ones, since collectives must match.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rollgym.trainer.data.batch import Batch, balanced, micro_batches
from rollgym.trainer.data.packing import bundles, whole_episodes
from rollgym.trainer.learner.forward import Layout
from rollgym.trainer.learner.strategies.base import ParallelStrategy

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class RowPartition:
    """Divides rows between data ranks and into micro-batches.

    Example:
        >>> for part in partition.micro_batches(batch, range(len(batch.sequences))):
        ...     rows = [batch.sequences[row] for row in part]
    """

    strategy: ParallelStrategy
    """Of this rank: its data rank and its context group."""
    several: bool
    """Whether there are other ranks."""
    layout: Layout
    tokens_per_rank: int
    """``learner.max_tokens_per_microbatch``."""
    _warned: bool = field(default=False, init=False)

    @property
    def max_tokens(self) -> int:
        """Maximum tokens of a micro-batch, of which each rank of a context group has a part."""
        context = self.strategy.context
        return self.tokens_per_rank * (1 if context is None else context.size)

    def micro_batches(
        self, batch: Batch, rows: Sequence[int], *, by_episode: bool = False
    ) -> Iterator[list[int]]:
        """Yield this rank's micro-batches; an empty one stands for a row of weight 0.

        Rows that the model reads alike are in the same micro-batch where possible, and computed once;
        with ``by_episode``, so are the rows of an episode.
        """
        padded = self.layout == "padded"
        lengths = batch.index.lengths[list(rows)].tolist()
        self._warn_of_long_rows(max(lengths, default=0))
        if by_episode:
            sets = whole_episodes([int(batch.episode_of[row]) for row in rows], lengths, padded=padded)
            sets = [([rows[i] for i in members], cost) for members, cost in sets]
        else:
            # Padded rows lie side by side, so that only whole rows can be computed once: no room for others.
            sets = bundles(batch.index, 0 if padded else self._bundle_room(sum(lengths)), rows)
        parts = self.split([cost for _, cost in sets], padded=padded)
        batch.fetch([row for part in parts for number in part for row in sets[number][0]])
        for part in parts:
            yield [row for number in part for row in sets[number][0]]

    def split(self, lengths: Sequence[int], *, padded: bool) -> list[list[int]]:
        """Return the micro-batches of this rank, padded with empty ones to the number of every rank."""
        if not self.several:
            return micro_batches(lengths, self.max_tokens, padded=padded)
        parts = []
        for share in balanced([float(length) for length in lengths], self.strategy.data_world):
            own = micro_batches([lengths[i] for i in share], self.max_tokens, padded=padded)
            parts.append([[share[i] for i in part] for part in own])
        mine, most = parts[self.strategy.data_rank], max(map(len, parts))
        return mine + [[] for _ in range(most - len(mine))]

    def _bundle_room(self, tokens: int) -> int:
        """Return the maximum tokens of rows that are kept together, of a batch with so many tokens."""
        if not self.several:
            return self.max_tokens
        # A bundle of more than half of a rank's share would make the other ranks wait.
        return min(self.max_tokens, tokens // (2 * self.strategy.data_world))

    def _warn_of_long_rows(self, longest: int) -> None:
        """Log once if rows exceed a micro-batch and cannot be computed in pieces."""
        packed = self.layout == "packed"
        if self._warned or longest <= self.max_tokens or (packed and not self.several):
            return
        self._warned = True
        reason = (
            f"strategy={self.strategy.name} cuts no rows (learner.parallel.context shares them between ranks)"
            if packed
            else "rows are padded, and only packed rows are cut"
        )
        log.warning(
            "a row of %d tokens is computed at once, with more memory than "
            "learner.max_tokens_per_microbatch=%d suggests: %s",
            longest,
            self.tokens_per_rank,
            reason,
        )
