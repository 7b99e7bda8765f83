"""A sandbox for the tests of code environments."""

from collections.abc import Iterator

import pytest

from rollgym.core.errors import UsageError
from rollgym.envs.code.sandbox_handle import sandbox_settings
from rollgym.sandbox.factory import open_sandbox
from rollgym.sandbox.types import Sandbox


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Sandbox]:
    """One for all tests: each execution is a world of its own."""
    try:
        opened = open_sandbox(sandbox_settings({"minimum": "landlock"}))
    except UsageError as error:
        pytest.skip(str(error))
    yield opened
    opened.close()
