"""Views of a position: grid symbols and coordinates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

VOCABULARIES: Mapping[str, str] = {"ragen": "#_OX√PS", "letters": "W.GBCA@", "xsb": "# .$*@+"}
"""For each vocabulary its wall, floor, target, box, box on target, player and player on target."""

VIEWS = ("grid", "coords", "grid_coords", "cells", "relative", "around", "words")

_NEXT = {"#": "wall", " ": "free", ".": "free", "@": "free", "+": "free", "$": "blocked", "*": "blocked"}
_SIDES = ((-1, 0), (1, 0), (0, -1), (0, 1))
_SIDE_NAMES = ("up", "down", "left", "right")
_CORNERS = ((-1, -1), (-1, 1), (1, -1), (1, 1))
_CORNER_NAMES = ("up left", "up right", "down left", "down right")
_RING = tuple((dy, dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1) if dy or dx)
_MEANINGS = ("wall", "floor", "target", "box", "box on target", "player", "player on target")
_STYLES = ("grey50", "grey30", "red", "yellow", "bold green", "bold cyan", "bold magenta")


def translation(vocabulary: str) -> dict[int, int]:
    """A table for ``str.translate`` from XSB."""
    return str.maketrans(VOCABULARIES["xsb"], VOCABULARIES[vocabulary])


def legend(vocabulary: str) -> str:
    """Meaning of each symbol, in one line."""
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
    if view == "cells":
        return cells(board)
    if view == "words":
        return in_words(board)
    if view in ("relative", "around"):
        return relative(board, _SIDES if view == "relative" else _RING)
    return f"{board.translate(table)}\n{coordinates(board, walls=False)}"


def coordinates(board: str, *, walls: bool) -> str:
    """A position as (row, column) of everything in it; of the walls, those inside the border."""
    rows = board.split("\n")
    lines = [
        f"Player: {_coordinates(rows, '@+')}",
        f"Boxes: {_coordinates(rows, '$*')}",
        f"Targets: {_coordinates(rows, '.*+')}",
    ]
    if walls:
        inner = [f" {row[1:-1]}" for row in rows[1:-1]]
        lines.insert(0, f"Room: {len(rows)} rows, {len(rows[0])} columns")
        lines.append(f"Walls inside: {_coordinates([' ', *inner], '#') or 'none'}")
    return "\n".join(lines)


def cells(board: str) -> str:
    """A position in few words: cells have names as in chess, columns from a and rows from 1 at the top."""
    rows = board.split("\n")
    inner = [f" {row[1:-1]}" for row in rows[1:-1]]
    names_by_kind = {
        "player": _names(rows, "@+"),
        "box": _names(rows, "$*"),
        "target": _names(rows, ".*+"),
        "wall": _names([" ", *inner], "#"),
    }
    return " ".join(f"{kind} {' '.join(names)}" for kind, names in names_by_kind.items() if names)


def relative(board: str, near: Sequence[tuple[int, int]]) -> str:
    """A position as seen by the player: how far off the boxes are, and from each box the targets.

    The player and each box also list their ``near`` cells, given as (rows down, columns right).
    """
    rows = board.split("\n")
    (player,) = _cells(rows, "@+")
    words = ["you", *_around(rows, player, near)]
    for box in _cells(rows, "$*"):
        words += ["box", *_offset(player, box), *_around(rows, box, near)]
        for target in _cells(rows, ".*+"):
            words += ["target", *_offset(box, target)]
    return " ".join(words)


def in_words(board: str) -> str:
    """What `relative` contains, as sentences for a language model, and the corners of each box.

    Without the corners some positions look alike although they need different moves: the way around a box
    leads over them.
    """
    rows = board.split("\n")
    (player,) = _cells(rows, "@+")
    boxes, targets = _cells(rows, "$*"), _cells(rows, ".*+")
    sentences = [f"Next to you: {_sides(rows, player)}."]
    for number, box in enumerate(boxes, 1):
        name = f"Box {number}" if len(boxes) > 1 else "Box"
        sentences.append(f"{name}: {_distance(player, box)}. Next to it: {_sides(rows, box)}.")
        sentences.append(f"Blocked corners of it: {_blocked_corners(rows, box)}.")
        sentences += [f"Target from it: {_distance(box, target)}." for target in targets]
    return " ".join(sentences)


def _sides(rows: list[str], cell: tuple[int, int]) -> str:
    found = _around(rows, cell, _SIDES)
    return ", ".join(f"{side} {kind}" for side, kind in zip(_SIDE_NAMES, found, strict=True))


def _blocked_corners(rows: list[str], cell: tuple[int, int]) -> str:
    found = zip(_CORNER_NAMES, _around(rows, cell, _CORNERS), strict=True)
    return ", ".join(name for name, kind in found if kind != "free") or "none"


def _distance(start: tuple[int, int], end: tuple[int, int]) -> str:
    """The distance of ``end`` from ``start``: "2 up, 1 left", or "here"."""
    down, right = end[0] - start[0], end[1] - start[1]
    steps = [f"{abs(down)} {'up' if down < 0 else 'down'}"] if down else []
    steps += [f"{abs(right)} {'left' if right < 0 else 'right'}"] if right else []
    return ", ".join(steps) or "here"


def _offset(start: tuple[int, int], end: tuple[int, int]) -> tuple[str, str]:
    down, right = end[0] - start[0], end[1] - start[1]
    return f"{'up' if down < 0 else 'down'}{abs(down)}", f"{'left' if right < 0 else 'right'}{abs(right)}"


def _around(rows: list[str], cell: tuple[int, int], near: Sequence[tuple[int, int]]) -> list[str]:
    y, x = cell
    return [_NEXT[rows[y + dy][x + dx]] for dy, dx in near]


def _names(rows: list[str], symbols: str) -> list[str]:
    return [f"{_column(x)}{y + 1}" for y, x in _cells(rows, symbols)]


def _column(number: int) -> str:
    """The name of a column: a to z, then aa and so on."""
    name = ""
    number += 1
    while number:
        number, letter = divmod(number - 1, 26)
        name = chr(ord("a") + letter) + name
    return name


def _coordinates(rows: list[str], symbols: str) -> str:
    return ", ".join(map(str, _cells(rows, symbols)))


def _cells(rows: list[str], symbols: str) -> list[tuple[int, int]]:
    """(row, column) of every cell that shows one of the symbols."""
    return [(y, x) for y, row in enumerate(rows) for x, symbol in enumerate(row) if symbol in symbols]
