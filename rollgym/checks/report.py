"""Rules, their results, and the report of a check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollgym.checks.rollout import EnvUnderTest


class Status(StrEnum):
    """The status of one rule."""

    PASSED = "passed"
    FAILED = "failed"
    WARNING = "warning"
    """Allowed, but probably not intended."""
    SKIPPED = "skipped"
    """Not applicable, or not decidable."""


class RuleFailed(Exception):
    """The rule failed; the message states what was observed, what was expected and how to fix it."""


class RuleWarning(Exception):
    """The rule is not broken, but a person should look."""


class RuleSkipped(Exception):
    """The rule does not apply; the message states why."""


class EnvRaised(Exception):
    """The environment raised where it must not. ``key`` is equal for the same error at the same line."""

    def __init__(self, message: str, key: str) -> None:
        super().__init__(message)
        self.key = key


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: its name, a title for tables, why it matters, and the function that checks it.

    ``run`` returns what was observed if the rule passes, and raises `RuleFailed`, `RuleWarning` or
    `RuleSkipped` otherwise.
    """

    name: str
    title: str
    why: str
    run: Callable[[EnvUnderTest], str]
    needs: tuple[str, ...] = ()
    """Rules that must pass before this one can be checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleResult:
    """The result of one rule."""

    rule: str
    title: str
    status: Status
    detail: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The results of all rules for one environment.

    Example:
        >>> report = rollgym.check("my_module:Maze", quick=True)
        >>> for result in report.results:
        ...     print(result.status, result.rule, result.detail)
        passed runs made, reset, and played 'up'.
    """

    env_id: str
    env_kwargs: dict[str, Any]
    results: tuple[RuleResult, ...]

    @property
    def ok(self) -> bool:
        """True if no rule failed; warnings and skipped rules are allowed."""
        return not self.with_status(Status.FAILED)

    @property
    def seconds(self) -> float:
        """Duration of the whole check in seconds."""
        return sum(result.seconds for result in self.results)

    def with_status(self, status: Status | str) -> tuple[str, ...]:
        """The names of the rules with this status, in order."""
        return tuple(result.rule for result in self.results if result.status == status)

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values (a dict for ``json.dumps``)."""
        results = [
            asdict(result) | {"status": str(result.status), "seconds": round(result.seconds, 3)}
            for result in self.results
        ]
        return {"env": self.env_id, "kwargs": self.env_kwargs, "ok": self.ok, "results": results}
