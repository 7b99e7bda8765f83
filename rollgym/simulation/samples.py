"""What a simulation measures in one training step, at every level of detail."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """One simulated training step."""

    wait: float
    """Seconds that the learner waited for groups."""
    wait_generate: float = 0.0
    """Of these, by what the playing episodes waited for: replies, ..."""
    wait_environment: float = 0.0
    """... or environments."""
    forced: float = 0.0
    """Of ``wait``, while other groups were ready: the next update would have made one too old."""
    train: float = 0.0
    sync: float = 0.0
    turns: int = 0
    """Turns of the groups trained on."""
    discarded: int = 0
    """Turns that no batch contains: of stale groups, of surplus and of failed episodes."""
    filtered: int = 0
    """Turns of groups without variance."""
    tokens: Mapping[int, float] = field(default_factory=dict)
    """Tokens trained on, by their age in weight versions."""
    masked: float = 0.0
    """Of these, tokens older than the bound, which have no gradient."""
    slow: int = 0
    """Slow groups trained on."""
    replayed: int = 0
    """Groups stopped and started again."""
    generating: float = 0.0
    """Mean number of replies being generated."""
    in_flight: float = 0.0
    """Mean number of episodes in flight."""
    engine_busy: float = 0.0
    """Mean share of the engines that generate."""
    progress: float = 0.0
    """Mean number of turns that an episode in flight has finished."""

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.wait + self.train + self.sync


def mean(values: Iterable[float]) -> float:
    """The mean; 0 of nothing."""
    found = list(values)
    return sum(found) / len(found) if found else 0.0


def ages(samples: Sequence[StepSample]) -> dict[int, float]:
    """Tokens by age over all samples."""
    total: dict[int, float] = {}
    for sample in samples:
        for age, count in sample.tokens.items():
            total[age] = total.get(age, 0.0) + count
    return total


def age_quantile(tokens: Mapping[int, float], share: float) -> float:
    """The age that this share of the tokens does not exceed."""
    if not tokens:
        return 0.0
    order = sorted(tokens)
    counts = np.cumsum([tokens[age] for age in order])
    return float(order[min(int(np.searchsorted(counts, share * counts[-1])), len(order) - 1)])


def mean_age(tokens: Mapping[int, float]) -> float:
    """The mean age of tokens."""
    total = sum(tokens.values())
    return sum(age * count for age, count in tokens.items()) / total if total else 0.0


def discarded_share(samples: Sequence[StepSample]) -> float:
    """Share of all turns that no batch contains."""
    lost = sum(sample.discarded for sample in samples)
    played = lost + sum(sample.turns + sample.filtered for sample in samples)
    return lost / played if played else 0.0
