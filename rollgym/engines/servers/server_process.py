"""A server as a child process: starts it, monitors it, restarts it, and never leaves it running."""

from __future__ import annotations

import atexit
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
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any, ClassVar

import httpx

from rollgym.core.errors import EngineLost, UsageError
from rollgym.engines.servers.client import auth_headers, transport
from rollgym.engines.servers.process_reaper import (
    guard,
    reap_orphans,
    register,
    session_pids,
    signal_all,
    start_time,
    unregister,
)

log = logging.getLogger(__name__)
DELTA_PLUGIN = Path(__file__).resolve().parents[1] / "weight_sync" / "server_plugin"
"""Folder of the module with which servers apply changes of values."""
STOP_SECONDS = 15.0
_TAIL = 12
"""Lines of the log shown in an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseServerOptions(ABC):
    """Options of a server to start."""

    python: str = sys.executable
    """Python interpreter with the server's software, for example that of a separate virtual environment."""
    device: str | None = None
    """``cpu``, ``cuda`` or another device of the server; default: ``cpu`` if there is no accelerator."""
    dtype: str | None = None
    """Default: float32 on a CPU, else as in the model's configuration."""
    tp: int = 1
    """Tensor parallelism: number of devices of the server."""
    memory_fraction: float | None = None
    max_running: int | None = None
    """Maximum number of replies generated at once."""
    context_length: int | None = None
    return_routed_experts: bool = False
    """Report the experts of every token, for `learner.router_replay`; mixtures of experts only."""
    weight_delta: bool = False
    """Load rollgym's plugin that applies changes of values, for an engine with ``delta=True``. The server
    then keeps a copy of its weights in the memory of the host."""
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
    """Additional command-line arguments, except --config, --api-key and those that rollgym depends on."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Additional environment variables."""

    reserved: ClassVar[tuple[str, ...]] = ("--config", "--api-key")
    """Arguments that ``extra`` must not contain."""

    def __post_init__(self) -> None:
        if not 0 < self.hang_seconds < math.inf:
            raise UsageError(f"hang_seconds must be positive and finite, not {self.hang_seconds}.")
        for word in self.extra:
            if word.partition("=")[0] in self.reserved:
                raise UsageError(
                    f"extra must not contain {word.partition('=')[0]}: rollgym sets it, and passes the key "
                    "of each server in a file. Pass other settings as separate arguments."
                )

    @property
    def on_cpu(self) -> bool:
        """Whether the server runs on the CPU."""
        if self.device is not None:
            return self.device == "cpu"
        return not any(Path(file).exists() for file in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))

    @abstractmethod
    def command(self, model: Path, port: int, version: int) -> list[str]:
        """Return the command line."""

    def environment(self) -> dict[str, str]:
        """Return the environment variables: ours, without those that would break or slow down the server."""
        env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        # The virtual environment and path of this process must not affect the server.
        for name in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME"):
            env.pop(name, None)
        # PYTHONSAFEPATH: files in the current folder must not shadow packages of the server.
        env |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONSAFEPATH": "1"}
        if self.on_cpu:
            env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        return env


def with_python_path(env: Mapping[str, str], folders: Sequence[Path]) -> dict[str, str]:
    """Return environment variables with folders put before the PYTHONPATH, if any."""
    path = [*map(str, folders), *filter(None, [env.get("PYTHONPATH")])]
    return {**env, "PYTHONPATH": os.pathsep.join(path)} if path else dict(env)


def words(options: Mapping[str, Any]) -> list[str]:
    """Return command-line options with their values; those without a value are left out."""
    return [str(word) for name, value in options.items() if value is not None for word in (name, value)]


class ServerProcess(ABC):
    """One server and its subprocesses."""

    software: ClassVar[str]
    """Name of the server's software, for messages."""
    package: ClassVar[str]
    """The Python package of the software."""
    ready_path: ClassVar[str] = "/health"
    """Answered with 200 by a server that can generate."""
    alive_path: ClassVar[str] = "/health"
    """Answered with 200 also by a paused server."""

    def __init__(self, model: Path, options: BaseServerOptions, *, version: int = 0) -> None:
        self.model = model.resolve()
        self.options = options
        self.version = version
        """Version of the weights in the folder."""
        self.starts = 0
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._began = ""
        self._guard: int | None = None
        self._closed = False
        self._log = Path(tempfile.mkdtemp(prefix=f"rollgym-{self.package}-")) / "server.log"
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
            raise EngineLost(f"The {self.software} server was closed.")
        reap_orphans()
        self.check_install()
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
                target=self._watch,
                args=(process, self._began),
                name=f"rollgym-{self.package}-watch",
                daemon=True,
            ).start()

    def healthy(self, *, paused: bool = False, seconds: float = 30.0) -> bool:
        """Whether it runs and generates; a paused server is only checked for an answer."""
        if not self.alive:
            return False
        path = self.alive_path if paused else self.ready_path
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
            self.key_file.unlink(missing_ok=True)
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
                    "The %s server at %s has not answered for %g s: killing it.",
                    *(self.software, self.url, allowed),
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
    def key_file(self) -> Path:
        """File with the key, in a private folder: command lines are visible to every user."""
        return self._log.with_name("key.yaml")

    def check_install(self) -> None:
        """Raise `UsageError` if the interpreter has a version of the software that is not supported."""
        return

    @abstractmethod
    def pass_key(self) -> tuple[list[str], dict[str, str]]:
        """Write the key into `key_file`; returns the arguments and variables that name the file."""

    def _launch(self) -> None:
        options = self.options
        arguments, variables = self.pass_key()
        command = [*options.command(self.model, self._port, self.version), *arguments]
        try:
            with self._log.open("wb") as out:
                # A new session: all its processes can be killed together, and Ctrl-C only reaches us.
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env={**options.environment(), **variables},
                    start_new_session=True,
                )
        except OSError as error:
            raise UsageError(
                f"Cannot start {self.software} with {options.python}: {error.strerror or error}."
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
                raise EngineLost(f"The {self.software} server was stopped while starting.")
            if process.poll() is not None:
                raise EngineLost(self._death(process.returncode))
            if time.monotonic() > until:
                seconds = self.options.start_seconds
                raise EngineLost(
                    f"The {self.software} server was not ready within {seconds:g} s; end of its log:\n"
                    f"{self.log}"
                )
            time.sleep(0.25)

    def _death(self, code: int) -> str:
        text = self.log
        name = self.package
        if f"No module named '{name}'" in text or f"No module named {name}" in text:
            return self.not_installed
        return f"The {self.software} server died while starting (exit code {code}); end of its log:\n{text}"

    @property
    def not_installed(self) -> str:
        """Message for an interpreter without the software."""
        return (
            f"{self.options.python} has no {self.software}: install it there (pip install {self.package}), "
            "or pass an interpreter that has it (python=...)."
        )

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


def start_all(servers: Sequence[ServerProcess]) -> None:
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
