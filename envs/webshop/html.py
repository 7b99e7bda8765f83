"""A page as HTML, for the ``html`` observation and for the web server.

Every clickable element is a submit button of one form that posts ``action``, so a page needs no script. The
text of the page, taken node by node, is that of the ``text`` observation.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

from rollgym.core.errors import MissingExtra
from rollgym.envs.webshop.pages import Page

if TYPE_CHECKING:
    import jinja2

TEMPLATES = Path(__file__).parent / "templates"


def html(page: Page, target: str = "") -> str:
    """Render a page as a document whose form posts to ``target`` (if empty, to the page's own address)."""
    return template_called("page.html").render(page=page, target=target)


@functools.lru_cache(maxsize=8)
def template_called(name: str) -> jinja2.Template:
    """A template of this package; everything put into it is escaped."""
    try:
        import jinja2
    except ImportError:
        raise MissingExtra("WebShop as HTML", "webshop") from None
    settings = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return settings.get_template(name)
