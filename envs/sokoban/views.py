"""How a position is shown: vocabularies of symbols for the grid, and coordinates."""

from __future__ import annotations

from collections.abc import Mapping

VOCABULARIES: Mapping[str, str] = {
    "ragen": "#_OX√PS",
    "letters": "W.GBCA@",
    "xsb": "# .$*@+",
}
"""For each vocabulary its wall, floor, target, box, box on target, player and player on target."""

VIEWS = ("grid", "coords", "grid_coords")

_MEANINGS = ("wall", "floor", "target", "box", "box on target", "player", "player on target")
_STYLES = ("grey50", "grey30", "red", "yellow", "bold green", "bold cyan", "bold magenta")


def translation(vocabulary: str) -> dict[int, int]:
    """A table for ``str.translate`` from XSB."""
    return str.maketrans(VOCABULARIES["xsb"], VOCABULARIES[vocabulary])


def legend(vocabulary: str) -> str:
    """What each symbol means, in one line."""
    pairs = zip(VOCABULARIES[vocabulary], _MEANINGS, strict=True)
    return ", ".join(f"{'(space)' if symbol == ' ' else symbol} {meaning}" for symbol, meaning in pairs)


def palette(vocabulary: str) -> dict[str, str]:
    """A rich style for each symbol."""
    return dict(zip(VOCABULARIES[vocabulary], _STYLES, strict=True))


def show(board: str, view: str, table: Mapping[int, int]) -> str:
    """A position in XSB as an agent sees it."""
    if view == "grid":
        return board.translate(table)
    if view == "coords":
        return coordinates(board, walls=True)
    return f"{board.translate(table)}\n{coordinates(board, walls=False)}"


def coordinates(board: str, *, walls: bool) -> str:
    """A position as (row, column) of everything in it; of the walls, those inside the border."""
    rows = board.split("\n")
    lines = [
        f"Player: {_places(rows, '@+')}",
        f"Boxes: {_places(rows, '$*')}",
        f"Targets: {_places(rows, '.*+')}",
    ]
    if walls:
        inner = [f" {row[1:-1]}" for row in rows[1:-1]]
        lines.insert(0, f"Room: {len(rows)} rows, {len(rows[0])} columns")
        lines.append(f"Walls inside: {_places([' ', *inner], '#') or 'none'}")
    return "\n".join(lines)


def _places(rows: list[str], symbols: str) -> str:
    places = [(y, x) for y, row in enumerate(rows) for x, symbol in enumerate(row) if symbol in symbols]
    return ", ".join(f"({y}, {x})" for y, x in places)
