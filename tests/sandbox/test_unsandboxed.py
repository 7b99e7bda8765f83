"""No walls: only for those who say so, and the same contract otherwise. Nothing here may harm the host."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator

import pytest

from rollgym.core.errors import UsageError, WorkerLost
from rollgym.sandbox.client import WorkerSandbox
from rollgym.sandbox.factory import open_plain
from rollgym.sandbox.types import Ended, Level, Limits, SandboxSettings
from rollgym.sandbox.worker_limits import alive, descendants


@pytest.fixture(scope="module")
def plain() -> Iterator[WorkerSandbox]:
    with contextlib.closing(open_plain(SandboxSettings(backend="none", allow_unsafe=True))) as sandbox:
        yield sandbox


def test_it_must_be_allowed() -> None:
    with pytest.raises(UsageError, match="allow_unsafe=True"):
        open_plain(SandboxSettings(backend="none"))


def test_it_says_that_there_are_no_walls(plain: WorkerSandbox) -> None:
    assert (plain.backend, plain.level) == ("none", Level.NONE)
    assert plain.weaknesses[0].startswith("No isolation")
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


def test_a_session_does_not_outlive_a_worker_that_was_killed() -> None:
    sandbox = open_plain(SandboxSettings(allow_unsafe=True))
    sandbox.run("x = 1")
    sandbox.run("x = 2")
    worker: int = sandbox._channel.pid  # type: ignore[attr-defined]
    (head,) = descendants(worker)
    os.kill(worker, signal.SIGKILL)
    with pytest.raises(WorkerLost):
        sandbox.run("x = 3")
    deadline = time.monotonic() + 20
    while alive(head) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive(head)
