"""No walls: only for those who say so, and the same contract otherwise. Nothing here may harm the host."""

import contextlib
from collections.abc import Iterator

import pytest

from rollgym.errors import UsageError
from rollgym.sandbox.client import WorkerSandbox
from rollgym.sandbox.plain import open_plain
from rollgym.sandbox.types import Ended, Level, Limits, SandboxSettings


@pytest.fixture(scope="module")
def plain() -> Iterator[WorkerSandbox]:
    with contextlib.closing(open_plain(SandboxSettings(backend="none", allow_unsafe=True))) as sandbox:
        yield sandbox


def test_it_must_be_allowed() -> None:
    with pytest.raises(UsageError, match="allow_unsafe=True"):
        open_plain(SandboxSettings(backend="none"))


def test_it_says_that_there_are_no_walls(plain: WorkerSandbox) -> None:
    assert (plain.backend, plain.level) == ("none", Level.NONE)
    assert plain.weaknesses[0].startswith("There are no walls")
    assert plain.exec("print(open('/etc/hostname').readable())").stdout == "True\n"


def test_it_runs_and_limits_like_the_others(plain: WorkerSandbox) -> None:
    assert plain.exec("print(input())", stdin="hello").stdout == "hello\n"
    assert plain.exec("while True: pass", limits=Limits(seconds=0.3)).ended is Ended.TIMEOUT
    plain.run("x = 1")
    assert plain.run("x = 2\nwhile True: pass", limits=Limits(seconds=0.3)).state == "rolled_back"
    assert plain.run("print(x)").stdout == "1\n"
    plain.write("a", b"b")
    assert plain.read("a") == b"b"
    plain.reset()
    assert "NameError" in plain.run("print(x)").stderr
