"""Docker backend: a locked-down container per sandbox; also for macOS and Windows."""

from __future__ import annotations

import contextlib
import os
import struct
import time
from typing import Any

from rollgym.core.errors import RunError, WorkerLost
from rollgym.sandbox import client, docker_engine, seccomp
from rollgym.sandbox.cgroup import SPARE_MB
from rollgym.sandbox.client import BOOT, PYTHON_FLAGS, WorkerSandbox
from rollgym.sandbox.interpreter import NOBODY
from rollgym.sandbox.types import Level, Limits, SandboxSettings

FRAME = struct.Struct(">BxxxI")
"""Frame header of the attach stream: stream number and length."""
STDOUT = 1
SPARE_TASKS = 4
"""Processes besides the code's: worker, session head, waiter and one that is ending."""
LEAST_TASKS = 24
"""Processes that the engine's helper needs until it becomes the worker."""
KEEP_ERRORS = 2000
OOM_WAIT_SECONDS = 0.5
"""Seconds to wait for the engine to report an OOM kill."""


def memory_bytes(limits: Limits, folders: int = 0) -> int:
    """Memory limit of a container: code, files (tmpfs) and worker; ``folders`` besides the usual ones."""
    return (limits.memory_mb + (2 + folders) * limits.disk_mb + SPARE_MB) << 20


def first_tasks(limits: Limits) -> int:
    """Process and thread limit of a container at start."""
    return max(LEAST_TASKS, limits.processes + SPARE_TASKS)


