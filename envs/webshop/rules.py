"""The two rule sets: the original's, quirks included, and one with the quirks repaired."""

from __future__ import annotations

from dataclasses import dataclass

from rollgym.envs.arguments import check_choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Rule set: one flag per quirk of the original, by default without it."""

    name: str
    strict_grammar: bool = False
    """Action names must be lower case, and a ``[`` within the argument breaks the action."""
    search_anywhere: bool = False
    """A search is accepted on every page, not only where there is a search bar."""
    special_searches: bool = False
    """``<r>``, ``<c>`` and ``<q>`` as the first word search at random, by department, by search term."""
    endless_pages: bool = False
    """``Next >`` is offered after the last result, and leads to empty pages."""
    page_by_url: bool = False
    """Pages are identified by address, so a query can be mistaken for another page."""
    clashing_values: bool = False
    """Of two options with an equal value only the last can be chosen; one named like a button, never."""
    hidden_choices: bool = False
    """``text`` does not show chosen options; ``text_rich`` finds them in the address."""
    score_shown: bool = False
    """The last page shows the reward."""
    fuzzy_options: bool = False
    """Options are judged by likeness and color words, not by name and value."""
    explain: bool = True
    """An action that is not possible is answered with the reason, not only with the same page."""


ORIGINAL = Rules(
    name="original",
    strict_grammar=True,
    search_anywhere=True,
    special_searches=True,
    endless_pages=True,
    page_by_url=True,
    clashing_values=True,
    hidden_choices=True,
    score_shown=True,
    fuzzy_options=True,
    explain=False,
)
CLEAN = Rules(name="clean")
RULES = {rules.name: rules for rules in (ORIGINAL, CLEAN)}


def rules_called(name: str) -> Rules:
    """Return a rule set by name."""
    check_choice("rule set", name, RULES)
    return RULES[name]
