"""Pages as blocks of texts, buttons, links and options, and their text forms.

The page is the model; ``text``, ``text_rich``, the names one can click and the HTML all come from it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from rollgym.envs.webshop.rules import Rules
from rollgym.envs.webshop.types import Goal, Product

if TYPE_CHECKING:
    from rollgym.envs.webshop.session import PageKind, Session
    from rollgym.envs.webshop.shop import Shop

PER_PAGE = 10
SEPARATOR = " [SEP] "
SUB_PAGES = ("Description", "Features", "Reviews")
_SPACES = " \t\n\f\r"


class Element(NamedTuple):
    """One piece of a page: plain text, or something to click."""

    kind: Literal["text", "button", "link", "option", "submit"]
    """``link`` leads to a product, ``submit`` belongs to the search bar and cannot be clicked."""
    text: str
    role: str = ""
    """Kind of a text: ``title``, ``price``, ``name``…"""
    key: str = ""
    """Name in ``click[...]``; empty for text."""
    name: str = ""
    """Of an option: its name, as in ``size``."""
    value: str = ""
    """Of an option: its value."""
    pressed: bool = False
    """Whether the option is chosen or the product was visited."""


class Block(NamedTuple):
    """Elements that belong together: a product among results, the values of an option."""

    role: str
    elements: tuple[Element, ...]
    image: str = ""


@dataclass(frozen=True, slots=True)
class Page:
    """A page, whole."""

    kind: PageKind
    url: str
    blocks: tuple[Block, ...]
    targets: Mapping[str, Element]
    """Clickable elements by name, in the original's order: buttons, links, options."""
    named: Mapping[str, Element]
    """Options by ``name: value`` too, where the rules know that form."""

    @property
    def has_search_bar(self) -> bool:
        """Whether the page has a search field."""
        return self.kind == "search"

    @property
    def clickables(self) -> list[str]:
        """Names of the clickable elements."""
        return list(self.targets)

    @property
    def elements(self) -> Iterator[Element]:
        """All elements in order."""
        for block in self.blocks:
            yield from block.elements

    def find(self, key: str) -> Element | None:
        """Return the element of this name."""
        return self.targets.get(key) or self.named.get(key)


Blocks: TypeAlias = list[Block]


def view(shop: Shop, goal: Goal, session: Session) -> Page:
    """The page that a session is on."""
    make = {"search": _search, "results": _results, "item": _item, "sub": _sub, "done": _done}[session.kind]
    url = session.url
    blocks = make(shop, goal, session, url)
    targets, named = _targets(blocks, shop.rules)
    return Page(session.kind, url, tuple(blocks), targets, named)


def text(page: Page, separator: str = SEPARATOR) -> str:
    """The ``text`` observation: every piece of text, joined."""
    return separator.join(e.text.strip() for e in page.elements if _kept(e.text))


def text_rich(page: Page) -> str:
    """The ``text_rich`` observation: a line each, with buttons marked, and those already clicked."""
    lines: list[str] = []
    clicked: list[str] = []
    for element in page.elements:
        if not _kept(element.text):
            continue
        piece = element.text if element.text.strip(_SPACES) else " "
        if element.kind != "text":
            lead = {"link": "\n", "option": "  "}.get(element.kind, "")
            word = "clicked button" if element.pressed else "button"
            if element.pressed and element.kind == "option":
                clicked.append(f"You have clicked {piece}.\n")
            piece = f"{lead}[{word}] {piece} [{word}_]"
        lines.append(piece + "\n")
    return "".join(reversed(clicked)) + "".join(lines)


def shortened(page: Page, title_words: int | None, option_values: int | None) -> Page:
    """The page with long titles and lists of values cut at the end, whatever the goal is.

    What is cut off is replaced by ``…``; a value that is not shown can still be chosen.
    """
    return replace(page, blocks=tuple(_shorten(block, title_words, option_values) for block in page.blocks))


def _shorten(block: Block, title_words: int | None, option_values: int | None) -> Block:
    elements = block.elements
    if title_words is not None:
        elements = tuple(
            e._replace(text=_first_words(e.text, title_words)) if e.role == "title" else e for e in elements
        )
    if option_values is not None and block.role == "option" and len(elements) - 1 > option_values:
        shown = [e for number, e in enumerate(elements[1:]) if number < option_values or e.pressed]
        elements = (elements[0], *shown, _text("…", "cut"))
    return block._replace(elements=elements)


def _first_words(piece: str, count: int) -> str:
    words = piece.split()
    return piece if len(words) <= count else f"{' '.join(words[:count])} …"


def _kept(piece: str) -> bool:
    """Whether a text survives: the original's parser drops white space that contains a line break."""
    return bool(piece) and not ("\n" in piece and not piece.strip(_SPACES))


def _targets(blocks: Blocks, rules: Rules) -> tuple[dict[str, Element], dict[str, Element]]:
    """Clickable elements by name.

    Where values clash, the original keeps the last one, and a button's name always means the button. Else
    every clashing value is named ``name: value``, a form that works for any option.
    """
    elements = [e for block in blocks for e in block.elements if e.key]
    options = [e for e in elements if e.kind == "option"]
    targets = {e.key: e for e in elements if e.kind != "option"}
    if rules.clashing_values:
        buttons = frozenset(targets)
        targets.update((e.key, e) for e in options if e.key not in buttons)
        return targets, {}
    named = {f"{e.name}: {e.key}": e for e in options}
    counts: dict[str, int] = dict.fromkeys(targets, 1)
    for e in options:
        counts[e.key] = counts.get(e.key, 0) + 1
    targets.update((e.key if counts[e.key] == 1 else f"{e.name}: {e.key}", e) for e in options)
    return targets, named


