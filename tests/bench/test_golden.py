"""The golden scores of shipped suites are what their agents reach."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from rollgym.bench.suite import find_suite

Command = Callable[..., Any]


@pytest.mark.parametrize("agent", ["random", "expert"])
def test_smoke_reproduces_its_golden_scores(rollgym_command: Command, agent: str) -> None:
    ran = rollgym_command("bench", "run", "smoke", "--agent", agent, "--out", "r", "--json")
    assert ran.code == 0, ran.err
    summary = json.loads(ran.out.splitlines()[-1])
    assert summary["golden"] == {"checked": len(find_suite("smoke").entries), "missed": []}
    assert all(row["same_tasks"] for row in summary["entries"])
    assert summary["complete"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("agent", ["random", "expert"])
@pytest.mark.parametrize("name", ["code", "core", "sokoban", "webshop"])
def test_the_other_suites_reproduce_theirs(rollgym_command: Command, name: str, agent: str) -> None:
    ran = rollgym_command("bench", "run", name, "--agent", agent, "--workers", 2, "--out", "r", "--json")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["golden"]["checked"] == sum(not e.data for e in find_suite(name).entries)
    checked = rollgym_command("bench", "verify", "r", "--sample", 30, "--workers", 2)
    assert checked.code == 0, checked.out
