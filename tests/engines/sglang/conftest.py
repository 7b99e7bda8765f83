"""A real server, where there is one: ROLLGYM_TEST_SGLANG names a virtual environment that has SGLang.

ROLLGYM_TEST_SGLANG_PATH, if set, is the server's PYTHONPATH: a folder with another version of SGLang.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rollgym.engines.sglang import ServerOptions

VENV = os.environ.get("ROLLGYM_TEST_SGLANG", "")
OVERLAY = os.environ.get("ROLLGYM_TEST_SGLANG_PATH", "")


@pytest.fixture(scope="session")
def real_options() -> ServerOptions:
    if not VENV:
        pytest.skip("set ROLLGYM_TEST_SGLANG to a folder made by tests/engines/sglang/make_venv.py")
    return ServerOptions(
        python=str(Path(VENV).absolute() / "bin" / "python"),
        device="cpu",
        max_total_tokens=16_384,
        env={"PYTHONPATH": OVERLAY} if OVERLAY else {},
    )


@pytest.fixture(scope="session")
def real_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The folder of a tiny model with the weights of a seed."""
    from rollgym.trainer.builtin_policy.model import make_policy

    base = tmp_path_factory.mktemp("models")

    def make(seed: int) -> Path:
        folder = base / str(seed)
        if not folder.exists():
            make_policy(["rollgym/Bandit-v0"], folder, size="tiny", seed=seed, context=256)
        return folder

    return make
