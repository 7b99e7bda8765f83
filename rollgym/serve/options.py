"""Options of the endpoint, checked once."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from rollgym.core.errors import UsageError
from rollgym.utils.http_server import MAX_CONNECTIONS, REQUEST_SECONDS
from rollgym.utils.urls import is_loopback_host

UNKNOWN_ENV = "rollgym/Served-v0"
"""Environment id of recorded conversations unless the server or a client sets one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Address and limits of the endpoint."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 chooses a free port."""
    api_key: str | None = None
    """Bearer token that clients must send; required on every address but loopback."""
    model: str = "policy"
    """Model name that clients request."""
    env_id: str = UNKNOWN_ENV
    """Environment id of recorded conversations unless the client sets one."""
    split: str = "train"
    temperature: float | None = None
    """Overrides the temperature of requests: many programs ask for 0, from which nothing is learned."""
    fixed_sampling: bool = False
    """Sample at ``temperature`` from all tokens, with a separate seed per conversation, and ignore the
    temperature, top_p, top_k, min_p and seed of requests. Training requires it: the learner computes
    log-probs of that distribution, and the episodes of a group must be able to differ."""
    max_tokens: int | None = None
    """Limit of one reply in tokens. ``None``: only the client and the context limit it."""
    idle_seconds: float = 600.0
    """A conversation without a request for this many seconds is ended."""
    max_sessions: int = 1024
    """Open conversations at once; more are rejected with status 429."""
    max_requests: int = 256
    """Requests in flight at once; more are rejected with status 429."""
    max_body: int = 4_000_000
    """Bytes of a request body; larger ones are rejected with status 413."""
    request_seconds: float = REQUEST_SECONDS
    """Seconds for a whole request to arrive; after that its connection is closed."""
    max_connections: int = MAX_CONNECTIONS
    """Open connections at once; further ones are closed."""
    max_turns: int = 10_000
    """Maximum number of turns of a session that was opened without `max_turns`."""
    auxiliary: re.Pattern[str] | None = None
    """Requests whose last user message or system message matches are answered and not recorded: titles,
    summaries and other calls that are not the agent's own turns."""
    auxiliary_max_tokens: int = 0
    """Requests whose ``max_tokens`` is below this are answered and not recorded."""
    seed: int = 0
    """Seed of the sampling where a client gives none."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise UsageError(f"The port must be from 0 to 65535, not {self.port}.")
        for name in (
            "max_sessions", "max_requests", "max_body", "max_connections", "max_tokens", "max_turns"
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, not {value}.")
        for name, value in (("The idle time", self.idle_seconds), ("request_seconds", self.request_seconds)):
            if not 0 < value < math.inf:
                raise UsageError(f"{name} must be positive and finite, not {value}.")
        if self.temperature is not None and not 0 <= self.temperature < math.inf:
            raise UsageError(f"The temperature must be at least 0, not {self.temperature}.")
        if self.fixed_sampling and not self.temperature:
            raise UsageError("fixed_sampling requires temperature above 0.")
        if self.auxiliary_max_tokens < 0:
            raise UsageError(f"auxiliary_max_tokens must be at least 0, not {self.auxiliary_max_tokens}.")
        if self.seed < 0:
            raise UsageError(f"The seed must be at least 0, not {self.seed}.")
        if not self.model or not self.env_id:
            raise UsageError("model and env_id must not be empty.")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise UsageError("The API key must be plain printable characters.")
        if not self.api_key and not self.local:
            raise UsageError(
                f"Listening on {self.host or 'every address'} without an API key would let the whole network "
                "use the model: pass --api-key-env NAME, or use host 127.0.0.1."
            )

    @property
    def local(self) -> bool:
        """True where only this machine can reach the endpoint."""
        return is_loopback_host(self.host)
