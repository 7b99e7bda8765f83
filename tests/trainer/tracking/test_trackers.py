"""MLflow, Trackio and W&B against the real packages where they are installed; else one sentence."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollgym.core.errors import MissingExtra, UsageError
from rollgym.trainer.config import EnvConfig, TrackingConfig, TrainConfig
from rollgym.trainer.tracking.configured import tracker_makers, wandb_settings
from rollgym.trainer.tracking.jsonl import RunLogger
from rollgym.trainer.trusted import code_of


def logger_of(folder: Path, **settings: Any) -> RunLogger:
    config = TrackingConfig(tensorboard=False, **settings)
    return RunLogger(folder, tensorboard=False, wandb=wandb_settings(config), others=tracker_makers(config))


def play(logger: RunLogger, step: int) -> None:
    logger.log_metrics(step, {"loss": 1.0 / (1 + step), "wrong": float("nan")})
    logger.log_evaluation(step, {"success_rate": step / 10, "length": {"p50": 3}})


@pytest.mark.parametrize(
    ("name", "setting", "module"),
    [
        ("mlflow", "mlflow_experiment", "mlflow.tracking"),
        ("trackio", "trackio_project", "trackio"),
        ("wandb", "wandb_project", "wandb"),
    ],
)
def test_an_absent_package_is_one_sentence_and_unlocks_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, setting: str, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra, match=f"needs the package {name}: pip install {name}$"):
        logger_of(tmp_path, **{setting: "lake"})
    RunLogger(tmp_path, tensorboard=False).close()


def test_trackers_are_made_only_if_configured() -> None:
    assert tracker_makers(TrackingConfig()) == []
    assert wandb_settings(TrackingConfig()) is None
    settings = TrackingConfig(wandb_project="lake", wandb_mode="offline")
    assert wandb_settings(settings) == {"project": "lake", "mode": "offline"}


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"wandb_mode": "offline"}, "wandb_mode requires wandb_project"),
        ({"mlflow_uri": "http://127.0.0.1:5000"}, "mlflow_uri requires mlflow_experiment"),
        (
            {"mlflow_uri": "http://me:secret123@host:5000", "mlflow_experiment": "x"},
            "contains a password",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises((UsageError, ValueError), match=reason) as caught:
        TrackingConfig(**settings)
    assert "remove it" not in reason
    assert "secret123" not in str(caught.value).split("input_value")[0]


def test_judges_and_addresses_of_a_config_are_listed_as_code() -> None:
    env = EnvConfig(id="rollgym/Data-v0", kwargs={"judge": "my_judges:length"})
    tracking = TrackingConfig(mlflow_experiment="lake", mlflow_uri="http://127.0.0.1:5000")
    assert code_of(TrainConfig(envs=[env], tracking=tracking)) == [
        "envs.0.kwargs.judge my_judges:length",
        "tracking.mlflow_uri http://127.0.0.1:5000",
    ]


def test_mlflow_keeps_every_number_in_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the tracker sets it too, and it must be undone
    tracking: Any = pytest.importorskip("mlflow.tracking", reason="the package mlflow is not installed")
    for step in (1, 2):  # the second start resumes the run
        with logger_of(tmp_path, mlflow_experiment="lake") as logger:
            play(logger, step)
    client = tracking.MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("lake")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == tmp_path.name
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.5), (2, 1 / 3)]
    assert client.get_metric_history(run.info.run_id, "eval/length/p50")[0].value == 3.0
    with pytest.raises(ZeroDivisionError), logger_of(tmp_path, mlflow_experiment="lake"):
        _ = 1 / 0
    assert client.get_run(run.info.run_id).info.status == "FAILED"


TRACKIO = """
import sys
from pathlib import Path
from rollgym.trainer.config import TrackingConfig
from rollgym.trainer.tracking.configured import tracker_makers
from rollgym.trainer.tracking.jsonl import RunLogger
config = TrackingConfig(tensorboard=False, trackio_project="lake")
folder = Path(sys.argv[1])
for step in (1, 2):
    with RunLogger(folder, tensorboard=False, others=tracker_makers(config)) as logger:
        logger.log_metrics(step, {"loss": 1.0 / step, "wrong": float("nan")})
from trackio.sqlite_storage import SQLiteStorage
rows = SQLiteStorage.get_logs("lake", folder.name)
print([(row["step"], row["train/loss"]) for row in rows])
"""


def test_trackio_keeps_every_number_in_a_local_project(tmp_path: Path) -> None:
    pytest.importorskip("trackio", reason="the package trackio is not installed")
    # In a process of its own: the package reads its folder from the environment when it is imported.
    environment = {
        **os.environ,
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", TRACKIO, str(tmp_path / "run")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "[(1, 1.0), (2, 0.5)]"


WANDB = """
import sys
from pathlib import Path
from rollgym.trainer.config import TrackingConfig
from rollgym.trainer.tracking.configured import wandb_settings
from rollgym.trainer.tracking.jsonl import RunLogger
config = TrackingConfig(tensorboard=False, wandb_project="lake", wandb_mode="offline")
with RunLogger(Path(sys.argv[1]), tensorboard=False, wandb=wandb_settings(config)) as logger:
    logger.log_metrics(1, {"loss": 0.5})
    logger.log_metrics(2, {"loss": 0.25})
"""


def test_wandb_offline_writes_to_the_run_folder(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="the package wandb is not installed")
    secret = "0123456789abcdef0123456789abcdef01234567"
    environment = {**os.environ, "WANDB_API_KEY": secret, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", WANDB, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (record,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    content = record.read_bytes()
    assert b"train/loss" in content
    assert secret.encode() not in content
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert secret.encode() not in path.read_bytes(), path
