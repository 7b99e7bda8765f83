"""A pair of processes and one alone, for all tests here: to start them takes longer than what they do."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

for needed in ("torch", "transformers", "deepspeed"):
    if find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed", allow_module_level=True)

from rank_cases import Ranks  # noqa: E402


@pytest.fixture(scope="session")
def pair() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def solo() -> Iterator[Ranks]:
    ranks = Ranks(1)
    yield ranks
    ranks.close()
