"""The machines of a bandit: names, mean payouts and how a payout is drawn."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

NAMES = (
    *("Amber", "Birch", "Comet", "Delta", "Ember", "Falcon", "Garnet", "Harbour", "Iris", "Juniper"),
    *("Kestrel", "Lantern", "Maple", "Nimbus", "Onyx", "Pebble", "Quartz", "River", "Saffron", "Tulip"),
)
SPREAD = 0.2
"""Standard deviation of Gaussian payoffs."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One machine. ``payoff`` is bernoulli (1 or 0), gaussian, or steady (always the mean)."""

    name: str
    mean: float
    payoff: str

    def pull(self, rng: np.random.Generator) -> float:
        """Draw the payout of one pull."""
        if self.payoff == "bernoulli":
            return float(rng.random() < self.mean)
        if self.payoff == "gaussian":
            return round(float(rng.normal(self.mean, SPREAD)), 2)
        return self.mean


SINGLE = (Arm("Lantern", 0.4, "steady"), Arm("Comet", 0.6, "bernoulli"))
"""The two machines of the single-pull mode: the sure thing pays less than the risk does on average."""


def random_arms(rng: np.random.Generator, count: int, payoff: str) -> tuple[Arm, ...]:
    """Machines with random names in random order: one good (0.7 to 0.9), the rest poor (0.1 to 0.5)."""
    names = [NAMES[i] for i in rng.permutation(len(NAMES))[:count]]
    means = [round(float(mean), 2) for mean in rng.uniform(0.1, 0.5, size=count)]
    means[int(rng.integers(count))] = round(float(rng.uniform(0.7, 0.9)), 2)
    return tuple(Arm(name, mean, payoff) for name, mean in zip(names, means, strict=True))


def single_arms(rng: np.random.Generator) -> tuple[Arm, ...]:
    """The two machines of the single-pull mode, in random order."""
    return tuple(SINGLE[i] for i in rng.permutation(len(SINGLE)))
