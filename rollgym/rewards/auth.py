"""Address and secret headers of a reward service; secrets come from environment variables."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from rollgym.core.errors import UsageError
from rollgym.utils.urls import is_http_url, is_loopback

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_RESERVED = {"accept-encoding", "connection", "content-length", "content-type", "host", "transfer-encoding"}
_SHORTEST_HIDDEN = 8
"""Shorter values are placeholders; replacing them would damage ordinary words."""


class Headers:
    """Headers with values from environment variables, which are not shown in a repr or a file."""

    __slots__ = ("_values",)

    def __init__(self, variables: Mapping[str, str]) -> None:
        for header in variables:
            if not _HEADER.fullmatch(header) or header.lower() in _RESERVED:
                raise UsageError(f"header_env cannot set the header {header!r}.")
        self._values = {header: _value(header, name) for header, name in variables.items()}

    def __repr__(self) -> str:
        return f"Headers({', '.join(self._values)})"

    def __reduce__(self) -> str:
        raise TypeError("secrets must not be copied or written to a file")

    def values(self) -> dict[str, str]:
        """Return the headers to send."""
        return dict(self._values)

    def hide(self, text: str) -> str:
        """Return the text with every secret replaced, also without a scheme before it (``Bearer``)."""
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
            f"The value of the header {header!r} contains a line break or a character outside ASCII."
        )
    return value


def check_url(url: object, allow_plain_http: bool) -> str:
    """Return the URL if it is allowed; otherwise raise a `UsageError`, which does not repeat it."""
    wrong = "A reward's url must be an address such as https://rewards.example/score"
    if not isinstance(url, str):
        raise UsageError(f"{wrong}, not a {type(url).__name__}.")
    if any(mark in url for mark in "@?#"):
        raise UsageError(
            f"{wrong}, without a user name, password or query: it is recorded. "
            "Secrets belong in environment variables (header_env)."
        )
    url = url.strip()
    if not is_http_url(url):
        raise UsageError(f"{wrong}, with https:// (or http:// on this machine) and a host.")
    if urlsplit(url).scheme == "http" and not allow_plain_http and not is_loopback(url):
        raise UsageError(
            f"{wrong}: plain http would send episodes and headers unencrypted over the network. "
            "Use https, or set allow_plain_http=True on a trusted network."
        )
    return url
