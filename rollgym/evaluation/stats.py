"""Statistics: confidence intervals, pass@k, paired comparison. Pure functions, no scipy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollgym.core.seeding import derive_rng

Z95 = 1.959963984540054
"""The 97.5 % point of the normal distribution."""
RESAMPLES = 2_000
FLIPS = 10_000


def wilson(successes: int, trials: int, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval for a proportion; it stays within [0, 1], also for few trials."""
    if not 0 <= successes <= trials or trials < 1:
        raise ValueError(f"{successes} successes in {trials} trials is not a proportion")
    share = successes / trials
    scale = 1 + z * z / trials
    center = (share + z * z / (2 * trials)) / scale
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials)) / scale
    low = 0.0 if successes == 0 else max(0.0, center - half)
    high = 1.0 if successes == trials else min(1.0, center + half)
    return low, high


def bootstrap_mean(
    clusters: Sequence[Sequence[float]], *, seed: int = 0, resamples: int = RESAMPLES
) -> tuple[float, float]:
    """A 95 % percentile interval for the mean over all values, resampling whole clusters.

    Values that belong together (episodes of one task) form a cluster; independent values are clusters of
    one. The seed is fixed, so the same data always give the same interval.
    """
    if not clusters or any(not cluster for cluster in clusters):
        raise ValueError("a bootstrap needs at least one value in every cluster")
    sums = np.array([math.fsum(cluster) for cluster in clusters])
    counts = np.array([len(cluster) for cluster in clusters], dtype=float)
    rng = derive_rng("bootstrap", seed, len(clusters))
    means = np.empty(resamples)
    for start in range(0, resamples, 256):
        rows = min(256, resamples - start)
        picks = rng.integers(len(clusters), size=(rows, len(clusters)))
        means[start : start + rows] = sums[picks].sum(axis=1) / counts[picks].sum(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def success_interval(clusters: Sequence[Sequence[float]]) -> tuple[str, tuple[float, float]]:
    """The method and 95 % interval of a success rate; a cluster holds the successes (0 or 1) of one task."""
    count, wins = sum(map(len, clusters)), int(sum(map(sum, clusters)))
    if len(clusters) == count:
        return "wilson", wilson(wins, count)
    if wins in (0, count):
        # Resampling identical values shows no spread; each task still counts as one trial.
        return "wilson over tasks", wilson(len(clusters) if wins else 0, len(clusters))
    # Episodes of one task are correlated, so Wilson's interval over all of them would be too narrow.
    return "bootstrap over tasks", bootstrap_mean(clusters)


def pass_at_k(tries: int, successes: int, k: int) -> float:
    """Unbiased pass@k: the chance that k tries, drawn without replacement, contain a success."""
    if not 0 <= successes <= tries or not 1 <= k <= tries:
        raise ValueError(f"pass@{k} of {successes} successes in {tries} tries is not defined")
    return 1.0 - math.comb(tries - successes, k) / math.comb(tries, k)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Mean, median, 90th and 99th percentile and maximum."""
    if not values:
        return {}
    array = np.asarray(values, dtype=float)
    p50, p90, p99 = np.percentile(array, [50, 90, 99])
    return {
        "mean": float(array.mean()),
        "p50": float(p50),
        "p90": float(p90),
        "p99": float(p99),
        "max": float(array.max()),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """Difference between A and B on the same tasks."""

    tasks: int
    mean_a: float
    mean_b: float
    difference: float
    low: float
    high: float
    p_value: float
    a_better: int
    b_better: int
    equal: int


def paired(a: Sequence[float], b: Sequence[float], *, seed: int = 0) -> Paired:
    """Compare two scores per task: mean difference, bootstrap interval, sign-flip test.

    The p-value is exact up to 16 tasks that differ (every assignment of signs is tried), else by 10,000
    random ones. It is the chance of a difference this large if A and B were exchangeable.
    """
    if len(a) != len(b) or not a:
        raise ValueError(f"a paired comparison needs equally many scores, got {len(a)} and {len(b)}")
    differences = np.asarray(a, dtype=float) - np.asarray(b, dtype=float)
    low, high = bootstrap_mean([[float(d)] for d in differences], seed=seed)
    return Paired(
        tasks=len(a),
        mean_a=float(np.mean(a)),
        mean_b=float(np.mean(b)),
        difference=float(differences.mean()),
        low=low,
        high=high,
        p_value=_sign_flip(differences, seed),
        a_better=int((differences > 1e-12).sum()),
        b_better=int((differences < -1e-12).sum()),
        equal=int((np.abs(differences) <= 1e-12).sum()),
    )


def _sign_flip(differences: np.ndarray, seed: int) -> float:
    changed = differences[np.abs(differences) > 1e-12]
    if not len(changed):
        return 1.0
    observed = abs(changed.sum()) - 1e-9 * np.abs(changed).sum()
    if len(changed) <= 16:
        signs = np.array(list(itertools.product((1.0, -1.0), repeat=len(changed))))
        return float((np.abs(signs @ changed) >= observed).mean())
    rng = derive_rng("sign flip", seed, len(changed))
    extreme = 0
    for _ in range(FLIPS // 500):
        signs = rng.integers(0, 2, size=(500, len(changed))) * 2.0 - 1.0
        extreme += int((np.abs(signs @ changed) >= observed).sum())
    return (extreme + 1) / (FLIPS + 1)
