"""Host side of a sandbox: sends orders to the worker and validates every answer."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from importlib import resources
from typing import Any, Protocol, get_args

from rollgym.core.errors import RunError, UsageError, WorkerLost
from rollgym.sandbox import protocol
from rollgym.sandbox.types import Ended, Level, Limits, Ran, State

STATES: dict[str, State] = {state: state for state in get_args(State)}
GRACE_SECONDS = 15.0
"""Seconds beyond its limit after which an execution's worker counts as dead."""
START_SECONDS = 30.0
PARTS = ("protocol", "worker_confinement", "worker_limits", "worker_files", "worker_child", "worker_watch")
SOURCES = (*PARTS, "worker")
"""Source files of the worker in dependency order."""
PYTHON_FLAGS = ("-s", "-S", "-c")
"""Not ``-I``: it ignores PYTHONHASHSEED, which makes set order differ between sandboxes."""
BOOT = """\
import sys
sys.path[:] = [path for path in sys.path if path]
import json, os, types
def take(size):
    data = b""
    while len(data) < size:
        part = os.read(0, size - len(data))
        if not part:
            os._exit(3)
        data += part
    return data
os.write(1, b"boot")
room = sys.modules["rollgym.sandbox"] = types.ModuleType("rollgym.sandbox")
for name, source in json.loads(take(int.from_bytes(take(4), "big"))):
    full = "rollgym.sandbox." + name
    module = sys.modules[full] = types.ModuleType(full)
    setattr(room, name, module)
    exec(compile(source, full, "exec"), module.__dict__)
room.worker.main()
"""
"""Boot code (``python *PYTHON_FLAGS BOOT``) that reads the worker's source from standard input."""
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUTF8": "1",
    # Each malloc arena and library thread counts against the address space.
    "MALLOC_ARENA_MAX": "2",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}
"""Environment variables of untrusted code, besides HOME and TMPDIR."""
SCRATCH = ("/tmp", "/dev/shm")
"""Folders besides the working folder that are emptied with it."""


class Channel(Protocol):
    """Byte channel to the worker. Methods raise `WorkerLost` when it breaks."""

    def write(self, data: bytes | memoryview, deadline: float) -> None:
        """Send all data before ``time.monotonic()`` reaches the deadline."""

    def read_into(self, view: memoryview, deadline: float) -> None:
        """Fill a buffer before the deadline."""

    def close(self) -> None:
        """End all processes at the other end. Idempotent."""

    def out_of_memory(self) -> bool:
        """Whether the kernel OOM-killed since the last call."""

    def adapt(self, limits: Limits) -> None:
        """Apply the limits of the next execution to the cgroup."""


def worker_config(limits: Limits, **more: Any) -> dict[str, Any]:
    """Return the configuration frame of a worker; each backend passes what differs.

    ``confinement``: the seccomp filter is put on the ``worker``, on each ``child`` (with Landlock: ``read``
    and ``write`` are the paths; of those read, only ``opened`` and what is below can be, and the names in
    ``listed``) or on ``none``; ``hidden``: paths that must not be readable inside; ``filter``: it, in hex;
    ``machine``: what it is for; ``work``: the folder for executions and session; ``scratch``: other folders
    that are cleaned, all on file systems of limited size; ``processes``: whether the user id inside is its
    ``own``, ``shared`` with others, or RLIMIT_NPROC is to be left alone (``none``); ``uid``: where the worker
    itself must give up being root.
    """
    config = {
        "confinement": "worker",
        "filter": "",
        "machine": "",
        "read": [],
        "opened": [],
        "listed": [],
        "hidden": [],
        "write": [],
        "work": "/work",
        "scratch": list(SCRATCH),
        "processes": "own",
        "preload": [],
        "uid": None,
        "env": dict(ENVIRONMENT),
        "limits": wire_limits(limits),
    }
    if unknown := more.keys() - config.keys():
        raise TypeError(f"no such configuration: {sorted(unknown)}")
    return config | more


def wire_limits(limits: Limits) -> dict[str, Any]:
    """Encode limits for the worker."""
    fields = {name: getattr(limits, name) for name in limits.__dataclass_fields__ if name != "cpu_seconds"}
    return fields | {"cpu": math.ceil(limits.cpu_seconds or math.ceil(limits.seconds) + 1)}


def hello(channel: Channel) -> None:
    """Wait for the interpreter inside. Nothing untrusted runs before `start`."""
    first_bytes = bytearray(len(protocol.HELLO))
    channel.read_into(memoryview(first_bytes), time.monotonic() + START_SECONDS)
    if first_bytes != protocol.HELLO:
        raise WorkerLost(f"Unexpected first bytes from the sandbox: {bytes(first_bytes)!r}.")


def start(channel: Channel, config: dict[str, Any]) -> dict[str, Any]:
    """Send the worker its source and configuration; return its self-description."""
    folder = resources.files("rollgym.sandbox")
    sources = [(name, (folder / f"{name}.py").read_text(encoding="utf-8")) for name in SOURCES]
    blob = json.dumps(sources).encode()
    deadline = time.monotonic() + START_SECONDS
    channel.write(len(blob).to_bytes(4, "big") + blob + protocol.prefix(config, 0), deadline)
    header, _ = protocol.receive(lambda view: channel.read_into(view, deadline))
    if "error" in header:
        raise RunError(f"Cannot set up the sandbox: {header['error']}")
    return header


