"""Draws a learning curve as SVG: held-out success over training steps, with confidence intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from rollgym.utils import svg

WIDTH, HEIGHT = 720, 360
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 34, 44


def learning_curve(runs: Mapping[str, Sequence[Mapping[str, Any]]], title: str = "") -> str:
    """Return an SVG of each run's evaluations (lines of ``evaluations.jsonl``), by the run's label."""
    steps = [line["step"] for lines in runs.values() for line in lines]
    last_step = max([1, *steps])
    parts = [*_frame(last_step, title)]
    for number, (label, lines) in enumerate(runs.items()):
        evaluated = [line for line in lines if line.get("success_rate") is not None]
        color = svg.COLORS[number % len(svg.COLORS)]
        parts += _curve(evaluated, last_step, color)
        # At the bottom: curves end at the top, where things go well.
        y = HEIGHT - BOTTOM - 10 - 16 * (len(runs) - 1 - number)
        parts.append(svg.text(WIDTH - RIGHT - 4, y, label, color=color, anchor="end"))
    return svg.document(WIDTH, HEIGHT, parts)


def _frame(last_step: int, title: str) -> list[str]:
    parts = [svg.text(LEFT, 20, title, size=14)]
    for tenth in range(0, 11, 2):
        y = _y(tenth / 10)
        parts.append(svg.line(LEFT, y, WIDTH - RIGHT, y, "#e2e8f0"))
        parts.append(svg.text(LEFT - 8, y + 4, f"{10 * tenth} %", anchor="end"))
    for quarter in range(5):
        step = round(last_step * quarter / 4)
        parts.append(svg.text(_x(step, last_step), HEIGHT - BOTTOM + 18, str(step), anchor="middle"))
    parts.append(svg.text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "training step", anchor="middle"))
    return parts


def _curve(lines: Sequence[Mapping[str, Any]], last_step: int, color: str) -> list[str]:
    points = [(_x(line["step"], last_step), _y(line["success_rate"])) for line in lines]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    parts = [f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>']
    for (x, y), line in zip(points, lines, strict=True):
        low, high = line["success_ci"]
        parts.append(svg.line(x, _y(low), x, _y(high), color, width=3, opacity=0.4))
        name = f"{line.get('phase', '')} step {line['step']}: {line['success_rate']:.3f}"
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"><title>{escape(name)}</title></circle>'
        )
    return parts


def _x(step: float, last_step: int) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * step / last_step


def _y(rate: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - rate)
