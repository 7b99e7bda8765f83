"""Sandboxes for the tests, and this package's own view of what is left behind."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollgym.core.errors import RollgymError
from rollgym.sandbox.client import WorkerSandbox
from rollgym.sandbox.landlock import open_landlock
from rollgym.sandbox.namespaces import open_namespaces
from rollgym.sandbox.types import Limits, SandboxSettings
from rollgym.sandbox.worker_limits import descendants

OPENERS = {"namespaces": open_namespaces, "landlock": open_landlock}
SETTINGS = SandboxSettings(limits=Limits(seconds=20))


def opened(backend: str, settings: SandboxSettings = SETTINGS) -> WorkerSandbox:
    try:
        return OPENERS[backend](settings)
    except RollgymError as error:
        pytest.skip(f"{backend} does not work here: {error}")


@pytest.fixture(scope="session")
def open_or_skip() -> Callable[..., WorkerSandbox]:
    """Opens a sandbox of a kind, or skips the test where there is none."""
    return opened


@pytest.fixture(scope="module", params=["namespaces", "landlock"])
def lasting(request: pytest.FixtureRequest) -> Iterator[WorkerSandbox]:
    """One sandbox for a whole file."""
    sandbox = opened(request.param)
    yield sandbox
    sandbox.close()


@pytest.fixture
def sandbox(lasting: WorkerSandbox) -> WorkerSandbox:
    """A sandbox whose session is empty."""
    lasting.reset()
    return lasting


@pytest.fixture
def another(lasting: WorkerSandbox) -> Iterator[Callable[[], WorkerSandbox]]:
    """Opens more of the same kind, which are closed afterwards."""
    made: list[WorkerSandbox] = []

    def open_one() -> WorkerSandbox:
        made.append(opened(lasting.backend))
        return made[-1]

    yield open_one
    for sandbox in made:
        sandbox.close()


@pytest.fixture
def left_behind() -> Callable[[], tuple[list[int], list[str], list[str], list[str]]]:
    """Asks for our processes, the mounts, our cgroups and the folders of sandboxes."""
    return _left_behind


def _left_behind() -> tuple[list[int], list[str], list[str], list[str]]:
    # Others on this machine may run containers meanwhile.
    mounts = [line for line in Path("/proc/self/mounts").read_text().splitlines() if "docker" not in line]
    groups = [str(path) for path in Path("/sys/fs/cgroup").rglob(f"rollgym-{os.getpid()}-*")]
    folders = [
        str(path) for path in Path(os.environ.get("TMPDIR", "/tmp")).glob(f"rollgym-sandbox-{os.getpid()}-*")
    ]
    return sorted(descendants(os.getpid())), mounts, sorted(groups), sorted(folders)
