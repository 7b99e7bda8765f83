"""A language model's endpoint that misbehaves: finished episodes stay, failures are counted and told."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from local_http import LocalServer

from .conftest import SUITE, write_suite

Command = Callable[..., Any]
Answer = Callable[[int], tuple[int, bytes]]


def good(text: str = "<answer>yes</answer>") -> tuple[int, bytes]:
    usage = {"prompt_tokens": 10, "completion_tokens": 2}
    body = {"choices": [{"message": {"role": "assistant", "content": text}}], "usage": usage}
    return 200, json.dumps(body).encode()


class Endpoint:
    """Answers the n-th request with ``answer(n)``."""

    def __init__(self) -> None:
        self.answer: Answer = lambda number: good()
        self.count = 0
        endpoint, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                with lock:
                    endpoint.count += 1
                    number = endpoint.count
                status, body = endpoint.answer(number)
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: Any) -> None:
                pass

        served = LocalServer(Handler)
        self.url, self.close = f"{served.url}/v1", served.close


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    served = Endpoint()
    yield served
    served.close()


def run(command: Command, endpoint: Endpoint, *more: object) -> Any:
    words = ("--agent", "chat", "--model", "m", "--base-url", endpoint.url, "--agent-arg", "api_key_env=null")
    return command("bench", "run", "little.toml", *words, "--out", "r", "--json", *more)


def test_a_model_plays_and_its_tokens_are_counted(
    rollgym_command: Command, endpoint: Endpoint, tmp_path: Path
) -> None:
    write_suite(tmp_path)
    ran = run(rollgym_command, endpoint)
    assert ran.code == 0, ran.err
    summary = json.loads(ran.out)
    assert (summary["success"], summary["golden"]["checked"]) == (1.0, 0)
    assert summary["tokens"] == 12 * 3 * 12, "12 episodes of 3 turns of 12 tokens"
    assert summary["entries"][0]["completion_tokens"] == 6 * 3 * 2
    assert rollgym_command("bench", "verify", "r", "--sample", 0).code == 0
    assert rollgym_command("replay", "r", "--env-module", "faulty").code == 0


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (lambda: (429, b"{}"), "429"),
        (lambda: (500, b'{"error": "out of order"}'), "500"),
        (lambda: (200, b"<html>garbage"), ""),
        (lambda: (time.sleep(4), (200, b"{}"))[1], ""),
    ],
    ids=["429", "500", "garbage", "slow"],
)
def test_failures_are_counted_and_rerun_once_the_endpoint_recovers(
    rollgym_command: Command,
    endpoint: Endpoint,
    tmp_path: Path,
    answer: Callable[[], tuple[int, bytes]],
    sentence: str,
) -> None:
    write_suite(tmp_path, SUITE.replace("tasks = 6", "tasks = 2").replace("tasks = 3", "tasks = 1"))
    # The first episode (three turns) is answered, then the trouble begins.
    endpoint.answer = lambda number: good() if number <= 3 else answer()
    patience = ("--agent-arg", "retries=0", "--agent-arg", "timeout=3")
    ran = run(rollgym_command, endpoint, *patience)
    assert ran.code == 1
    assert sentence in ran.err
    assert "3 of 4 episodes failed" in ran.err
    summary = json.loads(ran.out)
    assert summary["failed"] == 3
    assert summary["entries"][0]["success"] == 1.0, "failures have no score"
    assert summary["entries"][1]["success"] is None
    first = (tmp_path / "r/entries/alone/episodes.jsonl").read_bytes().splitlines()[0]
    endpoint.answer = lambda number: good()
    again = run(rollgym_command, endpoint, *patience, "--resume")
    assert again.code == 0, again.err
    assert json.loads(again.out)["failed"] == 0
    assert (tmp_path / "r/entries/alone/episodes.jsonl").read_bytes().startswith(first)


def test_a_dead_endpoint_ends_the_suite_early_with_a_hint_to_resume(
    rollgym_command: Command, endpoint: Endpoint, tmp_path: Path
) -> None:
    write_suite(tmp_path, SUITE.replace("tasks = 6", "tasks = 30"))
    endpoint.answer = lambda number: (500, b"{}")
    ran = run(rollgym_command, endpoint, "--agent-arg", "retries=0")
    assert ran.code == 1
    assert "All of the first 10 episodes failed" in ran.err
    assert "Stopped with 10 of 36 episodes, 10 of them failed" in ran.err
    assert "--resume plays the rest" in " ".join(ran.err.split())
    endpoint.answer = lambda number: good()
    again = run(rollgym_command, endpoint, "--agent-arg", "retries=0", "--resume")
    assert again.code == 0, again.err
    assert json.loads(again.out)["episodes"] == 36
