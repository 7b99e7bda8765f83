"""A plan on the terminal: who is where, memory by phase, the timeline of a step, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rollgym.devices.detail import (
    ZERO,
    DetailedPlan,
    DeviceMemory,
    Reason,
    count_text,
    describe,
    size_text,
    time_text,
)
from rollgym.devices.memory import PARTS, Part
from rollgym.devices.ranges import format_range, numbers_text
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
COLOURS: dict[Part, str] = {
    "weights": "blue",
    "gradients": "magenta",
    "optimiser": "yellow",
    "activations": "green",
    "kv_cache": "cyan",
}
FILLS: dict[Part, str] = {
    "weights": "█",
    "gradients": "▓",
    "optimiser": "▒",
    "activations": "░",
    "kv_cache": "▚",
}
BAR = 44
MOST_BOXES = 16


def show(console: Console, found: DetailedPlan) -> None:
    """Print a plan."""
    plan = found.plan
    console.print(
        f"[bold]{plan.layout}[/] on {describe(plan.cluster)}, about {time_text(found.seconds)} a step",
        highlight=False,
    )
    console.print(_roles(found))
    for line in boxes(found):
        console.print(line, highlight=False, markup=False)
    console.print("\n[bold]Memory of each device, by phase[/]", highlight=False)
    console.print(_memory(found))
    console.print("\n[bold]One step[/] (times are rough)", highlight=False)
    for line in timeline(found):
        console.print(line, highlight=False, markup=False)
    console.print("\n[bold]Why[/]", highlight=False)
    console.print(_reasons(found.reasons))
    console.print("\n[bold]Why not[/]", highlight=False)
    console.print(_reasons(found.alternatives))
    for note in found.notes:
        console.print(f"Note: {note}", style="dim", highlight=False, markup=False)


def boxes(found: DetailedPlan) -> Iterator[str]:
    """Nodes as rows of boxes with a letter for each role; equal neighbours are one row."""
    plan = found.plan
    names = [f"{LETTERS[role]} {role}" for role in plan.placements]
    yield f"  {', '.join(names)}"
    for name, devices in node_rows(found):
        inside = ["".join(LETTERS[role] for role in roles) or "·" for roles in devices[:MOST_BOXES]]
        more = f" and {len(devices) - MOST_BOXES} more" if len(devices) > MOST_BOXES else ""
        yield f"  {name:<14} {''.join(f'[{letters:^{len(names)}}]' for letters in inside)}{more}"


def timeline(found: DetailedPlan) -> Iterator[str]:
    """A bar for each span, where it lies in the step."""
    width = max(len(span.lane) + len(span.name) for span in found.timeline) + 2
    for span in found.timeline:
        first = round(BAR * span.start / found.seconds)
        last = max(first + 1, round(BAR * span.end / found.seconds))
        bar = f"{' ' * first}{'█' * (last - first)}"[: BAR + 1]
        name = f"{span.lane}: {span.name}"
        yield f"  {name:<{width}} │{bar:<{BAR + 1}}│ {time_text(span.end - span.start)}"


def bar(one: DeviceMemory, width: int = 24) -> list[tuple[Part, int]]:
    """How many cells of a bar each part fills."""
    cells: list[tuple[Part, int]] = []
    filled, total = 0, 0
    for part in PARTS:
        total += sum(size for _, name, size in one.parts if name == part)
        end = round(width * total / one.capacity)
        cells.append((part, end - filled))
        filled = end
    return cells


def _roles(found: DetailedPlan) -> Table:
    from rich.table import Table

    table = Table("role", "model", "devices", "TP x DP", "sharding", "goes to the host while idle", box=None)
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


def _devices(found: DetailedPlan, role: Role) -> str:
    return _short(format_range(found.plan.placements[role].devices, found.plan.cluster))


def _short(text: str) -> str:
    return text if len(text) <= 28 else f"{text[:24]}...]"


def _memory(found: DetailedPlan) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table("phase", "devices", *PARTS, "used / may use", "", box=None)
    for one in found.memory:
        sizes = [sum(size for _, name, size in one.parts if name == part) for part in PARTS]
        drawn = Text()
        for part, cells in bar(one):
            drawn.append(FILLS[part] * cells, style=COLOURS[part])
        table.add_row(
            one.phase,
            _short(format_range(one.devices, found.plan.cluster)),
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


def node_rows(found: DetailedPlan) -> list[tuple[str, list[tuple[Role, ...]]]]:
    """(name, roles of each device) of nodes; equal ones together."""
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
