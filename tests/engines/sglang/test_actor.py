"""Servers in Ray actors: sessions, recovery, and no server is left behind.

The servers here are scripted; `test_ray.py` has real ones.
"""

import asyncio
import os
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from scripted_server import model_folder, program

from rollgym.cluster.connect import connect
from rollgym.cluster.server_actor import SglangActor, server_slots, start_servers
from rollgym.core.errors import EngineLost, UsageError
from rollgym.engines.base import GenerateRequest, Generation, Sampling, WeightSource
from rollgym.engines.router import RoutedEngine
from rollgym.engines.servers import process_reaper
from rollgym.engines.sglang import ServerOptions

ray: Any = pytest.importorskip("ray")
PLACE = {"num_cpus": 1, "num_gpus": 1}


@pytest.fixture(scope="module", autouse=True)
def here() -> Iterator[None]:
    with connect(gpus=2, cpus=4):
        yield


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Ray leaves closing its processes and log files to the garbage collector."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=ResourceWarning)
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = model_folder(tmp_path / "model")
    save_file({"weight": np.zeros(2, dtype=np.float32)}, made / "model.safetensors")
    return made


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "started"


@pytest.fixture
def options(tmp_path: Path, log: Path) -> ServerOptions:
    return ServerOptions(python=program(tmp_path / "py", log), device="cpu")


def ask(session: str) -> GenerateRequest:
    sampling = Sampling(max_tokens=4)
    return GenerateRequest(request_id=session, prompt_ids=(3, 4), sampling=sampling, session=session)


def started(log: Path) -> list[list[str]]:
    """A line for each start: number, visible devices, and the command."""
    return [line.split() for line in log.read_text(encoding="utf-8").splitlines()]


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.02)


async def answered(engine: Any, session: str) -> Generation:
    """A reply, however many are lost before; those tell how many."""
    while True:
        try:
            made: Generation = await engine.generate(ask(session))
            return made
        except EngineLost:
            await asyncio.sleep(0.02)


def test_two_servers_share_sessions_and_recover_from_any_death(
    folder: Path, options: ServerOptions, log: Path
) -> None:
    async def main() -> None:
        engine = RoutedEngine(await start_servers(folder, [PLACE, PLACE], options=options))
        assert engine.context_length == 100
        assert len(started(log)) == 2
        await asyncio.gather(*(engine.generate(ask(f"s{number}")) for number in range(6)))
        replica_of = {name: replica.number for name, replica in engine._replica_of.items()}
        assert sorted(replica_of.values()) == [0, 0, 0, 1, 1, 1]
        await asyncio.gather(*(engine.generate(ask(f"s{number}")) for number in range(6)))
        assert replica_of == {name: replica.number for name, replica in engine._replica_of.items()}, (
            "they stay"
        )

        await engine.update_weights(3, WeightSource(path=folder))
        assert (await engine.generate(ask("s0"))).version == 3
        first = engine.engines[0]
        assert isinstance(first, SglangActor)
        await sleep_and_wake_up(engine, folder)
        await a_server_dies(engine, first, log)
        await an_actor_dies(engine, first, log)
        pids = [int(words[0]) for words in started(log)]
        await engine.close()
        await until(lambda: not any(process_reaper.start_time(pid) for pid in pids))

    asyncio.run(main())


async def sleep_and_wake_up(engine: RoutedEngine, folder: Path) -> None:
    """Nothing is generated meanwhile; new weights may come, and otherwise the last ones do."""
    for version in (3, 4):
        await engine.sleep()
        waiting = asyncio.create_task(engine.generate(ask("s1")))
        await engine.update_weights(version, WeightSource(path=folder))
        assert not waiting.done()
        await engine.wake_up()
        assert (await waiting).version == version
    await engine.sleep()
    await engine.wake_up()
    assert (await engine.generate(ask("s1"))).version == 4


async def a_server_dies(engine: RoutedEngine, first: SglangActor, log: Path) -> None:
    """The actor starts another; sessions go elsewhere or wait, and it has the last weights."""
    assert first._client is not None
    pid = await first._client.actor.server_pid.remote()
    os.kill(pid, signal.SIGKILL)
    assert {(await answered(engine, f"s{number}")).version for number in range(6)} == {4}
    await until(lambda: len(started(log)) == 3 and not engine.lost)
    assert (await first.generate(ask("alone"))).version == 4
    assert first.deaths == 0


async def an_actor_dies(engine: RoutedEngine, first: SglangActor, log: Path) -> None:
    """Another takes its place, with the last weights; the server of the dead one is ended."""
    assert first._client is not None
    pid = await first._client.actor.server_pid.remote()
    ray.kill(first._client.actor)
    await until(lambda: first.deaths == 1)
    assert (await first.generate(ask("alone"))).version == 4
    assert len(started(log)) == 4
    await until(lambda: not process_reaper.start_time(pid))
    assert {(await answered(engine, f"s{number}")).version for number in range(6)} == {4}


@pytest.mark.slow
def test_a_server_over_two_devices_sees_both(folder: Path, options: ServerOptions, log: Path) -> None:
    async def main() -> None:
        (engine,) = await start_servers(folder, server_slots([PLACE, PLACE], 2), options=options)
        await engine.close()

    asyncio.run(main())
    _, devices, *words = started(log)[0]
    assert sorted(devices.split(",")) == ["0", "1"]
    assert words[words.index("--tp-size") + 1] == "2"


@pytest.mark.slow
def test_a_failed_start_is_one_sentence_and_leaves_nothing(
    folder: Path, options: ServerOptions, tmp_path: Path, log: Path
) -> None:
    async def failed(**changes: Any) -> BaseException:
        with pytest.raises((UsageError, EngineLost)) as caught:
            await start_servers(**{"model": folder, "slots": [PLACE], "options": options, **changes})
        return caught.value

    dying = tmp_path / "dying"
    dying.write_text("#!/bin/sh\necho 'No module named sglang'\nexit 1\n", encoding="utf-8")
    dying.chmod(0o755)

    async def main() -> None:
        assert "at least one actor slot" in str(await failed(slots=[]))
        port = ServerOptions(python=options.python, port=7)
        assert "cannot share a port" in str(await failed(slots=[PLACE, PLACE], options=port))
        assert "is not a model folder" in str(await failed(model=tmp_path / "none"))
        gone = await failed(options=ServerOptions(python=str(dying), device="cpu"))
        assert "has no SGLang: install it there" in str(gone)

    asyncio.run(main())
    with pytest.raises(UsageError, match="3 devices cannot be divided into servers of 2 devices each"):
        server_slots([PLACE] * 3, 2)
    with pytest.raises(UsageError, match=r"engine\.replicas is 3, but the plan has devices for 2"):
        server_slots([PLACE] * 2, replicas=3)
    assert len(server_slots([PLACE] * 2, replicas=1)) == 1
    assert not log.exists()
