"""Steps that change a list of whole numbers, and problems that put several in a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollgym.envs.code.families.base import Family, Rng, compiled, fill, make_problem, numbers
from rollgym.envs.code.types import Problem


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to do to the list ``xs``."""

    phrase: str
    """Description in words; ``$n`` is its number."""
    code: str
    """One line of Python that does it."""
    choices: tuple[int, ...] = (0,)

    def phrase_for(self, n: int) -> str:
        """The words for one number."""
        return fill(self.phrase, {"n": str(n)})

    def code_for(self, n: int) -> str:
        """The line for one number."""
        return fill(self.code, {"n": str(n)})


STEPS: Mapping[str, Step] = {
    "add": Step("add $n to each number", "xs = [x + $n for x in xs]", (1, 2, 3, 5, 10)),
    "times": Step("multiply each number by $n", "xs = [x * $n for x in xs]", (2, 3, 4, 7)),
    "negate": Step("change the sign of each number", "xs = [-x for x in xs]"),
    "square": Step("square each number", "xs = [x * x for x in xs]"),
    "absolute": Step("drop the minus signs", "xs = [abs(x) for x in xs]"),
    "modulo": Step(
        "replace each number by its remainder modulo $n", "xs = [x % $n for x in xs]", (5, 7, 9, 11)
    ),
    "cap": Step("replace numbers above $n by $n", "xs = [min(x, $n) for x in xs]", (10, 20, 30)),
    "above": Step("keep the numbers above $n", "xs = [x for x in xs if x > $n]", (-5, 0, 5, 10)),
    "even": Step("keep the even numbers", "xs = [x for x in xs if x % 2 == 0]"),
    "odd": Step("keep the odd numbers", "xs = [x for x in xs if x % 2 == 1]"),
    "drop": Step("drop the first $n numbers", "xs = xs[$n:]", (1, 2, 3)),
    "take": Step("keep the first $n numbers", "xs = xs[:$n]", (3, 4, 5)),
    "reverse": Step("reverse the order", "xs = xs[::-1]"),
    "sort": Step("sort the numbers, least first", "xs = sorted(xs)"),
    "once": Step("keep only the first of equal numbers", "xs = list(dict.fromkeys(xs))"),
    "running": Step(
        "replace each number by the sum of all up to it", "xs = [sum(xs[: i + 1]) for i in range(len(xs))]"
    ),
    "gaps": Step(
        "replace the list by the differences, each number minus the one before",
        "xs = [b - a for a, b in zip(xs, xs[1:])]",
    ),
    "twice": Step("write each number twice", "xs = [x for x in xs for _ in range(2)]"),
    "index": Step("add to each number its index", "xs = [x + i for i, x in enumerate(xs)]"),
    "every": Step("keep every $n-th number, beginning with the first", "xs = xs[::$n]", (2, 3)),
}


def random_steps(rng: Rng, count: int, names: tuple[str, ...] = tuple(STEPS)) -> list[list[Any]]:
    """Different steps, each with a number."""
    chosen_names = [names[int(k)] for k in rng.choice(len(names), size=count, replace=False)]
    return [[name, STEPS[name].choices[int(rng.integers(len(STEPS[name].choices)))]] for name in chosen_names]


_PROBES = (
    (5, -3, 12, 7, 0, 12, -8),
    (1, 2, 3, 4, 5, 6),
    (40, 21, -13, 9, 9, 30),
    (-20, 33, 8, 15, -1),
    (17, 6, 38),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline(Family):
    """Several steps in a row."""

    count: int = 2

    def choose(self, rng: Rng) -> dict[str, Any]:
        """Random steps that make different lists of different ones."""
        while True:
            parameters = {"steps": random_steps(rng, self.count)}
            function = compiled(self.program(parameters), self.function)
            if len({repr(function(list(probe))) for probe in _PROBES}) >= 4:
                return parameters

    def program(self, parameters: Mapping[str, Any]) -> str:
        """One line for each step."""
        lines = [STEPS[name].code_for(n) for name, n in parameters["steps"]]
        return "\n    ".join([f"def {self.function}(xs):", *lines, "return xs"]) + "\n"

    def problem(self, parameters: Mapping[str, Any], rng: Rng) -> Problem:
        """A problem with these steps and random tests."""
        phrases = "; then ".join(STEPS[name].phrase_for(n) for name, n in parameters["steps"])
        statement = f"Given a list of whole numbers, {phrases}. Return the list."
        return make_problem(self, statement, self.program(parameters), parameters, rng)


PIPELINES = tuple(
    Pipeline(
        name=f"{count} steps",
        level=level,
        signature="change(xs: list[int]) -> list[int]",
        statement="",
        solution="",
        count=count,
        inputs=lambda rng, p: (numbers(rng, -20, 40, 5, 12),),
        edges=(([],), ([3],)),
    )
    for count, level in ((2, 1), (3, 2), (5, 3))
)
