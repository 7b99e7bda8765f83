"""Two results of a suite side by side, task by task."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rollgym.bench.folder import entry_folder, read_results_manifest, recorded_suite
from rollgym.comparison import by_task, compare_runs, success_of
from rollgym.errors import UsageError
from rollgym.stats import paired
from rollgym.store import MANIFEST, load_run

Pairs = list[tuple[float, float]]


def compare_results(a: Path, b: Path) -> dict[str, Any]:
    """A paired comparison of every entry that both played, and of the suite."""
    manifests = [read_results_manifest(path) for path in (a, b)]
    _same_suite(manifests, a, b)
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
    notes = [f"{name}: {note}" for name, found in entries.items() for note in found["warnings"]]
    if left:
        notes.append(f"played by one side only: {', '.join(left)}")
    suite = recorded_suite(manifests[0], a)
    return {
        "suite": {"name": suite.name, "version": suite.version},
        "a": {"agent": manifests[0]["agent"]["name"], "out": str(a)},
        "b": {"agent": manifests[1]["agent"]["name"], "out": str(b)},
        "success": _overall([_pairs(a, b, name) for name in shared]),
        "entries": entries,
        "notes": notes,
    }


def _same_suite(manifests: list[dict[str, Any]], a: Path, b: Path) -> None:
    first, second = manifests
    if first["suite_hash"] != second["suite_hash"]:
        suites = [recorded_suite(manifest, path) for manifest, path in zip(manifests, (a, b), strict=True)]
        words = [f"{suite.name} {suite.version} ({suite.fingerprint})" for suite in suites]
        raise UsageError(f"{a} is of suite {words[0]} and {b} of {words[1]}: they cannot be compared.")


def _pairs(a: Path, b: Path, name: str) -> Pairs:
    """The success of both on every task of an entry."""
    one, other = (by_task(load_run(entry_folder(path, name))[1]) for path in (a, b))
    scores = [(success_of(one[key]), success_of(other[key])) for key in one if key in other]
    return [(x, y) for x, y in scores if x is not None and y is not None]


def _overall(entries: list[Pairs]) -> dict[str, Any] | None:
    """All tasks together, each entry with the same weight, as in the suite's own success."""
    known = [pairs for pairs in entries if pairs]
    total = sum(map(len, known))
    scaled = [
        (x * total / (len(known) * len(pairs)), y * total / (len(known) * len(pairs)))
        for pairs in known
        for x, y in pairs
    ]
    return asdict(paired([x for x, _ in scaled], [y for _, y in scaled])) if scaled else None
