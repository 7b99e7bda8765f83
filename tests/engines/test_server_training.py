"""Whole training runs on real SGLang and vLLM servers: they learn, though a server is killed in the middle.

Run by `make test-sglang` and `make test-vllm`; skipped without a virtual environment of the software.
"""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from training import fast_versions, lines

from rollgym.config.loader import load
from rollgym.engines.base import GenerateRequest, Generation
from rollgym.engines.servers import process_reaper
from rollgym.engines.servers.engine import ServerEngine
from rollgym.trainer.config import TrainConfig
from rollgym.trainer.config_files import find_config
from rollgym.trainer.loop import train
from rollgym.trainer.main import open_components, run_training
from rollgym.trainer.runtime import Components
from rollgym.trainer.tracking.console import Console
from rollgym.trainer.train_run import TrainRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]
KINDS = ("sglang", "vllm")
FATAL = 1100
"""The request at which the server is killed: after two evaluations of 200 episodes, in the sixth step."""


def settings_of(kind: str, server_options: Callable[[str], Any]) -> list[str]:
    """The settings of a run on real servers."""
    options = server_options(kind)
    if options.env:
        pytest.skip("the server's own environment cannot be named in a configuration")
    return [f"engine.kind={kind}", f"engine.python={options.python}", "tracking.tensorboard=false"]


def check_learned(folder: Path) -> None:
    """All steps were trained, and the policy is better than before."""
    steps: list[dict[str, Any]] = lines(folder / "metrics.jsonl")
    assert len(steps) == 30
    before, *_, after = lines(folder / "evaluations.jsonl")
    gaps = [step["train_rollout_logprob_diff"] for step in steps]
    print(f"success {before['success_rate']:.3f} before, {after['success_rate']:.3f} after")
    print(f"train_rollout_logprob_diff at most {max(gaps):.2e}")
    assert max(gaps) < 1e-4
    assert after["success_rate"] > before["success_rate"] + 0.2
    assert after["success_rate"] > 0.75


@pytest.mark.parametrize("kind", KINDS)
def test_the_bandit_is_learned_on_a_server_that_is_killed_meanwhile(
    kind: str, server_options: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(kind, server_options)
    fast_versions(monkeypatch)
    requests = 0
    engines: set[ServerEngine] = set()
    generate = ServerEngine.generate

    async def count(self: ServerEngine, request: GenerateRequest) -> Generation:
        nonlocal requests
        requests += 1
        engines.add(self)
        if requests == FATAL:
            assert self.server is not None
            assert self.server.pid is not None
            os.kill(self.server.pid, signal.SIGKILL)
        return await generate(self, request)

    monkeypatch.setattr(ServerEngine, "generate", count)
    run_training("bandit-grpo", settings, tmp_path / "run", plain=True)
    (engine,) = engines
    assert engine.server is not None
    assert engine.server.starts == 2
    assert engine.server.pid is None  # it was ended with the run
    check_learned(tmp_path / "run")


@pytest.mark.parametrize("kind", KINDS)
def test_the_bandit_is_learned_on_two_servers_in_actors(
    kind: str, server_options: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    fast_versions(monkeypatch)
    settings = [
        *settings_of(kind, server_options), "runtime=ray", "ray.num_gpus=3", "devices.layout=split",
        "devices.actor_train=gpu[0]", "devices.actor_infer=gpu[1-2]",
    ]  # fmt: skip
    config = load(TrainConfig, find_config("bandit-grpo"), settings)
    run = TrainRun(config, tmp_path / "run", Console(plain=True))
    pids: list[int] = []

    async def disturb(parts: Components) -> None:
        """Kill a server in the middle of a step."""
        first, second = (engine for engine in parts.engine.engines)  # type: ignore[attr-defined]
        pids.extend([await one._client.actor.server_pid.remote() for one in (first, second)])
        while run.progress.step < 5:
            await asyncio.sleep(0.05)
        os.kill(pids[0], signal.SIGKILL)

    async def main() -> None:
        async with open_components(config, run.folder) as parts:
            beside = asyncio.create_task(disturb(parts))
            await train(parts, run)
            await beside
            engines: Any = parts.engine
            pids.extend(
                [await one._client.actor.server_pid.remote() for one in engines.engines if one._client]
            )

    try:
        asyncio.run(main())
    finally:
        run.close()
    assert len(set(pids)) >= 3, "the killed one was started again"
    assert not any(process_reaper.start_time(pid) for pid in pids), "they end with the run"
    check_learned(run.folder)
