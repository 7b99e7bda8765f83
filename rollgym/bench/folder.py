"""A suite's results on disk: a manifest, a folder like that of an evaluation for each entry, the numbers.

DIR/manifest.json            the suite, whole; the agent; versions
DIR/entries/NAME/            what `rollgym.store` writes: manifest, episodes, events, summary
DIR/summary.json, report.md  the numbers, with a hash of every file of episodes
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import msgspec

from rollgym.bench.suite import NAME, Entry, Suite, Who, suite_from
from rollgym.errors import ResultsError, UsageError
from rollgym.files import refuse_links
from rollgym.store import MANIFEST, SUMMARY, read_versioned, refuse_change, write_json
from rollgym.types import SCHEMA_VERSION
from rollgym.versions import package_versions

ENTRIES, REPORT = "entries", "report.md"
KIND = "bench"


def entry_folder(out: Path, name: str) -> Path:
    """Where an entry's episodes are."""
    return out / ENTRIES / name


def make_manifest(suite: Suite, entries: list[Entry], who: Who) -> dict[str, Any]:
    """What was asked for, with everything needed to check or repeat it."""
    versions: dict[str, str] = {}
    for entry in entries:
        versions |= package_versions(entry.env)
    manifest = {
        "schema": SCHEMA_VERSION,
        "kind": KIND,
        "suite": suite.to_json(),
        "suite_hash": suite.fingerprint,
        "agent": {"name": who.agent, "options": dict(who.options)},
        "entries": [entry.name for entry in entries],
        "data": {name: value for name, value in who.data.items() if name in {e.name for e in entries}},
        "versions": versions,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    plain: dict[str, Any] = json.loads(json.dumps(manifest))  # as it will be read back
    return plain


def open_results(out: Path, manifest: dict[str, Any], resume: bool) -> dict[str, Any]:
    """Begin a folder, or go on with one that was made for the same; its manifest."""
    path = out / MANIFEST
    if path.exists() and not resume:
        raise UsageError(f"{out} already holds results: give --resume to finish them, or another --out.")
    if not path.exists():
        try:
            (out / ENTRIES).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"Cannot write results to {out}: {error.strerror}.") from None
        write_json(path, manifest)
        return manifest
    refuse_links(out)
    before = read_results_manifest(out)
    refuse_change(out, before, manifest, ("suite_hash", "agent", "entries", "data"))
    return before


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of any run's folder; a newer schema is refused."""
    if not folder.is_dir():
        raise UsageError(f"There is no results folder {folder}.")
    if not (folder / MANIFEST).exists():
        raise UsageError(f"{folder} is no results folder: it has no {MANIFEST}.")
    return read_versioned(folder / MANIFEST)


def read_results_manifest(out: Path) -> dict[str, Any]:
    """The manifest of a suite's results."""
    manifest = read_manifest(out)
    if manifest.get("kind") != KIND:
        raise UsageError(f"{out} holds no results of a suite, but of kind {manifest.get('kind')!r}.")
    try:
        msgspec.convert(manifest, _Form)
    except msgspec.ValidationError as error:
        raise ResultsError(f"{out / MANIFEST} is broken: {error}.") from None
    return manifest


_Name = Annotated[str, msgspec.Meta(pattern=rf"^{NAME}$")]


class _Agent(msgspec.Struct):
    name: str
    options: dict[str, Any]


class _Form(msgspec.Struct):
    """What a manifest must have."""

    suite: dict[str, Any]
    suite_hash: str
    agent: _Agent
    entries: list[_Name]
    data: dict[str, Any]
    versions: dict[str, str]


def recorded_suite(manifest: dict[str, Any], out: Path) -> Suite:
    """The suite as the results have it."""
    try:
        return suite_from(manifest["suite"], f"the suite in {out / MANIFEST}")
    except UsageError as error:
        raise ResultsError(str(error)) from None


def read_results_summary(out: Path) -> dict[str, Any]:
    """The numbers of a suite's results."""
    if not (out / SUMMARY).exists():
        raise ResultsError(
            f"{out} has no {SUMMARY}: its run was ended before the first entry was done. The command that "
            "began it goes on with --resume."
        )
    summary = read_versioned(out / SUMMARY)
    if summary.get("kind") != KIND or not isinstance(summary.get("entries"), list):
        raise ResultsError(f"{out / SUMMARY} is broken: it has no entries of a suite.")
    return summary


def parts(run: Path) -> dict[str, Path]:
    """The folders of episodes in a run: its entries by name for a suite, else the run itself."""
    manifest = read_manifest(run)
    if manifest.get("kind") != KIND:
        return {"": run}
    named = {name: entry_folder(run, name) for name in read_results_manifest(run)["entries"]}
    return {name: folder for name, folder in named.items() if (folder / MANIFEST).exists()}
