"""Address and API key of an endpoint. The key comes from the environment, never from an option.

Options are recorded with the results and in the shell's history; a key must be in neither.
"""

from __future__ import annotations

import os
import re

from rollgym.core.errors import UsageError
from rollgym.utils.urls import is_http_url

PUBLIC_URL = "https://api.openai.com/v1"
PUBLIC_KEY_ENV = "OPENAI_API_KEY"
BASE_URL_ENV = "OPENAI_BASE_URL"

_SHORTEST_HIDDEN = 8
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Secret:
    """An API key that is not shown in a repr or a file."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def __repr__(self) -> str:
        return "Secret(...)"

    def __bool__(self) -> bool:
        return bool(self._value)

    def __reduce__(self) -> str:
        raise TypeError("an API key must not be copied or written to a file")

    def headers(self) -> dict[str, str]:
        """Return the header that carries the key; empty without a key."""
        return {"Authorization": f"Bearer {self._value}"} if self._value else {}

    def reveal(self) -> str | None:
        """Return the key, for a client that builds its own headers; ``None`` without a key."""
        return self._value or None

    def hide(self, text: str) -> str:
        """Return the text with the key replaced.

        Keys below eight characters are placeholders for local servers ("EMPTY"), not secrets; replacing
        them would damage ordinary words.
        """
        return text.replace(self._value, "[api key]") if len(self._value) >= _SHORTEST_HIDDEN else text


def find_key(variable: str | None) -> Secret:
    """Return the key in the named environment variable; an empty one where none is required or set."""
    if variable is None:
        return Secret("")
    if not isinstance(variable, str) or not _NAME.fullmatch(variable):
        # The value is not repeated: a key pasted here by mistake must not reach a log.
        raise UsageError("api_key_env must be the name of an environment variable that holds the key.")
    value = os.environ.get(variable, "").strip()
    if not value and variable != PUBLIC_KEY_ENV:
        raise UsageError("The environment variable that api_key_env names is not set.")
    if not all("!" <= character <= "~" for character in value):
        raise UsageError(
            "The API key contains a space, a line break or a character outside ASCII: copy it again."
        )
    return Secret(value)


def find_base_url(given: str | None, variable: str | None, key: Secret) -> str:
    """Return the endpoint's address: as given, from the environment, or OpenAI's where its key is set."""
    url = given if given is not None else os.environ.get(BASE_URL_ENV, "").strip() or None
    if url is None and key and variable == PUBLIC_KEY_ENV:
        url = PUBLIC_URL
    if url is None:
        raise UsageError(
            f"No endpoint given: pass base_url=http://localhost:8000/v1 (or set {BASE_URL_ENV}), or set "
            f"{PUBLIC_KEY_ENV} to use {PUBLIC_URL}."
        )
    return _check_url(url)


def _check_url(url: object) -> str:
    wrong = "base_url must be an address such as http://localhost:8000/v1"
    if not isinstance(url, str):
        raise UsageError(f"{wrong}, not a {type(url).__name__}.")
    # The value is not repeated: it may contain a key.
    if any(mark in url for mark in "@?#"):
        raise UsageError(
            f"{wrong}, without a user name, password or query: it is recorded with the results. "
            "The key belongs in an environment variable (api_key_env)."
        )
    if not is_http_url(url.strip()):
        raise UsageError(f"{wrong}, with http:// or https:// and a host.")
    return url.strip().rstrip("/").removesuffix("/chat/completions")
