"""A minimal SVG writer: rectangles, lines and text in a white document."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

COLORS = ("#2563eb", "#d97706", "#059669", "#db2777", "#7c3aed", "#475569")
TEXT_COLOR = "#334155"


def document(width: float, height: float, elements: Iterable[str], title: str = "") -> str:
    """Return an SVG document of this size with a white background."""
    heading = f"<title>{escape(title)}</title>\n" if title else ""
    body = "\n".join(elements)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" '
        f'font-family="sans-serif" font-size="12" role="img">\n{heading}'
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def rect(x: float, y: float, width: float, height: float, fill: str, tooltip: str = "") -> str:
    """Return a filled rectangle."""
    tag = f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" fill="{fill}"'
    return f"{tag}><title>{escape(tooltip)}</title></rect>" if tooltip else f"{tag}/>"


def line(x1: float, y1: float, x2: float, y2: float, color: str, width: float = 1, opacity: float = 1) -> str:
    """Return a straight line."""
    return (
        f'<line x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}" stroke="{color}" '
        f'stroke-width="{width}" stroke-opacity="{opacity}"/>'
    )


def text(
    x: float, y: float, content: str, *, size: int = 12, anchor: str = "start", color: str = TEXT_COLOR
) -> str:
    """Return a text; ``anchor`` is start, middle or end."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{color}">'
        f"{escape(content)}</text>"
    )
