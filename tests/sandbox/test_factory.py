"""Which sandbox is opened, and what is said where none is."""

import contextlib
from typing import Any

import pytest

from rollgym.core.errors import RunError, UsageError
from rollgym.sandbox import factory as opening
from rollgym.sandbox.factory import open_sandbox
from rollgym.sandbox.types import Level, SandboxSettings


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without any walls."""

    def fail(words: str) -> Any:
        def opener(settings: SandboxSettings) -> Any:
            raise RunError(words)

        return opener

    monkeypatch.setitem(opening.OPENERS, "namespaces", fail("bwrap: No permissions to create new namespace."))
    monkeypatch.setitem(opening.OPENERS, "landlock", fail("this kernel has none"))


def test_the_strongest_that_works_is_taken() -> None:
    try:
        sandbox = open_sandbox()
    except UsageError as error:
        pytest.skip(str(error))
    with contextlib.closing(sandbox):
        assert sandbox.backend == "namespaces"
        assert sandbox.level >= Level.NAMESPACES


def test_a_weaker_one_only_where_it_was_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        opening.OPENERS, "namespaces", opening.OPENERS["none"]
    )  # refuses without allow_unsafe
    monkeypatch.setitem(opening.OPENERS, "landlock", lambda settings: "the weaker one")
    assert open_sandbox(SandboxSettings(minimum=Level.LANDLOCK)) == "the weaker one"
    with pytest.raises(UsageError, match="landlock: weaker than required"):
        open_sandbox()


def test_without_walls_it_refuses_and_says_all_reasons_and_fixes(broken: None) -> None:
    with pytest.raises(UsageError) as caught:
        open_sandbox(SandboxSettings(minimum=Level.LANDLOCK))
    words = str(caught.value)
    for piece in (
        "namespaces: bwrap: No permissions to create new namespace; landlock: this kernel has none",
        "apt install bubblewrap",
        "user namespaces",
        "backend='docker'",
        "rollgym doctor",
        "allow_unsafe=True",
    ):
        assert piece in words


def test_no_walls_are_taken_only_where_both_were_said(broken: None) -> None:
    for settings in (
        SandboxSettings(allow_unsafe=True),
        SandboxSettings(minimum=Level.NONE),
        SandboxSettings(backend="none"),
    ):
        with pytest.raises(UsageError):
            open_sandbox(settings)
    for settings in (
        SandboxSettings(allow_unsafe=True, minimum=Level.NONE),
        SandboxSettings(backend="none", allow_unsafe=True),
    ):
        with contextlib.closing(open_sandbox(settings)) as sandbox:
            assert sandbox.level is Level.NONE


def test_a_backend_below_the_minimum_is_refused() -> None:
    with pytest.raises(UsageError, match="landlock has isolation level landlock, but at least namespaces"):
        open_sandbox(SandboxSettings(backend="landlock"))


def test_a_backend_that_does_not_work_is_not_replaced(broken: None) -> None:
    with pytest.raises(UsageError, match="namespaces does not work here: bwrap: No permissions"):
        open_sandbox(SandboxSettings(backend="namespaces"))


def test_an_unknown_backend_is_named() -> None:
    with pytest.raises(UsageError, match="Unknown sandbox backend 'jail'; choose one of auto, namespaces"):
        open_sandbox(SandboxSettings(backend="jail"))  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["landlock", "docker", "none"])
def test_links_need_namespaces(backend: Any) -> None:
    settings = SandboxSettings(
        backend=backend, minimum=Level.NONE, allow_unsafe=True, links=(("/app", "/work/session"),)
    )
    with pytest.raises(UsageError, match="cannot link /app; only namespaces can"):
        open_sandbox(settings)


@pytest.mark.parametrize("backend", ["landlock", "none"])
def test_folders_need_a_file_system_of_the_sandbox(backend: Any) -> None:
    settings = SandboxSettings(backend=backend, minimum=Level.NONE, allow_unsafe=True, folders=("/tests",))
    with pytest.raises(UsageError, match="cannot add /tests; only namespaces and docker can"):
        open_sandbox(settings)
