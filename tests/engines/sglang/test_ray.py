"""A whole training run on real SGLang servers in Ray actors; one server is killed on the way.

Run by `make test-sglang`; skipped without ROLLGYM_TEST_SGLANG.
"""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from training import fast_versions, lines

from rollgym.config.loader import load
from rollgym.engines.servers import process_reaper
from rollgym.engines.sglang import ServerOptions
from rollgym.trainer.config import TrainConfig
from rollgym.trainer.config_files import find_config
from rollgym.trainer.loop import train
from rollgym.trainer.main import open_components
from rollgym.trainer.runtime import Components
from rollgym.trainer.tracking.console import Console
from rollgym.trainer.train_run import TrainRun

ray: Any = pytest.importorskip("ray")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3000),
]


def test_the_bandit_is_learned_on_two_servers_in_actors(
    real_options: ServerOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if real_options.env:
        pytest.skip("the server's own environment cannot be named in a configuration")
    fast_versions(monkeypatch)
    settings = [
        "runtime=ray", "ray.num_gpus=3", "engine.kind=sglang", f"engine.python={real_options.python}",
        "devices.layout=split", "devices.actor_train=gpu[0]", "devices.actor_infer=gpu[1-2]",
        "tracking.tensorboard=false",
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
    steps = lines(run.folder / "metrics.jsonl")
    assert len(steps) == 30
    before, *_, after = lines(run.folder / "evaluations.jsonl")
    print(f"success {before['success_rate']:.3f} before, {after['success_rate']:.3f} after")
    assert after["success_rate"] > before["success_rate"] + 0.2
    assert after["success_rate"] > 0.75