def _text(piece: str, role: str = "") -> Element:
    return Element("text", piece, role)


def _button(label: str) -> Element:
    return Element("button", label, key=label.lower())


_BACK, _PREV, _NEXT, _BUY = map(_button, ("Back to Search", "< Prev", "Next >", "Buy Now"))
_PARTS = Block("parts", tuple(map(_button, SUB_PAGES)))
_BUY_BLOCK = Block("buy", (_BUY,))


def _head(goal: Goal, *buttons: Element) -> Blocks:
    texts = (_text("Instruction:", "label"), _text(goal.instruction, "instruction"))
    return [Block("instruction", texts), Block("bar", (_BACK, *buttons))]


def _search(shop: Shop, goal: Goal, session: Session, url: str) -> Blocks:
    return [
        Block("banner", (_text("WebShop", "banner"),)),
        Block("instruction", (_text("Instruction: ", "label"), _text(goal.instruction, "instruction"))),
        Block("search", (Element("submit", "Search", key="search"),)),
    ]


def _results(shop: Shop, goal: Goal, session: Session, url: str) -> Blocks:
    first, end = (session.number - 1) * PER_PAGE, session.number * PER_PAGE
    total = len(session.hits)
    buttons = [_PREV] if session.number > 1 else []
    if shop.rules.endless_pages or end < total:
        buttons.append(_NEXT)
    count = _text(f"Page {session.number} (Total results: {total})", "count")
    products = [shop.product(number) for number in session.hits[first:end]]
    return [
        *_head(goal),
        Block("pager", (count, *buttons)),
        *(_result(product, product.asin in session.visited) for product in products),
    ]


def _result(product: Product, visited: bool) -> Block:
    link = Element("link", product.asin, key=product.asin.lower(), pressed=visited)
    return Block(
        "product", (link, _text(product.title, "title"), _text(product.price_text, "price")), product.image
    )


def _item(shop: Shop, goal: Goal, session: Session, url: str) -> Blocks:
    product = shop.by_asin(session.asin)
    chosen = dict(session.options)
    facts = (
        _text(product.title, "title"),
        _text(f"Price: {product.price_text}", "price"),
        _text("Rating: N.A.", "rating"),
    )
    return [
        *_head(goal, _PREV),
        *(_option(name, product, chosen, url, shop.rules) for name in product.options),
        Block("facts", facts, product.image),
        _PARTS,
        _BUY_BLOCK,
    ]


def _option(name: str, product: Product, chosen: Mapping[str, str], url: str, rules: Rules) -> Block:
    elements = [_text(name, "name")]
    if not rules.hidden_choices and name in chosen:
        elements = [_text(f"{name} (chosen: {chosen[name]})", "name")]
    for value in product.options[name]:
        key = value if rules.hidden_choices else " ".join(value.split())
        pressed = f'"{value}"' in url if rules.hidden_choices else value == chosen.get(name)
        elements.append(Element("option", value, key=key, name=name, value=value, pressed=pressed))
    return Block("option", tuple(elements))


def _sub(shop: Shop, goal: Goal, session: Session, url: str) -> Blocks:
    product = shop.by_asin(session.asin)
    lines: tuple[str, ...] = ()
    if session.sub == "Description":
        lines = (product.description,)
    elif session.sub == "Features":
        lines = tuple(f" {bullet}" for bullet in product.bullets)
    part = Block(session.sub.lower(), tuple(_text(line, "line") for line in lines))
    return [*_head(goal, _PREV), part]


_DONE = "Thank you for shopping with us!"


def _done(shop: Shop, goal: Goal, session: Session, url: str) -> Blocks:
    options = _json_on_page(dict(session.options))
    if not shop.rules.score_shown:
        bought = ("Purchased", "asin", session.asin, "options", options)
        return [Block("thanks", (_text(_DONE),)), Block("purchased", tuple(map(_text, bought)))]
    return [Block("done", tuple(map(_text, _original_done(session, options))))]


def _original_done(session: Session, options: str) -> Iterator[str]:
    """The original's last page. Fields it leaves unfilled read ``None``, or are not there at all."""
    yield from (_DONE, "Your code: ", "None", " (Paste it in your MTurk interface.)")
    yield from ("Purchased", "asin", session.asin, "options", options)
    for name in ("attrs", "category", "query", "product category"):
        yield from (name, "None")
    yield from ("Target", "asin", "options", "attrs", "price upper", "instuction text", "category")
    yield from ("product category", "query", "Goal ", "None")
    yield from ("Reward", "Your score (min 0.0, max 1.0)", str(session.reward), "Reward Details ", "None")


def _json_on_page(options: Mapping[str, str]) -> str:
    """Options as the original's template writes them: sorted, and escaped where HTML would mind."""
    text = json.dumps(options, sort_keys=True)
    for sign in "<>&'":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text
