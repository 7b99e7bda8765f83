"""Device ranges such as ``gpu[0-3,6]``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from rollgym.core.errors import UsageError
from rollgym.devices.types import Cluster, Device

_WHOLE = re.compile(r"\s*(gpu|cpu)\s*\[([0-9,\-\s]*)\]\s*", re.ASCII)
_PART = re.compile(r"\s*([0-9]{1,9})\s*(?:-\s*([0-9]{1,9})\s*)?", re.ASCII)
_FORM = "write gpu[0-3], gpu[0,2,4-7] or cpu[0-1]"


def parse_range(text: str, cluster: Cluster, key: str = "devices") -> tuple[Device, ...]:
    """Parse a device range; returns the devices in cluster order. ``key`` is the setting in errors."""
    whole = _WHOLE.fullmatch(text)
    if whole is None:
        raise UsageError(f"{key} is {text!r}, which is not a device range: {_FORM}.")
    kind, inside = whole.groups()
    every = cluster.devices
    numbers: list[int] = []
    for part in inside.split(","):
        numbers += _part(part, text, key, len(every), kind)
    twice = sorted(number for number, count in Counter(numbers).items() if count > 1)
    if twice:
        raise UsageError(f"{key} is {text!r}, which contains device {twice[0]} twice.")
    devices = tuple(every[number] for number in sorted(numbers))
    for number, device in zip(sorted(numbers), devices, strict=True):
        node = cluster.nodes[device.node]
        if node.kind != kind:
            raise UsageError(f"{key} is {text!r}, but device {number} is a {node.kind} (of {node.name}).")
    return devices


def format_range(devices: Sequence[Device], cluster: Cluster) -> str:
    """Format devices as a range that `parse_range` accepts."""
    number_of = {device: number for number, device in enumerate(cluster.devices)}
    numbers = sorted(number_of[device] for device in devices)
    kind = cluster.nodes[devices[0].node].kind if devices else "gpu"
    return f"{kind}[{numbers_text(numbers)}]"


def numbers_text(numbers: Sequence[int]) -> str:
    """Format sorted numbers as ``0-3,6``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _part(part: str, text: str, key: str, count: int, kind: str) -> range:
    match = _PART.fullmatch(part)
    if match is None:
        problem = f"{part.strip()!r} is not a number or range" if part.strip() else "a number is missing"
        raise UsageError(f"{key} is {text!r}: {problem}; {_FORM}.")
    first = int(match[1])
    last = first if match[2] is None else int(match[2])
    if last < first:
        raise UsageError(f"{key} is {text!r}: {first}-{last} goes backwards; write {last}-{first}.")
    if last >= count:
        there = f"there are {count}, numbered {kind}[0-{count - 1}]" if count else "there are none"
        raise UsageError(f"{key} is {text!r}: device {last} does not exist; {there}.")
    return range(first, last + 1)
