"""The doctor tries every backend, and tells what to do about those that fail."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from rollgym.core.errors import RunError
from rollgym.sandbox import factory as opening
from rollgym.sandbox.factory import doctor, examine
from rollgym.sandbox.types import Level, SandboxSettings


def fail(settings: SandboxSettings) -> Any:
    raise RunError("it is\n broken [here]")


@pytest.fixture
def no_docker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine has tests of its own."""
    monkeypatch.setitem(opening.OPENERS, "docker", fail)


def test_every_backend_is_examined(no_docker: None) -> None:
    findings = {finding.backend: finding for finding in doctor()}
    assert list(findings) == ["namespaces", "landlock", "docker", "none"]
    assert findings["none"].works
    assert findings["none"].level is Level.NONE
    assert findings["none"].weaknesses
    for finding in findings.values():
        assert finding.works or (finding.reason and finding.fix)


def test_what_fails_has_a_reason_and_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(opening.OPENERS, "namespaces", fail)
    finding = examine("namespaces")
    assert not finding.works
    assert finding.reason == "it is broken [here]"
    assert "namespaces" in finding.fix or "bubblewrap" in finding.fix


def test_code_that_does_not_run_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollgym.sandbox.factory.PROBE", "1 / 0")
    finding = examine("none")
    assert not finding.works
    assert "ZeroDivisionError" in finding.reason


def test_the_command_prints_a_table_or_json(no_docker: None, rollgym_command: Callable[..., Any]) -> None:
    ran = rollgym_command("doctor")
    assert "broken [here]" in ran.out
    assert "No isolation" in ran.out
    rows = json.loads(rollgym_command("doctor", "--json").out)
    assert [row["backend"] for row in rows] == ["namespaces", "landlock", "docker", "none"]
    assert rows[0]["level"] == "namespaces"


def test_a_machine_without_walls_is_exit_code_1(
    no_docker: None, monkeypatch: pytest.MonkeyPatch, rollgym_command: Callable[..., Any]
) -> None:
    for name in ("namespaces", "landlock"):
        monkeypatch.setitem(opening.OPENERS, name, fail)
    ran = rollgym_command("doctor")
    assert ran.code == 1
    assert "Default (backend: auto): code is refused" in " ".join(ran.out.split())
