"""`VllmEngine`: an `Engine` over HTTP for one vLLM server."""

from __future__ import annotations

from collections.abc import Sequence
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
    with a recomputed KV cache; ``resend``: abort them and request the rest again.
    """

    servers_class = VllmServers
    sender_class = VllmWeightSender
    modes = {"keep": "keep", "resend": "abort"}

    def supported_routes(self, servers: ServerGroup) -> Sequence[Route]:
        """Return all routes where the server has a transfer backend, else ``disk``."""
        return self.sender_class.routes if cast(VllmServers, servers).broadcasts else ("disk",)

    def check_route(self, servers: ServerGroup, route: Route) -> None:
        """Raise `UsageError` if the server cannot receive weights by this route."""
        if route != "disk" and not cast(VllmServers, servers).broadcasts:
            raise UsageError(
                f"route={route!r} needs a vLLM server with --weight-transfer-config "
                f'\'{{"backend": "rollgym"}}\': restart {servers.front.url} with it, or use route="disk".'
            )
