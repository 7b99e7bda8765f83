"""Generated problems: kinds of questions by level, from single sums to equations and word problems."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import comb, isqrt
from typing import Any

import numpy as np

Rng = np.random.Generator
Values = dict[str, Any]
Draw = tuple[int, int]

LEVELS = (1, 2, 3, 4, 5)
NAMES = (
    *("Ada", "Boris", "Clara", "Deniz", "Elif", "Farid", "Gita", "Henrik", "Iris", "Jamal", "Kaito", "Lena"),
    *("Milo", "Nadia", "Oskar", "Priya", "Quinn", "Rafael", "Selma", "Tomas", "Uma", "Viktor", "Wanda"),
)  # fmt: skip
THINGS = (
    *("apples", "buttons", "candles", "eggs", "marbles", "nails", "pencils", "plates", "ropes", "seeds"),
    *("shells", "spoons", "stamps", "stones", "tickets", "tiles", "toys", "walnuts"),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of problem; its texts have the values in braces."""

    name: str
    level: int
    texts: tuple[str, ...]
    ranges: Mapping[str, Draw]
    """Least and greatest whole number of each value."""
    solve: Callable[[Values], Fraction | int | None]
    """The answer, or ``None`` where the values do not make a problem of this kind."""
    shown: Callable[[Values], Values] = dict
    """The values in the text, from the drawn ones; `solve` reads these."""

    def draw(self, rng: Rng) -> Problem:
        """A random problem of this kind."""
        while True:
            drawn = {name: int(rng.integers(low, high + 1)) for name, (low, high) in self.ranges.items()}
            values = self.shown(drawn)
            answer = self.solve(values)
            if answer is not None:
                break
        people = rng.choice(len(NAMES), size=2, replace=False)
        words = {
            "who": NAMES[int(people[0])],
            "other": NAMES[int(people[1])],
            "things": THINGS[int(rng.integers(len(THINGS)))],
        }
        text = self.texts[int(rng.integers(len(self.texts)))]
        return Problem(
            kind=self.name,
            level=self.level,
            text=text.format(**values, **words),
            values=values,
            answer=str(Fraction(answer)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A question and its answer."""

    text: str
    answer: str
    """As text: of generated problems a whole number or a fraction in lowest terms."""
    kind: str = ""
    level: int | None = None
    values: Mapping[str, Any] | None = None
    """The numbers in the text, for an expert."""

    @property
    def key(self) -> str:
        """The content that no two splits share: the kind and its numbers, in whatever order and words."""
        return f"{self.kind} {sorted((self.values or {}).values())}"


def random_problem(rng: Rng, level: int | None = None, only: Collection[str] | None = None) -> Problem:
    """A problem of a level, or of any; ``only`` of these kinds if given."""
    known = [kind for kind in KINDS.values() if only is None or kind.name in only]
    if level is None:
        levels = [level for level in LEVELS if any(kind.level == level for kind in known)]
        level = levels[int(rng.integers(len(levels)))]
    kinds = [kind for kind in known if kind.level == level]
    return kinds[int(rng.integers(len(kinds)))].draw(rng)


def solve(kind: str, values: Mapping[str, Any]) -> str:
    """The answer to a problem of a kind."""
    return str(Fraction(KINDS[kind].solve(dict(values)) or 0))


def _linear(v: Values) -> Fraction | None:
    return Fraction(v["d"] - v["b"], v["a"] - v["c"]) if v["a"] != v["c"] else None


def _equations(v: Values) -> Values:
    """Two equations that x and y solve."""
    factors = {name: v[name] for name in "abcd"}
    return {**factors, "e": v["a"] * v["x"] + v["b"] * v["y"], "f": v["c"] * v["x"] + v["d"] * v["y"]}


def _system(v: Values) -> Fraction | None:
    determinant = v["a"] * v["d"] - v["b"] * v["c"]
    return Fraction(v["e"] * v["d"] - v["b"] * v["f"], determinant) if determinant else None


def _larger_root(v: Values) -> int | None:
    square = v["s"] ** 2 - 4 * v["p"]
    return (v["s"] + isqrt(square)) // 2 if square else None


_KINDS = (
    # Level 1: one operation.
    Kind(
        name="addition",
        level=1,
        texts=("{a} + {b}",),
        ranges={"a": (2, 50), "b": (2, 50)},
        solve=lambda v: v["a"] + v["b"],
    ),
    Kind(
        name="subtraction",
        level=1,
        texts=("{a} - {b}",),
        ranges={"a": (2, 60), "b": (2, 60)},
        solve=lambda v: v["a"] - v["b"] if v["a"] > v["b"] else None,
    ),
    Kind(
        name="multiplication",
        level=1,
        texts=("{a} * {b}",),
        ranges={"a": (2, 15), "b": (2, 15)},
        solve=lambda v: v["a"] * v["b"],
    ),
    Kind(
        name="missing number",
        level=1,
        texts=("{a} + ? = {b}",),
        ranges={"a": (2, 50), "b": (4, 60)},
        solve=lambda v: v["b"] - v["a"] if v["b"] > v["a"] else None,
    ),
    # Level 2: several operations, remainders.
    Kind(
        name="two products",
        level=2,
        texts=("Compute {a} * {b} + {c} * {d}.", "What is {a} * {b} + {c} * {d}?"),
        ranges=dict.fromkeys("abcd", (2, 19)),
        solve=lambda v: v["a"] * v["b"] + v["c"] * v["d"],
    ),
    Kind(
        name="bracket",
        level=2,
        texts=("Compute {a} * ({b} - {c}) - {d}.", "What is {a} * ({b} - {c}) - {d}?"),
        ranges={"a": (2, 12), "b": (10, 60), "c": (2, 50), "d": (2, 99)},
        solve=lambda v: v["a"] * (v["b"] - v["c"]) - v["d"],
    ),
    Kind(
        name="remainder",
        level=2,
        texts=("What is the remainder of {a} divided by {b}?", "{a} is divided by {b}. What remains?"),
        ranges={"a": (50, 999), "b": (3, 30)},
        solve=lambda v: v["a"] % v["b"],
    ),
    Kind(
        name="chain",
        level=2,
        texts=("Compute {a} + {b} - {c} + {d} - {e}.",),
        ranges=dict.fromkeys("abcde", (10, 200)),
        solve=lambda v: v["a"] + v["b"] - v["c"] + v["d"] - v["e"],
    ),
    # Level 3: fractions, percentages, word problems of two steps.
    Kind(
        name="fractions",
        level=3,
        texts=(
            "Compute {a}/{b} + {c}/{d}. Give a fraction or a whole number.",
            "What is the sum of {a}/{b} and {c}/{d}, as a fraction or a whole number?",
        ),
        ranges={"a": (1, 11), "b": (2, 12), "c": (1, 11), "d": (2, 12)},
        solve=lambda v: Fraction(v["a"], v["b"]) + Fraction(v["c"], v["d"]),
    ),
    Kind(
        name="percentage",
        level=3,
        texts=(
            "A coat costs {a} coins. Its price is lowered by {b} percent. What does it cost now?",
            "Of {a} liters of water in a tank, {b} percent evaporate. How many liters remain?",
        ),
        ranges={"a": (20, 600), "b": (5, 90)},
        solve=lambda v: (
            v["a"] - Fraction(v["a"] * v["b"], 100) if v["b"] % 5 == 0 and v["a"] % 20 == 0 else None
        ),
    ),
    Kind(
        name="shopping",
        level=3,
        texts=(
            "{who} buys {a} {things} at {b} coins each and pays with {c} coins. How many come back?",
            "{who} has {c} coins and buys {a} {things}, each for {b} coins. How many coins are left?",
        ),
        ranges={"a": (2, 12), "b": (2, 25), "c": (30, 400)},
        solve=lambda v: v["c"] - v["a"] * v["b"] if v["c"] > v["a"] * v["b"] else None,
    ),
    Kind(
        name="sharing",
        level=3,
        texts=(
            "{who} has {a} boxes with {b} {things} in each and shares them equally among {c} children. "
            "How many {things} does each child get?",
            "{a} bags hold {b} {things} each. {who} puts all of them into {c} equal heaps. "
            "How many {things} are in a heap?",
        ),
        ranges={"a": (2, 24), "b": (3, 40), "c": (2, 12)},
        solve=lambda v: v["a"] * v["b"] // v["c"] if v["a"] * v["b"] % v["c"] == 0 else None,
    ),
    # Level 4: linear equations, rates, ages, averages.
    Kind(
        name="linear equation",
        level=4,
        texts=(
            "Solve for x: {a}x + {b} = {c}x + {d}. Give a fraction or a whole number.",
            "For which x is {a}x + {b} equal to {c}x + {d}? Give a fraction or a whole number.",
        ),
        ranges={"a": (2, 15), "b": (1, 60), "c": (2, 15), "d": (1, 60)},
        solve=_linear,
    ),
    Kind(
        name="ages",
        level=4,
        texts=(
            "{who} is {a} years older than {other}. In {b} years {who} will be twice as old as {other}. "
            "How old is {other} now?",
        ),
        ranges={"a": (5, 60), "b": (1, 40)},
        solve=lambda v: v["a"] - v["b"] if v["a"] > v["b"] + 2 else None,
    ),
    Kind(
        name="average",
        level=4,
        texts=(
            "{who} wrote {a} tests with a mean of {b} points. Which next score raises it to {c}?",
            "The mean of {a} numbers is {b}. A number is added, and the mean becomes {c}. "
            "Which number was added?",
        ),
        ranges={"a": (3, 12), "b": (10, 70), "c": (11, 80)},
        solve=lambda v: v["c"] * (v["a"] + 1) - v["b"] * v["a"] if v["c"] > v["b"] else None,
    ),
    Kind(
        name="meeting",
        level=4,
        texts=(
            "Two villages are {a} km apart. {who} walks from one at {b} km per hour, and {other} rides from "
            "the other towards {who} at {c} km per hour. After how many hours do they meet? "
            "Give a fraction or a whole number.",
        ),
        ranges={"a": (10, 150), "b": (3, 7), "c": (8, 30)},
        solve=lambda v: Fraction(v["a"], v["b"] + v["c"]),
    ),
    # Level 5: systems, quadratic equations, work, series, choices.
    Kind(
        name="system",
        level=5,
        texts=(
            "Two numbers x and y satisfy {a}x + {b}y = {e} and {c}x + {d}y = {f}. What is x?",
            "Solve for x: {a}x + {b}y = {e}, {c}x + {d}y = {f}.",
        ),
        ranges={**dict.fromkeys("abcd", (2, 9)), "x": (-12, 20), "y": (-12, 20)},
        shown=_equations,
        solve=_system,
    ),
    Kind(
        name="quadratic",
        level=5,
        texts=(
            "What is the larger solution of x^2 - {s}x + {p} = 0?",
            "The equation x^2 - {s}x + {p} = 0 has two solutions. What is the larger one?",
        ),
        ranges={"x": (1, 40), "y": (1, 40)},
        shown=lambda v: {"s": v["x"] + v["y"], "p": v["x"] * v["y"]},
        solve=_larger_root,
    ),
    Kind(
        name="work",
        level=5,
        texts=(
            "{who} paints a fence in {a} hours, {other} in {b} hours. They begin together, and after {c} "
            "hours {other} leaves. How many more hours does {who} need? Give a fraction or a whole number.",
        ),
        ranges={"a": (4, 20), "b": (4, 20), "c": (1, 6)},
        solve=lambda v: (
            v["a"] * (1 - v["c"] * (Fraction(1, v["a"]) + Fraction(1, v["b"])))
            if v["c"] * (v["a"] + v["b"]) < v["a"] * v["b"]
            else None
        ),
    ),
    Kind(
        name="series",
        level=5,
        texts=(
            "The first term of an arithmetic sequence is {a}, and each term is {b} more than the one before. "
            "What is the sum of the first {c} terms?",
        ),
        ranges={"a": (1, 50), "b": (2, 20), "c": (5, 40)},
        solve=lambda v: v["c"] * v["a"] + v["b"] * v["c"] * (v["c"] - 1) // 2,
    ),
    Kind(
        name="choices",
        level=5,
        texts=(
            "A team of {c} is chosen from {a} women and {b} men, with exactly {d} women in it. "
            "How many teams are possible?",
        ),
        ranges={"a": (3, 12), "b": (3, 12), "c": (2, 6), "d": (1, 5)},
        solve=lambda v: (
            comb(v["a"], v["d"]) * comb(v["b"], v["c"] - v["d"])
            if v["d"] < v["c"] and v["d"] <= v["a"] and v["c"] - v["d"] <= v["b"]
            else None
        ),
    ),
)
KINDS: Mapping[str, Kind] = {kind.name: kind for kind in _KINDS}
