"""Checks that an environment keeps the rules rollgym relies on; the library behind ``rollgym check``.

report = check_env("rollgym/Sokoban-v0")
for result in report.results:
    print(result.status, result.rule, result.detail)
"""

from rollgym.check.report import Report, Rule, RuleResult, Status
from rollgym.check.rules import RULES
from rollgym.check.runner import Progress, check_env

__all__ = ["RULES", "Progress", "Report", "Rule", "RuleResult", "Status", "check_env"]
