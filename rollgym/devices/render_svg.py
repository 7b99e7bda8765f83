"""Draws a plan as SVG: the devices, their memory in each phase, and the timeline of a step."""

from __future__ import annotations

from collections.abc import Iterator

from rollgym.core.text import shorten
from rollgym.devices.memory import PARTS, Part
from rollgym.devices.ranges import format_range
from rollgym.devices.render_text import node_rows
from rollgym.devices.report import PlanReport, describe, size_text, time_text
from rollgym.devices.types import Role
from rollgym.utils import svg

WIDTH, LEFT, RIGHT, ROW = 860, 190, 150, 22
ROLE_COLORS: dict[Role, str] = {
    "actor_train": "#2563eb", "actor_infer": "#d97706", "critic": "#7c3aed", "reference": "#64748b",
    "reward": "#db2777",
}  # fmt: skip
PART_COLORS: dict[Part, str] = {
    "weights": "#2563eb", "gradients": "#db2777", "optimizer": "#d97706", "activations": "#059669",
    "kv_cache": "#0891b2",
}  # fmt: skip
MAX_ROWS, MAX_DEVICES = 12, 16


def render_svg(report: PlanReport) -> str:
    """Return an SVG of a plan."""
    plan = report.plan
    title = f"{plan.layout} on {describe(plan.cluster)}: about {time_text(report.seconds)} per step"
    parts = [svg.text(12, 22, title, size=15)]
    y = 40.0
    for draw in (_devices, _memory, _timeline):
        lines = list(draw(report, y))
        parts += [line for line, _ in lines]
        y = max(bottom for _, bottom in lines) + 22
    return svg.document(WIDTH, y, parts, title)


def _devices(report: PlanReport, y: float) -> Iterator[tuple[str, float]]:
    yield from _legend(dict.fromkeys(report.plan.placements), ROLE_COLORS, y)
    y += 18
    rows = node_rows(report)
    for name, devices in rows[:MAX_ROWS]:
        yield svg.text(12, y + 14, shorten(name, 26)), y + ROW
        for at, roles in enumerate(devices[:MAX_DEVICES]):
            x = LEFT + 32 * at
            yield svg.rect(x, y, 28, 18, "#f1f5f9", ", ".join(roles) or "idle"), y + ROW
            for index, role in enumerate(roles):
                wide = 28 / len(roles)
                yield svg.rect(x + index * wide, y, wide, 18, ROLE_COLORS[role], role), y + ROW
        if len(devices) > MAX_DEVICES:
            more = f"and {len(devices) - MAX_DEVICES} more"
            yield svg.text(LEFT + 32 * MAX_DEVICES, y + 14, more), y + ROW
        y += ROW
    if len(rows) > MAX_ROWS:
        yield svg.text(12, y + 14, f"and {len(rows) - MAX_ROWS} other kinds of node"), y + ROW


def _memory(report: PlanReport, y: float) -> Iterator[tuple[str, float]]:
    yield svg.text(12, y + 10, "Memory per device", size=13), y
    yield from _legend(dict.fromkeys(PARTS), PART_COLORS, y)
    y += 18
    span = WIDTH - LEFT - RIGHT
    top = max(memory.capacity for memory in report.memory)
    for memory in report.memory:
        devices = format_range(memory.devices, report.plan.cluster)
        yield svg.text(12, y + 13, shorten(f"{memory.phase}, {devices}", 30)), y + ROW
        wide = span * memory.capacity / top
        yield svg.rect(LEFT, y, wide, 16, "#f1f5f9", f"{size_text(memory.capacity)} total"), y + ROW
        x = float(LEFT)
        for part in PARTS:
            size = sum(size for _, name, size in memory.parts if name == part)
            if size:
                length = span * size / top
                yield svg.rect(x, y, length, 16, PART_COLORS[part], f"{part} {size_text(size)}"), y + ROW
                x += length
        edge = LEFT + span * memory.limit / top
        yield svg.line(edge, y, edge, y + 16, "#0f172a"), y + ROW
        used = f"{size_text(memory.used)} of {size_text(memory.limit)}"
        yield svg.text(LEFT + wide + 8, y + 13, used), y + ROW
        y += ROW


def _timeline(report: PlanReport, y: float) -> Iterator[tuple[str, float]]:
    yield svg.text(12, y + 10, "Timeline of one step", size=13), y
    y += 18
    scale = (WIDTH - LEFT - RIGHT) / report.seconds
    for span in report.timeline:
        yield svg.text(12, y + 13, shorten(f"{span.lane}: {span.name}", 30)), y + ROW
        wide = max(1.0, scale * (span.end - span.start))
        fill = "#d97706" if span.name == "generate" else "#2563eb"
        yield svg.rect(LEFT + scale * span.start, y, wide, 16, fill, span.name), y + ROW
        text = time_text(span.end - span.start)
        yield svg.text(min(LEFT + scale * span.end + 8, WIDTH - 80), y + 13, text), y + ROW
        y += ROW


def _legend(
    names: dict[Role, None] | dict[Part, None], colors: object, y: float
) -> Iterator[tuple[str, float]]:
    assert isinstance(colors, dict)
    for at, name in enumerate(names):
        x = LEFT + 112 * at
        yield svg.rect(x, y, 12, 12, colors[name], name), y + 14
        yield svg.text(x + 17, y + 10, name.replace("_", " ")), y + 14
