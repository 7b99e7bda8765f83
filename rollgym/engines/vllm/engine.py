"""`VllmEngine`: an `Engine` over HTTP for one vLLM server."""

from __future__ import annotations

from typing import cast

from rollgym.core.errors import UsageError
from rollgym.engines.servers.engine import ServerEngine
from rollgym.engines.servers.server_group import ServerGroup
from rollgym.engines.servers.weights import Route
from rollgym.engines.vllm.server_group import VllmServers
from rollgym.engines.vllm.weights import VllmWeightSender


class VllmEngine(ServerEngine):
    """An engine for a vLLM server; the arguments are those of `ServerEngine`.

    ``interrupt`` is one of ``keep`` (default): in-flight replies wait during a weight update and continue
    with a recomputed KV cache; ``resend``: abort them and request the rest again. ``route`` is ``group`` by
    default.
    """

    servers_class = VllmServers
    sender_class = VllmWeightSender
    modes = {"keep": "keep", "resend": "abort"}

    def default_route(self, servers: ServerGroup) -> Route:
        """Return ``group`` where the server can join a broadcast group, else ``disk``."""
        return "group" if cast(VllmServers, servers).broadcasts else "disk"

    def check_route(self, servers: ServerGroup, route: Route) -> None:
        """Raise `UsageError` if the server cannot receive weights by this route."""
        if route != "disk" and not cast(VllmServers, servers).broadcasts:
            raise UsageError(
                f"route={route!r} needs a vLLM server with --weight-transfer-config "
                f'\'{{"backend": "rollgym"}}\': restart {servers.front.url} with it, or use route="disk".'
            )
