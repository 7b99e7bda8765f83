"""What each version of SGLang supports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rollgym.core.errors import UsageError
from rollgym.engines.servers.server_state import Version, parse_version, version_text

Interrupt = Literal["resend", "in_place", "retract"]
"""In-flight replies on a weight update (docs/sglang.md)."""

OLDEST: Version = (0, 5, 9)
NEWEST: Version = (0, 5, 23)
"""The oldest supported and the newest tested version."""


@dataclass(frozen=True, slots=True)
class SglangCompat:
    """Features that a version of SGLang supports."""

    version: Version

    @property
    def spans(self) -> bool:
        """Whether replies report the weight version of each token."""
        return self.version >= (0, 5, 19)

    @property
    def sessions(self) -> bool:
        """Whether weights by tensor or broadcast must be sent within an update session."""
        return self.version >= (0, 5, 21)

    @property
    def flush_after_retract(self) -> bool:
        """Whether the cache can be flushed while retracted requests wait: older versions crash."""
        return self.version >= (0, 5, 22)

    def can_flush(self, mode: str) -> bool:
        """Whether the cache can be flushed while the server is paused like this."""
        return mode == "abort" or (mode == "retract" and self.flush_after_retract)

    @property
    def tested(self) -> bool:
        """Whether rollgym was tested with this version or a newer one."""
        return self.version <= NEWEST

    def check(self, interrupt: Interrupt, where: str) -> None:
        """Raise `UsageError` if this version does not support the ``interrupt`` mode."""
        needed = {"resend": OLDEST, "in_place": (0, 5, 19), "retract": (0, 5, 22)}
        if interrupt not in needed:
            raise UsageError(f"interrupt must be one of {', '.join(needed)}, not {interrupt!r}.")
        if self.version < needed[interrupt]:
            raise UsageError(
                f"interrupt={interrupt!r} needs SGLang {version_text(needed[interrupt])}, but {where} runs "
                f"{version_text(self.version)}: use interrupt='resend'."
            )


def compat_of(version: object, where: str) -> SglangCompat:
    """Return the features of a server that reports this version."""
    parsed = parse_version(version)
    if parsed is None:
        raise UsageError(
            f"{where} reports an invalid SGLang version, {str(version)[:60]!r}: "
            f"{version_text(OLDEST)} or later is needed."
        )
    if parsed < OLDEST:
        raise UsageError(
            f"{where} runs SGLang {version_text(parsed)}, which is too old: "
            f"{version_text(OLDEST)} or later is needed."
        )
    return SglangCompat(parsed)
