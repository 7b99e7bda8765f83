"""A fixed date for templates that write today's date.

Templates call ``strftime_now(format)``. transformers does not accept a replacement of that function, but a
macro at the top of the template overrides it.
"""

from __future__ import annotations

import datetime
import json

from rollgym.core.errors import UsageError

_LETTERS = "eaAbBcdfHIjmMpSuUwWxXyYzZ"
_DIRECTIVES = ["%-d", "%-m", "%-H", "%-I", *(f"%{letter}" for letter in _LETTERS)]


def read_date(date: str | None) -> datetime.datetime | None:
    """Return the start of a day given as YYYY-MM-DD."""
    if date is None:
        return None
    try:
        return datetime.datetime.combine(datetime.date.fromisoformat(date), datetime.time())
    except (TypeError, ValueError):
        raise UsageError(f"date must be a day such as 2025-01-31, not {date!r}.") from None


def freeze_date(template: str, now: datetime.datetime) -> str:
    """Return the source of a template for which the time is always ``now``."""
    pairs = [(json.dumps(directive), json.dumps(now.strftime(directive))) for directive in _DIRECTIVES]
    steps = "".join(f".replace({directive}, {value})" for directive, value in pairs)
    # The plus keeps a newline with which the template may start.
    return f"{{% macro strftime_now(form) -%}}{{{{- form{steps} -}}}}{{%- endmacro +%}}{template}"
