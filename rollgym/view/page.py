"""The HTML document with embedded script and style; a strict CSP blocks everything else.

Data goes into elements that no browser runs. The policy names the script and the style by their hashes, so
that markup which got into the page in spite of everything could neither run nor load anything.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
from collections.abc import Iterable
from html import escape
from importlib.resources import files
from typing import Any

import msgspec

from rollgym.core.serialization import clean_text, jsonable

TEXT = 200_000
"""Maximum characters of a text; the page states how many are omitted."""
ITEMS = 2_000
"""Maximum entries of a list or object in an ``info``."""
DEPTH = 40
"""Maximum nesting depth of lists and objects."""


def bounded(value: Any, depth: int = 0) -> Any:
    """Return the value with long texts and lists cut and nesting limited."""
    if isinstance(value, str):
        return bounded_text(value)
    if isinstance(value, (dict, list, tuple)) and depth >= DEPTH:
        return "… nested too deeply"
    if isinstance(value, dict):
        kept = {str(key)[:TEXT]: bounded(value[key], depth + 1) for key in list(value)[:ITEMS]}
        return kept | ({"…": f"{len(value) - ITEMS} more"} if len(value) > ITEMS else {})
    if isinstance(value, (list, tuple)):
        rest = [f"… {len(value) - ITEMS} more"] if len(value) > ITEMS else []
        return [bounded(item, depth + 1) for item in value[:ITEMS]] + rest
    return value


def bounded_text(value: Any) -> Any:
    """Return a text cut to the limit; any other value unchanged."""
    if not isinstance(value, str) or len(value) <= TEXT:
        return value
    return f"{value[:TEXT]}\n… {len(value) - TEXT:,} more characters are in the run's folder only."


STYLE = "view.css"
SCRIPTS = (
    "text.js", "dom.js", "charts.js", "render.js", "tokens.js", "episode.js", "list.js", "timeline.js",
    "overview.js", "main.js",
)  # fmt: skip
"""Script files in concatenation order."""


def style() -> str:
    """The style sheet."""
    return _static(STYLE)


def script() -> str:
    """Return the whole script in one function scope."""
    return '"use strict";\n(() => {\n' + "\n".join(map(_static, SCRIPTS)) + "\n})();\n"


def policy(*, live: bool) -> str:
    """Return the Content-Security-Policy; a live page may connect only to its own server."""
    connect = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; script-src {_hash(script())}; style-src {_hash(style())}; "
        f"connect-src {connect}; img-src data:; base-uri 'none'; form-action 'none'"
    )


def page(title: str, data: Iterable[tuple[str, bytes]], *, live: bool = False) -> bytes:
    """The document; ``data`` are the packed parts by the id of their element."""
    parts = "".join(
        f'<script type="text/plain" id="{name}">{packed.decode("ascii")}</script>\n' for name, packed in data
    )
    head = (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy(live=live))}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>{style()}</style>\n"
    )
    body = (
        f'<body data-live="{int(live)}">\n<div id="app"><p class="empty">Reading the run …</p></div>\n'
        "<noscript>This page requires JavaScript.</noscript>\n"
    )
    return clean_text(f"{head}{body}{parts}<script>{script()}</script>\n</body>\n</html>\n").encode()


def pack(value: Any) -> bytes:
    """Encode a value as compressed JSON in base64."""
    return _compressed(encode(value))


def encode(value: Any) -> bytes:
    """Encode a value as JSON; non-finite numbers become null, unsupported types the nearest JSON type."""
    try:
        return msgspec.json.encode(value)
    except (UnicodeEncodeError, OverflowError, ValueError, RecursionError):
        return msgspec.json.encode(jsonable(bounded(value), lenient=True))


def blocks(bodies: Iterable[Any], size: int) -> Iterable[tuple[int, bytes]]:
    """Pack episodes into blocks of about ``size`` bytes of JSON: yields count and block."""
    held: list[bytes] = []
    for body in bodies:
        held.append(encode(body))
        if sum(map(len, held)) >= size:
            yield len(held), _compressed(b"[" + b",".join(held) + b"]")
            held = []
    if held:
        yield len(held), _compressed(b"[" + b",".join(held) + b"]")


def _compressed(content: bytes) -> bytes:
    return base64.b64encode(gzip.compress(content, 6, mtime=0))


def _static(name: str) -> str:
    return (files("rollgym.view") / "static" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
