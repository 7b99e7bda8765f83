"""A plan as a picture: the devices, their memory in each phase, and the timeline of a step."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from rollgym.devices.detail import DetailedPlan, describe, size_text, time_text
from rollgym.devices.draw import node_rows
from rollgym.devices.memory import PARTS, Part
from rollgym.devices.ranges import format_range
from rollgym.devices.types import Role

WIDTH, LEFT, RIGHT, ROW = 860, 190, 150, 22
ROLE_COLOURS: dict[Role, str] = {
    "actor_train": "#2563eb",
    "actor_infer": "#d97706",
    "critic": "#7c3aed",
    "reference": "#64748b",
    "reward": "#db2777",
}
PART_COLOURS: dict[Part, str] = {
    "weights": "#2563eb",
    "gradients": "#db2777",
    "optimiser": "#d97706",
    "activations": "#059669",
    "kv_cache": "#0891b2",
}
MOST_ROWS, MOST_DEVICES = 12, 16


def picture(found: DetailedPlan) -> str:
    """An SVG of a plan."""
    plan = found.plan
    title = f"{plan.layout} on {describe(plan.cluster)}: about {time_text(found.seconds)} a step"
    parts = [_text(12, 22, title, size=15)]
    y = 40.0
    for draw in (_devices, _memory, _timeline):
        lines = list(draw(found, y))
        parts += [line for line, _ in lines]
        y = max(bottom for _, bottom in lines) + 22
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y:.0f}" font-family="sans-serif" '
        f'font-size="12" role="img">\n<title>{escape(title)}</title>\n'
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def _devices(found: DetailedPlan, y: float) -> Iterator[tuple[str, float]]:
    yield from _legend(dict.fromkeys(found.plan.placements), ROLE_COLOURS, y)
    y += 18
    rows = node_rows(found)
    for name, devices in rows[:MOST_ROWS]:
        yield _text(12, y + 14, _clip(name, 26)), y + ROW
        for at, roles in enumerate(devices[:MOST_DEVICES]):
            x = LEFT + 32 * at
            yield _box(x, y, 28, 18, "#f1f5f9", ", ".join(roles) or "idle"), y + ROW
            for index, role in enumerate(roles):
                wide = 28 / len(roles)
                yield _box(x + index * wide, y, wide, 18, ROLE_COLOURS[role], role), y + ROW
        if len(devices) > MOST_DEVICES:
            more = f"and {len(devices) - MOST_DEVICES} more"
            yield _text(LEFT + 32 * MOST_DEVICES, y + 14, more), y + ROW
        y += ROW
    if len(rows) > MOST_ROWS:
        yield _text(12, y + 14, f"and {len(rows) - MOST_ROWS} other kinds of node"), y + ROW


def _memory(found: DetailedPlan, y: float) -> Iterator[tuple[str, float]]:
    yield _text(12, y + 10, "Memory of each device", size=13), y
    yield from _legend(dict.fromkeys(PARTS), PART_COLOURS, y)
    y += 18
    span = WIDTH - LEFT - RIGHT
    top = max(one.capacity for one in found.memory)
    for one in found.memory:
        devices = format_range(one.devices, found.plan.cluster)
        yield _text(12, y + 13, _clip(f"{one.phase}, {devices}", 30)), y + ROW
        wide = span * one.capacity / top
        yield _box(LEFT, y, wide, 16, "#f1f5f9", f"{size_text(one.capacity)} in all"), y + ROW
        x = float(LEFT)
        for part in PARTS:
            size = sum(size for _, name, size in one.parts if name == part)
            if size:
                yield (
                    _box(x, y, span * size / top, 16, PART_COLOURS[part], f"{part} {size_text(size)}"),
                    y + ROW,
                )
                x += span * size / top
        edge = LEFT + span * one.limit / top
        yield f'<line x1="{edge:.1f}" x2="{edge:.1f}" y1="{y}" y2="{y + 16}" stroke="#0f172a"/>', y + ROW
        yield _text(LEFT + wide + 8, y + 13, f"{size_text(one.used)} of {size_text(one.limit)}"), y + ROW
        y += ROW


def _timeline(found: DetailedPlan, y: float) -> Iterator[tuple[str, float]]:
    yield _text(12, y + 10, "One step", size=13), y
    y += 18
    scale = (WIDTH - LEFT - RIGHT) / found.seconds
    for span in found.timeline:
        yield _text(12, y + 13, _clip(f"{span.lane}: {span.name}", 30)), y + ROW
        wide = max(1.0, scale * (span.end - span.start))
        fill = "#d97706" if span.name == "generate" else "#2563eb"
        yield _box(LEFT + scale * span.start, y, wide, 16, fill, span.name), y + ROW
        text = time_text(span.end - span.start)
        yield _text(min(LEFT + scale * span.end + 8, WIDTH - 80), y + 13, text), y + ROW
        y += ROW


def _legend(
    names: dict[Role, None] | dict[Part, None], colours: object, y: float
) -> Iterator[tuple[str, float]]:
    assert isinstance(colours, dict)
    for at, name in enumerate(names):
        x = LEFT + 112 * at
        yield _box(x, y, 12, 12, colours[name], name), y + 14
        yield _text(x + 17, y + 10, name.replace("_", " ")), y + 14


def _box(x: float, y: float, width: float, height: float, fill: str, title: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" fill="{fill}">'
        f"<title>{escape(title)}</title></rect>"
    )


def _text(x: float, y: float, text: str, size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="#0f172a">{escape(text)}</text>'


def _clip(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
