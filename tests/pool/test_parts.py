"""The pool's smaller parts, each by itself."""

import os
from dataclasses import dataclass

import pytest

from rollgym.core.errors import UsageError
from rollgym.pool import status_page as status
from rollgym.pool.base import LeaseLost
from rollgym.pool.forkserver import LogRelay
from rollgym.pool.health import exit_failure
from rollgym.pool.hosted_env import IdleEnvs
from rollgym.pool.limits import WorkerLimits


@dataclass
class Kept:
    kind: bytes
    name: str


def test_idle_envs_match_by_kind_and_evict_the_oldest() -> None:
    shelf: IdleEnvs[Kept] = IdleEnvs(room=2)
    a, b, c = Kept(b"x", "a"), Kept(b"x", "b"), Kept(b"y", "c")
    assert shelf.take(b"x") is None
    assert shelf.put(a) is None
    assert shelf.put(b) is None
    assert shelf.put(c) is a
    assert shelf.take(b"x") is b
    assert shelf.take(b"x") is None
    assert shelf.clear() == [c]
    assert shelf.take(b"y") is None


def test_what_is_written_on_one_side_of_a_board_is_read_on_the_other() -> None:
    fd = status.create()
    ours, theirs = status.StatusPage(fd), status.StatusPage(fd)
    os.close(fd)
    assert ours.last_beat == 0
    theirs.beat()
    assert ours.last_beat > 0
    theirs.use(5)
    theirs.enter(3, 77, mb=12.5)
    theirs.enter(5, 78)
    assert [(call.slot, call.lease, call.mb_before) for call in ours.running()] == [(3, 77, 12), (5, 78, 0)]
    assert all(0 <= call.seconds < 60 for call in ours.running())
    theirs.leave(3)
    theirs.forget()  # as in a child of a worker: what it writes is its own
    theirs.leave(5)
    assert [call.lease for call in ours.running()] == [78]
    ours.close()


def test_output_is_passed_on_until_it_is_too_much(capfd: pytest.CaptureFixture[str]) -> None:
    reader, writer = os.pipe()
    output = LogRelay(reader, "worker 9")
    os.write(writer, b"hello\n")
    assert output.read()
    assert output.read()  # nothing there, but there may be more
    for _ in range(1000):
        os.write(writer, b"x" * 1000)
        assert output.read()
    os.write(writer, b"\xff last words")
    os.close(writer)
    output.drain()
    assert not output.read()
    os.close(reader)
    err = capfd.readouterr().err
    assert err.startswith("hello\n")
    assert "worker 9 prints too much" in err
    assert len(err) < 600_000
    assert output.tail.endswith("\N{REPLACEMENT CHARACTER} last words")


def test_exit_codes_and_signals_are_described() -> None:
    assert exit_failure(7).text == "a worker process died with exit code 7"
    assert exit_failure(-9).text == "a worker process died by signal 9 (SIGKILL)"
    assert exit_failure(-63).text == "a worker process died by signal 63"


def test_a_loss_has_an_innocent_default() -> None:
    loss = LeaseLost("gone")
    assert (loss.guilty, loss.culprits, loss.reason) == (False, (), "died")
    assert loss.failure is not None
    assert loss.failure.message == "gone"


def test_limits_without_sense_are_refused() -> None:
    with pytest.raises(UsageError, match="step_seconds of a worker must be positive, not 0"):
        WorkerLimits(step_seconds=0)
    with pytest.raises(UsageError, match=r"soft_memory_mb \(9\) must not be above hard_memory_mb \(8\)"):
        WorkerLimits(soft_memory_mb=9, hard_memory_mb=8)
