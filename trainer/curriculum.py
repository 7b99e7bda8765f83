"""Curriculum by pass rate: inside a domain, environments near a pass rate of one half get more groups.

Pure functions: pass rates and weights follow from the groups of each step, so a run resumes exactly.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollgym.core.types import Group
from rollgym.trainer.config import CurriculumConfig, TrainConfig, domain_groups, plays_in


def updated_pass_rates(
    before: Sequence[float | None], groups: Sequence[Group], config: TrainConfig, momentum: float
) -> list[float | None]:
    """Return the pass rates of all environments after a step; ``None`` where nothing was measured yet."""
    episodes = [episode for group in groups for episode in group.episodes]
    rates: list[float | None] = []
    for env, old in zip(config.envs, before or [None] * len(config.envs), strict=True):
        own = [float(e.success) for e in episodes if e.success is not None and plays_in(e, env)]
        if not own:
            rates.append(old)
        else:
            new = sum(own) / len(own)
            rates.append(new if old is None else old + momentum * (new - old))
    return rates


def pass_rate_weights(
    rates: Sequence[float | None], config: TrainConfig, settings: CurriculumConfig
) -> list[float]:
    """Return the weights of all environments; the sum of a domain stays that of ``envs.weight``.

    Example:
        Two levels of equal weight with pass rates 0.5 and 1.0 and ``floor=0.1`` get 10/11 and 1/11 of the
        groups of their domain.
    """
    base = [env.weight for env in config.envs]
    factors = [_factor(rate, settings.floor) for rate in rates]
    weights = list(base)
    # Environments without a domain share one: a list of levels needs no names.
    for members in domain_groups(config).values():
        raw = [base[number] * factors[number] for number in members]
        for number, share in zip(members, raw, strict=True):
            weights[number] = sum(base[n] for n in members) * share / sum(raw)
    return weights


def _factor(rate: float | None, floor: float) -> float:
    """The variance of success at a pass rate, scaled to 1 at one half, and at least ``floor``."""
    return 1.0 if rate is None else max(4.0 * rate * (1.0 - rate), floor)
