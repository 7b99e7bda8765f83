"""Run the rules on one environment."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

from rollgym.checks.determinism import global_state_kept
from rollgym.checks.env_under_test import EnvUnderTest
from rollgym.checks.report import (
    EnvRaised,
    Report,
    Rule,
    RuleFailed,
    RuleResult,
    RuleSkipped,
    RuleWarning,
    Status,
)
from rollgym.checks.rollout import named
from rollgym.checks.rules import RULES
from rollgym.core.errors import UnknownName, UsageError
from rollgym.core.registry import env_id_of, find_spec, import_module

Progress = Callable[[Rule, RuleResult | None], None]
"""Called with ``None`` when a rule starts and with its result when it is done."""


def check(
    env: str | Callable[..., Any],
    *,
    kwargs: Mapping[str, Any] | None = None,
    rules: Sequence[str] | None = None,
    quick: bool = False,
    modules: Sequence[str] = (),
    progress: Progress | None = None,
) -> Report:
    """Check an environment against Gymnasium's rules and rollgym's, as ``rollgym check`` does.

    Args:
        env: An id, ``module:Class``, a class, or a function that makes an environment.
        kwargs: Arguments for the environment.
        rules: Names of the rules to check (see `rollgym.checks.RULES`); all by default.
        quick: Play fewer episodes for each rule.
        modules: Modules to import first, here and in other processes: they register environments.
        progress: Called when a rule starts and when it is done.

    Returns:
        A report with one result per rule.

    Raises:
        UsageError: The environment or a rule is unknown, or the arguments are wrong.

    Example:
        >>> report = rollgym.check("rollgym/Sokoban-v0", quick=True)
        >>> report.ok, report.with_status("failed")
        (True, ())
    """
    chosen = _choose(rules)
    for module in modules:
        import_module(module)
    name = env_id_of(env)
    find_spec(name)
    subject = EnvUnderTest(name, kwargs or {}, modules, quick)
    with global_state_kept(), closing(subject):
        results = _Run(subject, progress or (lambda rule, result: None)).all(chosen)
    return Report(env_id=name, env_kwargs=subject.kwargs, results=tuple(results))


def _choose(names: Sequence[str] | None) -> list[Rule]:
    by_name = {rule.name: rule for rule in RULES}
    for name in names or ():
        if name not in by_name:
            raise UnknownName("rule", name, by_name, f"Rules: {', '.join(by_name)}.")
    return [rule for rule in RULES if names is None or rule.name in names]


class _Run:
    """One pass over the rules, with the failures so far."""

    def __init__(self, subject: EnvUnderTest, progress: Progress) -> None:
        self.subject = subject
        self.progress = progress
        self.failed: set[str] = set()
        self.raised: dict[str, str] = {}
        """The rule in which an error of the environment was first raised, by the key of the error."""

    def all(self, rules: Sequence[Rule]) -> list[RuleResult]:
        """Check the rules; if the environment does not run at all, the others are skipped."""
        first = RULES[0]
        result = self._one(first)
        kept = [result] if first in rules or result.status is Status.FAILED else []
        return kept + [self._one(rule) for rule in rules if rule is not first]

    def _one(self, rule: Rule) -> RuleResult:
        self.progress(rule, None)
        began = time.perf_counter()
        with warnings.catch_warnings():
            # Gymnasium's warnings are collected by the rule `gymnasium`.
            warnings.simplefilter("ignore")
            status, detail = self._verdict(rule)
        if status is Status.FAILED:
            self.failed.add(rule.name)
        seconds = time.perf_counter() - began
        result = RuleResult(rule=rule.name, title=rule.title, status=status, detail=detail, seconds=seconds)
        self.progress(rule, result)
        return result

    def _verdict(self, rule: Rule) -> tuple[Status, str]:
        for needed in ("runs", *rule.needs):
            if needed in self.failed:
                return Status.SKIPPED, f"it cannot be checked until the rule {needed!r} passes."
        try:
            return Status.PASSED, rule.run(self.subject)
        except RuleFailed as error:
            return Status.FAILED, str(error)
        except RuleWarning as error:
            return Status.WARNING, str(error)
        except RuleSkipped as error:
            return Status.SKIPPED, str(error)
        except EnvRaised as error:
            return self._after_raise(rule, error)
        except (Exception, SystemExit) as error:
            if isinstance(error, UsageError) and rule is RULES[0]:
                raise
            return Status.FAILED, f"it raised {named(error)}."

    def _after_raise(self, rule: Rule, error: EnvRaised) -> tuple[Status, str]:
        """The first rule in which an error is raised fails; others with the same error are skipped."""
        first = self.raised.setdefault(error.key, rule.name)
        if first != rule.name:
            return Status.SKIPPED, f"the environment raised as under {first!r}: {error}"
        return Status.FAILED, f"{error} Fix that: an exception costs the whole episode."
