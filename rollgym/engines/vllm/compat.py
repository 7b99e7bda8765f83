"""The versions of vLLM that rollgym supports."""

from __future__ import annotations

from dataclasses import dataclass

from rollgym.core.errors import UsageError
from rollgym.engines.servers.server_state import Version, parse_version, version_text

OLDEST: Version = (0, 32, 0)
BEYOND: Version = (0, 33, 0)
"""The oldest supported version, and the first that was not tested. The routes for reinforcement learning
change between minor versions, so a newer one is rejected as well."""


@dataclass(frozen=True, slots=True)
class VllmCompat:
    """Features that a version of vLLM supports."""

    version: Version

    @property
    def sessions(self) -> bool:
        """Weights by tensor or broadcast are always sent within an update session."""
        return True

    def can_flush(self, mode: str) -> bool:
        """The cache can be reset in every mode: replies that wait are computed again."""
        return True


def compat_of(version: object, where: str) -> VllmCompat:
    """Return the features of a server or interpreter that reports this version."""
    parsed = parse_version(version)
    expected = f"rollgym was tested with {version_text(OLDEST)} up to, not including, {version_text(BEYOND)}"
    install = f'install it with pip install "vllm>={version_text(OLDEST)},<{version_text(BEYOND)}"'
    if parsed is None:
        raise UsageError(f"{where} reports an invalid vLLM version, {str(version)[:60]!r}: {expected}.")
    if not OLDEST <= parsed < BEYOND:
        raise UsageError(f"{where} has vLLM {version_text(parsed)}, but {expected}: {install}.")
    return VllmCompat(parsed)
