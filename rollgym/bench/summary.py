"""Summary of a suite: computed from its episodes, compared with golden scores, written as Markdown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollgym.bench.results import entry_folder
from rollgym.bench.suite import CLOSE, Entry, Suite
from rollgym.core.seeding import file_hash
from rollgym.core.text import interval, number
from rollgym.core.types import SCHEMA_VERSION, Episode
from rollgym.evaluation.metrics import first_observation, summarize
from rollgym.io.run_dir import EPISODES

Part = tuple[Entry, Mapping[str, Any], Sequence[Episode]]
"""An entry, the manifest of its folder and its episodes."""


def suite_summary(
    suite: Suite, manifest: Mapping[str, Any], parts: Sequence[Part], out: Path
) -> dict[str, Any]:
    """Summarize a results folder as a JSON-able object; depends on its files alone."""
    agent = manifest["agent"]
    rows = [
        _row(entry, summarize(dict(entry_manifest), episodes), episodes, agent)
        for entry, entry_manifest, episodes in parts
    ]
    played = {entry.name for entry, _, _ in parts}
    return {
        "schema": SCHEMA_VERSION,
        "kind": "bench",
        "suite": {"name": suite.name, "version": suite.version, "hash": suite.fingerprint},
        "agent": agent["name"],
        "agent_options": agent["options"],
        **_totals(rows),
        "complete": played == set(manifest["entries"]) and all(row["complete"] for row in rows),
        "golden": {
            "checked": sum(row["golden"] is not None for row in rows),
            "missed": [row["name"] for row in rows if row["golden"] and not row["golden"]["reached"]],
        },
        "other_tasks": [row["name"] for row in rows if row["same_tasks"] is False],
        "entries": rows,
        "left_out": [entry.name for entry in suite.entries if entry.name not in manifest["entries"]],
        "files": {
            f"entries/{name}/{EPISODES}": file_hash(entry_folder(out, name) / EPISODES)
            for name in sorted(played)
        },
        "versions": manifest["versions"],
    }


def _row(
    entry: Entry, summary: dict[str, Any], episodes: Sequence[Episode], agent: Mapping[str, Any]
) -> dict[str, Any]:
    usage = summary["usage"]
    row = {
        "name": entry.name,
        "env": entry.env,
        "env_kwargs": summary["env_kwargs"],
        "split": summary["split"],
        "episodes": summary["episodes"],
        "requested": summary["requested"],
        "failed": summary["failed"],
        "excluded": summary["excluded"],
        "many_excluded": summary["many_excluded"],
        "complete": summary["complete"] and not summary["failed"],
        "success": summary["success_rate"],
        "success_ci": summary["success_ci"],
        "success_all": summary["success_all"],
        "score": summary["mean_return"],
        "score_ci": summary["return_ci"],
        "pass_at_k": summary["pass_at_k"],
        "turns": summary["length"].get("mean"),
        "valid_actions": summary["valid_actions"],
        "tokens": int(usage["prompt_tokens"] + usage["completion_tokens"]) if usage else None,
        "completion_tokens": int(usage["completion_tokens"]) if usage else None,
        "cost": usage["cost"] if usage else None,
        "seconds": summary["seconds"].get("mean"),
        "wall_seconds": _wall(episodes),
        "outcomes": summary["outcomes"],
        "errors": summary["errors"],
        "content": summary["content_hash"],
        "same_tasks": _same_tasks(entry, summary, episodes),
    }
    golden_scores = {kind: {"success": g.success, "score": g.score} for kind, g in entry.golden.items()}
    return {**row, "golden": _golden(entry, row, agent), "known": golden_scores}


def _same_tasks(entry: Entry, summary: Mapping[str, Any], episodes: Sequence[Episode]) -> bool | None:
    """Return whether the tasks match the suite's hash; ``None`` if unknown."""
    seen = all(not e.outcome.failed or first_observation(e) for e in episodes)
    if not entry.content or not summary["complete"] or not seen:
        return None
    return bool(summary["content_hash"] == entry.content)


def _golden(entry: Entry, row: Mapping[str, Any], agent: Mapping[str, Any]) -> dict[str, Any] | None:
    match = entry.golden_of(agent["name"], agent["options"])
    if match is None:
        return None
    kind, golden = match
    reached = (
        row["complete"]
        and row["success"] is not None
        and abs(row["success"] - golden.success) <= golden.tolerance + CLOSE
        and abs(row["score"] - golden.score) <= golden.score_tolerance + CLOSE
    )
    return {
        "of": kind,
        "success": golden.success,
        "score": golden.score,
        "tolerance": golden.tolerance,
        "reached": bool(reached),
    }


def _wall(episodes: Sequence[Episode]) -> float:
    """Seconds from the first start to the last end; a pause before a resume counts, too."""
    if not episodes:
        return 0.0
    return max(e.started + e.seconds for e in episodes) - min(e.started for e in episodes)


