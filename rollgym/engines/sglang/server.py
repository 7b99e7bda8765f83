"""SGLang server as a child process: starts it, monitors it, restarts it, and never leaves it running."""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any

import httpx

from rollgym.core.errors import EngineLost, UsageError
from rollgym.engines.sglang.client import auth_headers, transport
from rollgym.engines.sglang.process_reaper import (
    guard,
    reap_orphans,
    register,
    session_pids,
    signal_all,
    start_time,
    unregister,
)

log = logging.getLogger(__name__)
STOP_SECONDS = 15.0
_TAIL = 12
"""Lines of the log shown in an error."""
_CPU: tuple[str, ...] = (
    *("--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--disable-overlap-schedule", "--disable-cuda-graph"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Options of a server to start."""

    python: str = sys.executable
    """Python interpreter with SGLang installed, for example that of a separate virtual environment."""
    device: str | None = None
    """``cpu``, ``cuda`` or another device of SGLang; default: ``cpu`` if there is no accelerator."""
    dtype: str | None = None
    """Default: float32 on a CPU, else as in the model's configuration."""
    tp: int = 1
    """Tensor parallelism: number of devices of the server."""
    memory_fraction: float | None = None
    max_total_tokens: int | None = None
    """Size of the KV cache in tokens; default: as many as fit (on a CPU 65,536)."""
    max_running: int | None = None
    context_length: int | None = None
    memory_saver: bool = False
    """Required for `Engine.sleep` to free memory; no effect without an accelerator."""
    host: str = "127.0.0.1"
    port: int | None = None
    """Default: a free port."""
    api_key: str | None = field(default=None, repr=False)
    """Required in every call; default: random for each server. Servers behind a router share one."""
    start_seconds: float = 900.0
    hang_seconds: float = 120.0
    """A server that has not answered a health check for this many seconds is killed and restarted. The check
    is answered by its web server, independently of the model."""
    extra: tuple[str, ...] = ()
    """Additional command-line arguments, except --config and --api-key."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Additional environment variables."""

    def __post_init__(self) -> None:
        if not 0 < self.hang_seconds < math.inf:
            raise UsageError(f"hang_seconds must be positive and finite, not {self.hang_seconds}.")
        for word in self.extra:
            if word.partition("=")[0] in ("--config", "--api-key"):
                raise UsageError(
                    f"extra must not contain {word.partition('=')[0]}: rollgym passes the key of each server "
                    "in a config file. Pass other settings as separate arguments."
                )

    @property
    def on_cpu(self) -> bool:
        """Whether the server runs on the CPU."""
        if self.device is not None:
            return self.device == "cpu"
        return not any(Path(file).exists() for file in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))

    def command(self, model: Path, port: int, version: int) -> list[str]:
        """Return the command line."""
        cpu = self.on_cpu
        words: dict[str, Any] = {
            "--model-path": model,
            "--host": self.host,
            "--port": port,
            "--weight-version": version,
            "--device": "cpu" if cpu else self.device,
            "--dtype": self.dtype or ("float32" if cpu else None),
            "--tp-size": self.tp if self.tp > 1 else None,
            "--mem-fraction-static": self.memory_fraction or (0.5 if cpu else None),
            "--max-total-tokens": self.max_total_tokens or (65_536 if cpu else None),
            "--max-running-requests": self.max_running or (64 if cpu else None),
            "--context-length": self.context_length,
        }
        flags = [str(word) for name, value in words.items() if value is not None for word in (name, value)]
        more = [*(_CPU if cpu else ()), *(["--enable-memory-saver"] if self.memory_saver and not cpu else [])]
        return [self.python, "-m", "sglang.launch_server", *flags, *more, *self.extra]

    def environment(self) -> dict[str, str]:
        """Return the environment variables: ours, without those that would break or slow down the server."""
        env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        # The virtual environment and path of this process must not affect the server.
        for name in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME"):
            env.pop(name, None)
        # PYTHONSAFEPATH: files in the current folder must not shadow packages of the server.
        env |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONSAFEPATH": "1"}
        if self.on_cpu:
            env |= {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        return env | dict(self.env)


class Server:
    """One SGLang server and its subprocesses."""

    def __init__(self, model: Path, options: ServerOptions | None = None, *, version: int = 0) -> None:
        self.model = model.resolve()
        self.options = options or ServerOptions()
        self.version = version
        """Version of the weights in the folder."""
        self.starts = 0
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._began = ""
        self._guard: int | None = None
        self._closed = False
        self._log = Path(tempfile.mkdtemp(prefix="rollgym-sglang-")) / "server.log"
        self.api_key = self.options.api_key or secrets.token_hex(32)
        """Without it the server answers /health only: any user of the machine can reach its port."""
        atexit.register(self.stop)

    @property
    def url(self) -> str:
        """Address of the server."""
        return f"http://{self.options.host}:{self._port}"

    @property
    def pid(self) -> int | None:
        """Process id of the server's main process."""
        return None if self._process is None else self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the main process is running."""
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        """The last lines of its output."""
        try:
            text = self._log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        text = text.replace(self.api_key, "***")  # the server prints its arguments
        lines = [line for line in text.splitlines() if line.strip()]
        return "\n".join(lines[-_TAIL:])

    def start(self) -> None:
        """Start the server and wait until it can generate; raises `EngineLost` if it does not start."""
        if self._closed:
            raise EngineLost("The SGLang server was closed.")
        reap_orphans()
        self._port = self._free_port()
        self._launch()
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise
        process = self._process
        if process is not None:
            threading.Thread(
                target=self._watch, args=(process, self._began), name="rollgym-sglang-watch", daemon=True
            ).start()

    def healthy(self, *, paused: bool = False, seconds: float = 30.0) -> bool:
        """Whether it runs and generates; a paused server is only checked for an answer."""
        if not self.alive:
            return False
        path = "/model_info" if paused else "/health"
        try:
            with httpx.Client(timeout=seconds, **transport(self.url)) as client:
                answer = client.get(self.url + path, headers=auth_headers(self.api_key))
                return answer.status_code == 200
        except httpx.HTTPError:
            return False

    def restart(self) -> None:
        """Stop the server and start it again, at the same address if that is free."""
        self.stop()
        self.start()

    def stop(self) -> None:
        """Stop all its processes: SIGTERM, then SIGKILL. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        unregister(process.pid)
        guard_pipe, self._guard = self._guard, None
        try:
            self._end(process)
        finally:
            if guard_pipe is not None:
                os.close(guard_pipe)

    def close(self) -> None:
        """Stop for good and delete the log."""
        self._closed = True  # also ends a start in progress in another thread
        self.stop()
        atexit.unregister(self.stop)
        with suppress(OSError):
            self._log.unlink(missing_ok=True)
            self._key_file.unlink(missing_ok=True)
            self._log.parent.rmdir()

    def _watch(self, process: subprocess.Popen[bytes], began: str) -> None:
        """Kill a server that hangs, so that pending calls fail."""
        allowed = self.options.hang_seconds
        heard = time.monotonic()
        while self._process is process and process.poll() is None:
            if self.healthy(paused=True, seconds=allowed):
                heard = time.monotonic()
            elif time.monotonic() - heard >= allowed and self._process is process:
                log.warning(
                    "The SGLang server at %s has not answered for %g s: killing it.", self.url, allowed
                )
                signal_all(process.pid, began, SIGKILL)
                return
            time.sleep(min(5.0, allowed / 4))

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        for number, seconds in ((SIGTERM, STOP_SECONDS), (SIGKILL, STOP_SECONDS)):
            signal_all(process.pid, self._began, number)
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                process.poll()
                if process.returncode is not None and not session_pids(process.pid, self._began):
                    return
                time.sleep(0.05)

    @property
    def _key_file(self) -> Path:
        """Config file with the key, in a private folder: command lines are visible to every user."""
        return self._log.with_name("key.yaml")

    def _launch(self) -> None:
        options = self.options
        # JSON is YAML: the quotes keep a numeric key a string.
        self._key_file.write_text(f"api-key: {json.dumps(self.api_key)}\n", encoding="utf-8")
        command = options.command(self.model, self._port, self.version)
        command += ["--config", str(self._key_file)]
        try:
            with self._log.open("wb") as out:
                # A new session: all its processes can be killed together, and Ctrl-C only reaches us.
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=options.environment(),
                    start_new_session=True,
                )
        except OSError as error:
            raise UsageError(
                f"Cannot start SGLang with {options.python}: {error.strerror or error}."
            ) from None
        self.starts += 1
        self._began = start_time(self._process.pid)
        register(self._process.pid, self._began)
        self._guard = guard(self._process.pid, self._began)

    def _wait(self) -> None:
        until = time.monotonic() + self.options.start_seconds
        while not self.healthy():
            process = self._process
            if self._closed or process is None:
                raise EngineLost("The SGLang server was stopped while starting.")
            if process.poll() is not None:
                raise EngineLost(self._death(process.returncode))
            if time.monotonic() > until:
                seconds = self.options.start_seconds
                raise EngineLost(
                    f"The SGLang server was not ready within {seconds:g} s; end of its log:\n{self.log}"
                )
            time.sleep(0.25)

    def _death(self, code: int) -> str:
        text = self.log
        if "No module named 'sglang'" in text or "No module named sglang" in text:
            return (
                f"{self.options.python} has no SGLang: install it there (pip install sglang), or pass an "
                "interpreter that has it (python=...)."
            )
        return f"The SGLang server died while starting (exit code {code}); end of its log:\n{text}"

    def _free_port(self) -> int:
        preferred = self.options.port or self._port
        if preferred and _is_free(self.options.host, preferred):
            return preferred
        if self.options.port is not None:
            raise UsageError(
                f"Port {preferred} of {self.options.host} is in use: choose another, or leave port out to "
                "use a free one."
            )
        with socket.socket() as probe:
            probe.bind((self.options.host, 0))
            return int(probe.getsockname()[1])


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def start_all(servers: Sequence[Server]) -> None:
    """Start servers in parallel; if one fails or the call is interrupted, all are closed."""
    with ThreadPoolExecutor(len(servers)) as threads:
        futures = [threads.submit(server.start) for server in servers]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
            for future in futures:
                if future.done():
                    future.result()
        except BaseException:
            for server in servers:
                server.close()
            raise
