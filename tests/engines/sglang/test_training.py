"""A whole training run on a real SGLang server: it learns, though the server is killed in the middle.

Run by `make test-sglang`; skipped without ROLLGYM_TEST_SGLANG.
"""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from training import fast_versions, lines

from rollgym.engines.base import GenerateRequest, Generation
from rollgym.engines.sglang import ServerOptions, SglangEngine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]
FATAL = 1100
"""The request at which the server is killed: after two evaluations of 200 episodes, in the sixth step."""


def test_the_bandit_is_learned_on_a_server_that_is_killed_meanwhile(
    real_options: ServerOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if real_options.env:
        pytest.skip("the server's own environment cannot be named in a configuration")
    from rollgym.trainer.main import run_training

    fast_versions(monkeypatch)
    requests = 0
    engines: set[SglangEngine] = set()
    generate = SglangEngine.generate

    async def count(self: SglangEngine, request: GenerateRequest) -> Generation:
        nonlocal requests
        requests += 1
        engines.add(self)
        if requests == FATAL:
            assert self.server is not None
            assert self.server.pid is not None
            os.kill(self.server.pid, signal.SIGKILL)
        return await generate(self, request)

    monkeypatch.setattr(SglangEngine, "generate", count)
    settings = ["engine.kind=sglang", f"engine.python={real_options.python}", "tracking.tensorboard=false"]
    run_training("bandit-grpo", settings, tmp_path / "run", plain=True)
    (engine,) = engines
    assert engine.server is not None
    assert engine.server.starts == 2
    assert engine.server.pid is None  # it was ended with the run
    steps: list[dict[str, Any]] = lines(tmp_path / "run" / "metrics.jsonl")
    assert len(steps) == 30
    before, *_, after = lines(tmp_path / "run" / "evaluations.jsonl")
    assert after["success_rate"] > before["success_rate"] + 0.2
    assert after["success_rate"] > 0.75
