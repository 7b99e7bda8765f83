"""The live page: it follows a run, gives nothing to other sites and takes nothing from anybody."""

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from made_runs import line_of, make_episode

pytest.importorskip("uvicorn")

from rollgym.view.live import make_server

MakeRun = Callable[..., Path]


@pytest.fixture
def serve() -> Iterator[Callable[[Path], str]]:
    """Serve a run's folder on a free port until the test ends."""
    running = []

    def start(folder: Path) -> str:
        server = make_server(folder)
        place = socket.create_server(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [place]})
        thread.start()
        running.append((server, thread))
        return f"http://127.0.0.1:{place.getsockname()[1]}"

    yield start
    for server, thread in running:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def append(folder: Path, name: str, data: bytes) -> None:
    with open(folder / name, "ab") as file:
        file.write(data)


def test_the_answers_are_what_the_folder_holds(make_run: MakeRun, serve: Callable[[Path], str]) -> None:
    folder = make_run([make_episode(0), make_episode(1)])
    with httpx.Client(base_url=serve(folder)) as client:
        first = client.get("/api/overview").json()
        assert first["episodes"] == 2
        assert client.get("/api/overview", params={"seen": first["tag"]}).json() == {"same": True}
        append(folder, "episodes.jsonl", line_of(make_episode(2)) + line_of(make_episode(3))[:40])
        assert client.get("/api/overview", params={"seen": first["tag"]}).json()["episodes"] == 3
        assert [cells[1] for cells in client.get("/api/rows?from=1").json()["rows"]] == ["e1", "e2"]
        assert len(client.get("/api/rows?from=-1").json()["rows"]) == 3
        assert client.get("/api/episode/2").json()["id"] == "e2"
        assert client.get("/api/episode/3").status_code == 404
        assert client.get("/api/timeline").json()["lanes"] == []


def test_it_is_closed_to_others(make_run: MakeRun, serve: Callable[[Path], str]) -> None:
    with httpx.Client(base_url=serve(make_run([make_episode(0)]))) as client:
        page = client.get("/")
        rules = page.headers["content-security-policy"]
        assert "default-src 'none'" in rules
        assert "connect-src 'self'" in rules
        assert "frame-ancestors 'none'" in rules
        assert page.headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in page.headers
        assert client.get("/", headers={"host": "evil.example"}).status_code == 400
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            for path in ("/", "/api/overview", "/api/rows", "/api/episode/0", "/api/timeline"):
                assert client.request(method, path).status_code == 405
        assert client.get("/../manifest.json").status_code == 404


def test_a_run_in_progress_updates(
    make_run: MakeRun, serve: Callable[[Path], str], open_page: Callable[..., Any]
) -> None:
    folder = make_run(
        [line_of(make_episode(n), step=1) for n in range(3)],
        manifest={"kind": "train"},
        metrics=[{"step": 1, "return": 0.5}],
    )
    page = open_page(serve(folder))
    page.wait_for_selector(".cards")
    assert page.inner_text(".card >> nth=0").startswith("3")
    append(folder, "episodes.jsonl", b"".join(line_of(make_episode(n), step=2) for n in range(3, 8)))
    append(folder, "metrics.jsonl", b'{"step": 2, "return": 0.75}\n')
    page.wait_for_selector(".card .value:text-is('8')")
    assert "Return" in page.inner_text("main")
    page.click("nav.main >> text=Episodes")
    page.wait_for_selector(".rows .row:has-text('e7')")
    page.click(".rows .row:has-text('e5')")
    page.wait_for_selector(".episode h2:has-text('e5')")
    append(folder, "episodes.jsonl", line_of(make_episode(8), step=3))
    page.wait_for_selector(".rows .row:has-text('e8')")
    assert page.inner_text(".episode h2") == "e5"  # what one reads stays


def test_a_run_that_goes_back_is_followed(
    make_run: MakeRun, serve: Callable[[Path], str], open_page: Callable[..., Any]
) -> None:
    folder = make_run([make_episode(n) for n in range(4)])
    page = open_page(serve(folder), "/#episodes")
    page.wait_for_selector(".rows .row:has-text('e3')")
    (folder / "episodes.jsonl").write_bytes(line_of(make_episode(0)) + line_of(make_episode(9)))
    page.wait_for_selector(".rows .row:has-text('e9')")
    assert page.locator(".rows .row").count() == 2
