"""Learners: they turn batches into better weights. The loop knows this protocol alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rollgym.engines import WeightSource
from rollgym.trainer.batch import Batch
from rollgym.trainer.rows import FloatArray

if TYPE_CHECKING:  # it imports torch, which reading a configuration does without
    from rollgym.trainer.layout import LayoutChoice

Metrics = dict[str, float]


class Learner(Protocol):
    """Owns the weights that are trained, and whatever it takes to change them."""

    @property
    def has_critic(self) -> bool:
        """Whether `values` can be asked."""

    def describe_layout(self) -> LayoutChoice:
        """How rows are laid out for the model, and how far that is from a plain forward."""

    def logprobs(self, batch: Batch) -> FloatArray:
        """Log-probs of all action tokens under the weights as they are now."""

    def reference(self, batch: Batch) -> FloatArray:
        """The same under the weights that the run began with."""

    def set_reference(self, model: Path) -> None:
        """Take the weights in a folder as the reference."""

    def adapt_kl(self, metrics: Metrics) -> float:
        """Change the weight of the KL penalty by what an update saw, and return it."""

    def set_kl(self, coef: float) -> None:
        """Go on with this weight of the KL penalty."""

    def values(self, batch: Batch) -> tuple[FloatArray, list[float]]:
        """The critic's value before each action token, and after the last turn of each episode."""

    def update(self, batch: Batch) -> Metrics:
        """Learn from a batch."""

    def start_imitation(self, rate: float, steps: int) -> None:
        """Learn by imitation from here on, at this rate, in so many optimizer steps."""

    def end_imitation(self, taught: Path | None) -> None:
        """Go on as usual with a fresh optimizer; a separate critic starts from the policy in ``taught``."""

    def weights(self) -> WeightSource:
        """The policy's weights, for an engine."""

    def offload(self, parts: Sequence[str]) -> dict[str, int]:
        """Move ``optimiser`` or ``weights`` to the host's memory; bytes by part. Computing reloads."""

    def reload(self) -> dict[str, int]:
        """Bring back what was moved; bytes by part."""

    def save(self, path: Path) -> None:
        """Write everything needed to go on, into an existing folder."""

    def load(self, path: Path) -> None:
        """Go on from what `save` wrote."""

    def export(self, path: Path) -> None:
        """Write the policy as a model folder in Hugging Face format."""
