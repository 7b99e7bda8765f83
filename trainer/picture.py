"""A learning curve as a picture: held-out success over training steps, with intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

WIDTH, HEIGHT = 720, 360
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 34, 44
COLOURS = ("#2563eb", "#d97706", "#059669", "#db2777", "#7c3aed", "#475569")


def learning_curve(runs: Mapping[str, Sequence[Mapping[str, Any]]], title: str = "") -> str:
    """An SVG of each run's evaluations (lines of ``evaluations.jsonl``), by the run's label."""
    steps = [line["step"] for lines in runs.values() for line in lines]
    last = max([1, *steps])
    parts = [*_frame(last, title)]
    for number, (label, lines) in enumerate(runs.items()):
        known = [line for line in lines if line.get("success_rate") is not None]
        colour = COLOURS[number % len(COLOURS)]
        parts += _curve(known, last, colour)
        # At the bottom: curves end at the top, where things go well.
        y = HEIGHT - BOTTOM - 10 - 16 * (len(runs) - 1 - number)
        parts.append(_text(WIDTH - RIGHT - 4, y, label, colour=colour, anchor="end"))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12" role="img">\n<rect width="100%" height="100%" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def _frame(last: int, title: str) -> list[str]:
    parts = [_text(LEFT, 20, title, size=14)]
    for tenth in range(0, 11, 2):
        y = _y(tenth / 10)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke="#e2e8f0"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{10 * tenth} %", anchor="end"))
    for quarter in range(5):
        step = round(last * quarter / 4)
        parts.append(_text(_x(step, last), HEIGHT - BOTTOM + 18, str(step), anchor="middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "training step", anchor="middle"))
    return parts


def _curve(lines: Sequence[Mapping[str, Any]], last: int, colour: str) -> list[str]:
    points = [(_x(line["step"], last), _y(line["success_rate"])) for line in lines]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    parts = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>']
    for (x, y), line in zip(points, lines, strict=True):
        low, high = line["success_ci"]
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_y(low):.1f}" y2="{_y(high):.1f}" stroke="{colour}" '
            'stroke-opacity="0.4" stroke-width="3"/>'
        )
        name = f"{line.get('phase', '')} step {line['step']}: {line['success_rate']:.3f}"
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"><title>{escape(name)}</title></circle>'
        )
    return parts


def _x(step: float, last: int) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * step / last


def _y(rate: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - rate)


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", colour: str = "#334155", size: int = 12
) -> str:
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" fill="{colour}" font-size="{size}">'
        f"{escape(text)}</text>"
    )
