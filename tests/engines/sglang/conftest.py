"""Options of a real SGLang server."""

from collections.abc import Callable
from typing import Any

import pytest

from rollgym.engines.sglang import ServerOptions


@pytest.fixture(scope="session")
def real_options(server_options: Callable[[str], Any]) -> ServerOptions:
    options: ServerOptions = server_options("sglang")
    return options
