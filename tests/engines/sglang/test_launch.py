"""Starting servers: error messages, and no server is left behind."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from scripted_server import model_folder

from rollgym.core.errors import EngineLost, UsageError
from rollgym.engines.servers import process_reaper
from rollgym.engines.servers.server_process import start_all
from rollgym.engines.sglang import Server, ServerOptions, SglangEngine, launch, open_sglang

STAND_IN = """#!{python}
import subprocess, sys, http.server
words = sys.argv
port = int(words[words.index("--port") + 1])
subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *args): pass
print("listening", flush=True)
http.server.HTTPServer(("127.0.0.1", port), Healthy).serve_forever()
"""
"""In the place of Python: listens as a server does, and has a child."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "model")


@pytest.fixture(autouse=True)
def own_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    monkeypatch.setattr(process_reaper, "_folder", lambda: notes)


def program(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def test_the_command_line_has_all_options(folder: Path) -> None:
    options = ServerOptions(
        python="py", device="cpu", tp=2, context_length=99, extra=("--log-level", "error")
    )
    words = options.command(folder, 7, 3)
    assert words[:3] == ["py", "-m", "sglang.launch_server"]
    pairs = dict(zip(words[3:], words[4:], strict=False))
    assert pairs["--model-path"] == str(folder)
    assert pairs["--port"] == "7"
    assert pairs["--weight-version"] == "3"
    assert pairs["--tp-size"] == "2"
    assert pairs["--context-length"] == "99"
    assert pairs["--dtype"] == "float32"
    assert pairs["--attention-backend"] == "torch_native"
    assert words[-2:] == ["--log-level", "error"]
    assert "--attention-backend" not in ServerOptions(python="py", device="cuda").command(folder, 7, 3)


def test_a_python_without_sglang_is_reported(folder: Path, tmp_path: Path) -> None:
    without = program(tmp_path / "py", '#!/bin/sh\necho "$0: No module named sglang"\nexit 1\n')
    with pytest.raises(EngineLost, match="has no SGLang: install it there"):
        launch(folder, ServerOptions(python=without))


def test_a_server_that_dies_while_it_starts_shows_the_end_of_its_log(folder: Path, tmp_path: Path) -> None:
    dying = program(tmp_path / "py", "#!/bin/sh\necho one; echo 'CUDA is out of memory'; exit 3\n")
    with pytest.raises(EngineLost, match=r"(?s)died while starting \(exit code 3\).*CUDA is out of memory"):
        launch(folder, ServerOptions(python=dying))


def test_a_server_that_is_never_ready_is_killed(folder: Path, tmp_path: Path) -> None:
    server = Server(
        folder, ServerOptions(python=program(tmp_path / "py", "#!/bin/sh\nsleep 60\n"), start_seconds=0.3)
    )
    with pytest.raises(EngineLost, match=r"not ready within 0\.3 s"):
        server.start()
    assert not server.alive
    server.close()


def test_a_missing_python_and_a_missing_model_are_one_sentence_each(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Cannot start SGLang with /no/python"):
        launch(folder, ServerOptions(python="/no/python"))
    with pytest.raises(UsageError, match="is not a model folder"):
        launch(tmp_path / "none")
    with pytest.raises(UsageError, match="needs model_folder, and either url or server"):
        SglangEngine()
    with pytest.raises(UsageError, match="replicas must be at least 1"):
        open_sglang(folder, replicas=0)
    with pytest.raises(UsageError, match="cannot share a port"):
        open_sglang(folder, replicas=2, options=ServerOptions(port=30000))
    with pytest.raises(UsageError, match="replicas is 2, but 3 addresses are given"):
        open_sglang(folder, url=["http://a", "http://b", "http://c"], replicas=2)


def test_a_port_in_use_is_named(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"Port {port} of 127.0.0.1 is in use"):
            Server(folder, ServerOptions(port=port)).start()


def test_stopping_ends_every_process_and_a_restart_keeps_the_address(folder: Path, tmp_path: Path) -> None:
    python = program(tmp_path / "py", STAND_IN.format(python=sys.executable))
    server = Server(folder, ServerOptions(python=python))
    server.start()
    first, url = server.pid, server.url
    assert first is not None
    family = process_reaper.session_pids(first, process_reaper.start_time(first))
    assert len(family) == 2
    os.kill(first, 9)
    server.restart()
    assert server.url == url
    assert server.starts == 2
    assert not any(process_reaper.start_time(pid) for pid in family)
    second = server.pid
    server.close()
    server.close()
    assert second is not None
    assert not process_reaper.start_time(second)


ASKS_FOR_A_KEY = """#!{python}
import json, sys, http.server
words = sys.argv
port = int(words[words.index("--port") + 1])
key = json.loads(open(words[words.index("--config") + 1]).read().partition(":")[2])
print("server_args: api_key=" + key, words, flush=True)
class Guarded(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        good = self.headers.get("Authorization") == "Bearer " + key
        self.send_response(200 if good else 401)
        self.end_headers()
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", port), Guarded).serve_forever()
"""
"""Like SGLang with an API key: takes it from its configuration file, prints its arguments."""


def test_a_server_has_a_key_that_no_other_user_can_see(folder: Path, tmp_path: Path) -> None:
    """Its port is open to every user of the machine; its command line and log are read by others."""
    python = program(tmp_path / "py", ASKS_FOR_A_KEY.format(python=sys.executable))
    one, other = (Server(folder, ServerOptions(python=python)) for _ in range(2))
    try:
        one.start()
        assert one.healthy(paused=True)
        assert httpx.get(f"{one.url}/model_info", trust_env=False).status_code == 401
        assert len(one.api_key) >= 32
        assert one.api_key != other.api_key
        words = Path(f"/proc/{one.pid}/cmdline").read_bytes().decode()
        assert one.api_key not in words
        assert one.api_key not in Path(f"/proc/{one.pid}/environ").read_bytes().decode()
        file = Path(words.split("\0")[words.split("\0").index("--config") + 1])
        assert file.parent.stat().st_mode & 0o077 == 0
        assert "api_key=" in one.log
        assert one.api_key not in one.log
    finally:
        one.close()
        other.close()
    assert not file.parent.exists()


def test_the_key_cannot_be_passed_in_extra() -> None:
    for extra in (("--config", "x.yaml"), ("--api-key=abc",)):
        with pytest.raises(UsageError, match=f"extra must not contain {extra[0].partition('=')[0]}"):
            ServerOptions(extra=extra)


def test_a_server_that_hangs_is_killed_and_can_be_started_again(folder: Path, tmp_path: Path) -> None:
    """Not dead, but stopped: every call to it would wait for minutes."""
    python = program(tmp_path / "py", STAND_IN.format(python=sys.executable))
    server = Server(folder, ServerOptions(python=python, hang_seconds=1.0))
    server.start()
    first = server.pid
    assert first is not None
    try:
        os.kill(first, signal.SIGSTOP)
        deadline = time.monotonic() + 60
        while server.alive and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not server.alive
        server.restart()
        assert server.pid not in (None, first)
        assert server.healthy()
    finally:
        server.close()


def test_only_servers_of_dead_owners_are_killed(tmp_path: Path) -> None:
    def sleeper() -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sleep", "600"], start_new_session=True)

    with sleeper() as ours, sleeper() as orphan, sleeper() as stranger:
        try:
            process_reaper.register(ours.pid, process_reaper.start_time(ours.pid))
            notes = tmp_path / "notes"
            began = process_reaper.start_time(orphan.pid)
            gone = f'"owner": {os.getpid()}, "owner_began": "1"'
            (notes / "1.json").write_text(
                f'{{"pid": {orphan.pid}, "began": "{began}", {gone}}}', encoding="utf-8"
            )
            # A number that is another's by now: it began at another moment.
            (notes / "2.json").write_text(
                f'{{"pid": {stranger.pid}, "began": "5", {gone}}}', encoding="utf-8"
            )
            (notes / "3.json").write_text("nonsense", encoding="utf-8")
            assert process_reaper.reap_orphans() == [orphan.pid]
            assert orphan.wait(30) == -9
            time.sleep(0.05)
            assert ours.poll() is None
            assert stranger.poll() is None
        finally:
            for one in (ours, orphan, stranger):
                one.kill()


def test_if_one_server_fails_all_are_closed(folder: Path, tmp_path: Path) -> None:
    good = ServerOptions(python=program(tmp_path / "slow", "#!/bin/sh\nsleep 60\n"))
    bad = ServerOptions(python=program(tmp_path / "bad", "#!/bin/sh\nexit 3\n"))
    servers = [Server(folder, good), Server(folder, bad)]
    with pytest.raises(EngineLost, match="exit code 3"):
        start_all(servers)
    assert not any(server.alive for server in servers)
    assert servers[0].pid is None


OWNER = """
import importlib.util, os, signal, subprocess
spec = importlib.util.spec_from_file_location("process_reaper", {file!r})
process_reaper = importlib.util.module_from_spec(spec)
spec.loader.exec_module(process_reaper)
server = subprocess.Popen(["sleep", "600"], start_new_session=True)
process_reaper.guard(server.pid, process_reaper.start_time(server.pid))
print(server.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_server_is_killed_when_its_owner_is_killed() -> None:
    command = [sys.executable, "-S", "-c", OWNER.format(file=process_reaper.__file__)]
    owner = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    assert owner.returncode == -9
    server = int(owner.stdout)
    while process_reaper.start_time(server):
        time.sleep(0.02)
