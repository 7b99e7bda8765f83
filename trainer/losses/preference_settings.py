"""Settings of preference losses. Imports no torch, so that a mistake in a config is found at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from rollgym.core.errors import UsageError
from rollgym.trainer.losses.aggregation import Mode
from rollgym.trainer.losses.settings import LossConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DPOSettings:
    """The DPO loss (arXiv 2305.18290); `docs/dpo.md` has the formula."""

    beta: float = 0.1
    """Strength of the pull to the reference: rewards are beta times the log-ratio to it."""
    label_smoothing: float = 0.0
    """Assumed share of pairs with swapped labels, below 0.5 (conservative DPO)."""
    sft_weight: float = 0.0
    """Weight of an additional term: the mean negative log-likelihood per token of the chosen replies."""

    def __post_init__(self) -> None:
        rules = {
            "beta > 0": 0 < self.beta < math.inf,
            "0 <= label_smoothing < 0.5": 0 <= self.label_smoothing < 0.5,
            "sft_weight >= 0": 0 <= self.sft_weight < math.inf,
        }
        for rule, holds in rules.items():
            if not holds:
                raise UsageError(f"The DPO loss needs {rule}.")


@dataclass(frozen=True, slots=True)
class PreferenceLoss(LossConfig):
    """The loss of a learner that trains on preference pairs, each as one episode of its batch.

    The tokens of a pair stay in one micro-batch, as those of an episode do, and each pair counts the same.

    Example:
        >>> PreferenceLoss(settings=DPOSettings(beta=0.05)).settings.beta
        0.05
    """

    name: str = "dpo"
    settings: DPOSettings = DPOSettings()
    ratio_level: Literal["sequence", "episode"] = "episode"
    aggregation: Mode = "sequence-mean"

    def __post_init__(self) -> None:
        """Check nothing: the settings of policy losses stay at their defaults."""
