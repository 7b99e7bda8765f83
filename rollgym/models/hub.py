"""Models of the Hugging Face Hub: from the local cache, or downloaded."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

from rollgym.core.errors import MissingExtra, UsageError, one_line

_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")
FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
"""Files to download: configuration, tokenizer and weights. Neither code nor pickles."""


def is_hub_id(name: str) -> bool:
    """Return True for OWNER/NAME or OWNER/NAME@REVISION, unless OWNER is a local folder."""
    return _ID.fullmatch(name) is not None and not Path(name.partition("/")[0]).is_dir()


def hub_folder(name: str) -> Path:
    """Return the local folder of a Hub model; needs no network if it is in the cache with its weights.

    Raises:
        UsageError: It is neither in the cache nor can be downloaded, with the reason.
    """
    match = _ID.fullmatch(name)
    if match is None:
        raise UsageError(f"{name!r} is not a Hugging Face Hub id: use OWNER/NAME.")
    try:
        hub: Any = importlib.import_module("huggingface_hub")
        problems: Any = importlib.import_module("huggingface_hub.errors")
    except ModuleNotFoundError:
        raise MissingExtra(f"Fetching the model {name}", "train") from None
    wanted = {
        "repo_id": match["id"],
        "revision": match["revision"],
        "allow_patterns": list(FILES),
        "ignore_patterns": ["*/*"],
    }
    try:
        cached = Path(hub.snapshot_download(**wanted, local_files_only=True))
        if _is_whole(cached):
            return cached
        where = "its files in the Hugging Face cache are incomplete"
    except (problems.LocalEntryNotFoundError, OSError, ValueError):
        where = "it is not in the Hugging Face cache"
    try:
        fetched = Path(hub.snapshot_download(**wanted))
        if _is_whole(fetched):
            return fetched
        # Without a network the library returns incomplete snapshots.
        why = "the Hub cannot be reached, or has no config.json and weights in safetensors format for it"
    except problems.GatedRepoError:
        why = "it is gated: accept its terms on the Hub and set HF_TOKEN"
    except problems.RepositoryNotFoundError:
        why = "the Hub has no model of that name (or it is private: set HF_TOKEN)"
    except problems.RevisionNotFoundError:
        why = f"the Hub has no revision {match['revision']!r} of it"
    except Exception as error:  # any network error
        why = f"the Hub cannot be reached ({one_line(error)[:160]})"
    raise UsageError(f"Model {name} not found: it is not a local folder, {where}, and {why}.")


def _is_whole(folder: Path) -> bool:
    """Return True if a cached snapshot can be loaded: some tools download only the configuration."""
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
