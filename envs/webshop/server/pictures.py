"""Generated pictures of products, since pages load nothing from other hosts."""

from __future__ import annotations

import hashlib

from markupsafe import Markup

from rollgym.envs.webshop.types import Product

_DRAWINGS = {
    "beauty": '<path d="M40 34h20v12H40z"/><rect x="34" y="46" width="32" height="38" rx="6"/>'
    '<path d="M45 20h10v14H45z"/>',
    "electronics": '<rect x="22" y="28" width="56" height="38" rx="4"/><path d="M42 66h16v8H42z"/>'
    '<rect x="34" y="74" width="32" height="5" rx="2"/>',
    "garden": '<path d="M24 52 50 28l26 24v30H24z"/><path d="M16 54 50 22l34 32-5 4-29-27-29 27z"/>',
    "fashion": '<path d="M38 24c4 7 20 7 24 0l20 12-7 15-9-4v35H34V47l-9 4-7-15z"/>',
    "grocery": '<path d="M30 40h40l6 42H24z"/><path d="M38 44c0-24 24-24 24 0h-5c0-17-14-17-14 0z"/>',
}
_OTHER = '<path d="M50 22 80 36v30L50 80 20 66V36z"/>'


def picture(product: Product) -> Markup:
    """Draw a tile in a color derived from the asin, with a symbol of the department."""
    hue = hashlib.sha256(product.asin.encode()).digest()[0] * 360 // 256
    # No text of the product is in it.
    return Markup(
        '<svg class="picture" viewBox="0 0 100 100" preserveAspectRatio="xMidYMid slice" '
        'aria-hidden="true">'
        f'<rect width="100" height="100" fill="hsl({hue} 55% 92%)"></rect>'
        f'<g fill="hsl({hue} 40% 62%)">{_DRAWINGS.get(product.category, _OTHER)}</g></svg>'
    )
