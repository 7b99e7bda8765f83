"""The trackers that a config asks for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rollgym.trainer.config import TrackingConfig
from rollgym.trainer.tracking.base import Tracker
from rollgym.trainer.tracking.mlflow import MLflowTracker
from rollgym.trainer.tracking.trackio import TrackioTracker


def wandb_settings(config: TrackingConfig) -> dict[str, Any] | None:
    """The arguments of ``wandb.init``; ``None`` where W&B is not used."""
    if config.wandb_project is None:
        return None
    return {"project": config.wandb_project, **({"mode": config.wandb_mode} if config.wandb_mode else {})}


def tracker_makers(config: TrackingConfig) -> list[Callable[[Path], Tracker]]:
    """Functions that make the other trackers for a run folder."""
    makers: list[Callable[[Path], Tracker]] = []
    if config.mlflow_experiment is not None:
        makers.append(partial(MLflowTracker, experiment=config.mlflow_experiment, uri=config.mlflow_uri))
    if config.trackio_project is not None:
        makers.append(partial(TrackioTracker, project=config.trackio_project))
    return makers