class Attached:
    """Channel to the worker of a container; removes the container on close."""

    def __init__(self, api: Any, container: str, limits: Limits, folders: int = 0) -> None:
        self._api, self._container, self._folders = api, container, folders
        self._given = memory_bytes(limits, folders), first_tasks(limits)
        self._left = 0
        """Remaining bytes of the current output frame."""
        self._errors = b""
        self._closed = False
        self._kills = 0
        self._born = int(time.time())
        # Before the start, or what the worker says first could be lost in the buffer of the HTTP library.
        self._stream = api.attach_socket(container, {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
        self._socket = getattr(self._stream, "_sock", self._stream)

    def start(self) -> None:
        """Start the container."""
        self._api.start(self._container)

    def write(self, data: bytes | memoryview, deadline: float) -> None:
        """Send all of it before the deadline."""
        rest = memoryview(data)
        while rest:
            self._patience(deadline)
            try:
                rest = rest[self._socket.send(rest) :]
            except TimeoutError:
                raise self._lost("did not answer in time") from None
            except OSError:
                raise self._lost("or the engine died") from None

    def read_into(self, view: memoryview, deadline: float) -> None:
        """Fill a buffer from the worker's output before the deadline."""
        while view:
            if not self._left:
                self._left = self._next_piece(deadline)
                continue
            size = self._receive(view[: self._left], deadline)
            self._left -= size
            view = view[size:]

    def _next_piece(self, deadline: float) -> int:
        """Return the length of the next stdout frame; stderr before it is stored."""
        header = bytearray(FRAME.size)
        self._fill(memoryview(header), deadline)
        stream, size = FRAME.unpack(header)
        if stream == STDOUT:
            return int(size)
        while size:
            piece = bytearray(min(size, 1 << 16))
            self._fill(memoryview(piece), deadline)
            self._errors = (self._errors + piece)[-KEEP_ERRORS:]
            size -= len(piece)
        return 0

    def _fill(self, view: memoryview, deadline: float) -> None:
        while view:
            view = view[self._receive(view, deadline) :]

    def _receive(self, view: memoryview, deadline: float) -> int:
        self._patience(deadline)
        try:
            size = int(self._socket.recv_into(view))
        except TimeoutError:
            raise self._lost("did not answer in time") from None
        except OSError:
            size = 0
        if not size:
            raise self._lost("or the engine died")
        return size

    def _patience(self, deadline: float) -> None:
        if self._closed:
            raise WorkerLost("The container of a sandbox is closed.")
        # 0 would mean non-blocking, with a different error.
        self._socket.settimeout(max(0.001, deadline - time.monotonic()))

    def _lost(self, why: str) -> WorkerLost:
        words = self._errors.decode("utf-8", "replace").strip().rpartition("\n")[2]
        self.close()
        return WorkerLost(f"The worker of a sandbox in a container {why}{': ' + words if words else ''}.")

    def out_of_memory(self) -> bool:
        """Whether the kernel OOM-killed since the last call."""
        filters = {"container": self._container, "event": "oom"}
        until = time.time() + OOM_WAIT_SECONDS
        with contextlib.suppress(*docker_engine.failures()):
            events = self._api.events(since=self._born, until=f"{until:.3f}", filters=filters, decode=True)
            before, self._kills = self._kills, max((event["timeNano"] for event in events), default=0)
            return self._kills > before
        return False

    def adapt(self, limits: Limits) -> None:
        """Apply the limits of the next execution if they changed."""
        size, tasks = wanted = memory_bytes(limits, self._folders), limits.processes + SPARE_TASKS
        if self._closed or wanted == self._given:
            return
        new = {"Memory": size, "MemorySwap": size, "PidsLimit": tasks}
        # The package's method does not support PidsLimit.
        url = f"{self._api.base_url}/v{self._api.api_version}/containers/{self._container}/update"
        try:
            answer = self._api.post(url, json=new, timeout=self._api.timeout)
        except OSError:
            raise self._lost("did not get its limits: the engine does not answer") from None
        if answer.status_code != 200:
            raise self._lost(f"did not get its limits ({' '.join(answer.text.split())[:300]})")
        self._given = wanted

    def close(self) -> None:
        """Remove the container."""
        if self._closed:
            return
        self._closed = True
        docker_engine.remove(self._api, self._container)
        # The stream is only a view of the connection, which the answer holds.
        getattr(self._stream, "_response", self._stream).close()
        self._socket.close()
        self._api.close()


RUNTIME_VARIABLE = "ROLLGYM_DOCKER_RUNTIME"
"""Environment variable that selects another engine runtime, such as ``runsc`` (gVisor)."""
SHARED_MB = 16
LEAST_OPEN_FILES = 1024
MOST_FILES = 25_000
"""Inodes per file system: above the worker's limit, so that the worker reports the error."""
NO_MEMORY_LIMIT = (
    "This Docker engine cannot limit memory: it is sampled 20 times per second, so a fast program can "
    "exceed it briefly, and kernel buffers of pipes and sockets are not counted."
)


def host_config(
    limits: Limits,
    *,
    runtime: str | None = None,
    volumes: tuple[str, ...] = (),
    folders: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Host configuration of a container; ``volumes`` of the image are read-only, ``folders`` writable."""
    size = memory_bytes(limits, len(folders))
    files = max(limits.open_files, LEAST_OPEN_FILES)
    room = f"rw,nosuid,nodev,size={limits.disk_mb}m,nr_inodes={MOST_FILES}"
    # Message queues outlive their creator: a program could pass data to the next one.
    nothing = dict.fromkeys((*volumes, "/dev/mqueue"), "ro,nosuid,nodev,noexec,size=4k")
    return {
        "network_mode": "none",
        "read_only": True,
        "tmpfs": nothing
        # The engine may give a mount the mode its folder has in the image, but not its owner.
        | dict.fromkeys(("/tmp", "/work"), f"{room},noexec,uid={NOBODY},gid={NOBODY},mode=0700")
        | dict.fromkeys(folders, f"{room},exec,uid={NOBODY},gid={NOBODY},mode=0755"),
        "shm_size": SHARED_MB << 20,
        "mem_limit": size,
        "memswap_limit": size,
        "pids_limit": first_tasks(limits),
        "nano_cpus": 1_000_000_000,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        # Ceilings; the worker sets what each execution may have.
        "ulimits": [
            _ulimit("nofile", files),
            _ulimit("fsize", max(limits.file_mb, limits.disk_mb) << 20),
            _ulimit("core", 0),
        ],
        "ipc_mode": "private",
        "log_config": {"Type": "none", "Config": {}},
        # Hides the host's name servers.
        "dns": ["127.0.0.1"],
        "dns_search": ["."],
        # Its stdin closes with our process; then it exits and is removed.
        "auto_remove": True,
        "runtime": runtime,
    }


def _ulimit(name: str, value: int) -> dict[str, Any]:
    return {"Name": name, "Soft": value, "Hard": value}


def open_docker(settings: SandboxSettings, *, runtime: str | None = None) -> WorkerSandbox:
    """Start a sandbox in a new container.

    ``runtime`` (default: ROLLGYM_DOCKER_RUNTIME) is the engine's runtime, such as ``runsc``.
    Raises `RunError` or `UsageError` with the reason if it cannot start.
    """
    runtime = runtime or os.environ.get(RUNTIME_VARIABLE) or None
    api = docker_engine.connect()
    try:
        info = api.info()
        docker_engine.check_runtime(info, runtime)
        if not info.get("PidsLimit", True):
            raise RunError("this Docker engine cannot limit processes (a rootless one needs cgroup v2)")
        image = docker_engine.find_image(api, settings.image or docker_engine.DEFAULT_IMAGE)
        docker_engine.reap(api)
        return _start(api, info, image, settings, runtime)
    except docker_engine.failures() as error:
        raise RunError(f"the Docker engine failed: {docker_engine.explain(error)}") from None
    except WorkerLost as error:
        raise RunError(f"the container cannot be used: {error}") from None
    finally:
        # On success the channel has its own connection.
        api.close()


def _start(
    api: Any, info: dict[str, Any], image: dict[str, Any], settings: SandboxSettings, runtime: str | None
) -> WorkerSandbox:
    counted = bool(info.get("MemoryLimit", True))
    profile = seccomp.Profile(no_shared_memory=not counted)
    config = client.worker_config(
        settings.limits,
        filter=seccomp.program(profile, info["Architecture"]).hex(),
        machine=info["Architecture"],
        # All containers share a user id and so its count of processes: the engine counts instead.
        processes="none",
        preload=list(settings.preload),
        scratch=[*client.SCRATCH, *settings.folders],
    )
    channel = _attach(docker_engine.connect(), image, settings, runtime)
    try:
        channel.start()
        client.hello(channel)
        started = client.start(channel, config)
    except BaseException:
        channel.close()
        raise
    return WorkerSandbox(
        channel,
        backend="docker",
        level=Level.NAMESPACES,
        weaknesses=() if counted else (NO_MEMORY_LIMIT,),
        limits=settings.limits,
        python=f"{started['python']} of the image {settings.image or docker_engine.DEFAULT_IMAGE}"
        + (f" under {runtime}" if runtime else ""),
    )


def _attach(api: Any, image: dict[str, Any], settings: SandboxSettings, runtime: str | None) -> Attached:
    wanted = tuple((image.get("Config") or {}).get("Volumes") or ())
    flags = [flag for flag in PYTHON_FLAGS if not (settings.preload and flag == "-S")]
    container = None
    try:
        container = api.create_container(
            image["Id"],
            entrypoint=["python3"],
            command=[*flags, BOOT],
            user=f"{NOBODY}:{NOBODY}",
            hostname="sandbox",
            working_dir="/",
            environment=client.ENVIRONMENT,
            stdin_open=True,
            labels=docker_engine.labels(),
            # Settings that the image or the user's client configuration would add.
            healthcheck={"test": ["NONE"]},
            use_config_proxy=False,
            host_config=api.create_host_config(
                **host_config(settings.limits, runtime=runtime, volumes=wanted, folders=settings.folders)
            ),
        )["Id"]
        return Attached(api, container, settings.limits, len(settings.folders))
    except BaseException:
        if container:
            docker_engine.remove(api, container)
        api.close()
        raise
