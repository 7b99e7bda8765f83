"""The files of a run: no partial line is read, no complete line is lost, a resumed run continues exactly."""

import asyncio
import errno
import importlib
import json
import math
import os
import resource
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hand import ended

from rollgym.core.errors import MissingExtra, ResultsError, RunError, UsageError
from rollgym.core.types import Episode, EpisodeSpec
from rollgym.io.episode_blocks import episode_line, stored_episodes
from rollgym.io.run_dir import BLOCKS, EPISODES, STEPS
from rollgym.trainer.tracking.jsonl import BOARD, EVALUATIONS, METRICS, RunLogger, read_metrics

FILES = (METRICS, EVALUATIONS, BLOCKS, STEPS)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """All lines are written at the same time, so that files can be compared."""
    monkeypatch.setattr("rollgym.trainer.tracking.jsonl.time.time", lambda: 1000.5)


def episode(name: str) -> Episode:
    return ended(EpisodeSpec(episode_id=name, env_id="a/B-v0"), reward=1.0)


def play(logger: RunLogger, *steps: int) -> None:
    """Write these steps as a run does."""
    for step in steps:
        logger.log_metrics(step, {"success": step / 10, "loss": -1.5})
        logger.log_episodes(step, [episode(f"{step}-a"), episode(f"{step}-b")])
        asyncio.run(logger.written())
        logger.log_step({"step": step, "batch": "d"})
        logger.log_evaluation(step, {"success_rate": step / 20, "length": {"p50": 3}})


def read_episodes(folder: Path) -> list[Episode]:
    return [stored.episode for stored in stored_episodes(folder / BLOCKS)]


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in FILES}


def scalars(folder: Path) -> dict[str, Any]:
    """The scalars that TensorBoard shows."""
    reading = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    found = reading.EventAccumulator(str(folder / BOARD)).Reload()
    return {
        tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]
    }


def test_a_step_is_one_line_with_its_number_and_time(tmp_path: Path) -> None:
    metrics: dict[str, Any] = {"loss": 0.1, "tokens": 12, "gap": np.float32(0.5)}
    with RunLogger(tmp_path / "new" / "run") as logger:
        logger.log_metrics(3, metrics)
        assert read_metrics(logger.folder) == [
            {"step": 3, "time": 1000.5, "loss": 0.1, "tokens": 12.0, "gap": 0.5}
        ]


def test_non_finite_metrics_are_null_and_listed(tmp_path: Path) -> None:
    with RunLogger(tmp_path) as logger:
        logger.log_metrics(1, {"loss": math.nan, "kl": -math.inf, "return": 2.0})
    (line,) = read_metrics(tmp_path)
    assert (line["loss"], line["kl"], line["return"]) == (None, None, 2.0)
    assert line["not_finite"] == ["loss", "kl"]
    assert "NaN" not in (tmp_path / METRICS).read_text()
    assert math.isnan(scalars(tmp_path)["train/loss"][0][1])


@pytest.mark.parametrize(
    ("step", "metrics", "words"),
    [
        (-1, {"loss": 1.0}, r"must be an integer >= 0, not -1"),
        (1, {"step": 1.0}, "cannot be called 'step'"),
        (1, {"time": 1.0}, "cannot be called 'time'"),
        (1, {"loss": "1"}, "'loss' must be a number"),
        (1, {"loss": None}, "'loss' must be a number"),
        (1, {"loss": 10**400}, "'loss' must be a number"),
    ],
)
def test_an_invalid_line_is_rejected_and_not_written(
    tmp_path: Path, step: int, metrics: Any, words: str
) -> None:
    with RunLogger(tmp_path) as logger:
        with pytest.raises(UsageError, match=words):
            logger.log_metrics(step, metrics)
        assert read_metrics(tmp_path) == []


def test_evaluations_are_separate_from_training_metrics(tmp_path: Path) -> None:
    """Rule 32: no number of an evaluation enters training's."""
    with RunLogger(tmp_path) as logger:
        logger.log_metrics(1, {"success": 0.5})
        logger.log_evaluation(
            1, {"success": 0.25, "ci": (0.1, np.float64(0.4)), "mean": math.nan, "done": True}
        )
    (line,) = read_metrics(tmp_path)
    assert line == {"step": 1, "time": 1000.5, "success": 0.5}
    assert json.loads((tmp_path / EVALUATIONS).read_text()) == {
        "step": 1, "time": 1000.5, "success": 0.25, "ci": [0.1, 0.4], "mean": None, "done": True,
    }  # fmt: skip
    assert scalars(tmp_path) == {
        "train/success": [(1, 0.5)],
        "eval/success": [(1, 0.25)],
        "eval/done": [(1, 1.0)],
    }


