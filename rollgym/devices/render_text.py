"""Prints a plan on the terminal: placement, memory by phase, timeline of a step, and reasons."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rollgym.core.text import shorten
from rollgym.devices.memory import PARTS, Part
from rollgym.devices.ranges import format_range, numbers_text
from rollgym.devices.report import (
    ZERO,
    DeviceMemory,
    PlanReport,
    Reason,
    count_text,
    describe,
    size_text,
    time_text,
)
from rollgym.devices.types import Role

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

LETTERS: dict[Role, str] = {
    "actor_train": "T", "actor_infer": "G", "critic": "C", "reference": "F", "reward": "R",
}  # fmt: skip
COLORS: dict[Part, str] = {
    "weights": "blue", "gradients": "magenta", "optimizer": "yellow", "activations": "green",
    "kv_cache": "cyan",
}  # fmt: skip
FILLS: dict[Part, str] = {
    "weights": "█", "gradients": "▓", "optimizer": "▒", "activations": "░", "kv_cache": "▚",
}  # fmt: skip
BAR = 44
MAX_BOXES = 16


def render_text(console: Console, report: PlanReport) -> None:
    """Print a plan."""
    plan = report.plan
    console.print(
        f"[bold]{plan.layout}[/] on {describe(plan.cluster)}, about {time_text(report.seconds)} per step",
        highlight=False,
    )
    console.print(_roles(report))
    for line in boxes(report):
        console.print(line, highlight=False, markup=False)
    console.print("\n[bold]Memory per device, by phase[/]", highlight=False)
    console.print(_memory(report))
    console.print("\n[bold]Timeline of one step[/] (estimates)", highlight=False)
    for line in timeline(report):
        console.print(line, highlight=False, markup=False)
    console.print("\n[bold]Reasons[/]", highlight=False)
    console.print(_reasons(report.reasons))
    console.print("\n[bold]Alternatives[/]", highlight=False)
    console.print(_reasons(report.alternatives))
    for note in report.notes:
        console.print(f"Note: {note}", style="dim", highlight=False, markup=False)


def boxes(report: PlanReport) -> Iterator[str]:
    """Yield nodes as rows of boxes with a letter per role; equal nodes share a row."""
    plan = report.plan
    names = [f"{LETTERS[role]} {role}" for role in plan.placements]
    yield f"  {', '.join(names)}"
    for name, devices in node_rows(report):
        inside = ["".join(LETTERS[role] for role in roles) or "·" for roles in devices[:MAX_BOXES]]
        more = f" and {len(devices) - MAX_BOXES} more" if len(devices) > MAX_BOXES else ""
        yield f"  {name:<14} {''.join(f'[{letters:^{len(names)}}]' for letters in inside)}{more}"


def timeline(report: PlanReport) -> Iterator[str]:
    """Yield a bar for each span of the step."""
    width = max(len(span.lane) + len(span.name) for span in report.timeline) + 2
    for span in report.timeline:
        first = round(BAR * span.start / report.seconds)
        last = max(first + 1, round(BAR * span.end / report.seconds))
        bar = f"{' ' * first}{'█' * (last - first)}"[: BAR + 1]
        name = f"{span.lane}: {span.name}"
        yield f"  {name:<{width}} │{bar:<{BAR + 1}}│ {time_text(span.end - span.start)}"


def bar(memory: DeviceMemory, width: int = 24) -> list[tuple[Part, int]]:
    """Return the number of cells of a bar for each part."""
    cells: list[tuple[Part, int]] = []
    filled, total = 0, 0
    for part in PARTS:
        total += sum(size for _, name, size in memory.parts if name == part)
        end = round(width * total / memory.capacity)
        cells.append((part, end - filled))
        filled = end
    return cells


def _roles(report: PlanReport) -> Table:
    from rich.table import Table

    table = Table("role", "model", "devices", "TP x DP", "sharding", "offloaded while idle", box=None)
    for role, placement in report.plan.placements.items():
        model = report.job.models()[role]
        table.add_row(
            role,
            f"{model.name} ({count_text(model.parameters)})",
            shorten(format_range(placement.devices, report.plan.cluster), 28),
            f"{placement.tensor_parallel} x {placement.data_parallel}",
            ""
            if role == "actor_infer"
            else ZERO[placement.sharding]
            if placement.mesh is None
            else str(placement.mesh),
            ", ".join(placement.offload) or "-",
        )
    return table


def _memory(report: PlanReport) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table("phase", "devices", *PARTS, "used / usable", "", box=None)
    for memory in report.memory:
        sizes = [sum(size for _, name, size in memory.parts if name == part) for part in PARTS]
        drawn = Text()
        for part, cells in bar(memory):
            drawn.append(FILLS[part] * cells, style=COLORS[part])
        table.add_row(
            memory.phase,
            shorten(format_range(memory.devices, report.plan.cluster), 28),
            *(size_text(size) if size else "" for size in sizes),
            f"{size_text(memory.used)} / {size_text(memory.limit)}",
            drawn,
        )
    return table


def _reasons(reasons: Sequence[Reason]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False)
    for reason in reasons:
        table.add_row(reason.about.replace("_", " "), reason.choice, Text(reason.why))
    return table


def node_rows(report: PlanReport) -> list[tuple[str, list[tuple[Role, ...]]]]:
    """Return (name, roles of each device) of the nodes; equal nodes together."""
    plan = report.plan
    held: dict[tuple[int, int], tuple[Role, ...]] = {}
    for role, placement in plan.placements.items():
        for device in placement.devices:
            key = (device.node, device.index)
            held[key] = (*held.get(key, ()), role)
    alike: dict[tuple[tuple[Role, ...], ...], list[int]] = {}
    for at, node in enumerate(plan.cluster.nodes):
        alike.setdefault(tuple(held.get((at, index), ()) for index in range(node.devices)), []).append(at)
    return [(f"node {numbers_text(at)}", list(roles)) for roles, at in alike.items()]
