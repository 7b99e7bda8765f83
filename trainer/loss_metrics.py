"""Numbers about a loss that add up: the same for a batch, however it was cut into micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["sum", "mean", "max"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One number of a part of a batch, with what it takes to join it with the other parts.

    To join ranks: add ``total`` and ``count``, or take the greatest ``total`` where ``kind`` is ``max``.
    """

    kind: Kind
    total: Tensor
    count: Tensor
    """How many tokens are in ``total``; read by ``mean`` only."""

    @property
    def value(self) -> float:
        """The number itself; a mean over nothing is 0."""
        if self.kind != "mean":
            return float(self.total)
        return float(self.total) / max(float(self.count), 1.0)


def sum_of(values: Tensor) -> Metric:
    """A sum, for terms of the loss."""
    return Metric("sum", values.detach().sum(), values.new_tensor(float(values.numel())))


def mean_of(values: Tensor, mask: Tensor) -> Metric:
    """A mean over the tokens of ``mask``, all of the same weight."""
    values = values.detach().float() if values.dtype == torch.bool else values.detach()
    return Metric("mean", torch.where(mask, values, 0.0).sum(), mask.sum().to(values.dtype))


def max_of(values: Tensor, mask: Tensor) -> Metric:
    """The greatest of numbers that are not negative; 0 of none."""
    values = torch.where(mask, values.detach(), 0.0)
    return Metric("max", torch.cat([values.new_zeros(1), values]).max(), mask.sum().to(values.dtype))


def merge(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """The metrics of a batch from those of its parts, in any order."""
    found: dict[str, list[Metric]] = {}
    for part in parts:
        for name, metric in part.items():
            found.setdefault(name, []).append(metric)
    return {name: _join(metrics) for name, metrics in found.items()}


def _join(metrics: list[Metric]) -> Metric:
    # In float64: a float32 counts no further than 16 million tokens.
    totals = torch.stack([m.total for m in metrics]).cpu().double()
    counts = torch.stack([m.count for m in metrics]).cpu().double()
    kind = metrics[0].kind
    return Metric(kind, totals.max() if kind == "max" else totals.sum(), counts.sum())


def summary(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """The numbers to log, with those that only whole-batch means can give."""
    found = {name: metric.value for name, metric in metrics.items()}
    if "importance_squared" in found:
        square = found.pop("importance_squared")
        found["importance_ess"] = found["importance"] ** 2 / square if square else 0.0
    if "return_squared" in found:
        spread = found.pop("return_squared") - found["return"] ** 2
        error = found.pop("value_error_squared") - found["value_error"] ** 2
        found["value_explained"] = 1 - error / spread if spread > 1e-8 else 0.0
    return found
