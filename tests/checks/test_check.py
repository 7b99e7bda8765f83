import asyncio
import json
import random

import numpy as np
import pytest
from broken_envs import Good

from rollgym.checks import RULES, Status, check
from rollgym.core.errors import UnknownName, UsageError

GOOD = "check/Good-v0"
MODULES = ["broken_envs"]


def statuses(report):
    return {result.rule: result.status for result in report.results}


def detail(report, rule):
    return next(result.detail for result in report.results if result.rule == rule)


def test_a_good_environment_passes_every_rule_in_full():
    report = check(GOOD, modules=MODULES)
    assert statuses(report) == {rule.name: Status.PASSED for rule in RULES}
    assert report.ok
    assert detail(report, "leak").startswith("1,000 episodes")
    assert "all 20 episodes" in detail(report, "expert")


@pytest.mark.parametrize("env_id", ["CliffWalking-v1", "Taxi-v4"])
def test_environments_of_gymnasium_can_be_checked(env_id):
    report = check(env_id, quick=True)
    doubts = {"seeds"} if env_id == "CliffWalking-v1" else set()
    assert report.ok, report.to_json()
    assert set(report.with_status(Status.WARNING)) == doubts
    assert set(report.with_status(Status.SKIPPED)) == {"tasks", "expert"}


def test_an_environment_of_ours_keeps_every_rule():
    report = check("rollgym/FrozenLake-v0", quick=True)
    assert set(statuses(report).values()) == {Status.PASSED}, report.to_json()


def test_the_smallest_custom_environment_gets_warnings_only():
    report = check("check/Coin-v0", quick=True, modules=MODULES)
    assert report.ok
    # It takes its coin from the seed, accepts any text, and lists no actions.
    assert set(report.with_status(Status.WARNING)) == {"tasks", "nonsense", "random"}
    assert report.with_status(Status.SKIPPED) == ("expert",)


def test_one_start_for_all_seeds_is_a_warning_where_there_is_one_task():
    report = check("check/OneTask-v0", quick=True, rules=["seeds", "tasks"])
    assert statuses(report) == {"seeds": Status.WARNING, "tasks": Status.PASSED}


def test_arguments_reach_the_environment_here_and_in_other_processes():
    report = check("check/OneTask-v0", kwargs={"start": 3}, quick=True, modules=MODULES, rules=["processes"])
    assert report.ok
    assert report.to_json()["kwargs"] == {"start": 3}


def test_a_class_is_checked_by_its_path():
    report = check("broken_envs:Good", quick=True, rules=["deterministic", "processes", "tasks"])
    assert set(statuses(report).values()) == {Status.PASSED}


def test_an_environment_that_other_processes_cannot_find_gets_a_fix():
    report = check(GOOD, quick=True, rules=["processes"])
    assert report.with_status("failed") == ("processes",)
    assert "--env-module" in detail(report, "processes")


def test_rules_are_skipped_where_the_environment_does_not_run():
    report = check("check/CannotBeReset-v0", quick=True, rules=["leak", "close"])
    assert statuses(report) == {"runs": Status.FAILED, "close": Status.SKIPPED, "leak": Status.SKIPPED}
    assert "KeyError" in detail(report, "runs")
    assert "broken_envs.py line" in detail(report, "runs")


def test_the_same_exception_fails_one_rule_and_skips_the_others():
    report = check("check/RaisesOnLargeDigits-v0", quick=True, rules=["deterministic", "range", "leak"])
    assert statuses(report)["deterministic"] is Status.FAILED
    assert statuses(report)["leak"] is Status.SKIPPED
    assert "as under 'deterministic'" in detail(report, "leak")


def test_what_depends_on_repeating_is_skipped_where_nothing_repeats():
    report = check("check/ClockInInfo-v0", quick=True, rules=["deterministic", "siblings"])
    assert statuses(report)["siblings"] is Status.SKIPPED


def test_chosen_rules_run_alone_and_in_order():
    report = check(GOOD, quick=True, rules=["close", "seeds"])
    assert [result.rule for result in report.results] == ["seeds", "close"]


def test_an_unknown_rule_is_refused_with_the_nearest():
    with pytest.raises(UnknownName, match="Did you mean seeds"):
        check(GOOD, rules=["seed"])


def test_an_unknown_environment_is_refused():
    with pytest.raises(UnknownName, match="no environment called"):
        check("rollgym/NoSuch-v0")


def test_wrong_arguments_are_the_callers_mistake():
    with pytest.raises(UsageError, match="color"):
        check(GOOD, kwargs={"color": "red"})


def test_a_missing_module_is_refused():
    with pytest.raises(UsageError, match="no_such_module"):
        check(GOOD, modules=["no_such_module"])


def test_progress_is_called_before_and_after_each_rule():
    seen = []
    report = check(
        GOOD,
        quick=True,
        rules=["runs", "seeds"],
        progress=lambda rule, result: seen.append((rule.name, result and result.status)),
    )
    assert seen == [("runs", None), ("runs", "passed"), ("seeds", None), ("seeds", "passed")]
    assert report.seconds >= 0


def test_a_report_is_json():
    report = check(GOOD, quick=True, rules=["seeds"])
    (result,) = json.loads(json.dumps(report.to_json()))["results"]
    assert (result["rule"], result["status"]) == ("seeds", "passed")


def test_the_check_leaves_the_global_generators_as_they_were():
    random.seed(5)
    np.random.seed(5)
    before = random.getstate(), np.random.get_state()[1].tolist()
    check("check/SeedsNumpy-v0", quick=True, rules=["global-rng"])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_agents_are_played_inside_a_running_loop_too():
    async def inside():
        return check(GOOD, quick=True, rules=["expert"])

    assert asyncio.run(inside()).ok


def test_an_expert_is_not_asked_for_where_there_is_none():
    report = check(f"{Good.__module__}:Good", quick=True, rules=["expert"])
    assert statuses(report) == {"expert": Status.SKIPPED}


def test_every_rule_is_named_once_and_explained():
    names = [rule.name for rule in RULES]
    assert len(set(names)) == len(names)
    assert all(rule.title and rule.why.endswith(".") for rule in RULES)
    assert all(set(rule.needs) <= set(names[: names.index(rule.name)]) for rule in RULES)


class Forgeable(Good):
    """States that its reward can be forged, as an environment with tests of others does."""

    def facts(self):
        return {
            "forgeable": True,
            "weaknesses": ["Its sandbox is small.", "Tests run programs of the agent."],
        }


def test_a_reward_that_may_be_forged_is_a_warning():
    report = check(Forgeable, quick=True, rules=["forgeable"])
    assert report.ok
    assert statuses(report) == {"forgeable": Status.WARNING}
    assert detail(report, "forgeable").startswith(
        "it states that 3 of 3 episodes, such as seed 0, have a reward"
    )
    assert detail(report, "forgeable").endswith("forge: Tests run programs of the agent.")
