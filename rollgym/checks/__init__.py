"""Environment checks: the rules behind ``rollgym check`` and `rollgym.check`."""

from rollgym.checks.report import Report, Rule, RuleResult, Status
from rollgym.checks.runner import RULES, Progress, check

__all__ = ["RULES", "Progress", "Report", "Rule", "RuleResult", "Status", "check"]
