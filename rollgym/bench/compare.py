"""Paired comparison of two results of a suite."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rollgym.bench.results import entry_folder, read_results_manifest, recorded_suite
from rollgym.core.errors import UsageError
from rollgym.evaluation.compare import by_task, compare_runs, success_of
from rollgym.evaluation.stats import paired
from rollgym.io.run_dir import MANIFEST, read_run

Pairs = list[tuple[float, float]]


def compare_results(a: Path, b: Path) -> dict[str, Any]:
    """Compare every entry that both folders contain, and the suite as a whole."""
    manifests = [read_results_manifest(path) for path in (a, b)]
    suites = [recorded_suite(manifest, path) for manifest, path in zip(manifests, (a, b), strict=True)]
    if manifests[0]["suite_hash"] != manifests[1]["suite_hash"]:
        names = [f"{suite.name} {suite.version} ({suite.fingerprint})" for suite in suites]
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
        "suite": {"name": suites[0].name, "version": suites[0].version},
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
