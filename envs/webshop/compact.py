"""Compact view: a page and its actions in as few words as possible, for small models.

    find soft cotton shirt, color red, under 30 dollars
    page 1 more
    lacks soft price b d seen
    lacks red c
    lacks nothing a

    find soft cotton shirt, color red, under 30 dollars
    item
    25 soft cotton shirt
    color none | black | red
    lacks red

Among results, a line is what products lack of the instruction, and the letters that open them; those that
lack least come last, next to where a small model has to answer. A product can lack words of the instruction
that the title of another product on the page has, values that another's options have, and a price within the
bound. All this comes from the pages, not from the goal. The page of a product has its price and title, then
each option with its chosen value and its values, and last the values that are still lacking: those that the
instruction names and that can be chosen here. A compact action maps to an action of the same shop.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from rollgym.core.env import bare
from rollgym.envs.webshop.matching import matching_values
from rollgym.envs.webshop.pages import Block, Page
from rollgym.envs.webshop.shop import Shop
from rollgym.envs.webshop.types import Catalog, Product

LETTERS = "abcdefghij"
"""Names of the products of a page."""
TITLE_WORDS, PART_WORDS = 16, 60
"""Longer titles and descriptions are cut off here."""
SAMPLE, COMMON, MOST_WORDS = 2000, 3, 1000
"""Products and goals whose words are counted, minimum count of a word, and maximum number of words."""

_WHOLE = re.compile(r"\$([0-9]+)(?:\.0)?(?![0-9.])")
_WORD = re.compile("[a-z]{2,}")
_NUMBER = r"([0-9][0-9,]*(?:\.[0-9]+)?)"
_BOUND = re.compile(rf"\${_NUMBER}|{_NUMBER} dollars")
_LINKING = frozenset(re.findall("[a-z]+", "an and are as at by for from in is it of on or that the to with"))
_CLAUSE_END = re.compile(r"[.,;?!](?:\s|$)")
_BUTTONS = {
    "results": {"next": "next >", "prev": "< prev", "back": "back to search"},
    "item": {"features": "features", "description": "description", "buy": "buy now", "back": "< prev"},
    "sub": {"back": "< prev"},
}


def compact(page: Page, shop: Shop) -> str:
    """Render the page in a few lines: the instruction first, then the page."""
    if page.kind == "done":
        return "bought"
    instruction = _instruction(page)
    match page.kind:
        case "search":
            lines = ["start"]
        case "results":
            lines = _results(page, shop, instruction)
        case "item":
            lines = _item(page, instruction)
        case _:
            lines = _sub(page)
    return "\n".join([_joined(instruction), *lines]).lower()


def compact_actions(page: Page) -> dict[str, str]:
    """Available actions: compact action to shop action."""
    if page.kind == "search":
        return {"search": _searching(product_words(_instruction(page)))}
    links = [key for key, element in page.targets.items() if element.kind == "link"]
    values = [key for key, element in page.targets.items() if element.kind == "option"]
    actions = {f"open {letter}": f"click[{key}]" for letter, key in zip(LETTERS, links, strict=False)}
    actions |= {f"choose {_joined(key)}": f"click[{key}]" for key in values}
    buttons = _BUTTONS.get(page.kind, {})
    return actions | {name: f"click[{key}]" for name, key in buttons.items() if key in page.targets}


def shop_action(action: str, page: Page) -> str:
    """Return the shop's action for a compact one; empty if there is none."""
    actions = compact_actions(page)
    # A value may itself end in a quote or a full stop.
    for words in (_joined(action.lower()), _joined(bare(action).lower())):
        if words in actions:
            return actions[words]
    return _searching(words.removeprefix("search ")) if words.startswith("search ") else ""


def spoken(action: str, info: Mapping[str, object]) -> str:
    """Return a shop's action in the form that the environment expects, by its ``info``."""
    means = info.get("means")
    if not isinstance(means, Mapping):
        return action
    if action.startswith("search["):
        return f"search {action.removeprefix('search[').removesuffix(']')}"
    return next((name for name, meaning in means.items() if meaning == action), action)


def product_words(instruction: str) -> str:
    """Return the words that describe the product: the first clause; options come later."""
    return _CLAUSE_END.split(instruction, maxsplit=1)[0].strip() or instruction


