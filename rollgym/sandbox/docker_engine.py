"""Docker engine: connection, capabilities and removal of orphaned containers."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollgym.core.errors import MissingExtra, RunError, UsageError

DEFAULT_IMAGE = "rollgym-sandbox"
LABEL = "rollgym.sandbox"
HOST_LABEL, OWNER_LABEL = f"{LABEL}.host", f"{LABEL}.owner"
HOW_TO_GET = (
    "start one (apt install docker.io and run dockerd, or Docker Desktop), or set DOCKER_HOST to its address"
)
BUILD = "rollgym sandbox build-image"
USUAL = "unix:///var/run/docker.sock"
KNOCK_SECONDS = 5.0
REMOVAL_SECONDS = 10.0
_unremoved: set[str] = set()
"""Containers of this process whose removal failed."""


def library() -> Any:
    """Import the optional docker package."""
    try:
        return importlib.import_module("docker")
    except ImportError:
        raise MissingExtra("The sandbox backend docker", "docker") from None


@contextlib.contextmanager
def connected() -> Iterator[Any]:
    """Provide the engine's API within a ``with`` block."""
    api = connect()
    try:
        yield api
    finally:
        api.close()


def connect() -> Any:
    """Connect to the engine of DOCKER_HOST or this machine; `RunError` if none answers."""
    docker = library()
    where = os.environ.get("DOCKER_HOST") or ("its pipe" if sys.platform == "win32" else USUAL)
    try:
        knock(where)
        return docker.from_env().api
    except PermissionError:
        raise RunError(
            f"this user may not access the Docker engine at {where}: join the group docker (it has the "
            "rights of root), or use a rootless engine"
        ) from None
    except (docker.errors.DockerException, OSError):
        raise RunError(f"no Docker engine answers at {where}; {HOW_TO_GET}") from None


def knock(where: str) -> None:
    """Raise the error of connecting to the local socket, which the docker package hides."""
    if where.startswith("unix://"):
        with socket.socket(socket.AF_UNIX) as door:
            door.settimeout(KNOCK_SECONDS)
            door.connect(where.removeprefix("unix://"))


def failures() -> tuple[type[Exception], ...]:
    """Return the exceptions that the docker package raises for a failed engine."""
    # Errors of its HTTP library are OSErrors.
    return (library().errors.DockerException, OSError)


def explain(error: Exception) -> str:
    """Return the engine's error message without its address."""
    return " ".join(str(getattr(error, "explanation", None) or error).split())


def find_image(api: Any, name: str) -> dict[str, Any]:
    """Inspect an image; images are never pulled."""
    try:
        image: dict[str, Any] = api.inspect_image(name)
        return image
    except library().errors.ImageNotFound:
        how = BUILD if name == DEFAULT_IMAGE else f"docker pull {name}, or take no image and {BUILD}"
        raise UsageError(f"The Docker engine has no image {name}. Fix: {how}.") from None


def check_runtime(info: dict[str, Any], runtime: str | None) -> None:
    """Raise if the engine lacks the runtime."""
    runtimes = sorted(info.get("Runtimes") or {})
    if runtime is not None and runtime not in runtimes:
        raise UsageError(
            f"The Docker engine has no runtime {runtime!r}; it has {', '.join(runtimes)}. For gVisor: "
            "install runsc, name it under runtimes in the engine's daemon.json, and restart the engine."
        )


def host_id() -> str:
    """Identify this boot and PID namespace, in which a pid is valid."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{uuid.getnode():x}"


def owner_id(pid: int) -> str | None:
    """Return a pid with its start time; ``None`` if there is no such process."""
    if Path("/proc/self/stat").exists():
        try:
            started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        except OSError:
            return None
        return f"{pid} {started}"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:
        pass
    return str(pid)


def labels() -> dict[str, str]:
    """Return the labels of this process's containers."""
    return {LABEL: "1", HOST_LABEL: host_id(), OWNER_LABEL: owner_id(os.getpid()) or ""}


def reap(api: Any) -> list[str]:
    """Remove containers whose owner on this machine has exited; return their ids."""
    gone = []
    for container in api.containers(all=True, filters={"label": f"{HOST_LABEL}={host_id()}"}):
        owner = container["Labels"].get(OWNER_LABEL, "")
        pid = owner.partition(" ")[0]
        dead = not pid.isdigit() or owner_id(int(pid)) != owner
        if dead or container["Id"] in _unremoved:
            remove(api, container["Id"])
            gone.append(container["Id"])
    return gone


def remove(api: Any, container: str) -> None:
    """Kill and remove a container; on failure the next `reap` retries."""
    errors = library().errors
    deadline = time.monotonic() + REMOVAL_SECONDS
    _unremoved.add(container)
    with contextlib.suppress(*failures()):
        try:
            while time.monotonic() < deadline:
                try:
                    api.remove_container(container, force=True, v=True)
                except errors.APIError as error:
                    # It may already be exiting, or another process reaps it too.
                    if error.status_code != 409:
                        raise
                    time.sleep(0.05)
        except errors.NotFound:
            _unremoved.discard(container)
