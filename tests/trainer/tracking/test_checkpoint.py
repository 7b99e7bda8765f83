"""Checkpoints: whole or not at all, whatever happens while one is written."""

import errno
import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollgym.cluster.errors import ActorLost
from rollgym.core.errors import ResultsError, RunError
from rollgym.trainer.tracking.checkpoint import Checkpoints, verify_checkpoint


def writer(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "weights.bin").write_text(text)
        (folder / "inner").mkdir()
        (folder / "inner" / "more.bin").write_text(text * 2)

    return write


def save(folder: Path, *steps: int, keep: int = 9) -> Checkpoints:
    found = Checkpoints(folder, keep)
    for step in steps:
        found.save(step, {"mark": step * 10}, writer(f"step {step}"))
    return found


def test_a_checkpoint_comes_back_with_its_state(tmp_path: Path) -> None:
    found = save(tmp_path, 3).newest()
    assert found is not None
    place, state = found
    assert state == {"step": 3, "mark": 30}
    assert (place / "weights.bin").read_text() == "step 3"


def test_every_file_has_a_checksum(tmp_path: Path) -> None:
    save(tmp_path, 3)
    sums = json.loads((tmp_path / "step-00000003" / "sums.json").read_text())["files"]
    assert sorted(sums) == ["inner/more.bin", "state.json", "weights.bin"]


def test_nothing_else_is_left_in_the_folder(tmp_path: Path) -> None:
    found = save(tmp_path, 1, 2, 2)
    found.save_best(1, {}, writer("best"))
    found.save_best(2, {}, writer("better"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "step-00000001", "step-00000002"]


def test_a_checkpoint_gets_its_name_when_it_is_complete(tmp_path: Path) -> None:
    found = Checkpoints(tmp_path)

    def write(folder: Path) -> None:
        assert found.steps() == []
        assert folder.name.startswith(".")

    found.save(1, {}, write)
    assert found.steps() == [1]


def test_an_empty_folder_has_no_newest_checkpoint(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "nowhere").newest() is None


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    found = Checkpoints(tmp_path, keep=2)
    for step in (5, 10, 15, 100_000_000):
        found.save(step, {}, writer("x"))
        if step == 5:
            found.save_best(5, {}, writer("best"))
    assert found.steps() == [15, 100_000_000]
    assert verify_checkpoint(tmp_path / "best")["step"] == 5


def change(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit has flipped": (
        lambda place: change(place / "weights.bin"),
        "weights.bin was changed after it was written",
    ),
    "the state differs": (
        lambda place: change(place / "state.json"),
        "state.json was changed after it was written",
    ),
    "a file is cut off": (
        lambda place: os.truncate(place / "inner" / "more.bin", 3),
        "inner/more.bin was changed after it was written",
    ),
    "a file is missing": (lambda place: (place / "weights.bin").unlink(), "weights.bin is missing"),
    "the sums are missing": (lambda place: (place / "sums.json").unlink(), "sums.json"),
    "the sums are not JSON": (lambda place: (place / "sums.json").write_text("{"), "sums.json"),
    "the sums are empty": (lambda place: (place / "sums.json").write_text("{}"), "sums.json"),
    "it is not a folder": (
        lambda place: place.rename(place.with_name("x")) and place.touch(),
        "No checkpoint at",
    ),
}


