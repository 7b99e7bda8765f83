"""Rates and means of episodes with confidence intervals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from rollgym.core.types import Outcome
from rollgym.evaluation.stats import bootstrap_mean, percentiles, wilson
from rollgym.view.reader import Row

FAILED = frozenset(kind.value for kind in Outcome if kind.failed)
_HUGE = 1e200
_EXACT = 2_000
"""Maximum tasks for a bootstrap interval; above it the interval is narrow and slow to compute."""


def describe(rows: Sequence[Row]) -> dict[str, Any]:
    """Return statistics of episodes. Infrastructure failures are counted but not scored."""
    # Errors that the agent may have caused count as no success in the row.
    scored = [row for row in rows if row.outcome not in FAILED or row.success is not None]
    clusters = _clusters(scored)
    valid = [row.valid for row in scored if row.valid is not None]
    return {
        "episodes": len(rows),
        "tasks": len(clusters),
        "failed": sum(row.outcome in FAILED for row in rows),
        "excluded": len(rows) - len(scored),
        "success": success(clusters),
        "return": _mean(clusters),
        "length": percentiles([float(row.turns) for row in scored]),
        "seconds": percentiles([row.seconds for row in scored if abs(row.seconds) < _HUGE]),
        "tokens": sum(row.tokens for row in rows),
        "valid": sum(valid) / len(valid) if valid else None,
        "outcomes": outcomes(rows),
    }


def outcomes(rows: Iterable[Row]) -> dict[str, int]:
    """Count episodes by outcome, in the order of `Outcome`."""
    counts = Counter(row.outcome for row in rows)
    return {kind.value: counts[kind.value] for kind in Outcome if counts[kind.value]}


def success(clusters: Sequence[Sequence[Row]]) -> dict[str, Any] | None:
    """Return the success rate; ``None`` if no environment defines success."""
    known = [[float(row.success) for row in cluster if row.success is not None] for cluster in clusters]
    known = [cluster for cluster in known if cluster]
    count = sum(map(len, known))
    if not count:
        return None
    wins = int(sum(map(sum, known)))
    if len(known) == count:
        low, high = wilson(wins, count)
    elif wins in (0, count):
        # Identical values have no bootstrap spread; each task still counts as one trial.
        low, high = wilson(len(known) if wins else 0, len(known))
    elif len(known) > 10 * _EXACT:
        return {"value": wins / count, "of": count}
    else:
        low, high = bootstrap_mean(known)
    return {"value": wins / count, "low": low, "high": high, "of": count}


def failures(rows: Sequence[Row], most: int = 50) -> list[dict[str, Any]]:
    """Return errors by frequency, each with an example episode."""
    found: dict[tuple[str, str, str], list[int]] = {}
    for row in rows:
        if row.outcome in FAILED:
            found.setdefault((row.outcome, row.error, row.env), []).append(row.n)
    ranked = sorted(found.items(), key=lambda item: -len(item[1]))[:most]
    return [
        {"outcome": outcome, "message": message, "env": env, "count": len(numbers), "episode": numbers[0]}
        for (outcome, message, env), numbers in ranked
    ]


def _mean(clusters: Sequence[Sequence[Row]]) -> dict[str, Any] | None:
    # Sums near the float maximum would overflow.
    values = [[row.total for row in cluster if abs(row.total) < _HUGE] for cluster in clusters]
    values = [cluster for cluster in values if cluster]
    count = sum(map(len, values))
    if not count:
        return None
    mean = sum(map(sum, values)) / count
    if len(values) > _EXACT:
        return {"value": mean, "of": count}
    low, high = bootstrap_mean(values)
    return {"value": mean, "low": low, "high": high, "of": count}


def _clusters(rows: Iterable[Row]) -> list[list[Row]]:
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.entry, row.env, row.group or row.id), []).append(row)
    return list(groups.values())
