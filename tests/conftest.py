"""What all tests share: environments made to misbehave, and the command line in this process."""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

FIXTURES = Path(__file__).parent / "fixtures"
sys.path.insert(0, str(FIXTURES))

# What is built once per machine is built once per test run, for all processes of it.
RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID") or str(os.getpid())
os.environ["ROLLGYM_CACHE"] = str(Path(tempfile.gettempdir()) / f"rollgym-tests-{RUN}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """The last to leave tidies up."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(os.environ["ROLLGYM_CACHE"], ignore_errors=True)


@dataclass(frozen=True)
class Ran:
    """What a command did."""

    code: int
    out: str
    err: str


@pytest.fixture
def rollgym_command(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Ran]:
    """Run ``rollgym ...`` in this process, in an empty folder."""
    from rollgym.cli import main

    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> Ran:
        try:
            main([str(word) for word in words])
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        out, err = capfd.readouterr()
        assert "Traceback" not in err
        return Ran(code, out, err)

    return run
