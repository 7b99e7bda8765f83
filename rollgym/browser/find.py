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
    f"pass its path as chromium= or in the environment variable {VARIABLE}."
)


def find_chromium(
    program_path: str | None = None,
    environ: Mapping[str, str] = os.environ,
    *,
    what: str = "WebShop in a browser",
) -> str | None:
    """Return the program: as given, from the variable or on the path; None for Playwright's own.

    ``what`` needs it, for error messages.
    """
    if importlib.util.find_spec("playwright") is None:
        raise MissingExtra(what, "browser")
    for path, source in ((program_path, "chromium="), (environ.get(VARIABLE), VARIABLE)):
        if path:
            return _usable(path, source)
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None and not _own(environ):
        raise UsageError(f"{what} needs Chromium, which was not found. {FIX}")
    return program


def _usable(path: str, source: str) -> str:
    program = shutil.which(os.path.expanduser(path))
    if program is None:
        raise UsageError(f"{source} names {path!r} as Chromium, which is not an executable. {FIX}")
    return program


def _own(environ: Mapping[str, str]) -> bool:
    """Whether Playwright has downloaded its own browser."""
    default = Path.home() / ".cache" / "ms-playwright"
    folder = Path(environ.get("PLAYWRIGHT_BROWSERS_PATH") or default)
    return any(folder.glob("chromium*"))
