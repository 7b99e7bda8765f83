"""Results folders of suites, and their comparison: a manifest, an evaluation folder per entry, a summary.

DIR/manifest.json            the complete suite; the agent; versions
DIR/entries/NAME/            what `rollgym.io.run_dir` writes: manifest, episodes, events, summary
DIR/summary.json, report.md  the summary, with a hash of every episodes file
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import msgspec

from rollgym.bench.suite import NAME, AgentSpec, Entry, Suite, suite_from
from rollgym.core.errors import ResultsError, UsageError
from rollgym.core.files import refuse_links
from rollgym.core.types import SCHEMA_VERSION
from rollgym.evaluation.compare import by_task, compare_runs, success_of
from rollgym.evaluation.stats import paired
from rollgym.io.run_dir import (
    MANIFEST,
    SUMMARY,
    read_manifest,
    read_run,
    read_versioned,
    refuse_change,
    write_json,
)
from rollgym.utils.env_info import package_versions

ENTRIES, REPORT = "entries", "report.md"
KIND = "bench"


def entry_folder(out: Path, name: str) -> Path:
    """The folder of an entry's episodes."""
    return out / ENTRIES / name


def make_manifest(suite: Suite, entries: list[Entry], agent_spec: AgentSpec) -> dict[str, Any]:
    """The manifest: everything needed to check or repeat the run."""
    versions: dict[str, str] = {}
    for entry in entries:
        versions |= package_versions(entry.env)
    manifest = {
        "schema": SCHEMA_VERSION,
        "kind": KIND,
        "suite": suite.to_json(),
        "suite_hash": suite.fingerprint,
        "agent": {"name": agent_spec.agent, "options": dict(agent_spec.options)},
        "entries": [entry.name for entry in entries],
        "data": {name: value for name, value in agent_spec.data.items() if name in {e.name for e in entries}},
        "versions": versions,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    plain: dict[str, Any] = json.loads(json.dumps(manifest))  # as it will be read back
    return plain


def open_results(out: Path, manifest: dict[str, Any], resume: bool) -> dict[str, Any]:
    """Create a results folder, or resume one with the same manifest; returns its manifest."""
    path = out / MANIFEST
    if path.exists() and not resume:
        raise UsageError(
            f"{out} already holds results: pass --resume to finish them, or choose another --out."
        )
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


def read_results_manifest(out: Path) -> dict[str, Any]:
    """Read the manifest of a suite's results."""
    manifest = read_manifest(out)
    if manifest.get("kind") != KIND:
        raise UsageError(f"{out} does not hold the results of a suite: its kind is {manifest.get('kind')!r}.")
    try:
        msgspec.convert(manifest, _ManifestSchema)
    except msgspec.ValidationError as error:
        raise ResultsError(f"{out / MANIFEST} is broken: {error}.") from None
    return manifest


_Name = Annotated[str, msgspec.Meta(pattern=rf"^{NAME}$")]


class _Agent(msgspec.Struct):
    name: str
    options: dict[str, Any]


class _ManifestSchema(msgspec.Struct):
    """Required fields of a manifest."""

    suite: dict[str, Any]
    suite_hash: str
    agent: _Agent
    entries: list[_Name]
    data: dict[str, Any]
    versions: dict[str, str]


def recorded_suite(manifest: dict[str, Any], out: Path) -> Suite:
    """The suite as recorded in the results."""
    try:
        return suite_from(manifest["suite"], f"the suite in {out / MANIFEST}")
    except UsageError as error:
        raise ResultsError(str(error)) from None


def read_results_summary(out: Path) -> dict[str, Any]:
    """Read the summary of a suite's results."""
    if not (out / SUMMARY).exists():
        raise ResultsError(
            f"{out} has no {SUMMARY}: the run ended before its first entry was finished. Run the same "
            "command with --resume."
        )
    summary = read_versioned(out / SUMMARY)
    if summary.get("kind") != KIND or not isinstance(summary.get("entries"), list):
        raise ResultsError(f"{out / SUMMARY} is broken: it has no entries of a suite.")
    return summary


def parts(run: Path) -> dict[str, Path]:
    """The episode folders of a run: the entries of a suite by name, or the run itself."""
    manifest = read_manifest(run)
    if manifest.get("kind") != KIND:
        return {"": run}
    named = {name: entry_folder(run, name) for name in read_results_manifest(run)["entries"]}
    return {name: folder for name, folder in named.items() if (folder / MANIFEST).exists()}


Pairs = list[tuple[float, float]]


def compare_results(a: Path, b: Path) -> dict[str, Any]:
    """Compare every entry that both folders contain, and the suite as a whole."""
    manifests = [read_results_manifest(path) for path in (a, b)]
    suite = recorded_suite(manifests[0], a)
    if manifests[0]["suite_hash"] != manifests[1]["suite_hash"]:
        suites = (suite, recorded_suite(manifests[1], b))
        names = [f"{s.name} {s.version} ({s.fingerprint})" for s in suites]
        raise UsageError(f"Different suites cannot be compared: {a} has {names[0]}, {b} has {names[1]}.")
    shared = [
        name
        for name in manifests[0]["entries"]
        if name in manifests[1]["entries"]
        and all((entry_folder(path, name) / MANIFEST).exists() for path in (a, b))
    ]
    if not shared:
        raise UsageError(f"{a} and {b} have no entry in common.")
    entries = {name: compare_runs(entry_folder(a, name), entry_folder(b, name)) for name in shared}
    left = sorted({*manifests[0]["entries"], *manifests[1]["entries"]} - set(shared))
    notes = [f"{name}: {note}" for name, result in entries.items() for note in result["warnings"]]
    if left:
        notes.append(f"played by one side only: {', '.join(left)}")
    return {
        "suite": {"name": suite.name, "version": suite.version},
        "a": {"agent": manifests[0]["agent"]["name"], "out": str(a)},
        "b": {"agent": manifests[1]["agent"]["name"], "out": str(b)},
        "success": _overall([_pairs(a, b, name) for name in shared]),
        "entries": entries,
        "notes": notes,
    }


def _pairs(a: Path, b: Path, name: str) -> Pairs:
    """The success rates of both on every task of an entry."""
    tasks_a, tasks_b = (by_task(read_run(entry_folder(path, name))[1]) for path in (a, b))
    scores = [(success_of(tasks_a[key]), success_of(tasks_b[key])) for key in tasks_a if key in tasks_b]
    return [(x, y) for x, y in scores if x is not None and y is not None]


def _overall(entries: list[Pairs]) -> dict[str, Any] | None:
    """All tasks together, with equal weights of the entries, as in the suite's success rate."""
    scored = [pairs for pairs in entries if pairs]
    total = sum(map(len, scored))
    scaled = [
        (x * total / (len(scored) * len(pairs)), y * total / (len(scored) * len(pairs)))
        for pairs in scored
        for x, y in pairs
    ]
    return asdict(paired([x for x, _ in scaled], [y for _, y in scaled])) if scaled else None
