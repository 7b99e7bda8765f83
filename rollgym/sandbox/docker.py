"""Docker backend: a locked-down container per sandbox; also for macOS and Windows."""

from __future__ import annotations

import os
from typing import Any

from rollgym.core.errors import RunError, WorkerLost
from rollgym.sandbox import client, docker_engine, seccomp
from rollgym.sandbox.client import BOOT, PYTHON_FLAGS, WorkerSandbox
from rollgym.sandbox.docker_channel import Attached, first_tasks, memory_bytes
from rollgym.sandbox.interpreter import NOBODY
from rollgym.sandbox.types import Level, Limits, SandboxSettings

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
    limits: Limits, *, runtime: str | None = None, volumes: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Host configuration of a container; ``volumes`` of the image are mounted read-only."""
    size = memory_bytes(limits)
    files = max(limits.open_files, LEAST_OPEN_FILES)
    room = f"rw,nosuid,nodev,size={limits.disk_mb}m,nr_inodes={MOST_FILES}"
    # Message queues outlive their creator: a program could pass data to the next one.
    nothing = dict.fromkeys((*volumes, "/dev/mqueue"), "ro,nosuid,nodev,noexec,size=4k")
    return {
        "network_mode": "none",
        "read_only": True,
        "tmpfs": nothing
        # The engine may give a mount the mode its folder has in the image, but not its owner.
        | dict.fromkeys(("/tmp", "/work"), f"{room},noexec,uid={NOBODY},gid={NOBODY},mode=0700"),
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
    )
    channel = _attach(docker_engine.connect(), image, settings, runtime)
    try:
        channel.start()
        client.hello(channel)
        said = client.start(channel, config)
    except BaseException:
        channel.close()
        raise
    return WorkerSandbox(
        channel,
        backend="docker",
        level=Level.NAMESPACES,
        weaknesses=() if counted else (NO_MEMORY_LIMIT,),
        limits=settings.limits,
        python=f"{said['python']} of the image {settings.image or docker_engine.DEFAULT_IMAGE}"
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
                **host_config(settings.limits, runtime=runtime, volumes=wanted)
            ),
        )["Id"]
        return Attached(api, container, settings.limits)
    except BaseException:
        if container:
            docker_engine.remove(api, container)
        api.close()
        raise
