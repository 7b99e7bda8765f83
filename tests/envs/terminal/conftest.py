"""Terminal environments for the tests, where the machine has the sandbox they need."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rollgym.core.errors import RollgymError
from rollgym.envs.terminal.env import TerminalEnv
from rollgym.sandbox.namespaces import open_namespaces
from rollgym.sandbox.types import SandboxSettings


@pytest.fixture(scope="session")
def need_sandbox() -> Iterator[None]:
    """Skip where there is no namespaces sandbox; else keep the pool of sandboxes for all tests."""
    try:
        open_namespaces(SandboxSettings()).close()
    except RollgymError as error:
        pytest.skip(f"the namespaces sandbox does not work here: {error}")
    env = TerminalEnv()
    env._handle.fresh()
    yield
    env.close()


@pytest.fixture
def make_env(need_sandbox: None) -> Iterator[Callable[..., TerminalEnv]]:
    """Make environments that are closed afterwards."""
    made: list[TerminalEnv] = []

    def make(**kwargs: Any) -> TerminalEnv:
        made.append(TerminalEnv(**kwargs))
        return made[-1]

    yield make
    for env in made:
        env.close()