@pytest.mark.parametrize(("damage", "told"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_newest_checkpoint_is_reported_and_skipped(
    tmp_path: Path, damage: Callable[[Path], object], told: str
) -> None:
    found = save(tmp_path, 1, 2, 3)
    damage(tmp_path / "step-00000003")
    notes: list[str] = []
    newest = found.newest(notes.append)
    assert newest is not None
    assert newest[1]["step"] == 2
    assert len(notes) == 1
    assert "step-00000003" in notes[0]
    assert told in notes[0]


def test_if_all_are_damaged_all_are_reported(tmp_path: Path) -> None:
    found = save(tmp_path, 1, 2)
    for step in (1, 2):
        change(tmp_path / f"step-{step:08d}" / "weights.bin")
    with pytest.raises(
        ResultsError, match=r"(?s)All checkpoints of this run are damaged.*step-00000002.*-00000001"
    ):
        found.newest()


def test_a_damaged_later_checkpoint_does_not_displace_intact_ones(tmp_path: Path) -> None:
    save(tmp_path, 2, 4)
    change(tmp_path / "step-00000004" / "weights.bin")
    found = save(tmp_path, 3, keep=1)
    newest = found.newest()
    assert newest is not None
    assert newest[1]["step"] == 3


FULL = {
    "the operating system's word": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    "a library's own": RuntimeError("I/O error: No space left on device (os error 28)"),
}


@pytest.mark.parametrize("error", FULL.values(), ids=FULL)
def test_a_full_disk_ends_the_run_and_keeps_earlier_checkpoints(tmp_path: Path, error: Exception) -> None:
    found = save(tmp_path, 1, 2, keep=2)

    def write(folder: Path) -> None:
        (folder / "weights.bin").write_text("half of it")
        raise error

    with pytest.raises(
        RunError, match=r"Cannot write .*step-00000003: .*No space left.*free some disk space"
    ):
        found.save(3, {}, write)
    assert found.steps() == [1, 2]
    assert [verify_checkpoint(tmp_path / f"step-{step:08d}")["step"] for step in (1, 2)] == [1, 2]
    assert not list(tmp_path.glob(".*")), "what was half written would fill the disk further"


def test_a_rank_that_dies_while_it_saves_is_not_taken_for_a_full_disk(tmp_path: Path) -> None:
    """The run goes back to the checkpoint before, which needs the error as it is."""
    found = save(tmp_path, 1, 2)

    def write(folder: Path) -> None:
        (folder / "weights.bin").write_text("half of it")
        raise ActorLost("actor_train rank 0 is lost")

    with pytest.raises(ActorLost, match="^actor_train rank 0 is lost$"):
        found.save(3, {}, write)
    assert found.steps() == [1, 2]
    assert not list(tmp_path.glob(".*"))


def test_weights_that_do_not_fit_on_the_disk_give_the_same_error(tmp_path: Path) -> None:
    """The library that writes them raises other errors."""
    import torch
    from safetensors.torch import save_file

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(RunError, match="Cannot write the checkpoint .*: .*too large"):
            Checkpoints(tmp_path).save(
                1, {}, lambda folder: save_file({"a": torch.zeros(10_000)}, folder / "learner.safetensors")
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_the_old_checkpoint_keeps_its_name_if_the_rename_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Checkpoints(tmp_path)
    found.save_best(1, {}, writer("good"))
    real = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if self.name.endswith(".part"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(RunError, match="Input/output error"):
        found.save_best(2, {}, writer("better"))
    assert verify_checkpoint(tmp_path / "best")["step"] == 1


class Dead(BaseException):
    """The process was killed: nothing more is done in it."""


class Killer:
    """Has a process die before the n-th thing that it does to the disk."""

    def __init__(self, patch: pytest.MonkeyPatch, moment: int) -> None:
        self.left = moment
        for owner, name in (
            (os, "fsync"),
            (os, "replace"),
            (Path, "rename"),
            (Path, "mkdir"),
            (shutil, "rmtree"),
        ):
            patch.setattr(owner, name, self.watched(getattr(owner, name)))

    def watched(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left <= 0:
                raise Dead
            return real(*args, **kwargs)

        return call


@pytest.mark.parametrize("best", [False, True], ids=["another step", "in the place of the best"])
def test_a_kill_at_any_moment_of_writing_leaves_an_intact_checkpoint(tmp_path: Path, best: bool) -> None:
    """Rule 35."""
    outcomes = []
    for moment in range(1, 100):
        folder = tmp_path / str(moment)
        found = save(folder, 1, keep=1)
        found.save_best(1, {}, writer("good"))
        try:
            with pytest.MonkeyPatch.context() as patch:
                Killer(patch, moment)
                (found.save_best if best else found.save)(2, {}, writer("better"))
        except Dead:
            pass
        else:
            break
        after = Checkpoints(folder, keep=1)
        newest = after.newest(lambda text: pytest.fail(text))
        assert newest is not None
        outcomes.append(verify_checkpoint(folder / "best")["step"] if best else newest[1]["step"])
        found.save_best(3, {}, writer("best"))
        found.save(3, {}, writer("best"))
        assert sorted(path.name for path in folder.iterdir()) == ["best", "step-00000003"]
    assert outcomes == sorted(outcomes), "once the new one is there it stays"
    assert set(outcomes) == {1, 2}


def test_partial_files_of_a_later_step_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".step-00000002.part").mkdir()
    (tmp_path / ".step-00000002.part" / "weights.bin").write_text("half")
    found = save(tmp_path, 1, 2)
    assert found.steps() == [1, 2]
    assert verify_checkpoint(tmp_path / "step-00000002")["mark"] == 20
    assert not list(tmp_path.glob(".*"))