def _totals(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    scored = [row for row in rows if row["success"] is not None]
    tokens = [row["tokens"] for row in rows if row["tokens"] is not None]
    whole = [row["success_all"] for row in rows if row["success_all"] is not None]
    return {
        "success": math.fsum(row["success"] for row in scored) / len(scored) if scored else None,
        "success_ci": list(mean_interval(scored)) if scored else None,
        "success_all": math.fsum(whole) / len(whole) if whole else None,
        "episodes": sum(row["episodes"] for row in rows),
        "failed": sum(row["failed"] for row in rows),
        "excluded": sum(row["excluded"] for row in rows),
        "many_excluded": any(row["many_excluded"] for row in rows),
        "tokens": sum(tokens) if tokens else None,
        "wall_seconds": math.fsum(row["wall_seconds"] for row in rows),
    }


def mean_interval(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """A 95 % interval for the mean of the entries' success rates.

    Combines the intervals of the entries by the squares of their half-widths (Zou and Donner's MOVER), so
    that an entry with a success rate of 1 still counts as uncertain, unlike in a bootstrap.
    """
    count = len(rows)
    mean = math.fsum(row["success"] for row in rows) / count
    below = math.sqrt(math.fsum((row["success"] - row["success_ci"][0]) ** 2 for row in rows)) / count
    above = math.sqrt(math.fsum((row["success_ci"][1] - row["success"]) ** 2 for row in rows)) / count
    return max(0.0, mean - below), min(1.0, mean + above)


HEAD = ("entry", "environment", "success", "95 % interval", "score", "turns", "tokens", "s/episode", "golden")


def markdown(summary: Mapping[str, Any]) -> str:
    """The report: suite and agent, the table, remarks."""
    suite = summary["suite"]
    low_high = summary["success_ci"]
    lines = [
        f"# {suite['name']} {suite['version']}: {cell(summary['agent'])}",
        "",
        f"Success {number(summary['success'])} {interval(low_high)} (mean over {len(summary['entries'])} "
        f"entries), {summary['episodes']} episodes, {summary['wall_seconds']:.1f} s.",
        "",
        "| " + " | ".join(HEAD) + " |",
        "|" + "---|" * len(HEAD),
        *("| " + " | ".join(map(cell, row)) + " |" for row in table(summary)),
        "",
        *(f"- {sentence}" for sentence in remarks(summary)),
        f"- suite {suite['hash']}; "
        + ", ".join(f"{name} {version}" for name, version in summary["versions"].items()),
    ]
    return "\n".join(lines) + "\n"


def table(summary: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The cells of the table, a row per entry."""
    return [
        (
            row["name"],
            row["env"],
            number(row["success"]),
            interval(row["success_ci"]),
            number(row["score"]),
            number(row["turns"], 1),
            "–" if row["tokens"] is None else f"{row['tokens']:,}",
            number(row["seconds"]),
            _golden_text(row),
        )
        for row in summary["entries"]
    ]


def remarks(summary: Mapping[str, Any]) -> list[str]:
    """Remarks on the numbers, one sentence each."""
    notes = []
    for row in summary["entries"]:
        name = row["name"]
        if row["episodes"] < row["requested"]:
            notes.append(f"{name}: {row['episodes']} of {row['requested']} episodes were played.")
        if row["failed"]:
            message = f": {row['errors'][0]['message']}" if row["errors"] else ""
            notes.append(f"{name}: {row['failed']} episodes ended by an error{message}")
        if row["excluded"]:
            mark = "**WARNING** " if row["many_excluded"] else ""
            notes.append(
                f"{mark}{name}: {row['excluded']} of {row['episodes']} episodes are excluded from the score; "
                f"success is {number(row['success_all'])} with them as failures."
            )
        for kind, words in (("token_limit", "of tokens, or a full context"), ("time_limit", "of time")):
            if count := row["outcomes"].get(kind):
                notes.append(f"{name}: {count} of {row['episodes']} episodes ended at the limit {words}.")
        if row["same_tasks"] is False:
            notes.append(f"{name}: the tasks were not those of the suite ({row['content']}).")
        golden = row["golden"]
        if golden and not golden["reached"]:
            notes.append(
                f"{name}: the golden score of {golden['of']} was missed: success {number(row['success'])}, "
                f"not {number(golden['success'])}; score {number(row['score'])}, not "
                f"{number(golden['score'])}."
            )
    if summary["left_out"]:
        notes.append(f"not played: {', '.join(summary['left_out'])}.")
    return notes


def cell(text: Any) -> str:
    """Escape text for a table cell."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")


def _golden_text(row: Mapping[str, Any]) -> str:
    """Comparison with the agent's golden score; the known golden scores for other agents."""
    golden = row["golden"]
    if golden is None:
        return ", ".join(f"{kind} {number(score['success'])}" for kind, score in row["known"].items()) or "–"
    return f"{golden['of']} {number(golden['success'])} {'reached' if golden['reached'] else 'MISSED'}"
