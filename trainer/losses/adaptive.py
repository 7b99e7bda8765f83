"""Coefficients of the KL penalty and the entropy bonus that approach a target between steps."""

from __future__ import annotations

import math
from typing import NamedTuple

from rollgym.core.errors import RunError, UsageError

__all__ = ["AdaptiveEntropy", "AdaptiveKL", "Coefficients"]


class Coefficients(NamedTuple):
    """The coefficients of a step, part of a run's state."""

    kl: float = 0.0
    entropy: float = 0.0


class AdaptiveKL:
    """A KL coefficient that approaches a target KL (Ziegler et al. 2019, section 2.2).

    Each update multiplies it by ``1 + rate * error``, where the error is the relative deviation of the KL
    from the target, clamped to +-0.2.
    """

    def __init__(self, coef: float, target: float, rate: float = 0.1) -> None:
        _check_positive("KL", coef=coef, target=target, rate=rate)
        if rate >= 5:
            raise UsageError(
                f"Adaptive KL: rate must be below 5 (the coefficient would reach 0), not {rate}."
            )
        self.coef, self.target, self.rate = coef, target, rate

    def update(self, kl: float) -> float:
        """Update with the mean KL of a step; returns the coefficient for the next step."""
        if not math.isfinite(kl):
            raise RunError(
                f"The KL to the reference policy is {kl}: training has diverged, or a log-prob is not finite."
            )
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.coef *= 1 + self.rate * error
        return self.coef


class AdaptiveEntropy:
    """An entropy coefficient that keeps the policy's entropy near a target.

    Each update multiplies it by ``exp(rate * error)``, where the error is the relative distance of the
    entropy below the target, clamped to +-1: with the default rate it doubles in about two steps while the
    policy has no entropy. A policy that has collapsed has little gradient left to recover by, so a small
    coefficient must grow quickly.

    Example:
        >>> control = AdaptiveEntropy(0.1, target=0.4)
        >>> round(control.update(0.2), 3)
        0.116
    """

    def __init__(self, coef: float, target: float, rate: float = 0.3) -> None:
        _check_positive("entropy", coef=coef, target=target, rate=rate)
        self.coef, self.target, self.rate = coef, target, rate

    def update(self, entropy: float) -> float:
        """Update with the mean entropy of a step; returns the coefficient for the next step."""
        if not math.isfinite(entropy):
            raise RunError(f"The entropy of the policy is {entropy}: training has diverged.")
        error = min(max(1 - entropy / self.target, -1.0), 1.0)
        self.coef *= math.exp(self.rate * error)
        return self.coef


def _check_positive(what: str, **values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise UsageError(f"Adaptive {what}: {name} must be positive and finite, not {value}.")
