"""Checks before joining a Ray cluster: it answers, and runs the same versions."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

from rollgym.cluster.node_info import NodeInfo, local_node_info
from rollgym.core.errors import UsageError

# Queries the metadata of the cluster. In a subprocess, because Ray waits for minutes and then exits the
# process if there is no answer. The first line is for `_ask`: on a busy machine the import alone takes longer
# than a cluster may take to answer.
_ASK = """
import sys, ray._raylet
print("loaded", file=sys.stderr, flush=True)
client = ray._raylet.GcsClient(address=sys.argv[1])
metadata = client.internal_kv_get(b"CLUSTER_METADATA", namespace=b"cluster")
print((metadata or b"{}").decode())
"""


def find_address(address: str) -> str:
    """Resolve the address ``auto``; returns others unchanged."""
    if address != "auto":
        return address
    from ray._private import services

    own_address = services.get_ray_address_from_environment("auto", None)
    if not own_address or own_address == "auto":
        raise UsageError(
            "The Ray address is auto, but no Ray runs on this machine: start it with `ray start --head`, set "
            "its address, or leave the address out."
        )
    return str(own_address)


def check_address(address: str, wait: float = 20.0) -> None:
    """Raise `UsageError` if no Ray cluster of the same version answers."""
    host, port = _split(address)
    try:
        socket.create_connection((host, port), timeout=wait).close()
    except OSError as error:
        raise UsageError(
            f"No Ray cluster answers at {address} ({error.strerror or error}): check the address and that "
            "the head node is up."
        ) from None
    if address.startswith("ray://"):
        return
    try:
        theirs = json.loads(_ask(f"{host}:{port}", wait).splitlines()[-1])
    except (subprocess.TimeoutExpired, ValueError, IndexError):
        raise UsageError(
            f"Cannot join Ray at {address}, which accepts connections but described no cluster within "
            f"{wait:g} s: check the port (6379 by default) and RAY_AUTH_TOKEN."
        ) from None
    here = local_node_info()
    for name, own, other in (
        ("Ray", here.ray, theirs.get("ray_version")),
        ("Python", here.python, theirs.get("python_version")),
    ):
        if other is not None and other != own:
            raise UsageError(_mismatch(name, own, other, f"the cluster at {address}"))


def _ask(address: str, wait: float) -> str:
    """Return what a cluster says of itself; ``wait`` counts from when the question can be put."""
    command = [sys.executable, "-P", "-c", _ASK, address]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            process.stderr.readline()
            return process.communicate(timeout=wait)[0].strip()
        finally:
            process.kill()


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(f"{address!r} is not a Ray address: use auto, host:port or ray://host:port.")
    return host.strip("[]"), int(port)


def check_versions(others: list[NodeInfo]) -> None:
    """Raise `UsageError` if a node runs another version of Python or Ray than the driver."""
    here = local_node_info()
    for info in others:
        where = f"node {info.host}" if info.host else "a node"
        if info.error:
            raise UsageError(
                f"rollgym cannot be imported on {where} of the cluster ({info.error}): install rollgym "
                f"{here.rollgym} there."
            )
        for name, own, other in (("Python", here.python, info.python), ("Ray", here.ray, info.ray)):
            if own != other:
                raise UsageError(_mismatch(name, own, other, where))


def check_code(others: list[NodeInfo]) -> None:
    """Raise `UsageError` if a node has another rollgym than the driver, by version or source files."""
    check_versions(others)
    here = local_node_info()
    for info in others:
        if info.rollgym != here.rollgym:
            raise UsageError(_mismatch("rollgym", here.rollgym, info.rollgym, f"node {info.host}"))
        if info.digest != here.digest:
            raise UsageError(
                f"node {info.host} has rollgym {info.rollgym} like the driver, but with different source "
                "files: install the same there, or start the run from a source tree, which is uploaded."
            )


def _mismatch(what: str, own: str, other: str, where: str) -> str:
    return f"{where} runs {what} {other}, the driver {what} {own}: install the same on both."
