"""The retry rules: which losses are retried, and out of which budget."""

from typing import Any

import pytest
from hand import ended

from rollgym.core.errors import UsageError
from rollgym.core.types import EpisodeSpec, Outcome
from rollgym.rollout.retry import RETRIED, RetryBudget, RetryPolicy

SPEC = EpisodeSpec(episode_id="e", env_id="env")


@pytest.mark.parametrize("outcome", list(Outcome))
def test_only_the_outcomes_of_the_policy_are_retried(outcome: Outcome) -> None:
    budget = RetryBudget(RetryPolicy(max_retries=1))
    assert budget.spend(ended(SPEC, outcome)) == ("failure" if outcome in RETRIED else None)
    budget = RetryBudget(RetryPolicy(max_retries=1, outcomes={Outcome.WORKER_LOST}))
    assert budget.spend(ended(SPEC, outcome)) == ("failure" if outcome is Outcome.WORKER_LOST else None)


def test_losses_and_failures_have_separate_budgets() -> None:
    budget = RetryBudget(RetryPolicy(max_retries=1, max_infra_retries=2))
    lost = ended(SPEC, Outcome.WORKER_LOST, lost=True)
    assert [budget.spend(lost) for _ in range(3)] == ["infrastructure", "infrastructure", None]
    assert [budget.spend(ended(SPEC, Outcome.ENV_ERROR)) for _ in range(2)] == ["failure", None]


def test_without_a_separate_budget_losses_count_as_failures() -> None:
    budget = RetryBudget(RetryPolicy(max_retries=2))
    lost, failed = ended(SPEC, Outcome.WORKER_LOST, lost=True), ended(SPEC, Outcome.WORKER_LOST)
    assert [budget.spend(episode) for episode in (lost, failed, lost)] == ["infrastructure", "failure", None]


@pytest.mark.parametrize("policy", [{"max_retries": -1}, {"max_infra_retries": -1}])
def test_negative_budgets_are_refused(policy: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="must be >= 0"):
        RetryPolicy(**policy)