def test_episodes_are_written_with_their_step(tmp_path: Path) -> None:
    with RunLogger(tmp_path) as logger:
        play(logger, 1, 2)
        logger.log_episodes(3, [])
    assert read_episodes(tmp_path) == [episode(name) for name in ("1-a", "1-b", "2-a", "2-b")]
    assert [stored.step for stored in stored_episodes(tmp_path / BLOCKS)] == [1, 1, 2, 2]


def test_prepared_episodes_are_those_of_the_step_that_is_logged(tmp_path: Path) -> None:
    """A step that failed after `prepare_episodes` leaves nothing, and values need another encoding."""
    first, second = [episode("1-a")], [episode("2-a")]
    with RunLogger(tmp_path, tensorboard=False) as logger:
        logger.prepare_episodes(1, [episode("lost")])
        logger.prepare_episodes(1, first)
        logger.log_episodes(1, first)
        logger.prepare_episodes(2, [episode("lost")])
        logger.log_episodes(2, second)
        logger.prepare_episodes(3, second)
        logger.log_episodes(3, second, [{"ratios": [1.0, 0.5]}])
        logger.prepare_episodes(4, [episode("lost")])
    stored = list(stored_episodes(tmp_path / BLOCKS))
    assert [(one.step, one.episode.spec.episode_id) for one in stored] == [(1, "1-a"), (2, "2-a"), (3, "2-a")]
    assert [dict(one.values) for one in stored] == [{}, {}, {"ratios": [1.0, 0.5]}]


def test_a_folder_of_an_older_version_continues_in_blocks(tmp_path: Path) -> None:
    """Its lines stay, are rewound as before, and nothing is added to them."""
    with RunLogger(tmp_path / "old", tensorboard=False) as logger:
        play(logger, 1, 2)
        marks = logger.marks()
    old = b"".join(episode_line(stored) + b"\n" for stored in stored_episodes(tmp_path / "old" / BLOCKS))
    (tmp_path / "old" / EPISODES).write_bytes(old + b'{"step":3}\n')
    (tmp_path / "old" / BLOCKS).unlink()
    (tmp_path / "old" / STEPS).unlink()
    marks = {METRICS: marks[METRICS], EVALUATIONS: marks[EVALUATIONS], EPISODES: len(old)}
    with RunLogger(tmp_path / "old", tensorboard=False) as logger:
        logger.rewind(marks)
        play(logger, 3)
        later = logger.marks()
        play(logger, 4)
    with RunLogger(tmp_path / "old", tensorboard=False) as logger:
        logger.rewind(later)
    assert (tmp_path / "old" / EPISODES).read_bytes() == old
    assert read_episodes(tmp_path / "old") == [episode("3-a"), episode("3-b")]


def test_episodes_none_writes_no_episodes(tmp_path: Path) -> None:
    with RunLogger(tmp_path, episodes="none") as logger:
        play(logger, 1)
        assert logger.marks()[BLOCKS] == 0
    with pytest.raises(UsageError, match="'all' or 'none', not 'some'"):
        RunLogger(tmp_path, episodes="some")  # type: ignore[arg-type]


