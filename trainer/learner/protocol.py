"""The learner as the training loop sees it. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rollgym.engines.base import WeightSource
from rollgym.trainer.data.batch import Batch
from rollgym.trainer.data.sequences import FloatArray
from rollgym.trainer.losses.adaptive import Coefficients

if TYPE_CHECKING:  # imports torch
    from rollgym.engines.weight_sync.wire import WireFormat
    from rollgym.trainer.learner.layout import LayoutChoice

Metrics = dict[str, float]
OFFLOADABLE = ("optimizer", "weights")
"""Parts of a learner that `LearnerProtocol.offload` moves. Gradients are dropped with either."""


class LearnerProtocol(Protocol):
    """Owner of the trained weights: `Learner` in this process, `RayLearner` or `MultiRoleLearner` on Ray."""

    @property
    def has_critic(self) -> bool:
        """Whether `values` is available."""

    def describe_layout(self) -> LayoutChoice:
        """Return the layout of rows in a micro-batch and its measured difference from a plain forward."""

    def logprobs(self, batch: Batch) -> FloatArray:
        """Return log-probs of all action tokens under the current weights."""

    def reference(self, batch: Batch) -> FloatArray:
        """Return log-probs of all action tokens under the reference policy."""

    def set_reference(self, model: Path) -> None:
        """Use the weights in a model folder as the reference policy."""

    def adapt_coefficients(self, metrics: Metrics) -> Coefficients:
        """Adapt the KL and entropy coefficients to an update's metrics; returns them."""

    def set_coefficients(self, coefficients: Coefficients) -> None:
        """Restore adapted coefficients."""

    def values(self, batch: Batch) -> tuple[FloatArray, list[float]]:
        """Return the critic's value before each action token and after the last turn of each episode."""

    def update(self, batch: Batch) -> Metrics:
        """Train on a batch; returns metrics."""

    def start_imitation(self, rate: float, steps: int) -> None:
        """Switch to imitation learning at a learning rate, for a number of optimizer steps."""

    def end_imitation(self, taught: Path | None) -> None:
        """Return to the configured loss with a fresh optimizer; a separate critic starts from ``taught``."""

    def weights(self, wire: WireFormat | None = None) -> WeightSource:
        """Return the policy's weights, for an engine.

        ``wire``: how ranks on other machines send them; weights in this process are those of the learner.
        """

    def offload(self, parts: Sequence[str] = OFFLOADABLE) -> dict[str, int]:
        """Move parts to host memory; returns bytes by part. Any computation reloads them."""

    def reload(self) -> dict[str, int]:
        """Move offloaded parts back to the device; returns bytes by part."""

    def save(self, path: Path) -> None:
        """Write a checkpoint into an existing folder."""

    def load(self, path: Path) -> None:
        """Restore a checkpoint that `save` wrote."""

    def export(self, path: Path) -> None:
        """Write the policy into a folder in Hugging Face format, without a tokenizer."""
