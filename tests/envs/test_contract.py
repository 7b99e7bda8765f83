"""Every environment that comes with rollgym keeps the contract."""

import pytest

import rollgym
from rollgym.checks import check

SHIPPED = [card.env_id for card in rollgym.list_envs() if card.env_id.startswith("rollgym/")]
SLOW = {"rollgym/WebShopBrowser-v0", "rollgym/Terminal-v0"}
"""Checked in full by tests of their own, which take minutes."""


def test_all_the_games_are_there() -> None:
    assert len(SHIPPED) >= 13


@pytest.mark.parametrize("env_id", [env_id for env_id in SHIPPED if env_id not in SLOW])
def test_it_keeps_the_contract(env_id: str) -> None:
    report = check(env_id, quick=True)
    broken = {r.rule: r.detail for r in report.results if r.status == "failed"}
    assert report.ok, broken
    # Nothing of ours is skipped or in doubt either.
    assert {r.status for r in report.results} == {"passed"}
