import pytest
from broken_envs import BROKEN

from rollgym.checks import RULES, Status, check

# Two processes for each environment would take a minute; the rule about them is tested separately.
IN_PROCESS = [rule.name for rule in RULES if rule.name != "processes"]
OTHER_PROCESS = sorted(env_id for env_id, rules in BROKEN.items() if "processes" in rules)


@pytest.mark.parametrize("env_id", sorted(BROKEN))
def test_exactly_the_broken_rules_fail(env_id):
    report = check(env_id, quick=True, rules=IN_PROCESS)
    details = {result.rule: result.detail for result in report.results}
    assert set(report.with_status(Status.FAILED)) == BROKEN[env_id] - {"processes"}, details
    assert report.ok is not bool(BROKEN[env_id] - {"processes"})
    assert all(text.isprintable() and len(text) < 700 and text.endswith(".") for text in details.values())


@pytest.mark.parametrize("env_id", OTHER_PROCESS)
def test_what_differs_between_processes_is_found(env_id):
    report = check(env_id, rules=["processes"], modules=["broken_envs"])
    assert report.with_status(Status.FAILED) == ("processes",)
    assert "in another process" in report.results[0].detail
