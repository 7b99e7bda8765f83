"""Servers in Ray actors: where sessions go, what comes after a death, and that no server is left behind.

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
from rollgym.engines import GenerateRequest, Generation, Sampling, WeightSource
from rollgym.engines.replicas import ReplicaEngine
from rollgym.engines.sglang import ServerOptions, orphans
from rollgym.engines.sglang.actor import SglangActor, open_sglang_on_ray, server_places, start_servers
from rollgym.errors import EngineLost, UsageError

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


def test_two_servers_share_sessions_and_come_back_from_any_death(
    folder: Path, options: ServerOptions, log: Path
) -> None:
    async def main() -> None:
        engine = await open_sglang_on_ray(folder, [PLACE, PLACE], options=options)
        assert isinstance(engine, ReplicaEngine)
        assert engine.context_length == 100
        assert len(started(log)) == 2
        await asyncio.gather(*(engine.generate(ask(f"s{number}")) for number in range(6)))
        homes = {name: home.number for name, home in engine._homes.items()}
        assert sorted(homes.values()) == [0, 0, 0, 1, 1, 1]
        await asyncio.gather(*(engine.generate(ask(f"s{number}")) for number in range(6)))
        assert homes == {name: home.number for name, home in engine._homes.items()}, "they stay"

        await engine.update_weights(3, WeightSource(path=folder))
        assert (await engine.generate(ask("s0"))).version == 3
        first = engine.engines[0]
        assert isinstance(first, SglangActor)
        await memory_goes_and_comes(engine, folder)
        await a_server_dies(engine, first, log)
        await an_actor_dies(engine, first, log)
        pids = [int(words[0]) for words in started(log)]
        await engine.close()
        await until(lambda: not any(orphans.started(pid) for pid in pids))

    asyncio.run(main())


async def memory_goes_and_comes(engine: ReplicaEngine, folder: Path) -> None:
    """Nothing is generated meanwhile; new weights may come, and otherwise the last ones do."""
    for version in (3, 4):
        await engine.release()
        waiting = asyncio.create_task(engine.generate(ask("s1")))
        await engine.update_weights(version, WeightSource(path=folder))
        assert not waiting.done()
        await engine.resume()
        assert (await waiting).version == version
    await engine.release()
    await engine.resume()
    assert (await engine.generate(ask("s1"))).version == 4


async def a_server_dies(engine: ReplicaEngine, first: SglangActor, log: Path) -> None:
    """The actor starts another; sessions go elsewhere or wait, and it has the last weights."""
    assert first._line is not None
    pid = await first._line.actor.server_pid.remote()
    os.kill(pid, signal.SIGKILL)
    assert {(await answered(engine, f"s{number}")).version for number in range(6)} == {4}
    await until(lambda: len(started(log)) == 3 and not engine.lost)
    assert (await first.generate(ask("alone"))).version == 4
    assert first.deaths == 0


async def an_actor_dies(engine: ReplicaEngine, first: SglangActor, log: Path) -> None:
    """Another takes its place, with the last weights; the server of the dead one is ended."""
    assert first._line is not None
    pid = await first._line.actor.server_pid.remote()
    ray.kill(first._line.actor)
    await until(lambda: first.deaths == 1)
    assert (await first.generate(ask("alone"))).version == 4
    assert len(started(log)) == 4
    await until(lambda: not orphans.started(pid))
    assert {(await answered(engine, f"s{number}")).version for number in range(6)} == {4}


@pytest.mark.slow
def test_a_server_over_two_devices_sees_both(folder: Path, options: ServerOptions, log: Path) -> None:
    async def main() -> None:
        (engine,) = await start_servers(folder, server_places([PLACE, PLACE], 2), options=options)
        await engine.close()

    asyncio.run(main())
    _, devices, *words = started(log)[0]
    assert sorted(devices.split(",")) == ["0", "1"]
    assert words[words.index("--tp-size") + 1] == "2"


@pytest.mark.slow
def test_what_cannot_be_started_is_one_sentence_and_leaves_nothing(
    folder: Path, options: ServerOptions, tmp_path: Path, log: Path
) -> None:
    async def failed(**changes: Any) -> BaseException:
        with pytest.raises((UsageError, EngineLost)) as caught:
            await start_servers(**{"model": folder, "places": [PLACE], "options": options, **changes})
        return caught.value

    dying = tmp_path / "dying"
    dying.write_text("#!/bin/sh\necho 'No module named sglang'\nexit 1\n", encoding="utf-8")
    dying.chmod(0o755)

    async def main() -> None:
        assert "at least one place" in str(await failed(places=[]))
        port = ServerOptions(python=options.python, port=7)
        assert "cannot have one port" in str(await failed(places=[PLACE, PLACE], options=port))
        assert "no model folder" in str(await failed(model=tmp_path / "none"))
        gone = await failed(options=ServerOptions(python=str(dying), device="cpu"))
        assert "has no SGLang: install it there" in str(gone)

    asyncio.run(main())
    with pytest.raises(UsageError, match="3 devices cannot be shared out to servers of 2 each"):
        server_places([PLACE] * 3, 2)
    with pytest.raises(UsageError, match=r"engine\.replicas is 3, but the plan has devices for 2"):
        server_places([PLACE] * 2, replicas=3)
    assert len(server_places([PLACE] * 2, replicas=1)) == 1
    assert not log.exists()
