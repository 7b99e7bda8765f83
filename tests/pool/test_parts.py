"""The pool's smaller parts, each by itself."""

import os
import threading
import time
from dataclasses import dataclass

import pytest

from rollgym.errors import UsageError
from rollgym.pool import LeaseLost, board, shared
from rollgym.pool.host import Shelf
from rollgym.pool.limits import WorkerLimits
from rollgym.pool.output import Output
from rollgym.pool.verdict import death


def test_shared_things_are_made_once_however_many_ask_at_once() -> None:
    made: list[object] = []

    def slowly() -> object:
        time.sleep(0.05)
        made.append(object())
        return made[-1]

    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(shared("once", slowly))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert found == made * 8


def test_a_shared_thing_that_could_not_be_made_is_tried_again() -> None:
    def fails() -> int:
        raise OSError("no such file")

    with pytest.raises(OSError, match="no such file"):
        shared("again", fails)
    assert shared("again", lambda: 7) == 7
    assert shared("again", fails) == 7


def test_shared_things_may_be_made_of_others() -> None:
    assert shared("outer", lambda: shared("inner", lambda: 1) + 1) == 2
    assert shared("nothing", lambda: None) is None


@dataclass
class Kept:
    kind: bytes
    name: str


def test_a_shelf_gives_back_the_same_kind_and_lets_the_oldest_go() -> None:
    shelf: Shelf[Kept] = Shelf(room=2)
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
    fd = board.create()
    ours, theirs = board.Board(fd), board.Board(fd)
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
    output = Output(reader, "worker 9")
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


def test_deaths_are_told_in_words() -> None:
    assert death(7).text == "a worker process died with exit code 7"
    assert death(-9).text == "a worker process died by signal 9 (SIGKILL)"
    assert death(-63).text == "a worker process died by signal 63"


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
