"""A real router (sglang-router) in front of two real servers: one address, and both have the same weights.

Run by `make test-sglang`; skipped without ROLLGYM_TEST_SGLANG, or where the router is not installed there.
"""

import asyncio
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from torch_models import plain_logprobs

from rollgym.engines.base import GenerateRequest, Generation, Sampling, WeightSource
from rollgym.engines.embedded.model import read_module
from rollgym.engines.servers.client import auth_headers
from rollgym.engines.servers.server_process import start_all
from rollgym.engines.sglang import Server, ServerOptions, SglangEngine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
PROMPT = (7, 8, 9, 10)
KEY = "one-key-for-both-servers"
Model = Callable[[int], Path]


@pytest.fixture(scope="module")
def servers(real_options: ServerOptions, real_model: Model) -> Iterator[list[Server]]:
    asked = [real_options.python, "-c", "import sglang_router"]
    if subprocess.run(asked, env=real_options.environment(), capture_output=True, check=False).returncode:
        pytest.skip("sglang-router is not installed beside SGLang")
    options = replace(real_options, api_key=KEY)
    servers = [Server(real_model(0), options) for _ in range(2)]
    start_all(servers)
    yield servers
    for server in servers:
        server.close()


@pytest.fixture
def router(real_options: ServerOptions, servers: list[Server], tmp_path: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [real_options.python, "-m", "sglang_router.launch_router", "--worker-urls"]
    command += [*(server.url for server in servers), "--host", "127.0.0.1", "--port", str(port)]
    # The policy that goes by routing keys: a session stays where it began.
    command += ["--policy", "manual", "--assignment-mode", "min_group", "--api-key", KEY]
    log = tmp_path / "router.log"
    with (
        log.open("wb") as out,
        subprocess.Popen(command, stdout=out, stderr=out, env=real_options.environment()) as process,
    ):
        try:
            url = f"http://127.0.0.1:{port}"
            while not both_are_there(url):
                assert process.poll() is None, log.read_text(errors="replace")[-2000:]
                time.sleep(0.2)
            yield url
        finally:
            process.kill()


def both_are_there(url: str) -> bool:
    try:
        with httpx.Client(trust_env=False, timeout=30) as client:
            found = client.get(f"{url}/workers", headers=auth_headers(KEY)).json()
    except (httpx.HTTPError, ValueError):
        return False
    return sum(bool(one.get("is_healthy")) for one in found.get("workers", ())) == 2


def ask(name: str) -> GenerateRequest:
    return GenerateRequest(request_id=name, prompt_ids=PROMPT, sampling=Sampling(max_tokens=16), session=name)


def gap(folder: Path, made: Generation) -> float:
    plain = plain_logprobs(read_module(folder), PROMPT + made.token_ids, len(PROMPT))
    return max(abs(a - b) for a, b in zip(plain, made.logprobs, strict=True))


def served(servers: list[Server]) -> list[int]:
    """Count the requests in each server's log."""
    logs = [server._log.read_text(encoding="utf-8", errors="replace") for server in servers]
    return [text.count("POST /generate") for text in logs]


def test_through_a_router_both_servers_answer_and_get_new_weights(
    router: str, servers: list[Server], real_model: Model
) -> None:
    old, new = real_model(0), real_model(1)  # made here: that needs its own event loop

    async def main() -> None:
        engine = SglangEngine(router, old, api_key=KEY)
        assert {worker.client.url for worker in engine._servers.workers} == {one.url for one in servers}
        made = await asyncio.gather(*(engine.generate(ask(f"s{i}")) for i in range(24)))
        assert max(gap(old, one) for one in made) < 1e-4
        before = served(servers)
        assert min(before) > 0, "both had something to do"

        for _ in range(3):
            await engine.generate(ask("one and the same"))
        assert sorted(now - then for now, then in zip(served(servers), before, strict=True)) == [0, 3]

        weights: Any = dict(read_module(new).named_parameters())
        on_weight_update = [asyncio.create_task(engine.generate(ask(f"u{i}"))) for i in range(8)]
        await engine.update_weights(1, WeightSource(tensors=weights))
        await asyncio.gather(*on_weight_update)
        made = await asyncio.gather(*(engine.generate(ask(f"t{i}")) for i in range(24)))
        assert {one.version_spans for one in made} == {((1, 16),)}
        assert max(gap(new, one) for one in made) < 1e-4

        await engine.sleep()
        waiting = asyncio.create_task(engine.generate(ask("held")))
        await engine.wake_up()
        assert gap(new, await waiting) < 1e-4
        await engine.close()
        assert all(server.alive for server in servers), "they are not the engine's"

    assert os.environ.get("ROLLGYM_TEST_SGLANG")
    asyncio.run(asyncio.wait_for(main(), 900))
