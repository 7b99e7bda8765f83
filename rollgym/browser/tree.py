"""The accessibility tree of a page as short lines, with a reference for each interactive element.

Playwright's references depend on all earlier pages; here they are renumbered on every page, so that the same
page always has the same text.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

CLICKED = frozenset({"button", "link", "radio", "checkbox", "option", "tab", "menuitem"})
TYPED = frozenset({"searchbox", "textbox"})
LISTS = frozenset({"combobox", "listbox"})
"""Roles with options to select."""
_SILENT = frozenset({"generic", "paragraph", "text", "main", "form", "document", "region", "none", "status"})
"""Roles that are not shown to an agent, only their text."""
_STATES = ("checked", "disabled", "expanded", "pressed", "selected")
_LINE = re.compile(r"( *)- (.*)")
_NODE = re.compile(r'([a-z]+)(?: ("(?:[^"\\]|\\.)*"))?((?: \[[^\]]*\])*)(?::(?: (.*))?)?', re.DOTALL)
_QUOTED_KEY = re.compile(r"'((?:[^']|'')*)'(:.*)?", re.DOTALL)
_MARK = re.compile(r"\[([a-z]+)(?:=([^\]]*))?\]")
_BYTE = re.compile(r"\\x([0-9a-fA-F]{2})")


class Node(NamedTuple):
    """One line of the tree."""

    depth: int
    role: str
    name: str
    text: str
    marks: dict[str, str]


class Target(NamedTuple):
    """An interactive element."""

    ref: str
    """Playwright's reference, valid until the next snapshot."""
    role: str
    name: str
    options: tuple[str, ...] = ()
    """Names of the options, in a list."""


class Tree(NamedTuple):
    """A page as an agent sees it."""

    text: str
    targets: dict[str, Target]
    """Interactive elements by the displayed reference."""

    def refs(self, roles: frozenset[str]) -> list[str]:
        """References of the targets with one of these roles."""
        return [ref for ref, target in self.targets.items() if target.role in roles]


def read_tree(snapshot: str, roles: frozenset[str] = CLICKED | TYPED, *, pointers: bool = False) -> Tree:
    """Convert Playwright's snapshot (``mode="ai"``).

    Args:
        snapshot: The snapshot.
        roles: Roles of elements that get a reference.
        pointers: Also give one to elements over which the mouse cursor is a hand, whatever their role.
    """
    lines: list[str] = []
    targets: dict[str, Target] = {}
    above: list[Node] = []  # nodes with a separate line
    inside = ""  # the reference of the list that the node is in
    for node in map(_node, snapshot.splitlines()):
        if node is None:
            continue
        while above and above[-1].depth >= node.depth:
            above.pop()
        ref = ""
        usable = node.role in roles or (pointers and node.marks.get("cursor") == "pointer")
        if usable and "ref" in node.marks and "disabled" not in node.marks:
            ref = f"e{len(targets) + 1}"
            targets[ref] = Target(node.marks["ref"], node.role, node.name)
            if node.role in LISTS:
                inside = ref
        if inside and node.role == "option" and any(parent.role in LISTS for parent in above):
            options = targets[inside].options
            targets[inside] = targets[inside]._replace(options=(*options, node.name or node.text))
        line = _line_of(node, ref)
        if line and not (above and line == above[-1].name):
            lines.append("  " * len(above) + line)
            if node.role not in _SILENT or ref:
                above.append(node)
    return Tree("\n".join(lines), targets)


def _line_of(node: Node, ref: str) -> str:
    if node.role in _SILENT and not ref:
        return node.text
    states = "".join(f" ({state})" for state in _STATES if state in node.marks)
    name = f' "{node.name}"' if node.name else ""
    text = f": {node.text}" if node.text else ""
    return f"{f'[{ref}] ' if ref else ''}{node.role}{name}{states}{text}"


def _node(line: str) -> Node | None:
    """A line of the snapshot; None for one that is a property of the line above."""
    match = _LINE.fullmatch(line)
    if match is None:
        return None
    depth, content = len(match[1]), match[2]
    key = _QUOTED_KEY.fullmatch(content)
    if key is not None:
        content = key[1].replace("''", "'") + (key[2] or "")
    if content.startswith("/"):
        return None
    fields = _NODE.fullmatch(content)
    if fields is None:
        return Node(depth, "text", "", _value(content), {})
    role, name, marks, text = fields.groups()
    return Node(depth, role, _value(name or ""), _value(text or ""), dict(_MARK.findall(marks)))


def _value(text: str) -> str:
    """A value without its quotes, on one line."""
    if len(text) > 1 and text[0] == text[-1] == '"':
        try:
            text = str(json.loads(_BYTE.sub(r"\\u00\1", text)))
        except ValueError:
            text = text[1:-1]
    elif len(text) > 1 and text[0] == text[-1] == "'":
        text = text[1:-1].replace("''", "'")
    return " ".join(text.split())
