"""The sandbox of an environment: settings as plain values, opened when needed, replaced when lost."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar, get_args, get_type_hints

from rollgym.errors import UnknownName, UsageError, WorkerLost
from rollgym.sandbox.types import Level, Limits, Sandbox, SandboxSettings

T = TypeVar("T")
LIMITS: Mapping[str, Any] = {"seconds": 5.0, "memory_mb": 256, "processes": 16}
"""The limits of an execution, where nothing else is said."""
_BACKENDS = get_args(get_type_hints(SandboxSettings)["backend"])


def sandbox_settings(given: Mapping[str, Any] | None) -> SandboxSettings:
    """Settings from plain values: ``{"minimum": "namespaces", "limits": {"seconds": 5}}``."""
    values = _mapping("sandbox", given or {})
    _only("setting of the sandbox", values, [one.name for one in fields(SandboxSettings)])
    if values.get("backend", "auto") not in _BACKENDS:
        raise UnknownName(
            "sandbox backend", str(values["backend"]), _BACKENDS, f"There are: {', '.join(_BACKENDS)}."
        )
    if "minimum" in values:
        values["minimum"] = _level(values["minimum"])
    if "preload" in values:
        values["preload"] = tuple(values["preload"])
    values["limits"] = _limits(values.get("limits") or {})
    return SandboxSettings(**values)


def _level(name: Any) -> Level:
    names = {level.name.lower(): level for level in Level}
    if isinstance(name, Level):
        return name
    if str(name).lower() not in names:
        raise UnknownName("level of walls", str(name), names, f"There are: {', '.join(names)}.")
    return names[str(name).lower()]


def _limits(given: Any) -> Limits:
    values = {**LIMITS, **_mapping("sandbox.limits", given)}
    _only("limit of the sandbox", values, [one.name for one in fields(Limits)])
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise UsageError(f"The limit {name} must be a number, not {value!r}.")
    return Limits(**values)


def _mapping(name: str, given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise UsageError(f"{name} must be a mapping of names to values, not {given!r}.")
    return dict(given)


def _only(what: str, values: Mapping[str, Any], known: list[str]) -> None:
    for name in values:
        if name not in known:
            raise UnknownName(what, str(name), known, f"There are: {', '.join(known)}.")


def open_box(settings: SandboxSettings) -> Sandbox:
    """A sandbox with these settings, or an error that says what walls are missing."""
    from rollgym.sandbox.open import open_sandbox  # only when it is needed: it looks at the machine

    return open_sandbox(settings)


class Box:
    """One sandbox at a time. One that dies is replaced, so that no program gains by killing it."""

    def __init__(self, settings: SandboxSettings) -> None:
        self.settings = settings
        self._sandbox: Sandbox | None = None

    @property
    def sandbox(self) -> Sandbox:
        """The sandbox; opened at the first use."""
        if self._sandbox is None:
            self._sandbox = open_box(self.settings)
        return self._sandbox

    def facts(self) -> dict[str, Any]:
        """What is recorded of the walls."""
        sandbox = self.sandbox
        return {"backend": sandbox.backend, "level": sandbox.level.name.lower()}

    def fresh(self) -> None:
        """Forget what was done in it."""
        try:
            self.sandbox.reset()
        except WorkerLost:
            self.close()
            self.sandbox.reset()

    def use(self, work: Callable[[Sandbox], T]) -> T | None:
        """Do something in it; ``None`` where that killed it. The next use finds a new one."""
        try:
            return work(self.sandbox)
        except WorkerLost:
            self.close()
            return None

    def close(self) -> None:
        """Close what is open."""
        if self._sandbox is not None:
            with contextlib.suppress(WorkerLost):
                self._sandbox.close()
            self._sandbox = None
