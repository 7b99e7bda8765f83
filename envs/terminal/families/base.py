"""What the families of terminal tasks share: kinds of tasks, words, names and random choices."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from rollgym.envs.terminal.types import Check, TerminalTask, Tree

Rng = np.random.Generator
T = TypeVar("T")
LEVELS = (1, 2, 3)

_WORDS = (
    "amber anchor apple arrow autumn badge bakery barrel basin beacon birch blanket bottle branch "
    "bridge bronze bucket butter cabin candle canyon carpet castle cedar cello cherry circle clover "
    "cobalt comet copper coral cotton cradle crystal curtain daisy desert dolphin donkey drum eagle "
    "ember engine falcon feather fennel ferry fiddle forest fountain garden garnet ginger glacier "
    "granite hammer harbor hazel heron hollow honey island ivory jacket jasmine juniper kettle ladder "
    "lagoon lantern lemon lilac linen lizard magnet maple marble meadow mirror mitten mosaic mountain "
    "needle nickel oak oasis olive onyx orchid otter oyster paddle paper parrot pebble pepper pewter "
    "pillow pine planet plum pocket poplar prairie quartz quiver rabbit raven ribbon river rocket "
    "saddle saffron salmon sapphire satin shadow shovel silver sparrow spruce statue stone summit "
    "sunset tablet temple thistle thunder timber topaz tunnel turtle valley velvet violet walnut "
    "whistle willow window winter yarrow zephyr "
)
WORDS = tuple(_WORDS.split())
_PEOPLE = (
    "ada bela carl dora emil fay gus hana ivo jana karl lena milo nora olaf pia quin rosa sven tara "
    "ugo vera walt xena yuri zoe "
)
PEOPLE = tuple(_PEOPLE.split())
SERVICES = ("auth", "billing", "cart", "email", "gateway", "invoice", "media", "orders", "search", "stock")


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """Content of a task, drawn for a level."""

    instruction: str
    parameters: Mapping[str, Any]
    """Values that the instruction states; all that the expert gets."""
    tree: Tree
    checks: Sequence[Check]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of tasks: how one is drawn, and the commands that solve it."""

    family: str
    name: str
    make: Callable[[Rng, int], Draft]
    solve: Callable[[Mapping[str, Any]], list[str]]

    def task(self, rng: Rng, level: int) -> TerminalTask:
        """Draw a task of a level."""
        draft = self.make(rng, level)
        return TerminalTask(
            family=self.family,
            kind=self.name,
            level=level,
            instruction=draft.instruction,
            parameters=draft.parameters,
            tree=draft.tree,
            checks=tuple(draft.checks),
        )


def integer(rng: Rng, low: int, high: int) -> int:
    """A number from ``low`` to ``high``, both included."""
    return int(rng.integers(low, high + 1))


def pick(rng: Rng, choices: Sequence[T]) -> T:
    """One of the choices."""
    return choices[int(rng.integers(len(choices)))]


def sample(rng: Rng, choices: Sequence[T], count: int) -> list[T]:
    """Different choices, in random order."""
    return [choices[int(index)] for index in rng.choice(len(choices), size=count, replace=False)]


def sentence(rng: Rng, low: int = 4, high: int = 9) -> str:
    """A line of words."""
    return " ".join(pick(rng, WORDS) for _ in range(integer(rng, low, high)))


def paths(rng: Rng, count: int, depth: int, extensions: Sequence[str]) -> list[str]:
    """Different file paths, at most ``depth`` folders deep."""
    folders = sample(rng, WORDS, 4)
    found: dict[str, None] = {}
    for name in sample(rng, WORDS, count):
        above = [pick(rng, folders) for _ in range(integer(rng, min(depth, 1), depth))]
        found["/".join([*above, f"{name}.{pick(rng, extensions)}"])] = None
    return list(found)


def quote(text: str) -> str:
    """Quote a word for the shell."""
    return shlex.quote(text)


def write_file(path: str, text: str) -> str:
    """The command that writes a file."""
    return f"cat > {quote(path)} <<'END_OF_FILE'\n{text.rstrip()}\nEND_OF_FILE"


def unchanged(tree: Tree, names: Sequence[str]) -> list[Check]:
    """Checks that files are as they were."""
    return [
        Check(kind="same", path=path, expected=hashlib.sha256(tree[path]["content"]).hexdigest())
        for path in names
    ]


def listing(tree: Tree, path: str = "") -> Check:
    """A check that there are these files below a folder, and no others."""
    below = f"{path}/" if path else ""
    files = sorted(
        name[len(below) :]
        for name, entry in tree.items()
        if entry["kind"] != "folder" and name.startswith(below) and ".git" not in name.split("/")
    )
    return Check(kind="listing", path=path, expected="\n".join(files))


def answer(path: str, text: object) -> Check:
    """A check of a text file."""
    return Check(kind="text", path=path, expected=str(text))
