"""Sleep and wake_up of SGLang servers: the calls sent, and their weights."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted_server import Scripted, as_json, model_folder, reply, scripted

from rollgym.core.errors import AgentError
from rollgym.engines.base import GenerateRequest, Sampling, WeightSource
from rollgym.engines.router import RoutedEngine
from rollgym.engines.sglang import SglangEngine

CONTROL = (
    "/pause_generation",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/update_weights_from_disk",
    "/flush_cache",
    "/continue_generation",
    "/generate",
)


@pytest.fixture
def server() -> Iterator[Scripted]:
    with scripted() as script:
        yield script


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "model")


def told(server: Scripted) -> list[str]:
    """What was asked of the server, in order; memory with its tags, weights with their version."""
    found = []
    for path, body in server.seen:
        if path in CONTROL:
            word = path[1:].removesuffix("_occupation")
            more = (body or {}).get("tags") or (body or {}).get("weight_version") or ""
            found.append(f"{word} {' '.join(more) if isinstance(more, list) else more}".strip())
    return found


def ask(name: str = "r") -> GenerateRequest:
    return GenerateRequest(request_id=name, prompt_ids=(3, 4), sampling=Sampling(max_tokens=4), session=name)


def test_waking_up_restores_memory_and_the_last_weights(server: Scripted, folder: Path) -> None:
    async def main() -> None:
        engine = SglangEngine(server.url, folder)
        await engine.sleep()
        await engine.sleep()
        waiting = asyncio.create_task(engine.generate(ask()))
        await engine.wake_up()
        assert (await waiting).version == 0
        await engine.close()

    asyncio.run(main())
    assert told(server) == [
        "pause_generation",
        "release_memory kv_cache weights",
        "resume_memory weights kv_cache",
        "update_weights_from_disk 0",
        "continue_generation",
        "generate",
    ]


def test_weights_received_while_asleep_are_written_once(
    server: Scripted, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        engine = SglangEngine(server.url, folder)
        monkeypatch.setattr(engine._sender, "check", lambda servers, source: source)
        await engine.sleep()
        await engine.update_weights(1, WeightSource(path=folder))
        waiting = asyncio.create_task(engine.generate(ask()))
        await engine.wake_up()
        assert (await waiting).version == 1
        await engine.close()

    asyncio.run(main())
    # The cache is taken back last, and emptied: the update could not do so.
    assert told(server) == [
        "pause_generation",
        "release_memory kv_cache weights",
        "resume_memory weights",
        "update_weights_from_disk 1",
        "resume_memory kv_cache",
        "flush_cache",
        "continue_generation",
        "generate",
    ]


def test_a_server_that_rejects_a_release_is_not_asked_to_resume_memory(
    server: Scripted, folder: Path
) -> None:
    server.scripts["/release_memory_occupation"] = lambda body: (400, b"no memory saver")

    async def main() -> None:
        engine = SglangEngine(server.url, folder)
        with pytest.raises(AgentError, match="answered 400: no memory saver"):
            await engine.sleep()
        await engine.wake_up()
        assert (await engine.generate(ask())).version == 0
        await engine.close()

    asyncio.run(main())
    assert not server.asked("/resume_memory_occupation")


def test_memory_resumed_without_weights_is_an_error(server: Scripted, folder: Path) -> None:
    async def main() -> None:
        engine = SglangEngine(server.url, folder)
        await engine.sleep(["weights"])
        await engine.resume_memory(["weights"])
        engine._tracker.gate.set()
        with pytest.raises(AgentError, match="weights were released: call wake_up"):
            await engine.generate(ask())
        await engine.wake_up()
        assert (await engine.generate(ask())).version == 0
        await engine.close()

    asyncio.run(main())


def test_one_replica_sleeps_while_the_others_generate(server: Scripted, folder: Path) -> None:
    async def main(other: Scripted) -> None:
        engine = RoutedEngine([SglangEngine(one.url, folder) for one in (server, other)])
        await engine.sleep(replicas=[0])
        await asyncio.gather(*(engine.generate(ask(f"s{number}")) for number in range(4)))
        assert (len(server.asked("/generate")), len(other.asked("/generate"))) == (0, 4)
        await engine.wake_up(replicas=[0])
        await engine.sleep()
        await engine.wake_up()
        made: list[Any] = await asyncio.gather(*(engine.generate(ask(f"t{number}")) for number in range(4)))
        assert len(made) == 4
        await engine.close()

    with scripted() as other:
        asyncio.run(main(other))
        assert [word for word in told(server) if "memory" in word] == [
            "release_memory kv_cache weights",
            "resume_memory weights kv_cache",
        ] * 2
        assert [word for word in told(other) if "memory" in word] == [
            "release_memory kv_cache weights",
            "resume_memory weights kv_cache",
        ]
    assert len(server.asked("/generate")) > 0


def test_replies_that_finish_during_an_interruption_are_kept(server: Scripted, folder: Path) -> None:
    """An abort takes its time; what it was for has ended by itself when it comes back."""
    begun, abort_came, replied = threading.Event(), threading.Event(), threading.Event()

    def generate(body: Any) -> Any:
        begun.set()
        assert abort_came.wait(10)
        return as_json(reply(body))

    def abort(body: Any) -> Any:
        abort_came.set()
        assert replied.wait(10)
        return as_json({"success": True})

    server.scripts |= {"/generate": generate, "/abort_request": abort}

    async def main() -> None:
        engine = SglangEngine(server.url, folder)
        asked = asyncio.create_task(engine.generate(ask()))
        asked.add_done_callback(lambda _: replied.set())
        await asyncio.to_thread(begun.wait, 10)
        await engine.pause()
        assert len((await asked).token_ids) == 4
        await engine.resume()
        await engine.close()

    asyncio.run(main())
    assert len(server.asked("/abort_request")) == 1
