"""Constraints on a text, each with a sentence that states it and a check.

The names and arguments are those of IFEval's public data (arXiv 2311.07911), so that its files can be read;
the checks are written for this package and differ from the original in details (see the documentation).
Names that start with ``rollgym:`` exist here only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Arguments = Mapping[str, Any]

_WORD = re.compile(r"\w+")
_BULLET = re.compile(r"[ \t]*[*-][ \t]+(?=\S)")
_PLACEHOLDER = re.compile(r"\[[^\[\]]+\]")
_TITLE = re.compile(r"<<[^<>\n]+>>")
_HIGHLIGHT = re.compile(r"\*\*[^*\n]+\*\*|\*[^*\n]+\*")
RESPONSES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def words(text: str) -> list[str]:
    """The words of a text: runs of letters, digits and underscores."""
    return _WORD.findall(text)


def sentences(text: str) -> list[str]:
    """The sentences of a text: parts with a word that end with ``.``, ``!`` or ``?`` and white space."""
    return [part for part in re.split(r"(?<=[.!?])[\"')\]]?\s", text) if _WORD.search(part)]


def bullets(text: str) -> list[str]:
    """The content of the lines that start with ``* `` or ``- ``."""
    lines = (line for line in text.splitlines())
    return [line[match.end() :] for line in lines if (match := _BULLET.match(line))]


def paragraphs(text: str, separator: str = "\n\n") -> list[str]:
    """The parts of a text between separators that hold a word."""
    return [part.strip() for part in text.split(separator) if _WORD.search(part)]


def compare(count: int, relation: str, bound: int) -> bool:
    """Whether a count is as the relation says: ``at least``, ``less than``, ``at most`` or ``exactly``."""
    return {
        "at least": count >= bound,
        "less than": count < bound,
        "at most": count <= bound,
        "exactly": count == bound,
    }[relation]


def json_value(text: str) -> Any:
    """The JSON value that a text is, also inside a fenced block; ``None`` where it is not JSON."""
    body = text.strip()
    if body.startswith("```") and body.endswith("```") and len(body) > 6:
        body = body[3:-3].strip()
        body = body.removeprefix("json").removeprefix("JSON").removeprefix("Json").strip()
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _count(text: str, phrase: str) -> int:
    """How often a word or phrase occurs, as whole words, whatever the case."""
    return len(re.findall(rf"(?<!\w){re.escape(phrase.casefold())}(?!\w)", text.casefold()))


def _spoken(items: list[str]) -> str:
    return ", ".join(f'"{item}"' for item in items)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A kind of constraint."""

    name: str
    say: Callable[[Arguments], str]
    """The constraint as a sentence."""
    check: Callable[[str, Arguments], bool]
    arguments: Mapping[str, type] = field(default_factory=dict)
    """The arguments that it needs."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """A rule with its arguments.

    Example:
        >>> made = Constraint("length_constraints:number_words", {"num_words": 3, "relation": "exactly"})
        >>> made.holds("one two three"), made.sentence
        (True, 'It has exactly 3 words.')
    """

    name: str
    arguments: Arguments

    @property
    def sentence(self) -> str:
        """The constraint as a sentence."""
        return RULES[self.name].say(self.arguments)

    def holds(self, text: str) -> bool:
        """Whether a text satisfies it."""
        return RULES[self.name].check(text, self.arguments)

    def to_json(self) -> dict[str, Any]:
        """Name and arguments as JSON values."""
        return {"name": self.name, "arguments": dict(self.arguments)}


def _sections(text: str, a: Arguments) -> bool:
    marks = re.findall(rf"(?m)^[ \t#*]*{re.escape(a['section_spliter'])} ?\d+", text)
    return len(marks) >= int(a["num_sections"])


def _nth_paragraph(text: str, a: Arguments) -> bool:
    parts = paragraphs(text)
    number = a["nth_paragraph"]
    if len(parts) != a["num_paragraphs"] or not 1 <= number <= len(parts):
        return False
    return [word.casefold() for word in words(parts[number - 1])[:1]] == [a["first_word"].casefold()]


def _two_responses(text: str, a: Arguments) -> bool:
    parts = [part.strip() for part in text.split("******")]
    return len(parts) == 2 and all(map(_WORD.search, parts)) and parts[0] != parts[1]


def _postscript(text: str, a: Arguments) -> bool:
    marker = a["postscript_marker"].casefold().replace(" ", "")
    for line in text.casefold().splitlines():
        flat = line.replace(" ", "")
        if flat.startswith(marker) and _WORD.search(flat[len(marker) :]):
            return True
    return False


def _json_keys(text: str, a: Arguments) -> bool:
    value = json_value(text)
    if not isinstance(value, dict) or set(value) != set(a["keys"]):
        return False
    return (
        all(_WORD.search(str(item)) for item in value.values() if item is not None)
        and None not in value.values()
    )


def _capital_words(text: str) -> int:
    return sum(word.isupper() for word in words(text))


_RULES = (
    Rule(
        name="keywords:existence",
        say=lambda a: f"It contains {_spoken(a['keywords'])}.",
        check=lambda text, a: all(_count(text, keyword) for keyword in a["keywords"]),
        arguments={"keywords": list},
    ),
    Rule(
        name="keywords:forbidden_words",
        say=lambda a: f"It does not contain {_spoken(a['forbidden_words'])}.",
        check=lambda text, a: not any(_count(text, word) for word in a["forbidden_words"]),
        arguments={"forbidden_words": list},
    ),
    Rule(
        name="keywords:frequency",
        say=lambda a: f'It contains "{a["keyword"]}" {a["relation"]} {_plural(a["frequency"], "time")}.',
        check=lambda text, a: compare(_count(text, a["keyword"]), a["relation"], a["frequency"]),
        arguments={"keyword": str, "frequency": int, "relation": str},
    ),
    Rule(
        name="keywords:letter_frequency",
        say=lambda a: (
            f'The letter "{a["letter"]}" occurs {a["let_relation"]} {_plural(a["let_frequency"], "time")}.'
        ),
        check=lambda text, a: compare(
            text.casefold().count(a["letter"].casefold()), a["let_relation"], a["let_frequency"]
        ),
        arguments={"letter": str, "let_frequency": int, "let_relation": str},
    ),
    Rule(
        name="length_constraints:number_words",
        say=lambda a: f"It has {a['relation']} {_plural(a['num_words'], 'word')}.",
        check=lambda text, a: compare(len(words(text)), a["relation"], a["num_words"]),
        arguments={"num_words": int, "relation": str},
    ),
    Rule(
        name="length_constraints:number_sentences",
        say=lambda a: f"It has {a['relation']} {_plural(a['num_sentences'], 'sentence')}.",
        check=lambda text, a: compare(len(sentences(text)), a["relation"], a["num_sentences"]),
        arguments={"num_sentences": int, "relation": str},
    ),
    Rule(
        name="length_constraints:number_paragraphs",
        say=lambda a: (
            f"It has {_plural(a['num_paragraphs'], 'paragraph')}, with a line *** between two of them."
        ),
        check=lambda text, a: len(paragraphs(text, "***")) == a["num_paragraphs"],
        arguments={"num_paragraphs": int},
    ),
    Rule(
        name="length_constraints:nth_paragraph_first_word",
        say=lambda a: (
            f"It has {_plural(a['num_paragraphs'], 'paragraph')}, with an empty line between two of "
            f'them, and paragraph {a["nth_paragraph"]} starts with "{a["first_word"]}".'
        ),
        check=_nth_paragraph,
        arguments={"num_paragraphs": int, "nth_paragraph": int, "first_word": str},
    ),
    Rule(
        name="detectable_content:number_placeholders",
        say=lambda a: (
            f"It has at least {_plural(a['num_placeholders'], 'placeholder')} in square brackets, "
            "such as [name]."
        ),
        check=lambda text, a: len(_PLACEHOLDER.findall(text)) >= a["num_placeholders"],
        arguments={"num_placeholders": int},
    ),
    Rule(
        name="detectable_content:postscript",
        say=lambda a: f"Its last line is a postscript that starts with {a['postscript_marker']}",
        check=_postscript,
        arguments={"postscript_marker": str},
    ),
    Rule(
        name="detectable_format:number_bullet_lists",
        say=lambda a: (
            f"It has exactly {_plural(a['num_bullets'], 'bullet point')}, each on a line that starts "
            'with "* ".'
        ),
        check=lambda text, a: (
            len(found := bullets(text)) == a["num_bullets"] and all(map(_WORD.search, found))
        ),
        arguments={"num_bullets": int},
    ),
    Rule(
        name="detectable_format:constrained_response",
        say=lambda a: f"It contains one of these sentences: {', '.join(RESPONSES)}",
        check=lambda text, a: sum(response in text for response in RESPONSES) == 1,
    ),
    Rule(
        name="detectable_format:number_highlighted_sections",
        say=lambda a: (
            f"It highlights at least {_plural(a['num_highlights'], 'part')} with asterisks, *like this*."
        ),
        check=lambda text, a: (
            sum(bool(_WORD.search(m)) for m in _HIGHLIGHT.findall(text)) >= a["num_highlights"]
        ),
        arguments={"num_highlights": int},
    ),
    Rule(
        name="detectable_format:multiple_sections",
        say=lambda a: (
            f"It has at least {_plural(a['num_sections'], 'section')}, each headed "
            f'"{a["section_spliter"]}" and a number.'
        ),
        check=_sections,
        arguments={"section_spliter": str, "num_sections": int},
    ),
    Rule(
        name="detectable_format:json_format",
        say=lambda a: "The whole text is JSON.",
        check=lambda text, a: bool(json_value(text)),
    ),
    Rule(
        name="detectable_format:title",
        say=lambda a: "It has a title in double angle brackets, such as <<a day at sea>>.",
        check=lambda text, a: any(_WORD.search(title) for title in _TITLE.findall(text)),
    ),
    Rule(
        name="combination:two_responses",
        say=lambda a: "It has two different parts, with ****** between them.",
        check=_two_responses,
    ),
    Rule(
        name="combination:repeat_prompt",
        say=lambda a: f"It first repeats this word for word: {a['prompt_to_repeat']}",
        check=lambda text, a: (
            text.strip().casefold().startswith(a["prompt_to_repeat"].strip().casefold())
            and bool(_WORD.search(text.strip()[len(a["prompt_to_repeat"].strip()) :]))
        ),
        arguments={"prompt_to_repeat": str},
    ),
    Rule(
        name="startend:end_checker",
        say=lambda a: f'It ends with "{a["end_phrase"]}".',
        check=lambda text, a: text.strip().strip('"').casefold().endswith(a["end_phrase"].strip().casefold()),
        arguments={"end_phrase": str},
    ),
    Rule(
        name="startend:quotation",
        say=lambda a: "The whole text is in double quotation marks.",
        check=lambda text, a: len(text.strip()) > 2 and text.strip()[0] == text.strip()[-1] == '"',
    ),
    Rule(
        name="change_case:english_capital",
        say=lambda a: "All letters are capital letters.",
        check=lambda text, a: text.isupper(),
    ),
    Rule(
        name="change_case:english_lowercase",
        say=lambda a: "All letters are small letters.",
        check=lambda text, a: text.islower(),
    ),
    Rule(
        name="change_case:capital_word_frequency",
        say=lambda a: (
            f"Words in capital letters occur {a['capital_relation']} "
            f"{_plural(a['capital_frequency'], 'time')}."
        ),
        check=lambda text, a: compare(_capital_words(text), a["capital_relation"], a["capital_frequency"]),
        arguments={"capital_frequency": int, "capital_relation": str},
    ),
    Rule(
        name="punctuation:no_comma",
        say=lambda a: "It has no comma.",
        check=lambda text, a: "," not in text,
    ),
    Rule(
        name="rollgym:json_keys",
        say=lambda a: f"It is a JSON object with exactly the keys {_spoken(a['keys'])}, each with a value.",
        check=_json_keys,
        arguments={"keys": list},
    ),
    Rule(
        name="rollgym:first_word",
        say=lambda a: f'Its first word is "{a["word"]}".',
        check=lambda text, a: [w.casefold() for w in words(text)[:1]] == [a["word"].casefold()],
        arguments={"word": str},
    ),
)
RULES: Mapping[str, Rule] = {rule.name: rule for rule in _RULES}
RELATIONS = ("at least", "less than", "at most", "exactly")


def constraint(name: str, arguments: Mapping[str, Any]) -> Constraint:
    """A constraint with checked arguments; arguments that are ``None`` are left out.

    Raises:
        ValueError: The rule is unknown, or an argument is missing or has another type.
    """
    if name not in RULES:
        raise ValueError(f"the constraint {name!r} is not supported; supported are {', '.join(RULES)}")
    given: dict[str, Any] = {}
    for key, kind in RULES[name].arguments.items():
        value: Any = arguments.get(key)
        if kind is int and isinstance(value, float) and value.is_integer():
            value = int(value)
        typed = isinstance(value, kind) and not isinstance(value, bool)
        if not typed:
            raise ValueError(f"{name} needs {key}, a {kind.__name__}, not {value!r:.60}")
        if kind is list and not (value and all(isinstance(item, str) and item.strip() for item in value)):
            raise ValueError(f"{name} needs {key}, a list of texts, not {value!r:.60}")
        if key.endswith("relation") and value not in RELATIONS:
            raise ValueError(f"{name} needs {key}, one of {', '.join(RELATIONS)}, not {value!r:.60}")
        given[key] = value
    return Constraint(name, given)
