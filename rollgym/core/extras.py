"""Optional dependencies (extras): detect them, and state the command that installs them."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

from rollgym.core.errors import MissingExtra

MODULES = {
    "browser": ("playwright",),
    "distributed": ("ray",),
    "docker": ("docker",),
    "math": ("math_verify",),
    "openenv": ("starlette", "uvicorn", "websockets"),
    "parquet": ("pyarrow",),
    "serve": ("starlette", "uvicorn"),
    "train": ("torch", "transformers", "yaml", "safetensors", "tokenizers", "jinja2"),
    "view": ("starlette", "uvicorn"),
    "webshop": ("rapidfuzz",),
}
"""Modules that an extra consists of, where it is not one module of the same name."""


def require(what: str, extra: str) -> None:
    """Raise `MissingExtra` where an extra is not installed; imports nothing."""
    if any(find_spec(module) is None for module in MODULES.get(extra, (extra,))):
        raise MissingExtra(what, extra)


def install_command(extra: str) -> str:
    """The pip command that adds an extra to the running installation.

    A clone is installed from its folder, a Git URL from that URL, anything else from the package index.
    """
    source, editable = _origin()
    if source is None:
        return f"pip install 'rollgym[{extra}]'"
    if not isinstance(source, Path):
        return f"pip install 'rollgym[{extra}] @ {source}'"
    folder = "." if source == Path.cwd() else str(source)
    return f"pip install {'-e ' if editable else ''}'{folder}[{extra}]'"


def _origin() -> tuple[Path | str | None, bool]:
    """The installation's source (a folder, a URL, ``None`` for the index), and whether it is editable."""
    clone = Path(__file__).resolve().parents[2]
    try:
        text = distribution("rollgym").read_text("direct_url.json")
    except PackageNotFoundError:
        return (clone, True) if _is_clone(clone) else (None, False)
    try:
        origin = json.loads(text or "{}")
        parts = urlsplit(origin["url"])
    except (ValueError, KeyError, TypeError):
        return None, False
    if vcs := origin.get("vcs_info"):
        return f"{vcs['vcs']}+{origin['url']}@{vcs['commit_id']}", False
    folder = Path(unquote(parts.path))
    if parts.scheme == "file" and "dir_info" in origin and _is_clone(folder):
        return folder, bool(origin["dir_info"].get("editable"))
    return None, False


def _is_clone(folder: Path) -> bool:
    return (folder / "pyproject.toml").is_file() and (folder / "rollgym").is_dir()
