"""A suite's summary as Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HEAD = ("entry", "environment", "success", "95 % interval", "score", "turns", "tokens", "s/episode", "golden")


def markdown(summary: Mapping[str, Any]) -> str:
    """The report: suite and agent, the table, remarks."""
    suite = summary["suite"]
    low_high = summary["success_ci"]
    lines = [
        f"# {suite['name']} {suite['version']}: {cell(summary['agent'])}",
        "",
        f"Success {share(summary['success'])} {interval(low_high)} (mean over {len(summary['entries'])} "
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
            share(row["success"]),
            interval(row["success_ci"]),
            share(row["score"]),
            "–" if row["turns"] is None else f"{row['turns']:.1f}",
            "–" if row["tokens"] is None else f"{row['tokens']:,}",
            "–" if row["seconds"] is None else f"{row['seconds']:.3f}",
            _golden(row),
        )
        for row in summary["entries"]
    ]


def remarks(summary: Mapping[str, Any]) -> list[str]:
    """Remarks on the numbers, one sentence each."""
    found = []
    for row in summary["entries"]:
        name = row["name"]
        if row["episodes"] < row["requested"]:
            found.append(f"{name}: {row['episodes']} of {row['requested']} episodes were played.")
        if row["failed"]:
            said = f": {row['errors'][0]['message']}" if row["errors"] else ""
            found.append(f"{name}: {row['failed']} episodes ended by an error{said}")
        if row["excluded"]:
            mark = "**WARNING** " if row["many_excluded"] else ""
            found.append(
                f"{mark}{name}: {row['excluded']} of {row['episodes']} episodes are excluded from the score; "
                f"success is {share(row['success_all'])} with them as failures."
            )
        for kind, words in (("token_limit", "of tokens, or a full context"), ("time_limit", "of time")):
            if count := row["outcomes"].get(kind):
                found.append(f"{name}: {count} of {row['episodes']} episodes ended at the limit {words}.")
        if row["same_tasks"] is False:
            found.append(f"{name}: the tasks were not those of the suite ({row['content']}).")
        golden = row["golden"]
        if golden and not golden["reached"]:
            found.append(
                f"{name}: the golden score of {golden['of']} was missed: success {share(row['success'])}, "
                f"not {share(golden['success'])}; score {share(row['score'])}, not {share(golden['score'])}."
            )
    if summary["left_out"]:
        found.append(f"not played: {', '.join(summary['left_out'])}.")
    return found


def share(value: float | None) -> str:
    """A number with three decimals."""
    return "–" if value is None else f"{value:.3f}"


def interval(low_high: list[float] | None) -> str:
    """An interval with three decimals."""
    return "" if low_high is None else f"[{low_high[0]:.3f}, {low_high[1]:.3f}]"


def cell(text: Any) -> str:
    """Escape text for a table cell."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")


def _golden(row: Mapping[str, Any]) -> str:
    """Comparison with the agent's golden score; the known golden scores for other agents."""
    golden = row["golden"]
    if golden is None:
        return ", ".join(f"{kind} {share(score['success'])}" for kind, score in row["known"].items()) or "–"
    return f"{golden['of']} {share(golden['success'])} {'reached' if golden['reached'] else 'MISSED'}"