def lacks(products: Sequence[Product], instruction: str) -> list[list[str]]:
    """Return for each product the phrases of the instruction that others of these products have and it lacks.

    In the order of the instruction; ``price`` last, where the lowest price is above the bound.
    """
    text, bound = _joined(instruction.lower()), price_bound(instruction)
    values = [
        {_joined(value.lower()) for value in matching_values(product.options, text).values()}
        for product in products
    ]
    titles = [_words(product.title) for product in products]
    offered = sorted(set[str]().union(*values))
    # A word that is a value somewhere counts as a value.
    within = {word for value in offered for word in _WORD.findall(value)} | _LINKING
    words = dict.fromkeys(word for word in _WORD.findall(text) if word not in within)
    title_words = [word for word in words if any(word in title for title in titles)]
    phrases = sorted((*offered, *title_words), key=text.find)
    return [
        [phrase for phrase in phrases if phrase not in own_values | title]
        + (["price"] if min(product.prices) > bound else [])
        for product, own_values, title in zip(products, values, titles, strict=True)
    ]


def price_bound(instruction: str) -> float:
    """Return the price bound of an instruction; infinite without one."""
    match = _BOUND.search(instruction.lower())
    return float((match[1] or match[2]).replace(",", "")) if match else math.inf


def shop_words(catalog: Catalog) -> list[str]:
    """The words that are common in a shop, the most common first, for a tokenizer."""
    counts: Counter[str] = Counter()
    for number in range(min(len(catalog), SAMPLE)):
        product = catalog.product(number)
        values = [value for name in product.options for value in (name, *product.options[name])]
        counts.update(sorted(_words(" ".join((product.title, *values)))))
    for number in range(min(catalog.goal_count, SAMPLE)):
        counts.update(sorted(_words(catalog.goal(number).instruction)))
    return [word for word, count in counts.most_common(MOST_WORDS) if count >= COMMON]


def search_words(text: str) -> str:
    """Return words without brackets, as a search takes them."""
    return _joined(text.replace("[", " ").replace("]", " ")) or "anything"


def _words(text: str) -> set[str]:
    return {*_WORD.findall(text.lower())}


def _searching(words: str) -> str:
    return f"search[{search_words(words)}]"


def _instruction(page: Page) -> str:
    return next(e.text for e in page.elements if e.role == "instruction")


def _results(page: Page, shop: Shop, instruction: str) -> list[str]:
    count = next(e.text for e in page.elements if e.role == "count")
    more = " more" if "next >" in page.targets else ""
    links = [block.elements[0] for block in page.blocks if block.role == "product"]
    missing = lacks([shop.by_asin(link.text) for link in links], instruction)
    alike: dict[str, list[str]] = {}
    # Sorting is stable: products that lack as many things stay in the shop's order.
    for number in sorted(range(len(links)), key=lambda number: -len(missing[number])):
        letters_seen = [LETTERS[number], *(["seen"] if links[number].pressed else [])]
        alike.setdefault(_lacking(missing[number]), []).extend(letters_seen)
    lines = [" ".join([lacking, *letters]) for lacking, letters in alike.items()]
    return [count.split(" (")[0] + more, *(lines or ["nothing found"])]


def _facts(block: Block) -> str:
    texts = {element.role: element.text for element in block.elements}
    price = _WHOLE.sub(r"\1", texts["price"].removeprefix("Price: ")).replace("$", "")
    return f"{price} {_cut(texts['title'], TITLE_WORDS)}"


def _item(page: Page, instruction: str) -> list[str]:
    facts = next(block for block in page.blocks if block.role == "facts")
    options = [_option(block) for block in page.blocks if block.role == "option"]
    return ["item", _facts(facts), *options, _lacking(_unchosen(page, instruction))]


def _unchosen(page: Page, instruction: str) -> list[str]:
    """Return the values that the instruction names and that are not chosen yet, as named by actions."""
    values = {key: element for key, element in page.targets.items() if element.kind == "option"}
    offered: dict[str, list[str]] = {}
    for element in values.values():
        offered.setdefault(element.name, []).append(element.value)
    wanted = matching_values(offered, instruction)
    return [_joined(key) for key, e in values.items() if wanted.get(e.name) == e.value and not e.pressed]


def _lacking(words: Sequence[str]) -> str:
    return " ".join(["lacks", *(words or ["nothing"])])


def _option(block: Block) -> str:
    values = block.elements[1:]
    chosen = next((e.value for e in values if e.pressed), "none")
    name = values[0].name if values else block.elements[0].text
    return " | ".join([f"{name} {chosen}", *(e.value for e in values)])


def _sub(page: Page) -> list[str]:
    part = page.blocks[-1]
    return [part.role, _cut(" ".join(e.text for e in part.elements), PART_WORDS)]


def _joined(text: str) -> str:
    return " ".join(text.split())


def _cut(text: str, max_words: int) -> str:
    return " ".join(text.split()[:max_words])
