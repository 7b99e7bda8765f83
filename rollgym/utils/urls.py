"""Checks on addresses, without an HTTP client."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit


def is_http_url(url: str) -> bool:
    """Return whether ``url`` is an http(s) URL with a host and a valid port."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def is_loopback_host(host: str) -> bool:
    """Return whether a host name or IP address is this machine."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_loopback(url: str) -> bool:
    """Return whether a URL is on this machine."""
    return is_loopback_host(urlsplit(url).hostname or "")
