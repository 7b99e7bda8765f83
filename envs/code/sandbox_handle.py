"""The sandbox of an environment: settings as plain values, opened when needed, replaced when lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

from rollgym.core.deadline import seconds_left
from rollgym.core.errors import RunError, UsageError
from rollgym.envs.arguments import check_choice
from rollgym.sandbox.types import Level, Limits, Sandbox, SandboxSettings

if TYPE_CHECKING:
    from rollgym.sandbox.pool import SandboxPool

T = TypeVar("T")
LIMITS: Mapping[str, Any] = {"seconds": 5.0, "memory_mb": 256, "processes": 16}
"""Default limits of an execution."""
OPENINGS = 3
"""Attempts to open a sandbox: resources may be exhausted only briefly."""
_PAUSE = 0.5
RESERVE = 20.0
"""Seconds of a step reserved for noticing a sandbox that hangs: the step must still end with an answer."""
_BACKENDS = get_args(get_type_hints(SandboxSettings)["backend"])


def sandbox_settings(values: Mapping[str, Any] | None) -> SandboxSettings:
    """Settings from plain values: ``{"minimum": "namespaces", "limits": {"seconds": 5}}``."""
    values = _mapping("sandbox", values or {})
    # Links and folders belong to the environment.
    names = [option.name for option in fields(SandboxSettings) if option.name not in ("links", "folders")]
    for name in values:
        check_choice("setting of the sandbox", name, names)
    check_choice("sandbox backend", values.get("backend", "auto"), _BACKENDS)
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
    check_choice("isolation level", str(name).lower(), names)
    return names[str(name).lower()]


def _limits(values: Any) -> Limits:
    values = {**LIMITS, **_mapping("sandbox.limits", values)}
    for name, value in values.items():
        check_choice("limit of the sandbox", name, [option.name for option in fields(Limits)])
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise UsageError(f"The limit {name} must be a number, not {value!r}.")
    return Limits(**values)


def _mapping(name: str, values: Any) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        raise UsageError(f"{name} must be a mapping of names to values, not {values!r}.")
    return dict(values)


def open_handle(settings: SandboxSettings) -> Sandbox:
    """Open a sandbox with these settings or raise an error with the missing isolation."""
    from rollgym.sandbox.factory import open_sandbox  # lazy: it inspects the machine

    return open_sandbox(settings)


class SandboxHandle:
    """The sandbox of one episode, out of the pool of this process.

    A sandbox that dies is replaced, so no program gains by killing it; a returned one is reset.
    """

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        """Settings as plain values; ``counts: true`` adds sandbox counts to `facts`."""
        self._joined: SandboxPool | None = None
        self._leave: Callable[[SandboxPool], None]
        self._sandbox: Sandbox | None = None
        values = _mapping("sandbox", values or {})
        self._counted = bool(values.pop("counts", False))
        self.settings = sandbox_settings(values)

    @property
    def pool(self) -> SandboxPool:
        """The pool; joined at the first use."""
        if self._joined is None:
            from rollgym.sandbox import shared_pool as warm  # lazy: it inspects the machine

            self._joined, self._leave = warm.join(self.settings, open_handle), warm.leave
        return self._joined

    def facts(self) -> dict[str, Any]:
        """Isolation facts for the record."""
        isolation = self.pool.isolation
        facts: dict[str, Any] = {"backend": isolation.backend, "level": isolation.level.name.lower()}
        return facts | {"counts": asdict(self.pool.counts)} if self._counted else facts

    def weaknesses(self) -> list[str]:
        """Limitations of the isolation."""
        return list(self.pool.isolation.weaknesses)

    def fresh(self) -> None:
        """Return the sandbox, so that the next use gets a fresh one; raise if isolation is unavailable."""
        self._give()
        _ = self.pool.isolation

    def use(self, work: Callable[[Sandbox], T]) -> T | None:
        """Run ``work`` in the sandbox of this episode; ``None`` if that broke it."""
        if self._sandbox is None:
            self._sandbox = _take_sandbox(self.pool.take)
        try:
            return work(self._sandbox)
        except (RunError, OSError):
            self._drop()
            return None

    def once(self, work: Callable[[Sandbox], T], *, unused: bool = False) -> T | None:
        """Run ``work`` in another sandbox, with ``unused`` in a new one; ``None`` if that broke it."""
        result = None
        with self.pool.turn():
            sandbox = _take_sandbox(lambda: self.pool.take(unused=unused))
            try:
                result = work(sandbox)
            except (RunError, OSError):
                sandbox.close()  # it is broken: no other environment may get it
            finally:
                self.pool.give(sandbox)
        if unused:
            # The number of open sandboxes must not depend on timing.
            self.pool.settle()
        return result

    def limits(self) -> Limits:
        """Return the limits of an execution that starts now and ends before the step's deadline."""
        limits, seconds_left = self.settings.limits, self.seconds()
        return limits if seconds_left is None else replace(limits, seconds=min(limits.seconds, seconds_left))

    def seconds(self) -> float | None:
        """Remaining seconds for the executions of this step; ``None``: unlimited."""
        left = seconds_left()
        return None if left is None else max(left - RESERVE, left / 4, 0.01)

    def close(self) -> None:
        """Return the sandbox and leave the pool."""
        self._give()
        if self._joined is not None:
            pool, self._joined = self._joined, None
            self._leave(pool)

    def __del__(self) -> None:
        # An environment that was not closed must not keep its sandbox.
        self.close()

    def _drop(self) -> None:
        if self._sandbox is not None:
            self._sandbox.close()
            self._give()

    def _give(self) -> None:
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            self.pool.give(sandbox)


def _take_sandbox(take: Callable[[], Sandbox]) -> Sandbox:
    """Take a sandbox from the pool, with retries."""
    for openings in range(OPENINGS, 0, -1):
        try:
            return take()
        except (RunError, UsageError, OSError):
            left = seconds_left()
            if openings == 1 or (left is not None and left < RESERVE):
                raise
            time.sleep(_PAUSE)
    raise AssertionError
