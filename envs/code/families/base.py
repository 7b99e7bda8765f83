"""Problem families and generation of problems from them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from string import Template
from typing import Any

import numpy as np

from rollgym.envs.code.compare import format_value
from rollgym.envs.code.harness import decode, encode
from rollgym.envs.code.types import Case, Cases, Problem

Rng = np.random.Generator
Arguments = tuple[Any, ...]
Maker = Callable[[Rng, Mapping[str, Any]], Arguments]

PUBLIC, HIDDEN = 3, 12
_DRAWS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A problem family. ``$name`` in its texts is replaced by a parameter."""

    name: str
    level: int
    """1 is a line or two, 2 a loop with a twist, 3 a small algorithm."""
    signature: str
    """The function with its types: ``count(text: str) -> int``."""
    statement: str
    solution: str
    inputs: Maker
    parameters: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    edges: tuple[Arguments, ...] = ()
    """Inputs that every problem of the family is tested on."""

    def choose(self, rng: Rng) -> dict[str, Any]:
        """Random parameters."""
        return {name: values[int(rng.integers(len(values)))] for name, values in self.parameters.items()}

    @property
    def function(self) -> str:
        """The name of the function."""
        return self.signature.partition("(")[0]

    def program(self, parameters: Mapping[str, Any]) -> str:
        """The reference solution."""
        return fill(self.solution, {name: repr(value) for name, value in parameters.items()})

    def problem(self, parameters: Mapping[str, Any], rng: Rng) -> Problem:
        """Build a problem with these parameters and random tests."""
        program = self.program(parameters)
        statement = fill(self.statement, {name: str(value) for name, value in parameters.items()})
        return make_problem(self, statement, program, parameters, rng)


def make_problem(
    family: Family, statement: str, program: str, parameters: Mapping[str, Any], rng: Rng
) -> Problem:
    """Build a problem: tests from random inputs, expected values from the reference solution."""
    cases = _cases(family, program, parameters, rng)
    return Problem(
        key=f"{family.name} {sorted(parameters.items())}",
        statement=statement,
        name=family.function,
        signature=family.signature,
        public=Cases(cases=cases[:PUBLIC]),
        hidden=Cases(cases=cases[PUBLIC:]),
        solution=program,
        family=family.name,
        level=family.level,
        parameters=dict(parameters),
        shown=tuple(example(family.function, case) for case in cases[:PUBLIC]),
    )


def example(name: str, case: Case) -> str:
    """A case as one line for an agent: ``f(2, 3) == 5``."""
    arguments = ", ".join(format_value(argument, 400) for argument in case.arguments)
    return f"{name}({arguments}) == {format_value(case.expected, 400)}"


def _cases(family: Family, program: str, parameters: Mapping[str, Any], rng: Rng) -> tuple[Case, ...]:
    """Return cases with distinct inputs, the first ones with different values."""
    function = compiled(program, family.function)
    seen_arguments: set[str] = set()
    cases: list[Case] = []
    edges: list[Case] = []
    for arguments in family.edges:
        case = _case(function, arguments)
        seen_arguments.add(repr(case.arguments))
        edges.append(case)
    for _ in range(_DRAWS):
        case = _case(function, family.inputs(rng, parameters))
        if repr(case.arguments) not in seen_arguments:
            seen_arguments.add(repr(case.arguments))
            cases.append(case)
        if len(cases) + len(edges) >= PUBLIC + HIDDEN and len(_values(cases)) > 2:
            break
    return (*_varied(cases)[: PUBLIC + HIDDEN - len(edges)], *edges)


def _varied(cases: list[Case]) -> list[Case]:
    """Order the cases so that new values come first."""
    seen_values: set[str] = set()
    first: list[Case] = []
    repeats: list[Case] = []
    for case in cases:
        (repeats if repr(case.expected) in seen_values else first).append(case)
        seen_values.add(repr(case.expected))
    # Half of the different values stay hidden, so that no table of the examples is a solution.
    return first[:PUBLIC] + repeats[: HIDDEN // 3] + first[PUBLIC:] + repeats[HIDDEN // 3 :]


def _values(cases: list[Case]) -> set[str]:
    return {repr(case.expected) for case in cases}


def _case(function: Callable[..., Any], arguments: Arguments) -> Case:
    encoded = [encode(argument) for argument in arguments]
    # The reference gets copies, as a solution does.
    return Case(arguments=encoded, expected=encode(function(*(decode(argument) for argument in encoded))))


@functools.lru_cache(maxsize=64)
def compiled(program: str, name: str) -> Callable[..., Any]:
    """Compile a reference solution of this package; never an agent's code."""
    names: dict[str, Any] = {}
    exec(compile(program, "<reference>", "exec"), names)  # noqa: S102
    function: Callable[..., Any] = names[name]
    return function


def fill(text: str, values: Mapping[str, str]) -> str:
    """Substitute the parameters of a text."""
    return Template(text).substitute(values)


_WORDS = """
amber anvil apple badge barn basket bell birch bottle branch brick bridge brush bucket candle canoe
carrot castle chalk cherry circle clock cloud copper cotton crane desk dragon drum eagle ember
engine fence fern flute forest garden ginger glove grain hammer harbour hazel island jacket jungle
kettle ladder lantern lemon level lily marble meadow mirror noon olive orchid paddle pepper pillow
planet pocket puzzle quill radar raven ribbon river saddle salmon silver sparrow spoon stone summer
table thistle tiger tulip tunnel turtle valley velvet violin walnut willow window winter yellow
zebra
"""
WORDS = tuple(_WORDS.split())


def words(rng: Rng, fewest: int = 2, most: int = 6) -> list[str]:
    """Some words, with repetitions."""
    count = int(rng.integers(fewest, most + 1))
    return [WORDS[int(number)] for number in rng.integers(len(WORDS), size=count)]


def text(rng: Rng, fewest: int = 2, most: int = 6) -> str:
    """Some words with spaces between them, a few with capitals."""
    return " ".join(word.capitalize() if rng.random() < 0.2 else word for word in words(rng, fewest, most))


def letters(rng: Rng, alphabet: str, fewest: int = 3, most: int = 12) -> str:
    """Random letters of an alphabet."""
    size = int(rng.integers(fewest, most + 1))
    return "".join(alphabet[int(number)] for number in rng.integers(len(alphabet), size=size))


def numbers(rng: Rng, low: int = -20, high: int = 50, fewest: int = 3, most: int = 10) -> list[int]:
    """Random whole numbers."""
    return [int(n) for n in rng.integers(low, high + 1, size=int(rng.integers(fewest, most + 1)))]


def number(rng: Rng, low: int, high: int) -> int:
    """One random whole number, both ends included."""
    return int(rng.integers(low, high + 1))
