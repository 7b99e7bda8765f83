"""Attacks on every sandbox of this machine: behind namespaces none succeeds, and every one is judged."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from attack_table import (
    BEGIN,
    END,
    SUMMARY_PAGE,
    TABLE_PAGE,
    UNPRIVILEGED,
    Findings,
    cells,
    chosen,
    claims,
    settings,
    summary,
    table,
    tried,
    tried_as_user,
    user_command,
)
from attacks import ATTACKS, Attack, Stage, Trial, Verdict, staged
from attacks.model import LIMITS, Evidence, attack, bounded, stopped, survived, told, truthful, unfetched

from rollgym.core.errors import RollgymError
from rollgym.sandbox.types import Ended, Ran

PAGE = TABLE_PAGE
OPEN_BEHIND_LANDLOCK = {"stat-host-file"}
"""What the weaker walls are known not to hold; docs/security_tables.md shows the same."""


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with staged() as it:
        yield it


def opened(stage: Stage, backend: str) -> Iterator[Trial]:
    trial = Trial(stage, settings(backend))
    try:
        trial.open()
    except RollgymError as error:
        pytest.skip(f"{backend} does not work here: {error}")
    assert claims(trial, backend) is None
    yield trial
    trial.close()


@pytest.fixture(scope="module")
def namespaces(stage: Stage) -> Iterator[Trial]:
    yield from opened(stage, "namespaces")


def cases() -> list[object]:
    """Every attack; those that wait or fill are slow."""
    return [pytest.param(a, id=a.name, marks=[pytest.mark.slow] * a.slow) for a in ATTACKS]


@pytest.mark.parametrize("attack", cases())
def test_behind_namespaces_an_attack_is_blocked(namespaces: Trial, attack: Attack) -> None:
    verdict, why = namespaces.attack(attack)
    assert verdict is Verdict.BLOCKED, why


def failed(findings: Findings) -> dict[str, tuple[str, str]]:
    return {name: finding for name, finding in findings.items() if finding[0] != Verdict.BLOCKED}


def as_user(backend: str, quick: bool) -> Findings:
    if os.getuid():
        pytest.skip("this run has no root rights to give up: the tests above are without rights already")
    try:
        user_command()
    except RuntimeError as error:
        pytest.skip(str(error))
    return tried_as_user(backend, quick)


@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_behind_namespaces_of_a_user_without_rights_attacks_are_blocked(quick: bool) -> None:
    assert failed(as_user("namespaces", quick)) == {}


def usable(backend: str, attacks: list[Attack]) -> Findings:
    try:
        return tried(backend, attacks)
    except RollgymError as error:
        pytest.skip(f"{backend} does not work here: {error}")


def succeeded(findings: Findings) -> dict[str, str]:
    return {name: why for name, (verdict, why) in findings.items() if verdict == Verdict.SUCCEEDED}


@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_behind_landlock_only_what_is_known_succeeds(quick: bool) -> None:
    found = usable("landlock", chosen(quick))
    assert set(succeeded(found)) <= OPEN_BEHIND_LANDLOCK, succeeded(found)
    assert [name for name, (verdict, _) in found.items() if verdict == Verdict.UNJUDGED] == []


@pytest.mark.slow
@pytest.mark.skipif("ROLLGYM_TEST_DOCKER" not in os.environ, reason="ROLLGYM_TEST_DOCKER is not set")
def test_in_docker_all_attacks_are_blocked() -> None:
    assert failed(usable("docker", list(ATTACKS))) == {}


def test_without_walls_the_attacks_succeed_so_they_are_real() -> None:
    controls = [a for a in chosen(quick=True) if a.family not in ("memory", "output", "time")]
    found = usable("none", controls)
    missed = {name: finding for name, finding in found.items() if finding[0] != Verdict.SUCCEEDED}
    assert len(missed) <= len(controls) // 4, missed
    families = {a.family for a in controls if found[a.name][0] == Verdict.SUCCEEDED}
    assert families >= {"files", "network", "processes", "kernel", "secrets"}


def test_an_attack_has_one_name_and_a_reason() -> None:
    names = [a.name for a in ATTACKS]
    assert len(names) == len(set(names)) >= 60
    assert all(a.gain and a.steps for a in ATTACKS)


def test_the_page_lists_every_attack_and_claims_nothing_untried() -> None:
    text = PAGE.read_text()
    shown = cells(text.partition(BEGIN)[2].partition(END)[0])
    names = {a.name for a in ATTACKS}
    for column in ("namespaces", "namespaces" + UNPRIVILEGED):
        assert set(shown[column]) == names
        assert set(shown[column].values()) == {"blocked"}
    assert all(set(column) <= names for column in shown.values())
    assert summary(shown) in SUMMARY_PAGE.read_text()


def test_a_table_is_read_as_it_was_written() -> None:
    verdicts = {"namespaces": {a.name: "blocked" for a in ATTACKS}, "none": {ATTACKS[0].name: "SUCCEEDED"}}
    shown = cells(table(verdicts))
    assert {name: column for name, column in shown.items() if column} == verdicts


def judged(stage: Stage, judge: object, **ran: object) -> Verdict:
    fields = {"stdout": "", "stderr": "", "exit_code": 0, "ended": Ended.EXIT, "seconds": 0.1, **ran}
    evidence = Evidence(stage, LIMITS, [Ran(**fields)])  # type: ignore[arg-type]
    return judge(evidence)[0]  # type: ignore[no-any-return, operator]


def test_a_program_that_says_nothing_is_not_taken_for_blocked(stage: Stage) -> None:
    for judge in (told, survived, stopped, truthful, unfetched, bounded):
        assert judged(stage, judge) is Verdict.UNJUDGED, judge
        assert judged(stage, judge, stderr="NameError: x", exit_code=1) in (Verdict.UNJUDGED, Verdict.BLOCKED)
    assert judged(stage, told, stderr="NameError: x", exit_code=1) is Verdict.UNJUDGED


def test_judges_see_success(stage: Stage) -> None:
    assert judged(stage, told, stdout="PWNED it\n") is Verdict.SUCCEEDED
    assert judged(stage, told, stdout="HELD it\n") is Verdict.BLOCKED
    assert judged(stage, truthful, stdout="TRIED\n", exit_code=0) is Verdict.SUCCEEDED
    assert judged(stage, truthful, stdout="TRIED\n", exit_code=7) is Verdict.BLOCKED
    assert judged(stage, bounded, stdout="x" * 100_000) is Verdict.SUCCEEDED
    assert judged(stage, bounded, stdout="\ud800") is Verdict.SUCCEEDED
    assert judged(stage, stopped, stdout="TRIED\n", exit_code=None, ended=Ended.TIMEOUT) is Verdict.BLOCKED
    assert judged(stage, stopped, stdout="TRIED\n") is Verdict.UNJUDGED


def test_the_host_believes_what_it_sees_and_not_what_is_said(namespaces: Trial, stage: Stage) -> None:
    liar = attack("files", "liar", "nothing", f"held({stage.secret!r})")
    assert namespaces.attack(liar) == (Verdict.SUCCEEDED, "a secret of the host is in the output")
    (stage.folder / "planted").write_text("x")
    honest = attack("files", "honest", "nothing", 'held("no")')
    assert namespaces.attack(honest) == (Verdict.SUCCEEDED, "planted was planted on the host")
    assert namespaces.attack(honest) == (Verdict.BLOCKED, "no")
