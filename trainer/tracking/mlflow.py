"""MLflow: the same numbers, in one MLflow run for all starts of a run."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rollgym.core.errors import MissingExtra, RunError, boundary
from rollgym.io.run_dir import read_json, write_json
from rollgym.trainer.tracking.base import Tags, Tracker

MLFLOW, STORE = "mlflow.json", "mlruns"
"""The id of the MLflow run, and the file store inside the run folder."""


class MLflowTracker(Tracker):
    """An MLflow run; its id is kept in ``mlflow.json``, so that a resumed run continues it.

    Args:
        folder: The run folder.
        experiment: Name of the experiment.
        uri: Tracking URI. Default: files in ``mlruns`` of the run folder, which need no server.
    """

    def __init__(self, folder: Path, experiment: str, uri: str | None = None) -> None:
        try:
            client = importlib.import_module("mlflow.tracking").MlflowClient
            self._metric = importlib.import_module("mlflow.entities").Metric
        except (ImportError, AttributeError):
            raise MissingExtra("Logging to MLflow needs the package mlflow: pip install mlflow") from None
        if uri is None:
            # Newer versions of MLflow refuse a store of files, which needs no database, without this.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        path = folder / MLFLOW
        with boundary(RunError, "MLflow could not be started"):
            self._client = client(tracking_uri=uri or (folder.resolve() / STORE).as_uri())
            known = read_json(path).get("id") if path.exists() else None
            if known is None:
                found = self._client.get_experiment_by_name(experiment)
                number = self._client.create_experiment(experiment) if found is None else found.experiment_id
                known = self._client.create_run(number, run_name=folder.resolve().name).info.run_id
                write_json(path, {"id": known})
            else:
                self._client.update_run(known, status="RUNNING")
        self._run_id = str(known)

    def log(self, line: Mapping[str, Any], tags: Tags) -> None:
        """Send the numbers of one line; MLflow keeps no number that is not finite."""
        time = int(1000 * line["time"])
        metrics = [
            self._metric(name, value, time, line["step"])
            for name, value in tags.items()
            if math.isfinite(value)
        ]
        with boundary(RunError, "MLflow did not accept the metrics"):
            self._client.log_batch(self._run_id, metrics=metrics)

    def rewind(self, first: int, kept: Iterable[tuple[Mapping[str, Any], Tags]]) -> None:
        """Nothing: MLflow cannot forget. Steps that are played again have the same numbers."""

    def close(self, *, failed: bool = False) -> None:
        """End the MLflow run, marked as failed if it did."""
        with boundary(RunError, "MLflow could not end the run"):
            self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")
