"""What a check says: rules, their results, and the report of all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollgym.check.subject import Subject


class Status(StrEnum):
    """How an environment did on one rule."""

    PASSED = "passed"
    FAILED = "failed"
    WARNING = "warning"
    """Allowed, but probably not meant."""
    SKIPPED = "skipped"
    """It does not apply here, or cannot be told."""


class Broken(Exception):
    """The rule is broken; the message says what was seen, what was expected and how to fix it."""


class Doubt(Exception):
    """Not against the rule, but a person should look."""


class Skip(Exception):
    """The rule does not apply, and why."""


class Raised(Exception):
    """The environment raised where it must not. ``key`` is equal for the same error at the same line."""

    def __init__(self, message: str, key: str) -> None:
        super().__init__(message)
        self.key = key


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: its name, a title for tables, why it matters, and the function that checks it.

    ``run`` returns what was seen where all is well, and raises `Broken`, `Doubt` or `Skip` otherwise.
    """

    name: str
    title: str
    why: str
    run: Callable[[Subject], str]
    needs: tuple[str, ...] = ()
    """Rules without which this one cannot tell anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleResult:
    """How one rule went."""

    rule: str
    title: str
    status: Status
    detail: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How all rules went for one environment."""

    env_id: str
    env_kwargs: dict[str, Any]
    results: tuple[RuleResult, ...]

    @property
    def ok(self) -> bool:
        """True where no rule failed; warnings and skipped rules are allowed."""
        return not self.with_status(Status.FAILED)

    @property
    def seconds(self) -> float:
        """How long the whole check took."""
        return sum(result.seconds for result in self.results)

    def with_status(self, status: Status | str) -> tuple[str, ...]:
        """The names of the rules with this status, in order."""
        return tuple(result.rule for result in self.results if result.status == status)

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values (a dict for ``json.dumps``)."""
        results = [
            {
                "rule": result.rule,
                "title": result.title,
                "status": str(result.status),
                "detail": result.detail,
                "seconds": round(result.seconds, 3),
            }
            for result in self.results
        ]
        return {"env": self.env_id, "kwargs": self.env_kwargs, "ok": self.ok, "results": results}
