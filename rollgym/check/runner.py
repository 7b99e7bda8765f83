"""Runs the rules on one environment."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

from rollgym.check.play import named
from rollgym.check.repeat import global_state_kept
from rollgym.check.report import Broken, Doubt, Raised, Report, Rule, RuleResult, Skip, Status
from rollgym.check.rules import RULES
from rollgym.check.subject import Subject
from rollgym.errors import UnknownName, UsageError
from rollgym.registry import find_spec, import_module

Progress = Callable[[Rule, RuleResult | None], None]
"""Called with ``None`` when a rule starts and with its result when it is done."""


def check_env(
    name: str,
    *,
    kwargs: Mapping[str, Any] | None = None,
    rules: Sequence[str] | None = None,
    quick: bool = False,
    modules: Sequence[str] = (),
    progress: Progress | None = None,
) -> Report:
    """Check that an environment keeps the rules that rollgym relies on.

    Args:
        name: Any name that `rollgym.make` takes.
        kwargs: Arguments for the environment.
        rules: Names of the rules to check (see `RULES`); all by default.
        quick: Fewer episodes for each rule.
        modules: Modules to import first, here and in other processes: they register environments.
        progress: Told when a rule starts and when it is done.

    Raises:
        UsageError: There is no such environment or rule, or the arguments are wrong.
    """
    chosen = _choose(rules)
    for module in modules:
        import_module(module)
    find_spec(name)
    subject = Subject(name, kwargs or {}, modules, quick)
    with global_state_kept(), closing(subject):
        results = _Run(subject, progress or (lambda rule, result: None)).all(chosen)
    return Report(env_id=name, env_kwargs=subject.kwargs, results=tuple(results))


def _choose(names: Sequence[str] | None) -> list[Rule]:
    by_name = {rule.name: rule for rule in RULES}
    for name in names or ():
        if name not in by_name:
            raise UnknownName("rule", name, by_name, f"The rules: {', '.join(by_name)}.")
    return [rule for rule in RULES if names is None or rule.name in names]


class _Run:
    """One pass over the rules, and what it found so far."""

    def __init__(self, subject: Subject, progress: Progress) -> None:
        self.subject = subject
        self.progress = progress
        self.failed: set[str] = set()
        self.raised: dict[str, str] = {}
        """The rule that first met an error of the environment, by the error's key."""

    def all(self, rules: Sequence[Rule]) -> list[RuleResult]:
        """Check the rules; if the environment does not even run, the others are skipped."""
        first = RULES[0]
        result = self._one(first)
        kept = [result] if first in rules or result.status is Status.FAILED else []
        return kept + [self._one(rule) for rule in rules if rule is not first]

    def _one(self, rule: Rule) -> RuleResult:
        self.progress(rule, None)
        began = time.perf_counter()
        with warnings.catch_warnings():
            # What Gymnasium has to warn of is collected by the rule of that name.
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
                return Status.SKIPPED, f"it cannot be told before the rule {needed!r} is kept."
        try:
            return Status.PASSED, rule.run(self.subject)
        except Broken as error:
            return Status.FAILED, str(error)
        except Doubt as error:
            return Status.WARNING, str(error)
        except Skip as error:
            return Status.SKIPPED, str(error)
        except Raised as error:
            return self._after_raise(rule, error)
        except (Exception, SystemExit) as error:
            if isinstance(error, UsageError) and rule is RULES[0]:
                raise
            return Status.FAILED, f"it met {named(error)}."

    def _after_raise(self, rule: Rule, error: Raised) -> tuple[Status, str]:
        """The first rule to meet an error fails; others that meet the same one cannot tell."""
        known = self.raised.setdefault(error.key, rule.name)
        if known != rule.name:
            return Status.SKIPPED, f"the environment raised as under {known!r}: {error}"
        return Status.FAILED, f"{error} Mend that: an exception costs the whole episode."
