"""Address and API key of an endpoint. The key comes from the environment, never from an option.

Options are recorded with the results and in the shell's history; a key must be in neither.
"""

from __future__ import annotations

import os

from rollgym.core.errors import UsageError
from rollgym.utils.credentials import check_service_url, hide_secrets, read_secret

PUBLIC_URL = "https://api.openai.com/v1"
PUBLIC_KEY_ENV = "OPENAI_API_KEY"
BASE_URL_ENV = "OPENAI_BASE_URL"


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
        """Return the text with the key replaced."""
        return hide_secrets(text, [self._value], "[api key]")


def find_key(variable: str | None) -> Secret:
    """Return the key in the named environment variable; an empty one where none is required or set."""
    if variable is None:
        return Secret("")
    return Secret(read_secret(variable, "api_key_env", "API key", required=variable != PUBLIC_KEY_ENV))


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
    url = check_service_url(
        url, "base_url must be an address such as http://localhost:8000/v1", "api_key_env"
    )
    return url.rstrip("/").removesuffix("/chat/completions")
