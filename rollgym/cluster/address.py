"""Whether a cluster can be joined: somebody answers, and runs the same software."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

from rollgym.cluster.probe import Facts, facts_here
from rollgym.errors import UsageError

# Asks the cluster's own service who it is. In a process of its own, since Ray waits for minutes and then ends
# the whole process where nobody answers.
_ASK = """
import sys, ray._raylet
client = ray._raylet.GcsClient(address=sys.argv[1])
found = client.internal_kv_get(b"CLUSTER_METADATA", namespace=b"cluster")
print((found or b"{}").decode())
"""


def find_address(address: str) -> str:
    """The address that ``auto`` stands for; any other as it is."""
    if address != "auto":
        return address
    from ray._private import services

    found = services.get_ray_address_from_environment("auto", None)
    if not found or found == "auto":
        raise UsageError(
            "address is auto, but no Ray runs on this machine: start one with `ray start --head`, give the "
            "address of one, or leave it out."
        )
    return str(found)


def check_address(address: str, wait: float = 20.0) -> None:
    """Raise a sentence where nobody answers, or somebody of another version."""
    host, port = _split(address)
    try:
        socket.create_connection((host, port), timeout=wait).close()
    except OSError as error:
        raise UsageError(
            f"No Ray cluster answers at {address} ({error.strerror or error}): is its head node up, and "
            "is the address right?"
        ) from None
    if address.startswith("ray://"):
        return
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _ASK, f"{host}:{port}"], capture_output=True, text=True, timeout=wait
        )
        theirs = json.loads(done.stdout.strip().splitlines()[-1])
    except (subprocess.TimeoutExpired, ValueError, IndexError):
        raise UsageError(
            f"What answers at {address} is no Ray cluster that lets this machine in: is it the port of Ray's "
            "head (6379 by default), and is its token known here?"
        ) from None
    here = facts_here()
    for name, own, other in (
        ("Ray", here.ray, theirs.get("ray_version")),
        ("Python", here.python, theirs.get("python_version")),
    ):
        if other is not None and other != own:
            raise UsageError(_mismatch(name, own, other, f"the cluster at {address}"))


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(
            f"{address!r} is no address of a Ray cluster: it is auto, host:port or ray://host:port."
        )
    return host.strip("[]"), int(port)


def check_versions(others: list[Facts]) -> None:
    """Raise where workers run other software than the driver: results would differ, or nothing work."""
    here = facts_here()
    for facts in others:
        where = f"node {facts.host}" if facts.host else "a node"
        if facts.trouble:
            raise UsageError(
                f"rollgym cannot be imported on {where} of the cluster ({facts.trouble}): install rollgym "
                f"{here.rollgym} there."
            )
        for name, own, other in (("Python", here.python, facts.python), ("Ray", here.ray, facts.ray)):
            if own != other:
                raise UsageError(_mismatch(name, own, other, where))


def check_code(others: list[Facts]) -> None:
    """Raise where workers have another rollgym than the driver, in number or in its files."""
    check_versions(others)
    here = facts_here()
    for facts in others:
        if facts.rollgym != here.rollgym:
            raise UsageError(_mismatch("rollgym", here.rollgym, facts.rollgym, f"node {facts.host}"))
        if facts.digest != here.digest:
            raise UsageError(
                f"node {facts.host} has rollgym {facts.rollgym} like the driver, but other files of it: "
                "install the same there, or start the run from a source tree, which is then sent along."
            )


def _mismatch(what: str, own: str, other: str, where: str) -> str:
    return f"{where} runs {what} {other}, the driver {what} {own}: install the same on both."
