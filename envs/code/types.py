"""A programming problem and its tests, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call and its expected value, both encoded by `harness.encode`."""

    arguments: list[Any]
    expected: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Cases:
    """Tests by example: calls and the values they must return. The values stay outside the sandbox."""

    cases: tuple[Case, ...]

    def __len__(self) -> int:
        return len(self.cases)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asserts:
    """Tests that are programs: each must run to its end with the function as ``candidate`` or by its name."""

    tests: tuple[str, ...]
    setup: str = ""
    """A program of the task's author that each test begins with; it may define the function too."""

    def __len__(self) -> int:
        return len(self.tests)


Tests = Cases | Asserts


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A programming problem with its tests."""

    key: str
    """Identifies the content: equal only for equal problems."""
    statement: str
    name: str
    """Name of the required function."""
    signature: str
    public: Tests
    hidden: Tests
    solution: str | None = None
    """A program that passes."""
    prelude: str = ""
    """Imports and helpers of the task, which precede every program of the agent."""
    family: str = ""
    level: int = 0
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of the statement, for an expert."""
    shown: tuple[str, ...] = ()
    """The public tests as shown to an agent, one line each."""
