"""Generated tasks: a constraint on the form of a text, one on its words, and by level further ones.

A task is kept only if the writer finds a text that satisfies all of its constraints.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollgym.envs.instructions.rules import Constraint, words

Rng = np.random.Generator

LEVELS = (1, 2, 3, 4)
"""A level has one constraint more than its number: the form, wanted words, and from level 2 on others."""
NOUNS = (
    *("river", "stone", "lantern", "garden", "window", "harbor", "violin", "forest", "meadow", "castle"),
    *("bridge", "kettle", "mirror", "island", "orchid", "pebble", "ribbon", "candle", "falcon", "marble"),
)
FILLERS = (
    *("we", "walk", "near", "many", "old", "trees", "and", "birds", "sing", "while", "rain", "falls"),
    *("on", "small", "roofs", "then", "light", "comes", "back", "to", "every", "field", "in", "spring"),
)
ENDINGS = ("that is all", "see you soon", "good night", "until tomorrow")
MARKERS = ("P.S.", "P.P.S")
KEYS = ("name", "place", "color", "season", "animal", "tool", "price", "size")

WORDS, SENTENCES = "length_constraints:number_words", "length_constraints:number_sentences"
BULLETS, JSON = "detectable_format:number_bullet_lists", "rollgym:json_keys"
PARAGRAPHS = "length_constraints:number_paragraphs"
FRAMES = (WORDS, SENTENCES, BULLETS, PARAGRAPHS, JSON)
EXISTENCE, FORBIDDEN = "keywords:existence", "keywords:forbidden_words"
UPPER, LOWER = "change_case:english_capital", "change_case:english_lowercase"
END, QUOTED = "startend:end_checker", "startend:quotation"
TITLE, POSTSCRIPT = "detectable_format:title", "detectable_content:postscript"
FIRST, NO_COMMA = "rollgym:first_word", "punctuation:no_comma"
PLACEHOLDERS = "detectable_content:number_placeholders"
ADDED = (EXISTENCE, FORBIDDEN, UPPER, LOWER, END, QUOTED, TITLE, POSTSCRIPT, FIRST, NO_COMMA, PLACEHOLDERS)
_CLASHES = (
    {UPPER, LOWER},
    {END, POSTSCRIPT},
    {FIRST, TITLE},
    *({JSON, name} for name in (UPPER, LOWER, END, QUOTED, TITLE, POSTSCRIPT, FIRST, NO_COMMA, PLACEHOLDERS)),
)
"""Constraints that do not go together."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """A writing task."""

    prompt: str
    constraints: tuple[Constraint, ...]
    level: int | None = None

    @property
    def key(self) -> str:
        """The content that no two splits share: the constraints, in any order."""
        return json.dumps(sorted(json.dumps(c.to_json(), sort_keys=True) for c in self.constraints))


def random_instruction(rng: Rng, level: int | None = None) -> Instruction:
    """A task of a level, or of any, that the writer can do."""
    if level is None:
        level = LEVELS[int(rng.integers(len(LEVELS)))]
    while True:
        constraints = _draw(rng, level)
        text = write(constraints)
        if all(constraint.holds(text) for constraint in constraints):
            break
    lines = [f"- {constraint.sentence}" for constraint in constraints]
    prompt = "\n".join(["Write a text that meets every point:", *lines])
    return Instruction(prompt, tuple(constraints), level)


def _draw(rng: Rng, level: int) -> list[Constraint]:
    names = [FRAMES[int(rng.integers(len(FRAMES)))], EXISTENCE]
    while len(names) <= level:
        name = ADDED[int(rng.integers(len(ADDED)))]
        if name not in names and not any({name, other} in _CLASHES for other in names):
            names.append(name)
        elif JSON in names and len(names) == 3:
            names = [FRAMES[int(rng.integers(len(FRAMES)))], EXISTENCE]  # nothing else goes with these
    used: set[str] = set()
    return [Constraint(name, _arguments(name, rng, used)) for name in names]


def _arguments(name: str, rng: Rng, used: set[str]) -> dict[str, Any]:
    """Random arguments; ``used`` are nouns of other constraints, so that none is wanted and forbidden."""

    def nouns(count: int) -> list[str]:
        free = [noun for noun in NOUNS if noun not in used]
        picked = [free[int(k)] for k in rng.choice(len(free), size=count, replace=False)]
        used.update(picked)
        return picked

    def whole(low: int, high: int) -> int:
        return int(rng.integers(low, high + 1))

    def one(pool: Sequence[str]) -> str:
        return pool[int(rng.integers(len(pool)))]

    makers: Mapping[str, Callable[[], dict[str, Any]]] = {
        WORDS: lambda: {
            "num_words": whole(4, 18),
            "relation": one(("exactly", "exactly", "at least", "at most")),
        },
        SENTENCES: lambda: {"num_sentences": whole(2, 5), "relation": "exactly"},
        BULLETS: lambda: {"num_bullets": whole(2, 6)},
        PARAGRAPHS: lambda: {"num_paragraphs": whole(2, 4)},
        JSON: lambda: {
            "keys": [KEYS[int(k)] for k in rng.choice(len(KEYS), size=whole(2, 4), replace=False)]
        },
        EXISTENCE: lambda: {"keywords": nouns(whole(1, 3))},
        FORBIDDEN: lambda: {"forbidden_words": [one(FILLERS), *nouns(whole(1, 2))]},
        END: lambda: {"end_phrase": one(ENDINGS)},
        POSTSCRIPT: lambda: {"postscript_marker": one(MARKERS)},
        FIRST: lambda: {"word": nouns(1)[0]},
        PLACEHOLDERS: lambda: {"num_placeholders": whole(1, 3)},
    }
    return makers[name]() if name in makers else {}


def fault_of(text: str, task: str) -> str:
    """What disqualifies a text, whatever constraints it meets: an echo of the task, or one word repeated."""
    own = [word.casefold() for word in words(text)]
    flat, echoed = " ".join(own), " ".join(word.casefold() for word in words(task))
    if echoed in flat or (len(own) >= 5 and flat in echoed):
        return "The text repeats the task."
    if len(own) >= 4 and Counter(own).most_common(1)[0][1] > len(own) / 2:
        return "The text repeats one word."
    return ""


def share(constraints: Sequence[Constraint], held: Sequence[bool]) -> float:
    """The share of constraints that hold; 0 without the wanted words.

    A text about nothing meets restrictions such as "no comma", which must earn nothing alone.
    """
    if any(c.name == EXISTENCE and not holds for c, holds in zip(constraints, held, strict=True)):
        return 0.0
    return sum(held) / len(held)


def write(constraints: Sequence[Constraint]) -> str:
    """A text for constraints of the generated kinds; it may fail where they do not go together."""
    wanted = {constraint.name: constraint.arguments for constraint in constraints}
    forbidden = set(wanted.get(FORBIDDEN, {}).get("forbidden_words", ()))
    fillers = [word for word in FILLERS if word not in forbidden]
    keywords = list(wanted.get(EXISTENCE, {}).get("keywords", ()))
    if JSON in wanted:
        keys = wanted[JSON]["keys"]
        values = [*keywords, *fillers]
        spread = {key: values[number] for number, key in enumerate(keys)}
        spread[keys[-1]] = " ".join(values[len(keys) - 1 : max(len(keywords), len(keys))])
        return json.dumps(spread)
    text = _body(wanted, keywords, fillers)
    if TITLE in wanted:
        text = f"<<{fillers[0]}>>\n{text}"
    if POSTSCRIPT in wanted:
        text = f"{text}\n{wanted[POSTSCRIPT]['postscript_marker']} {fillers[1]}"
    if UPPER in wanted:
        text = text.upper()
    if LOWER in wanted:
        text = text.lower()
    return f'"{text}"' if QUOTED in wanted else text


def _body(wanted: Mapping[str, Any], keywords: list[str], fillers: list[str]) -> str:
    """The words of a text in the form that is wanted."""
    ending = wanted.get(END, {}).get("end_phrase", "").split()
    first = [wanted[FIRST]["word"]] if FIRST in wanted else []
    holders = [f"[{fillers[k]}]" for k in range(wanted.get(PLACEHOLDERS, {}).get("num_placeholders", 0))]
    must = [*first, *keywords, *holders]
    if WORDS in wanted:
        other = (1 if TITLE in wanted else 0) + (_marker_words(wanted) if POSTSCRIPT in wanted else 0)
        goal, relation = wanted[WORDS]["num_words"], wanted[WORDS]["relation"]
        room = goal - other - len(must) - len(ending)
        if relation == "at most":
            room = min(room, 3)
        return " ".join([*must, *_cycled(fillers, max(room, 0)), *ending])
    parts = next(
        wanted[name][key]
        for name, key in (
            (SENTENCES, "num_sentences"),
            (BULLETS, "num_bullets"),
            (PARAGRAPHS, "num_paragraphs"),
        )
        if name in wanted
    )
    extra = 1 if SENTENCES in wanted and POSTSCRIPT in wanted else 0
    count = max(parts - extra, 1)
    lines = [[fillers[(2 * k) % len(fillers)], fillers[(2 * k + 1) % len(fillers)]] for k in range(count)]
    lines[0] = [*must, *lines[0]]
    lines[-1] = [*lines[-1], *ending]
    if SENTENCES in wanted:
        joined = ". ".join(" ".join(line) for line in lines)
        return joined if ending else f"{joined}."
    if BULLETS in wanted:
        return "\n".join(f"* {' '.join(line)}" for line in lines)
    return "\n***\n".join(" ".join(line) for line in lines)


def _marker_words(wanted: Mapping[str, Any]) -> int:
    marker: str = wanted[POSTSCRIPT]["postscript_marker"]
    return 1 + sum(character.isalpha() for character in marker)


def _cycled(pool: Sequence[str], count: int) -> list[str]:
    return [pool[k % len(pool)] for k in range(count)]
