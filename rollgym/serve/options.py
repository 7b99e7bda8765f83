"""How the endpoint behaves, checked once, with a sentence for each mistake."""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass

from rollgym.errors import UsageError
from rollgym.web import MAX_CONNECTIONS, REQUEST_SECONDS

UNKNOWN_ENV = "rollgym/Served-v0"
"""What conversations are recorded as where nobody says what is being played."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Where the endpoint listens and what it allows."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free one."""
    api_key: str | None = None
    """What clients must show as a bearer token; needed on any address but this machine's own."""
    model: str = "policy"
    """The name that clients ask for."""
    env_id: str = UNKNOWN_ENV
    """What conversations are recorded as, unless they say otherwise."""
    split: str = "train"
    temperature: float | None = None
    """In place of what clients ask for: many programs ask for 0, and nothing is learnt from that."""
    fixed_sampling: bool = False
    """Draw at ``temperature`` from all tokens, with seeds of each conversation's own, and ignore the
    temperature, top_p, top_k, min_p and seed of requests. A training run needs it: the learner computes
    log-probs of that distribution, and members of a group must be able to differ."""
    max_tokens: int | None = None
    """Of one reply, at most. None leaves it to the client, and to the room in the context."""
    idle_seconds: float = 600.0
    """A conversation in which nothing was said for so long has ended."""
    max_sessions: int = 1024
    """Conversations open at once; more are refused with 429."""
    max_requests: int = 256
    """Requests under way at once; more are refused with 429."""
    max_body: int = 4_000_000
    """Bytes of a request; more are refused with 413."""
    request_seconds: float = REQUEST_SECONDS
    """Time for a whole request to arrive; then its connection is closed."""
    max_connections: int = MAX_CONNECTIONS
    """Connections open at once; further ones are closed."""
    seed: int = 0
    """Of everything that is drawn where a client gives no seed."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise UsageError(f"The port must be from 0 to 65535, not {self.port}.")
        for name in ("max_sessions", "max_requests", "max_body", "max_connections"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}.")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise UsageError(f"max_tokens must be at least 1, not {self.max_tokens}.")
        if not (0 < self.idle_seconds < math.inf):
            raise UsageError(f"The idle time must be positive and finite, not {self.idle_seconds}.")
        if not (0 < self.request_seconds < math.inf):
            raise UsageError(f"request_seconds must be positive and finite, not {self.request_seconds}.")
        if self.temperature is not None and not 0 <= self.temperature < math.inf:
            raise UsageError(f"The temperature must be at least 0, not {self.temperature}.")
        if self.fixed_sampling and not self.temperature:
            raise UsageError("fixed_sampling needs a temperature above 0, at which every reply is drawn.")
        if self.seed < 0:
            raise UsageError(f"The seed must be at least 0, not {self.seed}.")
        if not self.model or not self.env_id:
            raise UsageError("The model and the environment need a name.")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise UsageError("The API key must be plain printable characters.")
        if not self.api_key and not self.local:
            raise UsageError(
                f"Whoever reaches {self.host or 'every address'} could use the model: name a variable that "
                "holds a key for clients (--api-key-env NAME), or stay on 127.0.0.1."
            )

    @property
    def local(self) -> bool:
        """Whether only this machine can reach the endpoint."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
