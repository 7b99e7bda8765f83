"""Where an endpoint is, and the key to it: from the environment, never from an option.

Options are recorded with the results and stand in the shell's history; a key must be in neither.
"""

from __future__ import annotations

import os
import re
from urllib.parse import urlsplit

from rollgym.errors import UsageError

PUBLIC_URL = "https://api.openai.com/v1"
PUBLIC_KEY_ENV = "OPENAI_API_KEY"
BASE_URL_ENV = "OPENAI_BASE_URL"

_SHORTEST_HIDDEN = 8
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Secret:
    """An API key that does not show itself."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def __repr__(self) -> str:
        return "Secret(...)"

    def __bool__(self) -> bool:
        return bool(self._value)

    def __reduce__(self) -> str:
        raise TypeError("an API key is not to be copied or written to a file")

    def headers(self) -> dict[str, str]:
        """The header that carries the key; none where there is no key."""
        return {"Authorization": f"Bearer {self._value}"} if self._value else {}

    def reveal(self) -> str | None:
        """The key itself, for a client that builds its own headers; ``None`` where there is none."""
        return self._value or None

    def hide(self, text: str) -> str:
        """The text with the key blotted out.

        Keys below eight characters are placeholders for local servers ("EMPTY"), not secrets; hiding
        those would eat ordinary words.
        """
        return text.replace(self._value, "[api key]") if len(self._value) >= _SHORTEST_HIDDEN else text


def find_key(variable: str | None) -> Secret:
    """The key in the named environment variable; an empty one where no key is wanted or set."""
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
            "The API key holds a space, a line break or a character outside ASCII: it was not copied right."
        )
    return Secret(value)


def find_base_url(given: str | None, variable: str | None, key: Secret) -> str:
    """The endpoint's address: as given, from the environment, or the public one if there is its key."""
    url = given if given is not None else os.environ.get(BASE_URL_ENV, "").strip() or None
    if url is None and key and variable == PUBLIC_KEY_ENV:
        url = PUBLIC_URL
    if url is None:
        raise UsageError(
            f"Say where the model is served: base_url=http://localhost:8000/v1 (or set {BASE_URL_ENV}), "
            f"or set {PUBLIC_KEY_ENV} to use {PUBLIC_URL}."
        )
    return _check_url(url)


def _check_url(url: object) -> str:
    wrong = "base_url must be an address such as http://localhost:8000/v1"
    if not isinstance(url, str):
        raise UsageError(f"{wrong}, not a {type(url).__name__}.")
    # The value is not repeated: a key can stand in it.
    if any(mark in url for mark in "@?#"):
        raise UsageError(
            f"{wrong}, without a user name, password or query: it is recorded with the results. "
            "The key belongs in an environment variable (api_key_env)."
        )
    try:
        parts = urlsplit(url.strip())
        is_whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_whole = False
    if not is_whole:
        raise UsageError(f"{wrong}, with http:// or https:// and a host.")
    return url.strip().rstrip("/").removesuffix("/chat/completions")
