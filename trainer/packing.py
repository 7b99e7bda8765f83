"""Rows end to end, where tokens that several rows begin with are read once.

Members of a group begin with the same prompt, and often with the same first turns. A causal model makes the
same of them in every row, so they lie in the packed tokens once; each row has a path through them, and
attends along it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollgym.trainer.rows import IntArray, Row

LEAST_OVERLAP = 16
"""Fewer first tokens in common are no reason to keep rows together."""
LEAST_SAVED = 0.1
"""Below this share of all tokens, following paths costs more than it saves."""
ATTENDED = 0.25
"""What a token costs a row that another row computes: its keys and values are there once more."""


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """Tokens of several rows for one pass."""

    ids: IntArray
    """[T] what is computed."""
    positions: IntArray
    """[T] where in its row each token is."""
    paths: tuple[IntArray, ...]
    """For each row, where its tokens lie."""
    order: tuple[int, ...]
    """The rows in the order in which the tokens that they brought lie."""
    known: tuple[int, ...]
    """In that order: how many of a row's first tokens another brought."""

    @property
    def sizes(self) -> list[int]:
        """How long the rows are, in that order."""
        return [len(self.paths[row]) for row in self.order]

    @property
    def route(self) -> IntArray | None:
        """All paths end to end, in that order; None where that is the tokens as they lie."""
        return np.concatenate([self.paths[row] for row in self.order]) if any(self.known) else None


def pack(inputs: Sequence[IntArray]) -> Packing:
    """Lay rows end to end; where it is worth it, what they have in common only once."""
    order = sorted(range(len(inputs)), key=lambda row: inputs[row].tobytes())
    known = _overlaps([inputs[row] for row in order])
    if sum(known) < LEAST_SAVED * sum(map(len, inputs)):
        order, known = list(range(len(inputs))), [0] * len(inputs)
    paths: list[IntArray] = [np.zeros(0, dtype=np.int64)] * len(inputs)
    before, total = paths[0], 0
    for row, common in zip(order, known, strict=True):
        more = len(inputs[row]) - common
        before = np.concatenate([before[:common], np.arange(total, total + more)])
        paths[row] = before
        total += more
    pairs = list(zip(order, known, strict=True))
    return Packing(
        ids=np.concatenate([inputs[row][common:] for row, common in pairs]),
        positions=np.concatenate([np.arange(common, len(inputs[row])) for row, common in pairs]),
        paths=tuple(paths),
        order=tuple(order),
        known=tuple(known),
    )


def bundles(rows: Sequence[Row], room: int) -> list[tuple[list[int], int]]:
    """Rows that belong into one pass, as many as have room, and what each bundle costs in tokens.

    Rows that a model reads alike are always in one bundle, and cost no more than one of them.
    """
    keys = [row.key for row in rows]
    order = sorted(range(len(rows)), key=lambda row: keys[row])
    inputs = [rows[row].inputs for row in order]
    found: list[list[int]] = []
    costs: list[float] = []
    for at, (row, common) in enumerate(zip(order, _overlaps(inputs), strict=True)):
        alike = at > 0 and keys[row] == keys[order[at - 1]]
        more = 0.0 if alike else len(inputs[at]) - common + ATTENDED * common
        if not alike and (common < LEAST_OVERLAP or costs[-1] + more > room):
            found.append([])
            costs.append(0.0)
            more = float(len(inputs[at]))
        found[-1].append(row)
        costs[-1] += more
    return sorted((sorted(members), round(cost)) for members, cost in zip(found, costs, strict=True))


def whole_episodes(
    owners: Sequence[int], rows: Sequence[Row], *, padded: bool
) -> list[tuple[list[int], int]]:
    """The rows of each episode in one bundle, and what it costs in tokens.

    For losses with one ratio per episode: a micro-batch must hold all of its rows. Padded rows lie side by
    side, so each counts as long as the longest.
    """
    members: dict[int, list[int]] = {}
    for row, owner in enumerate(owners):
        members.setdefault(owner, []).append(row)
    found = []
    for own in members.values():
        lengths = [len(rows[row].inputs) for row in own]
        found.append((own, max(lengths) * len(own) if padded else sum(lengths)))
    return found


def _overlaps(inputs: Sequence[IntArray]) -> list[int]:
    """For each row, how many first tokens it has in common with the row before it."""
    found = [0] * len(inputs)
    for at in range(1, len(inputs)):
        one, other = inputs[at - 1], inputs[at]
        least = min(len(one), len(other))
        differ = one[:least] != other[:least]
        first = int(differ.argmax()) if least else 0
        found[at] = first if least and differ[first] else least
    return found
