"""Environment checks: the rules behind ``rollgym check`` and `rollgym.check`."""

from rollgym.checks.report import Report, Rule, RuleResult, Status
from rollgym.checks.rules import RULES
from rollgym.checks.runner import Progress, check

__all__ = ["RULES", "Progress", "Report", "Rule", "RuleResult", "Status", "check"]
