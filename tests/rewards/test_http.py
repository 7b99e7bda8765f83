"""The HTTP scorer against a real server on this machine: responses, errors, retries, secrets, limits."""

import asyncio
import json
import logging
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from virtual import run

from rollgym.core.errors import RewardError
from rollgym.core.failures import failure_of
from rollgym.core.serialization import decode_episode, encode_episode
from rollgym.rewards import Score, score_episode
from rollgym.rewards.http import FIRST_WAIT, MAX_RESPONSE_BYTES, MAX_WAIT, HttpScorer

SECRET = "Bearer sk-very-secret-0123456789"
Answer = tuple[int, bytes]


class Server:
    """Answers each request with the next of ``answers`` (the last one forever), and records the requests."""

    def __init__(self) -> None:
        self.answers: list[Answer | Callable[[], Answer]] = [(200, b'{"reward": 0.5}')]
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.at_once = self.most_at_once = 0
        self.release = threading.Event()
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                outer.answer(self)

            def log_message(self, *args: Any) -> None:
                return

        self.httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.httpd.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.httpd.server_port}/score"
        self.thread = threading.Thread(target=self.httpd.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        with self._lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            self.bodies.append(handler.rfile.read(int(handler.headers["Content-Length"])))
            self.headers.append({name.lower(): value for name, value in handler.headers.items()})
            planned = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        status, body = planned() if callable(planned) else planned
        try:
            if status:
                handler.send_response(status)
                handler.send_header("Content-Length", str(len(body)))
                if 300 <= status < 400:
                    handler.send_header("Location", f"{self.url}/elsewhere")
                handler.end_headers()
                handler.wfile.write(body)
            else:
                handler.connection.shutdown(socket.SHUT_RDWR)
                handler.close_connection = True
        except OSError:
            handler.close_connection = True
        finally:
            with self._lock:
                self.at_once -= 1

    def wait(self) -> Answer:
        self.release.wait(30.0)
        return 200, b'{"reward": 1}'

    def close(self) -> None:
        self.release.set()
        self.httpd.shutdown()
        self.httpd.server_close()
        self.thread.join()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def ask(url: str, episode: Any, waits: list[float] | None = None, **options: Any) -> Score:
    async def main() -> Score:
        scorer = HttpScorer(url, **options)

        async def sleep(seconds: float) -> None:
            if waits is not None:
                waits.append(seconds)

        scorer.http.sleep = sleep
        try:
            return await scorer.score(episode)
        finally:
            await scorer.close()

    return asyncio.run(main())


def test_the_episode_is_posted_whole_and_the_answer_is_its_score(kit: Any, server: Server) -> None:
    answer = {"reward": 0.25, "success": False, "parts": {"a": 1}, "note": "fine", "took": 3}
    server.answers = [(200, json.dumps(answer).encode())]
    episode = kit.episode()
    assert ask(server.url, episode) == Score(0.25, False, {"a": 1.0}, "fine")
    assert decode_episode(server.bodies[0]) == episode
    assert server.headers[0]["content-type"] == "application/json"


@pytest.mark.parametrize("trouble", [(503, b"busy"), (500, b"oops"), (0, b"")])
def test_transient_errors_are_retried_with_growing_waits(kit: Any, server: Server, trouble: Answer) -> None:
    waits: list[float] = []
    server.answers = [trouble, trouble, (200, b'{"reward": 2}')]
    assert ask(server.url, kit.episode(), waits).reward == 2.0
    assert len(server.bodies) == 3
    assert len(set(server.bodies)) == 1
    assert FIRST_WAIT / 2 <= waits[0] <= FIRST_WAIT
    assert FIRST_WAIT <= waits[1] <= 2 * FIRST_WAIT


def test_the_last_attempt_reports_the_reason(kit: Any, server: Server) -> None:
    waits: list[float] = []
    server.answers = [(503, b"busy\n  now")]
    with pytest.raises(RewardError, match=r"answered 503: busy now \(13 attempts\)"):
        ask(server.url, kit.episode(), waits, retries=12)
    assert len(server.bodies) == 13
    assert max(waits) <= MAX_WAIT


def test_a_refused_connection_is_retried(kit: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/score"
    waits: list[float] = []
    with pytest.raises(RewardError, match=r"cannot be reached: .* \(3 attempts\)"):
        ask(url, kit.episode(), waits, retries=2)
    assert len(waits) == 2


@pytest.mark.parametrize("status", [400, 401, 404, 422, 429, 302, 307])
def test_a_refusal_is_final(kit: Any, server: Server, status: int) -> None:
    server.answers = [(status, b"no")]
    with pytest.raises(RewardError, match=f"answered {status}: no"):
        ask(server.url, kit.episode())
    assert len(server.bodies) == 1, "neither tried again nor carried elsewhere by a redirect"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "did not answer with JSON"),
        (b"\xff\xfe", "did not answer with JSON"),
        (b'{"reward": NaN}', "did not answer with JSON"),
        (b"[" * 5000, "did not answer with JSON"),
        (b"0.5", "did not answer with a JSON object"),
        (b"{}", "'reward' is missing"),
        (b'{"reward": "1"}', "must be a number, not a str"),
        (b'{"reward": 1e999}', "must be finite|did not answer with JSON"),
        (b'{"reward": null}', "must be a number, not null"),
        (b'{"reward": 1, "success": "yes"}', "success must be true, false or null"),
        (b" " * (MAX_RESPONSE_BYTES + 1), f"longer than {MAX_RESPONSE_BYTES} bytes"),
    ],
)
def test_an_invalid_score_is_a_failure(kit: Any, server: Server, body: bytes, said: str) -> None:
    server.answers = [(200, body)]
    with pytest.raises(RewardError, match=said):
        ask(server.url, kit.episode())
    assert len(server.bodies) == 1


