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
    "actor_train": "T",
    "actor_infer": "G",
    "critic": "C",
    "reference": "F",
    "reward": "R",
}
COLORS: dict[Part, str] = {
    "weights": "blue",
    "gradients": "magenta",
    "optimizer": "yellow",
    "activations": "green",
    "kv_cache": "cyan",
}
FILLS: dict[Part, str] = {
    "weights": "█",
    "gradients": "▓",
    "optimizer": "▒",
    "activations": "░",
    "kv_cache": "▚",
}
BAR = 44
MAX_BOXES = 16


def render_text(console: Console, found: PlanReport) -> None:
    """Print a plan."""
    plan = found.plan
    console.print(
        f"[bold]{plan.layout}[/] on {describe(plan.cluster)}, about {time_text(found.seconds)} per step",
        highlight=False,
    )
    console.print(_roles(found))
    for line in boxes(found):
        console.print(line, highlight=False, markup=False)
    console.print("\n[bold]Memory per device, by phase[/]", highlight=False)
    console.print(_memory(found))
    console.print("\n[bold]Timeline of one step[/] (estimates)", highlight=False)
    for line in timeline(found):
        console.print(line, highlight=False, markup=False)
    console.print("\n[bold]Reasons[/]", highlight=False)
    console.print(_reasons(found.reasons))
    console.print("\n[bold]Alternatives[/]", highlight=False)
    console.print(_reasons(found.alternatives))
    for note in found.notes:
        console.print(f"Note: {note}", style="dim", highlight=False, markup=False)


def boxes(found: PlanReport) -> Iterator[str]:
    """Yield nodes as rows of boxes with a letter per role; equal nodes share a row."""
    plan = found.plan
    names = [f"{LETTERS[role]} {role}" for role in plan.placements]
    yield f"  {', '.join(names)}"
    for name, devices in node_rows(found):
        inside = ["".join(LETTERS[role] for role in roles) or "·" for roles in devices[:MAX_BOXES]]
        more = f" and {len(devices) - MAX_BOXES} more" if len(devices) > MAX_BOXES else ""
        yield f"  {name:<14} {''.join(f'[{letters:^{len(names)}}]' for letters in inside)}{more}"


def timeline(found: PlanReport) -> Iterator[str]:
    """Yield a bar for each span of the step."""
    width = max(len(span.lane) + len(span.name) for span in found.timeline) + 2
    for span in found.timeline:
        first = round(BAR * span.start / found.seconds)
        last = max(first + 1, round(BAR * span.end / found.seconds))
        bar = f"{' ' * first}{'█' * (last - first)}"[: BAR + 1]
        name = f"{span.lane}: {span.name}"
        yield f"  {name:<{width}} │{bar:<{BAR + 1}}│ {time_text(span.end - span.start)}"


def bar(one: DeviceMemory, width: int = 24) -> list[tuple[Part, int]]:
    """Return the number of cells of a bar for each part."""
    cells: list[tuple[Part, int]] = []
    filled, total = 0, 0
    for part in PARTS:
        total += sum(size for _, name, size in one.parts if name == part)
        end = round(width * total / one.capacity)
        cells.append((part, end - filled))
        filled = end
    return cells


def _roles(found: PlanReport) -> Table:
    from rich.table import Table

    table = Table("role", "model", "devices", "TP x DP", "sharding", "offloaded while idle", box=None)
    for role, one in found.plan.placements.items():
        model = found.job.models()[role]
        table.add_row(
            role,
            f"{model.name} ({count_text(model.parameters)})",
            f"{_devices(found, role)}",
            f"{one.tensor_parallel} x {one.data_parallel}",
            "" if role == "actor_infer" else ZERO[one.sharding],
            ", ".join(one.offload) or "-",
        )
    return table


def _devices(found: PlanReport, role: Role) -> str:
    return shorten(format_range(found.plan.placements[role].devices, found.plan.cluster), 28)


def _memory(found: PlanReport) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table("phase", "devices", *PARTS, "used / usable", "", box=None)
    for one in found.memory:
        sizes = [sum(size for _, name, size in one.parts if name == part) for part in PARTS]
        drawn = Text()
        for part, cells in bar(one):
            drawn.append(FILLS[part] * cells, style=COLORS[part])
        table.add_row(
            one.phase,
            shorten(format_range(one.devices, found.plan.cluster), 28),
            *(size_text(size) if size else "" for size in sizes),
            f"{size_text(one.used)} / {size_text(one.limit)}",
            drawn,
        )
    return table


def _reasons(found: Sequence[Reason]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False)
    for one in found:
        table.add_row(one.about.replace("_", " "), one.choice, Text(one.why))
    return table


def node_rows(found: PlanReport) -> list[tuple[str, list[tuple[Role, ...]]]]:
    """Return (name, roles of each device) of the nodes; equal nodes together."""
    plan = found.plan
    held: dict[tuple[int, int], tuple[Role, ...]] = {}
    for role, placement in plan.placements.items():
        for device in placement.devices:
            key = (device.node, device.index)
            held[key] = (*held.get(key, ()), role)
    alike: dict[tuple[tuple[Role, ...], ...], list[int]] = {}
    for at, node in enumerate(plan.cluster.nodes):
        alike.setdefault(tuple(held.get((at, index), ()) for index in range(node.devices)), []).append(at)
    return [(f"node {numbers_text(at)}", list(roles)) for roles, at in alike.items()]
