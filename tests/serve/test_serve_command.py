"""``rollgym serve`` from the command line."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollgym.core.extras import install_command
from rollgym.core.types import Outcome
from rollgym.io.run_dir import read_run
from rollgym.trainer.data.sequences import token_episode
from rollgym.trainer.imitation.retokenize import retokenize

Command = Callable[..., Any]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_open_conversations_as_cancelled_and_writes_everything(
    model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    words = ["serve", str(model), "--port", "0", "--out", "run", "--env", "rollgym/FrozenLake-v0"]
    with subprocess.Popen(
        [sys.executable, "-m", "rollgym", *words, "--agent-arg", "device=cpu"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        told = process.stdout.readline()
        found = re.search(r"Serving 'policy' at (http://127.0.0.1:\d+)/v1, recording to run", told)
        assert found, told + process.stderr.read()
        body = {"model": "policy", "messages": [{"role": "user", "content": "@ F"}], "max_tokens": 4}
        for name in ("done", "open"):
            path = f"{found[1]}/session/{name}/v1/chat/completions"
            assert httpx.post(path, json=body, timeout=60).status_code == 200
        end = httpx.post(f"{found[1]}/session/done/end", json={"reward": 1, "success": True})
        assert end.status_code == 200
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "2 episodes (1 terminated, 1 cancelled) are in run." in out
    assert "Traceback" not in err
    manifest, (done, left) = read_run(tmp_path / "run")
    assert (done.outcome, left.outcome, left.length) == (Outcome.TERMINATED, Outcome.CANCELLED, 1)
    assert manifest["env"]["id"] == done.spec.env_id == "rollgym/FrozenLake-v0"
    assert done.spec.split == "train"


def test_what_was_recorded_can_be_imitated(serving: Any, model: Path) -> None:
    import asyncio

    from rollgym.core.agent import AgentSetup, make_agent

    async def run() -> Any:
        async with serving() as place:
            finished = place.server.episodes()
            system = {"role": "system", "content": "Walk to G."}
            first = await place.say([system, {"role": "user", "content": "@ F"}], "one")
            said = [system, {"role": "user", "content": "@ F"}, {"role": "assistant", "content": first}]
            await place.say([*said, {"role": "user", "content": "F @"}], "one")
            await place.end("one", success=True)
        return [episode async for episode in finished]

    (episode,) = asyncio.run(run())
    agent: Any = make_agent("lm", AgentSetup(env_id="x"), model=str(model))
    told = retokenize(episode, agent)
    assert [turn.observation for turn in told.turns] == ["@ F", "F @"]
    assert [turn.response or turn.action for turn in told.turns] == [turn.action for turn in episode.turns]
    assert token_episode(told).num_tokens > 0


def test_mistakes_are_one_sentence_each(
    rollgym_command: Command, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "manifest.json").write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cases = {
            "There is no folder nowhere": ["nowhere", "--port", 0],
            "The folder empty does not hold a model": ["empty", "--port", 0],
            f"Cannot listen on 127.0.0.1, port {port}": [model, "--port", port],
            "The port must be from 0 to 65535": [model, "--port", 70000],
            "pass --api-key-env NAME, or use host 127.0.0.1": [model, "--host", "0.0.0.0", "--port", 0],
            "the variable NO_KEY is empty or not set": [model, "--api-key-env", "NO_KEY"],
            "--resume needs --out": [model, "--resume", "--port", 0],
            "The idle time must be positive": [model, "--idle", 0],
            "option of agent 'lm'": [model, "--port", 0, "--agent-arg", "devices=cpu"],
            "full already contains results": [model, "--port", 0, "--out", "full"],
        }
        for sentence, words in cases.items():
            ran = rollgym_command("serve", *words)
            assert ran.code == 2, (sentence, ran)
            assert sentence in ran.err
            assert len(ran.err.strip().splitlines()) <= 2


def test_a_missing_extra_is_named(
    rollgym_command: Command, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollgym.core.extras.find_spec", lambda name: None)
    ran = rollgym_command("serve", model, "--port", 0)
    assert (ran.code, install_command("serve") in ran.err) == (2, True)


def test_the_help_shows_an_example(rollgym_command: Command) -> None:
    ran = rollgym_command("serve", "--help")
    assert ran.code == 0
    assert "Example: rollgym serve models/lake" in ran.out
