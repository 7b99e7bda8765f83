"""Where a service is, and what is sent along: secrets come from the environment and are shown nowhere."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from rollgym.errors import UsageError

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_OURS = {"accept-encoding", "connection", "content-length", "content-type", "host", "transfer-encoding"}
_SHORTEST_HIDDEN = 8
"""Shorter values are placeholders; hiding them would eat ordinary words."""


class Headers:
    """Headers whose values stand in environment variables. They do not show themselves."""

    __slots__ = ("_values",)

    def __init__(self, variables: Mapping[str, str]) -> None:
        for header in variables:
            if not _HEADER.fullmatch(header) or header.lower() in _OURS:
                raise UsageError(f"header_env cannot set the header {header!r}.")
        self._values = {header: _value(header, name) for header, name in variables.items()}

    def __repr__(self) -> str:
        return f"Headers({', '.join(self._values)})"

    def __reduce__(self) -> str:
        raise TypeError("secrets are not to be copied or written to a file")

    def values(self) -> dict[str, str]:
        """What to send."""
        return dict(self._values)

    def hide(self, text: str) -> str:
        """The text with every secret blotted out, also without the word before it (``Bearer``)."""
        secrets = {part for value in self._values.values() for part in (value, value.rpartition(" ")[2])}
        for secret in sorted(secrets, key=len, reverse=True):
            if len(secret) >= _SHORTEST_HIDDEN:
                text = text.replace(secret, "[secret]")
        return text


def _value(header: str, variable: object) -> str:
    # The name is not repeated: a secret pasted here by mistake must not reach a log.
    if not isinstance(variable, str) or not _VARIABLE.fullmatch(variable):
        raise UsageError(
            f"header_env[{header!r}] must be the name of an environment variable that holds the value."
        )
    value = os.environ.get(variable, "").strip()
    if not value:
        raise UsageError(f"The environment variable that header_env[{header!r}] names is not set.")
    if not all(" " <= character <= "~" for character in value):
        raise UsageError(
            f"The value for the header {header!r} holds a line break or a character outside ASCII."
        )
    return value


def is_loopback(url: str) -> bool:
    """Whether an address is on this machine."""
    host = (urlsplit(url).hostname or "").lower()
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_url(url: object, allow_plain_http: bool) -> str:
    """An address that may be posted to; a `UsageError` that does not repeat it otherwise."""
    wrong = "A reward's url must be an address such as https://rewards.example/score"
    if not isinstance(url, str):
        raise UsageError(f"{wrong}, not a {type(url).__name__}.")
    if any(mark in url for mark in "@?#"):
        raise UsageError(
            f"{wrong}, without a user name, password or query: it is recorded. "
            "Secrets belong in environment variables (header_env)."
        )
    url = url.strip()
    try:
        parts = urlsplit(url)
        is_whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_whole = False
    if not is_whole:
        raise UsageError(f"{wrong}, with https:// (or http:// on this machine) and a host.")
    if parts.scheme == "http" and not allow_plain_http and not is_loopback(url):
        raise UsageError(
            f"{wrong}: plain http would send episodes and headers readable over the network. "
            "Use https, or set allow_plain_http=True if the network is your own."
        )
    return url