def test_a_line_is_in_the_file_before_the_call_returns(tmp_path: Path) -> None:
    """Rule 35: what a killed process has written is there."""
    code = (
        "import os, sys; from pathlib import Path; from rollgym.trainer.tracking.jsonl import RunLogger\n"
        "logger = RunLogger(Path(sys.argv[1])); logger.log_metrics(7, {'loss': 1.0}); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)]).returncode == 9
    assert [line["step"] for line in read_metrics(tmp_path)] == [7]
    assert scalars(tmp_path) == {"train/loss": [(7, 1.0)]}


def test_the_module_needs_neither_torch_nor_tensorboard() -> None:
    code = (
        "import sys, rollgym.trainer.tracking.jsonl\n"
        "assert not {'torch', 'tensorboard', 'wandb'} & sys.modules.keys(), sorted(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("marked", [0, 1, 3])
@pytest.mark.parametrize("killed", [1, 3, 4, 6])
def test_a_resumed_run_writes_the_same_files_as_an_uninterrupted_one(
    tmp_path: Path, marked: int, killed: int
) -> None:
    """Rule 35, for every file and for TensorBoard: rewound to the checkpoint, nothing is there twice."""
    with RunLogger(tmp_path / "whole") as logger:
        play(logger, *range(1, 8))
    with RunLogger(tmp_path / "killed") as logger:
        play(logger, *range(1, marked + 1))
        marks = logger.marks()
        play(logger, *range(marked + 1, killed + 1))
    for name in FILES:
        with open(tmp_path / "killed" / name, "ab") as file:
            # The line or block it died in.
            torn = (tmp_path / "whole" / name).read_bytes()[:40]
            file.write(torn if name == BLOCKS else b'{"step": 9, "ti')
    with RunLogger(tmp_path / "killed") as logger:
        logger.rewind(json.loads(json.dumps(marks)))
        play(logger, *range(marked + 1, 8))
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
    assert scalars(tmp_path / "killed") == scalars(tmp_path / "whole")


def test_a_checkpoint_between_a_step_and_its_evaluation_loses_neither(tmp_path: Path) -> None:
    """Rule 35: TensorBoard forgets whole steps, so the kept half of a step is logged again."""
    with RunLogger(tmp_path) as logger:
        play(logger, 1)
        logger.log_metrics(2, {"success": 0.2, "loss": math.nan})
        marks = logger.marks()
        logger.log_evaluation(2, {"success_rate": 0.9})
    with RunLogger(tmp_path) as logger:
        logger.rewind(marks)
    shown = scalars(tmp_path)
    assert shown["eval/success_rate"] == [(1, pytest.approx(0.05))]
    assert shown["train/success"] == [(1, pytest.approx(0.1)), (2, pytest.approx(0.2))]
    assert [step for step, _ in shown["train/loss"]] == [1, 2]


def test_tensorboard_forgets_steps_whose_lines_were_lost_in_a_crash(tmp_path: Path) -> None:
    with RunLogger(tmp_path) as logger:
        logger.log_metrics(1, {"loss": 1.0})
        marks = logger.marks()
        logger.log_metrics(2, {"loss": 2.0})
    os.truncate(tmp_path / METRICS, marks[METRICS])
    with RunLogger(tmp_path) as logger:
        logger.rewind(marks)
    assert scalars(tmp_path) == {"train/loss": [(1, 1.0)]}


def test_an_event_file_cut_off_by_a_crash_does_not_hide_the_resumed_run(tmp_path: Path) -> None:
    """Rule 35: half a record ends what TensorBoard reads of a file, so a resumed run has its own."""
    with RunLogger(tmp_path) as logger:
        play(logger, 1)
        marks = logger.marks()
        play(logger, 2)
    (events,) = (tmp_path / BOARD).iterdir()
    os.truncate(events, events.stat().st_size - 3)
    with RunLogger(tmp_path) as logger:
        logger.rewind(marks)
        play(logger, 2)
    assert [step for step, _ in scalars(tmp_path)["eval/success_rate"]] == [1, 2]


def test_a_run_continues_without_a_rewind_after_a_partial_line(tmp_path: Path) -> None:
    with RunLogger(tmp_path) as logger:
        play(logger, 1)
    with open(tmp_path / METRICS, "ab") as file:
        file.write(b'{"step": 2' + b" " * 70_000)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1]
    with RunLogger(tmp_path) as logger:
        play(logger, 2)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("change", ["shorter", "unmarked", "other"])
def test_rewind_rejects_another_file_and_truncates_nothing(tmp_path: Path, name: str, change: str) -> None:
    with RunLogger(tmp_path) as logger:
        play(logger, 1)
        marks = logger.marks()
        play(logger, 2)
        before = contents(tmp_path)
        marks[name] = {"shorter": len(before[name]) + 1, "unmarked": 0, "other": marks[name] - 1}[change]
        if change == "unmarked":
            del marks[name]
        with pytest.raises(ResultsError, match=f"{name} is not the file that the checkpoint belongs to"):
            logger.rewind(marks)
        assert contents(tmp_path) == before


def test_marks_syncs_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 35: a checkpoint never counts on bytes that a power cut can take."""
    synced: set[str] = set()
    real = os.fsync

    def fsync(number: int) -> None:
        synced.add(Path(os.readlink(f"/proc/self/fd/{number}")).name)
        real(number)

    with RunLogger(tmp_path) as logger:
        play(logger, 1)
        monkeypatch.setattr(os, "fsync", fsync)
        assert logger.marks() == {name: (tmp_path / name).stat().st_size for name in FILES}
        assert synced == {*FILES, "events.out.tfevents.000001"}


def _full(name: str, after: int) -> Callable[[int, Any], int]:
    """os.write for a disk that has room for ``after`` more bytes of one file."""
    real, room = os.write, [after]

    def write(number: int, data: Any) -> int:
        if name not in os.readlink(f"/proc/self/fd/{number}"):
            return real(number, data)
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = real(number, bytes(data)[: room[0]])
        room[0] -= done
        return done

    return write


@pytest.mark.parametrize("name", [*FILES, "events.out.tfevents.000001"])
@pytest.mark.parametrize("after", [0, 20])
def test_a_full_disk_is_named_and_what_was_written_stays_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, after: int
) -> None:
    with RunLogger(tmp_path) as logger:
        play(logger, 1)
        before = contents(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", _full(name, after))
            with pytest.raises(RunError, match=rf"Cannot write .*{name}: the disk is full\."):
                play(logger, 2)
        assert name not in before or contents(tmp_path)[name] == before[name]
        assert scalars(tmp_path)["eval/length/p50"] == [(1, 3.0)]
        play(logger, 3)  # there is room again
    assert read_metrics(tmp_path)[-1]["step"] == 3
    assert read_episodes(tmp_path)[-1] == episode("3-b")
    assert scalars(tmp_path)["train/success"][-1] == (3, pytest.approx(0.3))


@pytest.fixture
def small_files() -> Iterator[None]:
    """The kernel itself refuses to let a file grow beyond 200 bytes, after writing a part."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("small_files")
def test_a_partial_write_is_removed(tmp_path: Path) -> None:
    with RunLogger(tmp_path, tensorboard=False) as logger:
        logger.log_metrics(1, {"loss": 1.0})
        before = contents(tmp_path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        with pytest.raises(RunError, match="metrics.jsonl: File too large"):
            logger.log_metrics(2, {f"metric {n}": 1.0 for n in range(30)})
        assert contents(tmp_path) == before


def test_a_full_disk_does_not_hide_the_error_that_ended_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(number: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(ZeroDivisionError), RunLogger(tmp_path):
            _ = 1 / 0
        with pytest.raises(RunError, match="the disk is full"), RunLogger(tmp_path):
            pass
    with RunLogger(tmp_path):  # both unlocked the folder
        pass


def test_a_second_process_cannot_write_to_the_same_run(tmp_path: Path) -> None:
    with RunLogger(tmp_path) as logger:
        play(logger, 1)
        message = f"Another process is writing to {tmp_path} right now: wait until it ends, or use another"
        with pytest.raises(UsageError, match=message):
            RunLogger(tmp_path)
        play(logger, 2)
    logger.close()
    assert len(read_metrics(tmp_path)) == 2


def test_a_folder_that_cannot_be_written_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="Cannot write .*metrics.jsonl: Not a directory"):
        RunLogger(tmp_path / "file")


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    (tmp_path / METRICS).write_bytes(b'{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ResultsError, match=r"metrics.jsonl, line 2"):
        read_metrics(tmp_path)
    with pytest.raises(ResultsError, match="Cannot read .*metrics.jsonl: No such file"):
        read_metrics(tmp_path / "nowhere")


def test_without_tensorboard_no_event_files_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    with pytest.raises(MissingExtra, match=r"^Logging to TensorBoard needs .*pip install .*\[train\]'$"):
        RunLogger(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with RunLogger(tmp_path, tensorboard=False) as logger:
        play(logger, 1)
        marks = logger.marks()
        play(logger, 2)
        logger.rewind(marks)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1]
    assert not (tmp_path / BOARD).exists()


class FakeWandb(types.ModuleType):
    """Weights & Biases as far as the logger uses it."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.settings: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.ended: list[int] = []
        self.id = "abc123"

    def init(self, **settings: Any) -> "FakeWandb":
        self.settings.append(settings)
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((step, values))

    def finish(self, exit_code: int) -> None:
        self.ended.append(exit_code)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_wandb_receives_the_metrics_and_resumes_its_run(tmp_path: Path, wandb: FakeWandb) -> None:
    with RunLogger(tmp_path, wandb={"project": "lake"}) as logger:
        play(logger, 1)
    with pytest.raises(ZeroDivisionError), RunLogger(tmp_path, wandb={"project": "lake"}):
        _ = 1 / 0
    assert wandb.settings[0] == {"dir": str(tmp_path), "project": "lake"}
    assert wandb.settings[1] == {"dir": str(tmp_path), "project": "lake", "id": "abc123", "resume": "allow"}
    assert wandb.logged == [
        (1, {"train/success": 0.1, "train/loss": -1.5}),
        (1, {"eval/success_rate": 0.05, "eval/length/p50": 3.0}),
    ]
    assert wandb.ended == [0, 1]


def test_wandb_is_used_only_if_configured(tmp_path: Path, wandb: FakeWandb) -> None:
    with RunLogger(tmp_path) as logger:
        play(logger, 1)
    assert (wandb.settings, wandb.logged) == ([], [])


@pytest.mark.parametrize("found", [None, types.ModuleType("wandb")])
def test_a_missing_wandb_is_one_sentence_and_unlocks_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: types.ModuleType | None
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", found)
    with pytest.raises(MissingExtra, match=r"^Logging to W&B needs the package wandb: pip install wandb$"):
        RunLogger(tmp_path, wandb={})
    RunLogger(tmp_path).close()


def test_an_error_of_wandb_is_reported(
    tmp_path: Path, wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(**settings: Any) -> None:
        raise ValueError("no api key")

    monkeypatch.setattr(wandb, "init", broken)
    with pytest.raises(RunError, match="W&B could not be started: ValueError: no api key"):
        RunLogger(tmp_path, wandb={})
