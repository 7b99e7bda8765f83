"""Paired comparison of two evaluations, matched by task and seed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rollgym.core.errors import ResultsError, UsageError
from rollgym.core.types import Episode
from rollgym.evaluation.metrics import first_observation
from rollgym.evaluation.stats import paired
from rollgym.io.run_dir import MANIFEST, read_run, read_versioned

Key = tuple[str, int | None, int]


def compare_runs(a: Path, b: Path) -> dict[str, Any]:
    """A paired comparison of two results folders, as a JSON-able object."""
    manifest_a, episodes_a = _load(a)
    manifest_b, episodes_b = _load(b)
    if manifest_a["env"] != manifest_b["env"]:
        names = [
            f"{manifest['env']['id']} {manifest['env']['kwargs']}" for manifest in (manifest_a, manifest_b)
        ]
        raise UsageError(
            f"The two runs played different environments ({' and '.join(names)}), so they cannot be compared."
        )
    groups_a, groups_b = by_task(episodes_a), by_task(episodes_b)
    shared = [key for key in groups_a if key in groups_b]
    if not shared:
        raise UsageError(
            f"{a} and {b} have no task in common: evaluate both with the same --seed, --split and --episodes."
        )
    return {
        "env": manifest_a["env"]["id"],
        "a": {"agent": manifest_a["agent"]["name"], "out": str(a)},
        "b": {"agent": manifest_b["agent"]["name"], "out": str(b)},
        "tasks": len(shared),
        "success": _compare(groups_a, groups_b, shared, success_of),
        "return": _compare(
            groups_a, groups_b, shared, lambda episodes: sum(e.total_reward for e in episodes) / len(episodes)
        ),
        "warnings": _warnings(manifest_a, manifest_b, groups_a, groups_b, shared),
    }


def _load(folder: Path) -> tuple[dict[str, Any], list[Episode]]:
    """The results of an evaluation. Folders of other commands are refused."""
    if folder.is_dir() and (folder / MANIFEST).is_file():
        manifest = read_versioned(folder / MANIFEST)
        kind = str(manifest.get("kind", "eval"))
        if kind != "eval":
            contents, instead = _OTHERS.get(kind, (f"results of the kind {kind!r}", ""))
            raise UsageError(
                f"{folder} holds {contents}, but compare takes two folders of `rollgym eval`{instead}."
            )
        if not all(isinstance(manifest.get(name), dict) for name in ("env", "agent")):
            raise ResultsError(f"{folder / MANIFEST} does not name an environment and an agent.")
    return read_run(folder)


_OTHERS = {
    "train": ("a training run", ": evaluate its policy, DIR/final, with `rollgym eval --agent lm --model`"),
    "bench": ("the results of a suite", "; `rollgym bench compare` compares those"),
    "serve": ("recorded conversations", ""),
}
"""Other kinds of folders, and what to use instead."""


def by_task(episodes: Sequence[Episode]) -> dict[Key, list[Episode]]:
    """Episodes with a score, by task."""
    groups: dict[Key, list[Episode]] = defaultdict(list)
    for episode in episodes:
        if not episode.excluded:
            spec = episode.spec
            groups[(spec.split, spec.task, spec.env_seed)].append(episode)
    return dict(sorted(groups.items(), key=lambda item: str(item[0])))


def success_of(episodes: Sequence[Episode]) -> float | None:
    """The success rate of the episodes that define success."""
    values = [float(e.scored_success) for e in episodes if e.scored_success is not None]
    return sum(values) / len(values) if values else None


def _compare(
    a: dict[Key, list[Episode]], b: dict[Key, list[Episode]], shared: Sequence[Key], score: Any
) -> dict[str, Any] | None:
    pairs = [(score(a[key]), score(b[key])) for key in shared]
    scores = [(x, y) for x, y in pairs if x is not None and y is not None]
    return asdict(paired([x for x, _ in scores], [y for _, y in scores])) if scores else None


def _warnings(
    manifest_a: dict[str, Any],
    manifest_b: dict[str, Any],
    a: dict[Key, list[Episode]],
    b: dict[Key, list[Episode]],
    shared: Sequence[Key],
) -> list[str]:
    warnings = []
    left = len(a) + len(b) - 2 * len(shared)
    if left:
        warnings.append(f"{left} tasks were played by one side only and do not count")
    if manifest_a["task_set"] != manifest_b["task_set"]:
        warnings.append("the task sets differ")
    if manifest_a["limits"] != manifest_b["limits"]:
        warnings.append("the limits on turns or time differ")
    if _first_texts(a, shared) != _first_texts(b, shared):
        warnings.append("some tasks showed a different first observation: was the environment changed?")
    versions = {m["versions"].get("rollgym") for m in (manifest_a, manifest_b)}
    if len(versions) > 1:
        warnings.append("the runs were made by different versions of rollgym")
    return warnings


def _first_texts(groups: dict[Key, list[Episode]], shared: Sequence[Key]) -> list[str]:
    return [first_observation(groups[key][0]) for key in shared]
