"""Run the rules on one environment."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

from rollgym.checks.agents import expert, instructions, random_agent
from rollgym.checks.contract import (
    after_end,
    before_reset,
    close,
    ends,
    forgeable,
    gymnasium_rule,
    in_range,
    leak,
    nonsense,
    runs,
)
from rollgym.checks.determinism import (
    copies,
    deterministic,
    global_rng,
    global_state_kept,
    processes,
    seeds,
    siblings,
    tasks,
)
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
from rollgym.checks.roles import roles
from rollgym.checks.rollout import EnvUnderTest, named
from rollgym.core.errors import UnknownName, UsageError
from rollgym.core.registry import env_id_of, find_spec, import_module

_REPEATS = ("deterministic",)

RULES: tuple[Rule, ...] = (
    Rule("runs", "can be made, reset and stepped", "Nothing else can be checked otherwise.", runs),
    Rule("gymnasium", "passes Gymnasium's check_env",
         "Every tool that takes a Gymnasium environment then takes this one.", gymnasium_rule),
    Rule("deterministic", "same seed, same episode",
         "A result that cannot be reproduced can be neither trusted nor debugged.", deterministic),
    Rule("global-rng", "leaves global random generators alone",
         "Many episodes share a process: one must not affect the randomness of another.", global_rng),
    Rule("processes", "same episode in another process",
         "Episodes are distributed over workers, and the choice of worker must not matter.",
         processes, _REPEATS),
    Rule("siblings", "members of a group start equal",
         "GRPO compares the episodes of a group: they must start from the same state.", siblings, _REPEATS),
    Rule("copies", "returned values are copies",
         "Code that keeps or changes an observation or info must not change the episode.", copies, _REPEATS),
    Rule("seeds", "different seeds differ",
         "An agent memorizes a single episode, and its score then means nothing.", seeds),
    Rule("tasks", "tasks are reachable by number",
         "Training and test tasks are identified by split and number, so they can be separated and compared.",
         tasks, _REPEATS),
    Rule("range", "rewards, flags and infos are in range",
         "One NaN spoils a whole batch, and an info that is not JSON cannot be recorded.", in_range),
    Rule("nonsense", "nonsense actions are harmless",
         "Language models write anything, and an exception costs the whole episode.", nonsense),
    Rule("ends", "episodes end", "An endless episode holds its worker, and the batch, for good.", ends),
    Rule("before-reset", "a step before reset() is refused",
         "A wrong order of calls should be an error where it happens.", before_reset),
    Rule("after-end", "a step after the end is refused",
         "Rewards after the end would count for an episode that is over.", after_end),
    Rule("close", "close() works, also twice",
         "Cleaning up after an error must not raise another one.", close),
    Rule("leak", "many episodes leave nothing behind",
         "A worker runs for days: a leak in every episode ends in a crash.", leak),
    Rule("instructions", "instructions explain how to act",
         "They are all that a language model knows about the task.", instructions),
    Rule("expert", "the expert succeeds",
         "It shows that the tasks can be solved from what an agent sees.", expert),
    Rule("random", "random actions are valid and do not win",
         "The random agent is the lower baseline of every comparison.", random_agent),
    Rule("roles", "agents can play all roles",
         "Self-play and simulated users need to know who acts, and each role its own reward.", roles),
    Rule("forgeable", "the reward cannot be forged",
         "A policy finds every reward that it can write itself, and its score then means nothing.",
         forgeable),
)  # fmt: skip


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
