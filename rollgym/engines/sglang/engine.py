"""`SglangEngine`: an `Engine` over HTTP for one SGLang server, or a router with several workers."""

from __future__ import annotations

from typing import cast

from rollgym.engines.servers.engine import ServerEngine
from rollgym.engines.servers.route_choice import SMALL
from rollgym.engines.servers.server_group import ServerGroup
from rollgym.engines.sglang.compat import Interrupt, SglangCompat
from rollgym.engines.sglang.server_group import SglangServers
from rollgym.engines.sglang.weights import SglangWeightSender


class SglangEngine(ServerEngine):
    """An engine for SGLang servers; the arguments are those of `ServerEngine`.

    ``interrupt`` is one of ``resend`` (default): abort in-flight replies and request the rest again;
    ``in_place`` (SGLang 0.5.19): continue with the KV cache of the old weights; ``retract`` (0.5.22):
    continue and recompute the KV cache.
    """

    servers_class = SglangServers
    sender_class = SglangWeightSender
    modes = {"resend": "abort", "in_place": "in_place", "retract": "retract"}
    small = SMALL

    @property
    def compat(self) -> SglangCompat:
        """Features that the servers' SGLang version supports."""
        return cast(SglangServers, self._servers).compat

    def check_servers(self, servers: ServerGroup, interrupt: str) -> None:
        """Raise `UsageError` if the servers do not support the ``interrupt`` mode."""
        cast(SglangServers, servers).compat.check(cast(Interrupt, interrupt), servers.front.url)
