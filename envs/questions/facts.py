"""Generated questions, whose answers follow from their text, from calendars, units or alphabetical order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Rng = np.random.Generator
Values = Mapping[str, Any]

LEVELS = (1, 2, 3)
LETTERS = "ABCDEFGHIJ"
CHOICES = 4
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
WORDS = (
    *("acorn", "anchor", "basket", "bridge", "candle", "canyon", "castle", "copper", "desert", "dragon"),
    *("engine", "falcon", "fiddle", "forest", "garden", "guitar", "hammer", "harbor", "island", "jacket"),
    *("kettle", "ladder", "lantern", "marble", "meadow", "mirror", "needle", "orchid", "oyster", "pebble"),
    *("pillow", "planet", "quartz", "ribbon", "river", "saddle", "silver", "spider", "temple", "thunder"),
    *("turtle", "umbrella", "valley", "violin", "walnut", "window", "yogurt", "zebra"),
)
PEOPLE = (
    "Amir",
    "Bella",
    "Carlo",
    "Dana",
    "Emil",
    "Freya",
    "Goran",
    "Hana",
    "Ivan",
    "Julia",
    "Karim",
    "Lucia",
)
OBJECTS = ("key", "map", "coin", "book", "lamp", "ring", "flute", "rope")
PLACES = ("attic", "cellar", "garden", "garage", "kitchen", "library", "office", "stable")
UNITS: Mapping[str, tuple[str, int]] = {
    "hours": ("minutes", 60),
    "minutes": ("seconds", 60),
    "days": ("hours", 24),
    "weeks": ("days", 7),
    "meters": ("centimeters", 100),
    "kilometers": ("meters", 1_000),
    "kilograms": ("grams", 1_000),
    "years": ("months", 12),
    "dozens": ("pieces", 12),
}
VOCABULARY = (
    *WORDS, *DAYS, *MONTHS, *PEOPLE, *OBJECTS, *(f"{name}s" for name in OBJECTS), *PLACES,
    *UNITS, *dict.fromkeys(unit for unit, _ in UNITS.values()),
)  # fmt: skip
"""All words that questions take from lists, so that a tokenizer need not spell those that are rare."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question, its answer, and the choices where it has them."""

    text: str
    answer: str
    choices: tuple[str, ...] = ()
    kind: str = ""
    level: int | None = None
    values: Values = field(default_factory=dict)
    """What the answer follows from, for an expert."""

    @property
    def key(self) -> str:
        """The content that no two splits share, whatever the choices and their order."""
        return f"{self.kind} {sorted(self.values.items())}" if self.values else " ".join(self.text.split())

    @property
    def shown(self) -> str:
        """The question with its choices."""
        lines = [f"{LETTERS[number]}) {choice}" for number, choice in enumerate(self.choices)]
        return "\n".join([self.text, *lines])


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of question."""

    name: str
    level: int
    draw: Callable[[Rng], dict[str, Any]]
    ask: Callable[[Values], str]
    answer: Callable[[Values], str]
    others: Callable[[Values, Rng], Sequence[str]]
    """Candidates for wrong choices; the answer among them is left out."""

    def question(self, rng: Rng, *, choice: bool) -> Question:
        """A random question of this kind."""
        values = self.draw(rng)
        answer = self.answer(values)
        choices: tuple[str, ...] = ()
        if choice:
            wrong = [text for text in dict.fromkeys(self.others(values, rng)) if text != answer]
            picked = [wrong[int(k)] for k in rng.permutation(len(wrong))[: CHOICES - 1]]
            every = [answer, *picked]
            choices = tuple(every[int(k)] for k in rng.permutation(len(every)))
        return Question(
            text=self.ask(values),
            answer=answer,
            choices=choices,
            kind=self.name,
            level=self.level,
            values=values,
        )


def random_question(
    rng: Rng, level: int | None, *, choice: bool | None, only: Collection[str] | None = None
) -> Question:
    """A question of a level, or of any; with ``choice=None`` half of them have choices."""
    known = [kind for kind in KINDS.values() if only is None or kind.name in only]
    if level is None:
        levels = [level for level in LEVELS if any(kind.level == level for kind in known)]
        level = levels[int(rng.integers(len(levels)))]
    kinds = [kind for kind in known if kind.level == level]
    kind = kinds[int(rng.integers(len(kinds)))]
    with_choices = bool(rng.integers(2)) if choice is None else choice
    return kind.question(rng, choice=with_choices)


def _some(rng: Rng, pool: Sequence[str], count: int) -> list[str]:
    return [pool[int(k)] for k in rng.choice(len(pool), size=count, replace=False)]


def _int(rng: Rng, low: int, high: int) -> int:
    return int(rng.integers(low, high + 1))


def _near(value: int, rng: Rng) -> list[str]:
    """Wrong numbers near a value."""
    steps = [1, -1, 2, 10, -10, 5]
    return [str(value + step) for step in steps if value + step > 0] + [str(value + _int(rng, 11, 30))]


# --- level 1: one look


def _words(rng: Rng) -> dict[str, Any]:
    return {"words": _some(rng, WORDS, 4)}


def _numbers(rng: Rng) -> dict[str, Any]:
    return {"numbers": sorted({_int(rng, 10, 99) for _ in range(8)}, key=lambda n: (n * 7919) % 101)[:4]}


# --- level 2: a short computation or a chain


def _order(rng: Rng) -> dict[str, Any]:
    names = _some(rng, PEOPLE, 4)
    facts = [[names[i], names[i + 1]] for i in range(3)]
    return {
        "facts": [facts[int(k)] for k in rng.permutation(3)],
        "which": ["oldest", "youngest"][_int(rng, 0, 1)],
    }


def _extreme(values: Values) -> str:
    older, younger = ({pair[side] for pair in values["facts"]} for side in (0, 1))
    (end,) = older - younger if values["which"] == "oldest" else younger - older
    return str(end)


def _handovers(steps: int) -> Callable[[Rng], dict[str, Any]]:
    def draw(rng: Rng) -> dict[str, Any]:
        names, (thing,) = _some(rng, PEOPLE, 4), _some(rng, OBJECTS, 1)
        holders = [names[0]]
        while len(holders) <= steps:
            name = names[_int(rng, 0, 3)]
            if name != holders[-1]:
                holders.append(name)
        return {"thing": thing, "holders": holders}

    return draw


def _handover_text(values: Values) -> str:
    holders, thing = values["holders"], values["thing"]
    moves = [f"{a} gives the {thing} to {b}." for a, b in zip(holders, holders[1:], strict=False)]
    return f"{holders[0]} has the {thing}. {' '.join(moves)} Who has the {thing} now?"


# --- level 3: tables and stories with state


def _table(rng: Rng) -> dict[str, Any]:
    names, (first, second) = _some(rng, PEOPLE, 4), _some(rng, OBJECTS, 2)
    amounts = [int(n) for n in rng.choice(np.arange(1, 40), size=8, replace=False)]
    rows = {name: [amounts[2 * i], amounts[2 * i + 1]] for i, name in enumerate(names)}
    return {"columns": [first, second], "rows": rows, "by": _int(rng, 0, 1), "most": bool(_int(rng, 0, 1))}


def _table_text(values: Values) -> str:
    first, second = values["columns"]
    lines = [f"{name}: {a} {first}s, {b} {second}s" for name, (a, b) in values["rows"].items()]
    wanted = f"the {'most' if values['most'] else 'fewest'} {values['columns'][values['by']]}s"
    return "\n".join([*lines, f"Who has {wanted}?"])


def _table_answer(values: Values) -> str:
    rows, by = values["rows"], values["by"]
    pick = max if values["most"] else min
    return str(pick(rows, key=lambda name: rows[name][by]))


def _moves(rng: Rng) -> dict[str, Any]:
    names, places = _some(rng, PEOPLE, 3), _some(rng, PLACES, 4)
    (thing,) = _some(rng, OBJECTS, 1)
    steps: list[list[str]] = [[name, places[_int(rng, 0, 3)]] for name in names]
    carrier = names[_int(rng, 0, 2)]
    steps.append([carrier, ""])
    steps += [[names[_int(rng, 0, 2)], places[_int(rng, 0, 3)]] for _ in range(3)]
    return {"thing": thing, "places": places, "steps": steps}


def _moves_text(values: Values) -> str:
    thing = values["thing"]
    lines = [
        f"{name} goes to the {place}." if place else f"{name} picks up the {thing} and keeps it."
        for name, place in values["steps"]
    ]
    return f"{' '.join(lines)} In which place is the {thing}?"


def _moves_answer(values: Values) -> str:
    steps = values["steps"]
    carrier = next(name for name, place in steps if not place)
    return str([place for name, place in steps if name == carrier and place][-1])


def _count(rng: Rng) -> dict[str, Any]:
    start = _int(rng, 5, 40)
    changes: list[int] = []
    while len(changes) < 4:
        change = _int(rng, -9, 12)
        if change and start + sum(changes) + change > 0:
            changes.append(change)
    return {"start": start, "changes": changes, "thing": OBJECTS[_int(rng, 0, len(OBJECTS) - 1)]}


def _count_text(values: Values) -> str:
    thing = values["thing"]
    steps = [
        f"{abs(n)} {thing}s are {'put into' if n > 0 else 'taken out of'} it." for n in values["changes"]
    ]
    return f"A box holds {values['start']} {thing}s. {' '.join(steps)} How many {thing}s does it hold now?"


_KINDS = (
    Kind(
        name="first word",
        level=1,
        draw=_words,
        ask=lambda v: f"Which word comes first in alphabetical order: {', '.join(v['words'])}?",
        answer=lambda v: str(min(v["words"])),
        others=lambda v, rng: list(v["words"]),
    ),
    Kind(
        name="last word",
        level=1,
        draw=_words,
        ask=lambda v: f"Which word comes last in alphabetical order: {', '.join(v['words'])}?",
        answer=lambda v: str(max(v["words"])),
        others=lambda v, rng: list(v["words"]),
    ),
    Kind(
        name="largest",
        level=1,
        draw=_numbers,
        ask=lambda v: f"Which number is the largest: {', '.join(map(str, v['numbers']))}?",
        answer=lambda v: str(max(v["numbers"])),
        others=lambda v, rng: [str(n) for n in v["numbers"]],
    ),
    Kind(
        name="smallest",
        level=1,
        draw=_numbers,
        ask=lambda v: f"Which number is the smallest: {', '.join(map(str, v['numbers']))}?",
        answer=lambda v: str(min(v["numbers"])),
        others=lambda v, rng: [str(n) for n in v["numbers"]],
    ),
    Kind(
        name="weekday",
        level=2,
        draw=lambda rng: {"day": _int(rng, 0, 6), "days": _int(rng, 2, 60)},
        ask=lambda v: f"Today is {DAYS[v['day']]}. Which day of the week is it in {v['days']} days?",
        answer=lambda v: DAYS[(v["day"] + v["days"]) % 7],
        others=lambda v, rng: DAYS,
    ),
    Kind(
        name="month",
        level=2,
        draw=lambda rng: {"month": _int(rng, 0, 11), "months": _int(rng, 2, 40)},
        ask=lambda v: f"It is {MONTHS[v['month']]}. Which month is it {v['months']} months later?",
        answer=lambda v: MONTHS[(v["month"] + v["months"]) % 12],
        others=lambda v, rng: MONTHS,
    ),
    Kind(
        name="units",
        level=2,
        draw=lambda rng: {
            "unit": list(UNITS)[_int(rng, 0, len(UNITS) - 1)],
            "count": _int(rng, 2, 40),
            "more": _int(rng, 2, 6),
        },
        ask=lambda v: (
            f"How many {UNITS[v['unit']][0]} are {v['count']} {v['unit']} and {v['more']} "
            f"{UNITS[v['unit']][0]}?"
        ),
        answer=lambda v: str(v["count"] * UNITS[v["unit"]][1] + v["more"]),
        others=lambda v, rng: _near(v["count"] * UNITS[v["unit"]][1] + v["more"], rng),
    ),
    Kind(
        name="order",
        level=2,
        draw=_order,
        ask=lambda v: (
            " ".join(f"{a} is older than {b}." for a, b in v["facts"]) + f" Who is the {v['which']}?"
        ),
        answer=_extreme,
        others=lambda v, rng: [name for pair in v["facts"] for name in pair],
    ),
    Kind(
        name="handover",
        level=2,
        draw=_handovers(3),
        ask=_handover_text,
        answer=lambda v: str(v["holders"][-1]),
        others=lambda v, rng: [*v["holders"], *_some(rng, PEOPLE, 4)],
    ),
    Kind(
        name="table",
        level=3,
        draw=_table,
        ask=_table_text,
        answer=_table_answer,
        others=lambda v, rng: list(v["rows"]),
    ),
    Kind(
        name="moves",
        level=3,
        draw=_moves,
        ask=_moves_text,
        answer=_moves_answer,
        others=lambda v, rng: list(v["places"]),
    ),
    Kind(
        name="count",
        level=3,
        draw=_count,
        ask=_count_text,
        answer=lambda v: str(v["start"] + sum(v["changes"])),
        others=lambda v, rng: _near(v["start"] + sum(v["changes"]), rng),
    ),
    Kind(
        name="long handover",
        level=3,
        draw=_handovers(7),
        ask=_handover_text,
        answer=lambda v: str(v["holders"][-1]),
        others=lambda v, rng: [*v["holders"], *_some(rng, PEOPLE, 4)],
    ),
)
KINDS: Mapping[str, Kind] = {kind.name: kind for kind in _KINDS}
