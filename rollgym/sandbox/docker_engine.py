"""The Docker engine: finding it, what it can do, and clearing away what dead processes left in it."""

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

from rollgym.errors import MissingExtra, RunError, UsageError

DEFAULT_IMAGE = "rollgym-sandbox"
LABEL = "rollgym.sandbox"
HOST_LABEL, OWNER_LABEL = f"{LABEL}.host", f"{LABEL}.owner"
HOW_TO_GET = (
    "start one (apt install docker.io and run dockerd, or Docker Desktop), or say in DOCKER_HOST where it is"
)
BUILD = "rollgym sandbox build-image"
USUAL = "unix:///var/run/docker.sock"
KNOCK_SECONDS = 5.0
REMOVAL_SECONDS = 10.0
_unremoved: set[str] = set()
"""Containers of this process that an engine which did not answer still has."""


def library() -> Any:
    """The docker package, which is an optional part."""
    try:
        return importlib.import_module("docker")
    except ImportError:
        raise MissingExtra("The sandbox backend docker", "docker") from None


@contextlib.contextmanager
def connected() -> Iterator[Any]:
    """The engine's API for the length of a ``with`` block."""
    api = connect()
    try:
        yield api
    finally:
        api.close()


def connect() -> Any:
    """The API of the engine that DOCKER_HOST names, else of this machine's; `RunError` where none answers."""
    docker = library()
    where = os.environ.get("DOCKER_HOST") or ("its pipe" if sys.platform == "win32" else USUAL)
    try:
        knock(where)
        return docker.from_env().api
    except PermissionError:
        raise RunError(
            f"this user may not speak to the Docker engine at {where}: join the group docker (it has the "
            "rights of root), or use a rootless engine"
        ) from None
    except (docker.errors.DockerException, OSError):
        raise RunError(f"no Docker engine answers at {where}; {HOW_TO_GET}") from None


def knock(where: str) -> None:
    """Raise what keeps us from a socket of this machine: the docker package would hide it, and leak one."""
    if where.startswith("unix://"):
        with socket.socket(socket.AF_UNIX) as door:
            door.settimeout(KNOCK_SECONDS)
            door.connect(where.removeprefix("unix://"))


def failures() -> tuple[type[Exception], ...]:
    """What the docker package raises where an engine refuses or is gone."""
    # Errors of its HTTP library are OSErrors.
    return (library().errors.DockerException, OSError)


def explain(error: Exception) -> str:
    """What the engine said, without the address it was asked at."""
    return " ".join(str(getattr(error, "explanation", None) or error).split())


def find_image(api: Any, name: str) -> dict[str, Any]:
    """What the engine knows of an image; it is never fetched from elsewhere."""
    try:
        found: dict[str, Any] = api.inspect_image(name)
        return found
    except library().errors.ImageNotFound:
        how = BUILD if name == DEFAULT_IMAGE else f"docker pull {name}, or take no image and {BUILD}"
        raise UsageError(f"The Docker engine has no image {name}. What helps: {how}.") from None


def check_runtime(info: dict[str, Any], runtime: str | None) -> None:
    """Refuse a runtime that the engine does not have."""
    known = sorted(info.get("Runtimes") or {})
    if runtime is not None and runtime not in known:
        raise UsageError(
            f"The Docker engine has no runtime {runtime!r}; it has {', '.join(known)}. For gVisor: install "
            "runsc, name it under runtimes in the engine's daemon.json, and restart the engine."
        )


def host_id() -> str:
    """This boot of this machine and this world of processes: only here a process number means something."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{uuid.getnode():x}"


def owner_id(pid: int) -> str | None:
    """A process that cannot be taken for a later one of the same number; ``None`` where there is none."""
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
    """What a container of this process is marked with."""
    return {LABEL: "1", HOST_LABEL: host_id(), OWNER_LABEL: owner_id(os.getpid()) or ""}


def reap(api: Any) -> list[str]:
    """Remove containers whose owner on this machine is dead; return which."""
    gone = []
    for found in api.containers(all=True, filters={"label": f"{HOST_LABEL}={host_id()}"}):
        owner = found["Labels"].get(OWNER_LABEL, "")
        pid = owner.partition(" ")[0]
        dead = not pid.isdigit() or owner_id(int(pid)) != owner
        if dead or found["Id"] in _unremoved:
            remove(api, found["Id"])
            gone.append(found["Id"])
    return gone


def remove(api: Any, container: str) -> None:
    """Kill and remove a container; where the engine cannot now, the next `reap` tries again."""
    errors = library().errors
    deadline = time.monotonic() + REMOVAL_SECONDS
    _unremoved.add(container)
    with contextlib.suppress(*failures()):
        try:
            while time.monotonic() < deadline:
                try:
                    api.remove_container(container, force=True, v=True)
                except errors.APIError as error:
                    # It may be on its way out already: its worker ended, or another process reaps it too.
                    if error.status_code != 409:
                        raise
                    time.sleep(0.05)
        except errors.NotFound:
            _unremoved.discard(container)
