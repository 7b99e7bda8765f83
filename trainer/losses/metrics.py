"""Loss metrics that add up: the same for a batch however it is split into micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["sum", "mean", "max"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of a part of a batch, in a form that can be reduced over parts.

    To reduce over ranks: add ``total`` and ``count``, or take the maximum ``total`` if ``kind`` is ``max``.
    """

    kind: Kind
    total: Tensor
    count: Tensor
    """Number of tokens in ``total``; read by ``mean`` only."""

    @property
    def value(self) -> float:
        """The metric as a number; a mean over no tokens is 0."""
        if self.kind != "mean":
            return float(self.total)
        return float(self.total) / max(float(self.count), 1.0)


@dataclass(frozen=True, slots=True)
class LossResult:
    """The loss of a part of a batch; losses of parts add up, their metrics are combined by `merge`."""

    loss: Tensor
    metrics: dict[str, Metric]


def sum_of(values: Tensor) -> Metric:
    """A sum, for terms of the loss."""
    return Metric("sum", values.detach().sum(), values.new_full((), float(values.numel())))


def mean_of(values: Tensor, mask: Tensor) -> Metric:
    """An unweighted mean over the tokens of ``mask``."""
    values = values.detach().float() if values.dtype == torch.bool else values.detach()
    return Metric("mean", torch.where(mask, values, 0.0).sum(), mask.sum().to(values.dtype))


def max_of(values: Tensor, mask: Tensor) -> Metric:
    """The maximum of non-negative numbers over the tokens of ``mask``; 0 without tokens."""
    values = torch.where(mask, values.detach(), 0.0)
    return Metric("max", torch.cat([values.new_zeros(1), values]).max(), mask.sum().to(values.dtype))


def merge(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Combine the metrics of the parts of a batch, in any order."""
    by_name: dict[str, list[Metric]] = {}
    for part in parts:
        for name, metric in part.items():
            by_name.setdefault(name, []).append(metric)
    return {name: _join(metrics) for name, metrics in by_name.items()}


def _join(metrics: list[Metric]) -> Metric:
    # In float64: float32 counts exactly only up to 16 million tokens.
    totals = torch.stack([m.total for m in metrics]).cpu().double()
    counts = torch.stack([m.count for m in metrics]).cpu().double()
    kind = metrics[0].kind
    return Metric(kind, totals.max() if kind == "max" else totals.sum(), counts.sum())


def summary(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Numbers to log, including those derived from whole-batch means."""
    values = {name: metric.value for name, metric in metrics.items()}
    if "importance_squared" in values:
        square = values.pop("importance_squared")
        values["importance_ess"] = values["importance"] ** 2 / square if square else 0.0
    if "return_squared" in values:
        spread = values.pop("return_squared") - values["return"] ** 2
        error = values.pop("value_error_squared") - values["value_error"] ** 2
        values["value_explained"] = 1 - error / spread if spread > 1e-8 else 0.0
    return values
