"""Landlock backend, for hosts without namespaces (most containers): Landlock, seccomp and limits."""

from __future__ import annotations

import os
import platform

from rollgym.core.errors import RunError
from rollgym.sandbox import client, seccomp
from rollgym.sandbox.cgroup import Cgroup
from rollgym.sandbox.client import ENVIRONMENT, WorkerSandbox
from rollgym.sandbox.hidden import split
from rollgym.sandbox.interpreter import NOBODY, find_python, spare_uid
from rollgym.sandbox.launch import PipesWithFolder, boot, make_folder
from rollgym.sandbox.namespaces import NO_CGROUP
from rollgym.sandbox.types import Level, SandboxSettings
from rollgym.sandbox.worker_confinement import landlock_abi

LEAST_ABI = 3
"""First ABI version that restricts truncation."""
SIGNALS_ABI = 6
"""First ABI version that scopes signals."""
SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/alternatives", "/dev/urandom")
DEVICES = ("/dev/null",)
WEAKNESSES = (
    "The code shares the host's namespaces: it can tell whether a file exists, but not read it.",
    "Its files lie on the host's disk: their total size is checked only 20 times per second.",
    "Changing modes, owners and times of files, sockets with a name, and /proc are denied.",
)
OTHERS_OF_USER = (
    "It runs under the user id of this process, so processes are limited together with that user's others."
)
NO_SIGNALS = "This kernel's Landlock cannot scope signals, so all signals are denied, even to own processes."


def open_landlock(settings: SandboxSettings) -> WorkerSandbox:
    """Start a Landlock sandbox; `RunError` gives the reason if it cannot."""
    abi = landlock_abi()
    if abi < LEAST_ABI:
        problem = f"version {abi} is too old" if abi else "this kernel has none, or it is disabled"
        raise RunError(f"Landlock of version {LEAST_ABI} or later (Linux 6.2) is needed; {problem}")
    python = find_python(settings.preload)
    uid = spare_uid()
    cgroup = Cgroup.make(settings.limits)
    # With its own user id there is no other process to signal.
    no_signals = abi < SIGNALS_ABI and uid is None
    profile = seccomp.Profile(shared_host=True, no_signals=no_signals, no_shared_memory=cgroup is None)
    folder = make_folder(uid)
    roots = [path for path in (*SYSTEM, *python.folders) if os.path.exists(path)]
    out = python.hidden(roots, settings.preload)
    opened, listed = split(roots, out)
    channel = PipesWithFolder(
        folder, python.command(settings.preload), uid=uid, environment=ENVIRONMENT, cgroup=cgroup
    )
    config = client.worker_config(
        settings.limits,
        confinement="child",
        filter=seccomp.program(profile).hex(),
        machine=platform.machine(),
        read=roots,
        opened=opened,
        listed=listed,
        hidden=list(out),
        write=list(DEVICES),
        work=folder,
        scratch=[],
        processes="shared" if uid in (None, NOBODY) else "own",
        preload=list(settings.preload),
    )
    boot(channel, config, python.why)
    more = [(uid is None, OTHERS_OF_USER), (no_signals, NO_SIGNALS), (cgroup is None, NO_CGROUP)]
    return WorkerSandbox(
        channel,
        backend="landlock",
        level=Level.LANDLOCK,
        weaknesses=(*WEAKNESSES, *(sentence for holds, sentence in more if holds)),
        limits=settings.limits,
        python=python.why,
    )