def test_a_server_that_never_answers_is_given_up_at_the_deadline(kit: Any, server: Server) -> None:
    server.answers = [server.wait]
    with pytest.raises(RewardError, match=r"gave no score within 0.2 s"):
        ask(server.url, kit.episode(), timeout=0.2)


def test_the_deadline_holds_for_all_attempts_together(kit: Any, server: Server) -> None:
    async def main() -> None:
        scorer = HttpScorer(server.url, timeout=0.3, retries=10**6)
        try:
            with pytest.raises(RewardError, match=r"gave no score within 0.3 s"):
                await scorer.score(kit.episode())
        finally:
            await scorer.close()

    server.answers = [(503, b"busy")]
    asyncio.run(main())


def test_a_cancelled_score_stops_at_once(kit: Any, server: Server) -> None:
    async def main() -> None:
        scorer = HttpScorer(server.url)
        task = asyncio.create_task(scorer.score(kit.episode()))
        while not server.bodies:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task], timeout=20.0)
        assert task.cancelled()
        await scorer.close()

    server.answers = [server.wait]
    asyncio.run(main())


def test_no_more_at_once_than_asked_for(kit: Any, server: Server) -> None:
    def slow() -> Answer:
        time.sleep(0.05)
        return 200, b'{"reward": 1}'

    async def main() -> list[Score]:
        scorer = HttpScorer(server.url, concurrency=2)
        try:
            return await asyncio.gather(*(scorer.score(kit.episode(name=str(n))) for n in range(8)))
        finally:
            await scorer.close()

    server.answers = [slow]
    assert [score.reward for score in asyncio.run(main())] == [1.0] * 8
    assert server.most_at_once == 2


def test_waiting_for_others_does_not_count_as_taking_long(kit: Any) -> None:
    """Five episodes one after another take 50 s, each of them 10 of its 15."""

    async def main() -> tuple[list[Score], float]:
        scorer = HttpScorer("http://localhost:1/", timeout=15.0, concurrency=1)

        async def post(body: bytes) -> dict[str, Any]:
            await asyncio.sleep(10.0)
            return {"reward": 1}

        scorer._post = post  # type: ignore[method-assign]
        scores = await asyncio.gather(*(scorer.score(kit.episode(name=str(n))) for n in range(5)))
        return scores, asyncio.get_running_loop().time()

    assert run(main) == ([Score(1.0)] * 5, 50.0)


# Secrets


def test_headers_come_from_the_environment_and_are_shown_nowhere(
    kit: Any, server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("REWARD_AUTH", SECRET)
    caplog.set_level(logging.DEBUG)
    bare = SECRET.split()[1]
    server.answers = [
        (200, json.dumps({"reward": 1, "note": f"I got {SECRET}"}).encode()),
        (403, f"{SECRET} or {bare} is not known".encode()),
    ]

    async def main() -> tuple[Any, RewardError]:
        scorer = HttpScorer(server.url, header_env={"Authorization": "REWARD_AUTH"})
        try:
            episode = await score_episode(scorer, kit.episode())
            with pytest.raises(RewardError) as caught:
                await score_episode(scorer, kit.episode())
            for shown in (repr(vars(scorer)), repr(scorer._headers)):
                assert bare not in shown
            with pytest.raises(TypeError, match="must not be copied"):
                pickle.dumps(scorer._headers)
            return episode, caught.value
        finally:
            await scorer.close()

    episode, error = asyncio.run(main())
    assert server.headers[0]["authorization"] == SECRET
    failure = failure_of(error)
    everything = [
        encode_episode(episode).decode(),
        str(error),
        failure.message,
        failure.traceback,
        caplog.text,
    ]
    assert not [text for text in everything if bare in text]
    assert "[secret] or [secret] is not known" in str(error)
