"""The route of weights to a server if the settings leave it open."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

SMALL = 4 << 20
"""Bytes that SGLang takes in a call as fast as by any other route, without a group to form first."""


class RouteChoice(NamedTuple):
    """A route, and why it was chosen."""

    route: str
    reason: str


def choose_route(
    supported: Sequence[str], *, nbytes: int, local: bool, host: bool, shares_gpu: bool, small: int = 0
) -> RouteChoice:
    """Choose the route of a server.

    Args:
        supported: The routes that the server supports.
        nbytes: Bytes of a full update.
        local: The server is on this machine.
        host: An address of this machine for servers on others is given.
        shares_gpu: The server uses the GPU of this process.
        small: Bytes below which the call itself is fast.
    """
    if "group" not in supported:
        if "disk" in supported:
            return RouteChoice("disk", "the server has no transfer backend")
        return RouteChoice(supported[0], "the only one that the server supports")
    if not local and not host:
        return RouteChoice("tensor", "the server is on another machine, for which no host is given")
    if local and shares_gpu:
        return RouteChoice("disk", "NCCL joins no two processes on one GPU")
    if nbytes < small:
        return RouteChoice("tensor", f"{nbytes:,} bytes fit into one call")
    return RouteChoice("group", "a broadcast is the fastest route of large weights")
