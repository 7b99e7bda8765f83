"""Instructions shown once at the start."""

from __future__ import annotations

from rollgym.envs.webshop.pages import SEPARATOR
from rollgym.envs.webshop.rules import Rules

_FORMS = {
    "text": "Pieces of a page are separated by {separator}.",
    "text_rich": "What can be clicked stands between [button] and [button_].",
    "url": "You see the address of the page only.",
    "html": "You see the page as HTML.",
}


def prompt(
    rules: Rules, observation: str, max_turns: int, separator: str = SEPARATOR, *, tools: bool = False
) -> str:
    """The task, the actions by their grammar, and the limits, for a kind of observation."""
    # A separator of white space cannot be quoted in a sentence.
    name = separator.strip() or ("line breaks" if "\n" in separator else "spaces")
    ending = (
        f"You have {max_turns} turns. Only a purchase earns a reward: 1 when everything fits, less when "
        "something does not."
    )
    if observation == "compact":
        return _COMPACT + ending
    return (_tools if tools else _clicks)(rules, _FORMS[observation].format(separator=name)) + ending


def _clicks(rules: Rules, form: str) -> str:
    where = "on any page" if rules.search_anywhere else "only on the search page"
    named = "" if rules.clashing_values else " You may name the option too: click[size: large]."
    return (
        "You are shopping in a web shop. Find a product that fits the instruction, choose the options it "
        "asks for, and buy it.\n"
        "Answer with one action per turn, nothing else:\n"
        f"- search[words] searches for products ({where}). Example: search[red cotton shirt]\n"
        "- click[name] clicks something on the page: a product by its id, a button, or an option's value. "
        "Examples: click[b09qcp4579], click[large], click[next >], click[< prev], click[description], "
        f"click[back to search].{named}\n"
        "- click[buy now] on a product's page buys it with the options chosen so far, and ends the visit.\n"
        f"{form} Choose every option that the instruction names before you buy, and mind the price.\n"
    )


def _tools(rules: Rules, form: str) -> str:
    where = "on any page" if rules.search_anywhere else "only on the search page"
    named = "" if rules.clashing_values else " You may name the option too: size: large."
    return (
        "You are shopping in a web shop. Find a product that fits the instruction, choose the options it "
        "asks for, and buy it.\n"
        f"Use the tools `search` ({where}) and `click`. Click a product by its id, a button (next >, < prev, "
        f"description, back to search), or the value of an option.{named}\n"
        "A click on buy now on a product's page buys it with the options chosen so far, and ends the visit.\n"
        f"{form} Choose every option that the instruction names before you buy, and mind the price.\n"
    )


_COMPACT = (
    "You are shopping in a web shop. The first line says what is wanted. Find a product that fits, choose "
    "the options that are named, and buy it.\n"
    "Answer with one action per turn, nothing else:\n"
    "- search: on the start page, find what is wanted. With words of your own: search red cotton shirt\n"
    "- open a: on a page of products, look at one. A line: what products lack of what is wanted, then their "
    "letters; those that lack least come last.\n"
    "- next, prev: other pages of products.\n"
    "- choose red: on a product's page, choose a value. A line is an option, what is chosen, and its "
    "values; the last line says which values are still lacking.\n"
    "- features, description: read more about the product.\n"
    "- back: leave the product or the results.\n"
    "- buy: buy the product with the options chosen so far, which ends the visit.\n"
)
