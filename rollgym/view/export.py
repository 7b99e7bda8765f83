"""Export of a run as one HTML file that needs no server and no network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollgym.core.errors import UsageError
from rollgym.core.files import write_output
from rollgym.view.episode_detail import EpisodeDetails
from rollgym.view.overview import overview
from rollgym.view.page import blocks, pack, page
from rollgym.view.reader import COLUMNS, Row, RunView
from rollgym.view.timeline import Timeline

EPISODES = 5_000
BYTES = 200_000_000
"""Maximum bytes of episode lines to embed; compressed they take a tenth or less."""
_BLOCK = 400_000


@dataclass(frozen=True, slots=True)
class Exported:
    """Result of an export."""

    path: Path
    size: int
    shown: int
    episodes: int
    notes: tuple[str, ...]


def export(folder: Path, to: Path, *, episodes: int = EPISODES) -> Exported:
    """Write the page. Large runs are sampled by whole groups, evenly over the run."""
    if episodes < 0:
        raise UsageError(f"--episodes must be at least 0, got {episodes}.")
    run = RunView(folder)
    run.follow(final=True)
    chosen = choose(run.rows, run.sizes, episodes)
    notes = [left_out(len(chosen), len(run.rows))] if len(chosen) < len(run.rows) else []
    timeline = Timeline(run.events).read(final=True)
    first = overview(run, notes)
    document = page(f"{first['name']} – rollgym", _parts(run, first, timeline, chosen))
    write_output(to, document)
    return Exported(to, len(document), len(chosen), len(run.rows), tuple(first["notes"]))


def _parts(
    run: RunView, first: object, timeline: object, chosen: Sequence[int]
) -> Iterator[tuple[str, bytes]]:
    yield "overview", pack(first)
    yield "timeline", pack(timeline)
    bodies = EpisodeDetails(run)
    counts: list[int] = []
    for count, block in blocks((bodies.body(n) for n in chosen), _BLOCK):
        yield f"block-{len(counts)}", block
        counts.append(count)
    rows = [run.rows[n].values() for n in chosen]
    yield "rows", pack({"columns": COLUMNS, "rows": rows, "blocks": counts})


def choose(rows: Sequence[Row], sizes: Sequence[int], most: int, most_bytes: int = BYTES) -> list[int]:
    """Choose the episodes to show: all, or whole groups evenly spread over the run."""
    total = sum(sizes)
    if total > most_bytes:
        most = min(most, int(len(rows) * most_bytes / total))
    if len(rows) <= most:
        return list(range(len(rows)))
    groups: dict[tuple[int | None, str], list[int]] = {}
    for row in rows:
        groups.setdefault((row.step, row.group or row.id), []).append(row.n)
    members = list(groups.values())
    share = most / len(rows)
    chosen: list[int] = []
    due = 1.0 if most else 0.0
    for group in members:
        due += share * len(group)
        if due >= 1 and len(chosen) + len(group) <= most:
            chosen += group
            due -= len(group)
    return sorted(chosen)


def left_out(shown: int, total: int) -> str:
    """Return the note about omitted episodes."""
    return (
        f"This file holds {shown:,} of {total:,} episodes: whole groups, evenly over the run. The numbers "
        "above include all episodes. --episodes embeds more; `rollgym view --live` shows all."
    )
