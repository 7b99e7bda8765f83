"""Fixtures that run a small fine-tuning."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from training import fast_versions
from tuning import write_config

Tune = Callable[..., Path]


@pytest.fixture
def tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tune:
    """Fine-tune in this process; returns the run's folder."""
    from rollgym.trainer.sft.main import run_sft

    fast_versions(monkeypatch)

    def run(name: str = "run", *words: str, resume: bool = False, **changes: Any) -> Path:
        run_sft(str(write_config(tmp_path, **changes)), words, tmp_path / name, resume=resume, plain=True)
        return tmp_path / name

    return run
