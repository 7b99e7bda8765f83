"""Engines that outlive their driver, so that the next driver of the run need not start them again.

Their actors and the placement groups with their devices are detached: Ray keeps them when the driver dies. A
`LeaseActor` removes them if no driver renews the lease for some time. A file in the run folder has the names.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rollgym.cluster.errors import need_ray
from rollgym.cluster.heartbeat import MAX_INTERVAL
from rollgym.core.errors import ResultsError
from rollgym.io.run_dir import read_json, write_json

NAMESPACE = "rollgym"
"""The Ray namespace of all names."""
RECORD = "engines.json"
"""File of a run folder: the engines that run now."""
ANSWER_SECONDS = 30.0
"""Seconds within which a kept actor must answer."""
_LEASE = "lease"
_PREFIX = re.compile(r"rollgym-[0-9a-f]{32}-")


def detached(name: str) -> dict[str, Any]:
    """Return the Ray options of an actor that outlives its driver."""
    return {"name": name, "namespace": NAMESPACE, "lifetime": "detached"}


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """The engines of a run, as stored in `RECORD`.

    Names begin with ``prefix``, which is random: a file from elsewhere cannot name the actors of another run.
    """

    prefix: str
    made_for: Mapping[str, Any] = field(default_factory=dict)
    """Plan, nodes, model, options and code; engines made for anything else are not used."""
    groups: Mapping[str, str] = field(default_factory=dict)
    """Name of the placement group with engines on each node of the plan."""
    engines: tuple[str | None, ...] = ()
    """Name of the actor in each engine slot; ``None`` for an engine that is elsewhere."""

    @classmethod
    def read(cls, folder: Path) -> EngineRecord | None:
        """Read the record of a run folder; ``None`` if there is none that can be used."""
        if not (folder / RECORD).is_file():
            return None
        try:
            record = cls(**read_json(folder / RECORD, folder))
            names = [*record.groups.values(), *filter(None, record.engines)]
            own = all(name.startswith(record.prefix) for name in names)
            return record if own and _PREFIX.fullmatch(record.prefix) else None
        except (ResultsError, TypeError, AttributeError):
            return None

    def write(self, folder: Path) -> None:
        """Write it into a run folder."""
        write_json(folder / RECORD, asdict(self))


class LeaseActor:
    """Removes everything whose name begins with ``prefix`` once the lease was not renewed for ``seconds``.

    Separate from the engines: a group that still waits for its devices has no actor.
    """

    def __init__(self, prefix: str, seconds: float) -> None:
        self._prefix = prefix
        self._lock = threading.Lock()
        self._seconds, self._silent, self._ended = seconds, 0.0, False
        threading.Thread(target=self._watch, name="rollgym-lease", daemon=True).start()

    def renew(self, seconds: float) -> bool:
        """Renew the lease; returns False if it has ended."""
        with self._lock:
            self._seconds, self._silent = seconds, 0.0
            return not self._ended

    def _watch(self) -> None:
        while not self._expired():
            began = time.monotonic()
            tick = min(1.0, self._seconds / 4)
            time.sleep(tick)
            with self._lock:  # time during which the machine was suspended does not count
                self._silent += min(time.monotonic() - began, 2 * tick)
        ray = need_ray()
        done = 0
        while done < 3:  # a group or an actor may have been about to be made
            with contextlib.suppress(ray.exceptions.RayError, RuntimeError):  # Ray is out of reach
                remove(self._prefix, keep=leave_to_lease(self._prefix))
                done += 1
            time.sleep(1.0)
        ray.kill(ray.get_runtime_context().current_actor)

    def _expired(self) -> bool:
        with self._lock:
            self._ended = self._silent >= self._seconds
            return self._ended


class EngineLease:
    """The driver's side of a lease; `start` or `take` one. It is renewed as long as this process runs."""

    def __init__(self, prefix: str, seconds: float, actor: Any) -> None:
        self.prefix = prefix
        self.on_start: Callable[[], None] = lambda: None
        """Called when an engine has started."""
        self._actor = actor
        self._renewing = asyncio.create_task(self._renew(seconds))

    @classmethod
    def start(cls, seconds: float) -> EngineLease:
        """Start a lease. Its actor is known to Ray from here on, and starts even if this process dies."""
        prefix = f"rollgym-{uuid.uuid4().hex}-"
        options = {"num_cpus": 0, "max_restarts": -1, **detached(prefix + _LEASE)}
        return cls(prefix, seconds, need_ray().remote(LeaseActor).options(**options).remote(prefix, seconds))

    @classmethod
    async def take(cls, seconds: float, prefix: str) -> EngineLease | None:
        """Take over the lease of a former driver; ``None`` if it has ended."""
        ray = need_ray()
        try:
            actor = await asyncio.to_thread(ray.get_actor, prefix + _LEASE, NAMESPACE)
            renewed = await asyncio.wait_for(result_of(actor.renew.remote(seconds)), ANSWER_SECONDS)
        except (ValueError, TimeoutError, ray.exceptions.RayError):
            return None
        return cls(prefix, seconds, actor) if renewed else None

    def new_name(self, kind: str) -> str:
        """Return a name for an actor or a group that the lease is for."""
        return f"{self.prefix}{kind}-{uuid.uuid4().hex[:8]}"

    def end(self) -> None:
        """Remove everything that the lease was for, and the lease."""
        self._renewing.cancel()
        with contextlib.suppress(Exception):  # the cluster may be gone
            need_ray().kill(self._actor)
            remove(self.prefix)

    async def _renew(self, seconds: float) -> None:
        while True:
            self._actor.renew.remote(seconds)
            await asyncio.sleep(min(MAX_INTERVAL, seconds / 4))


def remove(prefix: str, keep: Collection[str] = ()) -> None:
    """Kill the actors and remove the placement groups whose names begin with ``prefix``."""
    ray = need_ray()
    from ray.util import list_named_actors, placement_group_table
    from ray.util.placement_group import get_placement_group, remove_placement_group

    for entry in list_named_actors(all_namespaces=True):
        name = entry["name"]
        if entry["namespace"] == NAMESPACE and name.startswith(prefix) and name not in keep:
            with contextlib.suppress(ValueError):  # it died meanwhile
                ray.kill(ray.get_actor(name, NAMESPACE))
    for group in placement_group_table().values():
        name = group["name"]
        if group["state"] != "REMOVED" and name.startswith(prefix) and name not in keep:
            with contextlib.suppress(ValueError):
                remove_placement_group(get_placement_group(name))


def leave_to_lease(prefix: str) -> tuple[str]:
    """Return what `remove` must keep for the lease to go on."""
    return (prefix + _LEASE,)


def find_groups(names: Mapping[str, str]) -> dict[str, Any] | None:
    """Return placement groups by the same keys as their names; ``None`` if one has not all its devices."""
    from ray.util import placement_group_table
    from ray.util.placement_group import get_placement_group

    groups = {}
    for key, name in names.items():
        try:
            groups[key] = get_placement_group(name)
        except ValueError:
            return None
        if placement_group_table(groups[key])["state"] != "CREATED":
            return None
    return groups


async def result_of(ref: Any) -> Any:
    """Return the result of a call to an actor, for functions that need a coroutine."""
    return await ref