class WorkerSandbox:
    """A sandbox with a started worker; every backend returns one."""

    def __init__(
        self,
        channel: Channel,
        *,
        backend: str,
        level: Level,
        weaknesses: tuple[str, ...] = (),
        limits: Limits | None = None,
        python: str = "",
    ) -> None:
        self.backend, self.level, self.weaknesses, self.python = backend, level, weaknesses, python
        self.limits = limits or Limits()
        self._channel, self._closed = channel, False

    def exec(
        self,
        code: str,
        *,
        stdin: str = "",
        files: Mapping[str, bytes] | None = None,
        limits: Limits | None = None,
    ) -> Ran:
        """Run a program in a fresh process and working folder."""
        source, given = _bytes(code), _bytes(stdin)
        named = [(file_name(name), content) for name, content in (files or {}).items()]
        request: dict[str, Any] = {"op": "exec", "code": len(source), "stdin": len(given)}
        request["files"] = [(name, len(content)) for name, content in named]
        return self._ran(request, limits, source, given, *(content for _, content in named))

    def run(self, code: str, *, limits: Limits | None = None) -> Ran:
        """Run code in the session: names and files persist until `reset`."""
        return self._ran({"op": "run"}, limits, _bytes(code))

    def write(self, name: str, content: bytes) -> None:
        """Write a file to the session's working folder."""
        header, _ = self._call({"op": "write", "name": file_name(name)}, [content])
        if "error" in header:
            raise OSError(f"{name} cannot be written in the sandbox: {header['error']}")

    def read(self, name: str) -> bytes:
        """Read a file of the session's working folder; `FileNotFoundError` if missing."""
        header, body = self._call({"op": "read", "name": file_name(name)}, [])
        if header.get("missing"):
            raise FileNotFoundError(f"File {name} not found in the session ({header['error']}).")
        if "error" in header:
            raise OSError(f"{name} cannot be read in the sandbox: {header['error']}")
        return bytes(body)

    def reset(self) -> None:
        """Discard the session: processes, state and files."""
        header, _ = self._call({"op": "reset"}, [])
        self._check(header)

    def close(self) -> None:
        """End all processes. Idempotent."""
        self._closed = True
        self._channel.close()

    def _ran(self, request: dict[str, Any], limits: Limits | None, *parts: bytes) -> Ran:
        limits = limits or self.limits
        self._channel.adapt(limits)
        request["limits"] = wire_limits(limits)
        header, body = self._call(request, list(parts), limits.seconds)
        self._check(header)
        try:
            return self._read_ran(header, memoryview(body), limits.output_chars)
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            raise self._lost(f"answered nonsense: {error!r}") from None

    def _read_ran(self, header: dict[str, Any], body: memoryview, keep: int) -> Ran:
        ended = Ended(header["ended"])
        if ended is Ended.LOST and self._channel.out_of_memory():
            ended = Ended.MEMORY
        out, cut_out = _text(header["stdout"], body, keep)
        err, cut_err = _text(header["stderr"], body[sum(header["stdout"][:2]) :], keep)
        return Ran(
            stdout=out,
            stderr=err,
            exit_code=header["code"],
            ended=ended,
            seconds=float(header["seconds"]),
            truncated=cut_out or cut_err,
            state=STATES[header["state"]],
        )

    def _call(
        self, request: dict[str, Any], parts: list[bytes], seconds: float = 0.0
    ) -> tuple[dict[str, Any], bytearray]:
        if self._closed:
            raise WorkerLost(f"The sandbox ({self.backend}) is closed.")
        try:
            head = protocol.prefix(request, sum(map(len, parts)))
        except protocol.FrameError as error:
            most = protocol.MAX_BODY >> 20
            raise UsageError(f"Code, input and files together are limited to {most} MB: {error}.") from None
        deadline = time.monotonic() + seconds + GRACE_SECONDS
        try:
            for part in (head, *parts):
                self._channel.write(part, deadline)
            return protocol.receive(lambda view: self._channel.read_into(view, deadline))
        except protocol.FrameError as error:
            raise self._lost(str(error)) from None
        except WorkerLost:
            self.close()
            raise

    def _check(self, header: dict[str, Any]) -> None:
        if "error" in header:
            raise RunError(f"The sandbox ({self.backend}) failed: {header['error']}")

    def _lost(self, why: str) -> WorkerLost:
        self.close()
        return WorkerLost(f"The sandbox ({self.backend}) was closed: its worker {why}.")


def file_name(name: str) -> str:
    """Validate a file name: relative, inside the working folder, not empty."""
    parts = name.split("/")
    if not name or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise UsageError(
            f"{name!r} is not a valid sandbox file name; expected a relative path such as data/a.txt."
        )
    return name


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _text(sizes: list[int], body: memoryview, keep: int) -> tuple[str, bool]:
    """Return output as text of limited length: head, tail and a note on what was omitted."""
    head, tail, total = sizes
    first, last = bytes(body[:head]), bytes(body[head : head + tail])
    if head + tail == total:
        whole = (first + last).decode("utf-8", "replace")
        if len(whole) <= keep:
            return whole, False
        start, end = whole, whole
    else:
        start, end = first.decode("utf-8", "replace"), last.decode("utf-8", "replace")
    start, end = start[: (keep + 1) // 2], end[len(end) - keep // 2 :]
    missing = total - len(start.encode()) - len(end.encode())
    return f"{start}\n[... {missing:,} bytes left out ...]\n{end}", True
