"""Secrets from environment variables and addresses of services, kept out of messages and records."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from rollgym.core.errors import UsageError
from rollgym.utils.urls import is_http_url

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SHORTEST_HIDDEN = 8


def read_secret(
    variable: object, setting: str, what: str, *, required: bool = True, spaces: bool = False
) -> str:
    """Return the secret in the environment variable that a setting names; empty if optional and not set.

    Errors name the ``setting`` and ``what`` the variable holds; ``spaces``: whether it may contain spaces.
    """
    # Errors repeat neither name nor value: a secret pasted here by mistake must not reach a log.
    if not isinstance(variable, str) or not _VARIABLE.fullmatch(variable):
        raise UsageError(f"{setting} must be the name of an environment variable that holds the {what}.")
    value = os.environ.get(variable, "").strip()
    if required and not value:
        raise UsageError(f"The environment variable that {setting} names is not set.")
    if not all((" " if spaces else "!") <= character <= "~" for character in value):
        space = "" if spaces else "a space, "
        raise UsageError(
            f"The {what} contains {space}a line break or a character outside ASCII: copy it again."
        )
    return value


def hide_secrets(text: str, secrets: Iterable[str], mark: str) -> str:
    """Return a text with every secret replaced by ``mark``.

    Values below eight characters are placeholders for local servers ("EMPTY"); replacing them would damage
    ordinary words.
    """
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _SHORTEST_HIDDEN:
            text = text.replace(secret, mark)
    return text


def check_service_url(url: object, expected: str, secret_setting: str) -> str:
    """Return a service's URL without white space around it; raise a `UsageError`, which does not repeat it.

    Errors start with ``expected``, which has an example, and name the setting in which a secret belongs.
    """
    if not isinstance(url, str):
        raise UsageError(f"{expected}, not a {type(url).__name__}.")
    if any(mark in url for mark in "@?#"):
        raise UsageError(
            f"{expected}, without a user name, password or query: it is recorded with the results. Secrets "
            f"belong in environment variables ({secret_setting})."
        )
    if not is_http_url(url.strip()):
        raise UsageError(f"{expected}, with http:// or https:// and a host.")
    return url.strip()
