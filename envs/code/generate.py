"""Random problems from the families."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollgym.core.errors import UnknownName, UsageError
from rollgym.envs.code.families.base import Family
from rollgym.envs.code.families.lists import LISTS
from rollgym.envs.code.families.maths import MATHS
from rollgym.envs.code.families.parsing import PARSING
from rollgym.envs.code.families.simulation import SIMULATION
from rollgym.envs.code.families.steps import PIPELINES
from rollgym.envs.code.families.strings import STRINGS
from rollgym.envs.code.families.structures import STRUCTURES

FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (*STRINGS, *LISTS, *MATHS, *PARSING, *SIMULATION, *STRUCTURES, *PIPELINES)
}
TOPICS: Mapping[str, Sequence[Family]] = {
    "strings": STRINGS,
    "lists": (*LISTS, *PIPELINES),
    "maths": MATHS,
    "parsing": PARSING,
    "simulation": SIMULATION,
    "data structures": STRUCTURES,
}
LEVELS = (1, 2, 3)


def choose_families(difficulty: int | None = None, family: str | None = None) -> Sequence[Family]:
    """The families of a level (all by default), of a topic or of a name."""
    if difficulty is not None and difficulty not in LEVELS:
        raise UsageError(f"difficulty must be 1, 2 or 3 (or left out for all), not {difficulty!r}.")
    candidates = list(FAMILIES.values())
    if family is not None:
        named = [FAMILIES[family]] if family in FAMILIES else []
        candidates = [*named, *TOPICS.get(family, ())]
        if not candidates:
            raise UnknownName(
                "family of problems", str(family), [*FAMILIES, *TOPICS], f"Topics: {', '.join(TOPICS)}."
            )
    matching = [candidate for candidate in candidates if difficulty in (None, candidate.level)]
    if not matching:
        levels = sorted({candidate.level for candidate in candidates})
        raise UsageError(f"{family!r} has no problems of difficulty {difficulty}, only of {levels}.")
    return matching


def random_problem(rng: np.random.Generator, families: Sequence[Family]) -> tuple[Family, dict[str, Any]]:
    """A family and parameters for it: what decides the content, without its tests."""
    family = families[int(rng.integers(len(families)))]
    return family, family.choose(rng)


def content_key(content: tuple[Family, Mapping[str, Any]]) -> str:
    """Names the content, so that no two splits share any."""
    family, parameters = content
    return f"{family.name} {sorted(parameters.items())}"
