"""A day that does not pass, for templates that write today's date.

Templates ask for it with ``strftime_now(format)``. transformers lets nobody hand in a function of that name,
but a macro at the top of the template takes its place.
"""

from __future__ import annotations

import datetime
import json

from rollgym.errors import UsageError

_LETTERS = "eaAbBcdfHIjmMpSuUwWxXyYzZ"
_DIRECTIVES = ["%-d", "%-m", "%-H", "%-I", *(f"%{letter}" for letter in _LETTERS)]


def read_date(date: str | None) -> datetime.datetime | None:
    """The first moment of a day given as YYYY-MM-DD."""
    if date is None:
        return None
    try:
        return datetime.datetime.combine(datetime.date.fromisoformat(date), datetime.time())
    except (TypeError, ValueError):
        raise UsageError(f"date must be a day such as 2025-01-31, not {date!r}.") from None


def stop_clock(template: str, now: datetime.datetime) -> str:
    """The source of a template for which it is always ``now``."""
    pairs = [(json.dumps(directive), json.dumps(now.strftime(directive))) for directive in _DIRECTIVES]
    steps = "".join(f".replace({directive}, {value})" for directive, value in pairs)
    # The plus keeps a newline with which the template may start.
    return f"{{% macro strftime_now(form) -%}}{{{{- form{steps} -}}}}{{%- endmacro +%}}{template}"
