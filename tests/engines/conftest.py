"""Real servers, where there are some.

ROLLGYM_TEST_SGLANG and ROLLGYM_TEST_VLLM name virtual environments that have the software, made by the
make_venv.py beside the tests of each. ROLLGYM_TEST_SGLANG_PATH, if set, is the PYTHONPATH of SGLang servers:
a folder with another version.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollgym.engines import sglang, vllm

OVERLAY = os.environ.get("ROLLGYM_TEST_SGLANG_PATH", "")


@pytest.fixture(scope="session")
def server_options() -> Callable[[str], Any]:
    """The options of a real server of a kind; skips where there is none."""

    def options(kind: str) -> Any:
        variable = f"ROLLGYM_TEST_{kind.upper()}"
        venv = os.environ.get(variable, "")
        if not venv:
            pytest.skip(f"set {variable} to a folder made by tests/engines/{kind}/make_venv.py")
        python = str(Path(venv).absolute() / "bin" / "python")
        if kind == "vllm":
            return vllm.ServerOptions(python=python, device="cpu", start_seconds=3600.0)
        env = {"PYTHONPATH": OVERLAY} if OVERLAY else {}
        return sglang.ServerOptions(
            python=python, device="cpu", max_total_tokens=16_384, env=env, start_seconds=3600.0
        )

    return options


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
