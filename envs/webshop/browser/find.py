"""Locates Chromium."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from rollgym.core.errors import MissingExtra, UsageError

VARIABLE = "ROLLGYM_CHROMIUM"
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
"""Supported programs; the first is the lightest and makes no network requests by itself."""
FIX = (
    "Install it by `apt install chromium-headless-shell` or `playwright install chromium-headless-shell`, or "
    f"say where it is: the argument chromium=, or the environment variable {VARIABLE}."
)


def find_chromium(given: str | None = None, environ: Mapping[str, str] = os.environ) -> str | None:
    """The program to start: as given, by the variable, on the path; None is Playwright's own."""
    if importlib.util.find_spec("playwright") is None:
        raise MissingExtra("WebShop in a browser", "browser")
    for said, how in ((given, "chromium="), (environ.get(VARIABLE), VARIABLE)):
        if said:
            return _usable(said, how)
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None and not _own(environ):
        raise UsageError(f"WebShop in a browser needs Chromium, and there is none. {FIX}")
    return found


def _usable(said: str, how: str) -> str:
    found = shutil.which(os.path.expanduser(said))
    if found is None:
        raise UsageError(f"{how} names {said!r} as Chromium, which is not an executable. {FIX}")
    return found


def _own(environ: Mapping[str, str]) -> bool:
    """Whether Playwright has downloaded its own browser."""
    default = Path.home() / ".cache" / "ms-playwright"
    place = Path(environ.get("PLAYWRIGHT_BROWSERS_PATH") or default)
    return any(place.glob("chromium*"))
