"""Fixtures that run a small training."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from training import Forge, fast_versions, write

FIXTURES = Path(__file__).parents[1] / "fixtures"
Run = Callable[..., Path]


@pytest.fixture
def train_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Train in this process; returns the run's folder."""
    from rollgym.trainer.main import run_training

    fast_versions(monkeypatch)

    def run(
        name: str = "run", *words: str, resume: bool = False, imitate: bool = False, **changes: Any
    ) -> Path:
        config = str(write(tmp_path, **changes))
        run_training(config, words, tmp_path / name, resume=resume, imitate_only=imitate, plain=True)
        return tmp_path / name

    return run


@pytest.fixture(scope="session")
def forge() -> Iterator[Forge]:
    with subprocess.Popen(
        [sys.executable, str(FIXTURES / "forge.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    ) as process:
        yield Forge(process)
        assert process.stdin is not None
        process.stdin.close()
