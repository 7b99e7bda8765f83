"""Fixtures that run a small preference optimization."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from preferences import write_config
from training import fast_versions

Prefer = Callable[..., Path]


@pytest.fixture
def prefer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prefer:
    """Train on pairs in this process; returns the run's folder."""
    from rollgym.trainer.dpo.main import run_dpo

    fast_versions(monkeypatch)

    def run(name: str = "run", *words: str, resume: bool = False, **changes: Any) -> Path:
        run_dpo(str(write_config(tmp_path, **changes)), words, tmp_path / name, resume=resume, plain=True)
        return tmp_path / name

    return run
