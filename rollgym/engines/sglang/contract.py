"""What each version of SGLang can do, and what would end it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from rollgym.errors import UsageError

Interrupt = Literal["resend", "in_place", "retract"]
"""What becomes of replies under way when the weights change (docs/sglang.md)."""
Version = tuple[int, int, int]

OLDEST: Version = (0, 5, 9)
NEWEST: Version = (0, 5, 23)
"""The oldest whose contract is known, and the newest this was run against."""


@dataclass(frozen=True, slots=True)
class Contract:
    """What one server can do."""

    version: Version

    @property
    def spans(self) -> bool:
        """Whether a reply says which weights each of its tokens came from."""
        return self.version >= (0, 5, 19)

    @property
    def sessions(self) -> bool:
        """Whether weights by tensor or broadcast must be sent between a begin and an end."""
        return self.version >= (0, 5, 21)

    @property
    def flush_after_retract(self) -> bool:
        """Whether the cache can be flushed while retracted replies wait: in some versions that is the end."""
        return self.version >= (0, 5, 22)

    @property
    def tested(self) -> bool:
        """Whether a version as new as this was run against."""
        return self.version <= NEWEST

    def check(self, interrupt: Interrupt, where: str) -> None:
        """Raise where this way to change weights under way cannot be had."""
        needed = {"resend": OLDEST, "in_place": (0, 5, 19), "retract": (0, 5, 22)}
        if interrupt not in needed:
            raise UsageError(f"interrupt must be one of {', '.join(needed)}, not {interrupt!r}.")
        if self.version < needed[interrupt]:
            raise UsageError(
                f"interrupt={interrupt!r} needs SGLang {_written(needed[interrupt])}, and {where} runs "
                f"{_written(self.version)}: use interrupt='resend'."
            )


def contract_of(version: object, where: str) -> Contract:
    """The contract of a server that says this is its version."""
    found = (
        re.match(r"v?(\d{1,6})\.(\d{1,6})\.(\d{1,6})(?!\d)", version) if isinstance(version, str) else None
    )
    if found is None:
        raise UsageError(
            f"{where} says its SGLang version is {str(version)[:60]!r}, which cannot be read: "
            f"{_written(OLDEST)} or later is needed."
        )
    major, minor, patch = map(int, found.groups())
    if (major, minor, patch) < OLDEST:
        raise UsageError(
            f"{where} runs SGLang {_written((major, minor, patch))}, which is too old: "
            f"{_written(OLDEST)} or later is needed."
        )
    return Contract((major, minor, patch))


def _written(version: Version) -> str:
    return ".".join(map(str, version))
