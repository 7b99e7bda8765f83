"""AutoDeviceMapping: tries what could be, keeps what fits, takes the fastest, and says why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rollgym.devices.arrange import Arrangement, Numbers, Site, arrangements
from rollgym.devices.detail import DetailedPlan, DeviceMemory
from rollgym.devices.estimate import OFFLOADS, Estimate, Estimator, Offload, held
from rollgym.devices.job import Job
from rollgym.devices.memory import SHARDINGS, Sharding
from rollgym.devices.reasons import alternatives, notes, reasons
from rollgym.devices.timing import Pace, pace_of
from rollgym.devices.types import Cluster, DeviceWishes, Layout, Placement, Plan, Role

LAYOUTS: tuple[Layout, ...] = ("colocated", "split", "overlapping")
AS_GOOD = 1.02
"""Candidates this much slower than the fastest are as good, and the simplest of them is taken."""


def make_plan(cluster: Cluster, job: Job, wishes: DeviceWishes | None = None) -> DetailedPlan:
    """Place a run's models on a cluster. `UsageError` with numbers where they cannot fit."""
    wishes = replace(wishes or DeviceWishes(), when_lost="replan")  # no matter of where anything is
    site = Site(cluster)
    tried = list(candidates(site, job, wishes))
    fitting = [one for one in tried if one.shortage is None]
    if not fitting:
        from rollgym.devices.refuse import refusal

        raise refusal(cluster, job, wishes, tried)
    best = choose(fitting)
    return DetailedPlan(
        plan=_plan(site, best),
        job=job,
        sharding=best.sharding,
        offload=best.offload,
        memory=tuple(_memory(site, job, best)),
        timeline=best.spans,
        seconds=best.seconds,
        kv_tokens=best.kv_tokens,
        reasons=tuple(reasons(best, job, wishes)),
        alternatives=tuple(alternatives(best, tried, site, job, wishes)),
        notes=tuple(notes(cluster, best, job)),
        tried=len(tried),
    )


def fits(cluster: Cluster, job: Job, wishes: DeviceWishes) -> bool:
    """Whether there is a plan at all."""
    return any(one.shortage is None for one in candidates(Site(cluster), job, wishes))


def candidates(site: Site, job: Job, wishes: DeviceWishes) -> Iterator[Estimate]:
    """Everything that is tried."""
    estimator = Estimator(job)
    known: dict[Numbers, Pace] = {}
    for arrangement in arrangements(site, job, wishes):
        for numbers in arrangement.sets.values():
            if numbers not in known:
                known[numbers] = pace_of(site, numbers)
        paces = {role: known[numbers] for role, numbers in arrangement.sets.items()}
        for sharding in _shardings(arrangement):
            for offload in _offloads(arrangement, wishes):
                yield estimator.estimate(arrangement, paces, sharding, offload)


def choose(fitting: list[Estimate]) -> Estimate:
    """The simplest of the fastest."""
    least = min(one.seconds for one in fitting)
    return min((one for one in fitting if one.seconds <= AS_GOOD * least), key=_plainness)


def _plainness(one: Estimate) -> tuple[int, int, int, int, float]:
    return (
        OFFLOADS.index(one.offload),
        LAYOUTS.index(one.arrangement.layout),
        SHARDINGS.index(one.sharding),
        one.arrangement.tensor_parallel,
        one.seconds,
    )


def _shardings(at: Arrangement) -> tuple[Sharding, ...]:
    ranks = max(len(at.sets[role]) for role in ("actor_train", "critic") if role in at.sets)
    return SHARDINGS if ranks > 1 else ("none",)


def _offloads(at: Arrangement, wishes: DeviceWishes) -> tuple[Offload, ...]:
    on_processors = at.site.cluster.nodes[at.site.node_of[at.sets["actor_train"][0]]].kind == "cpu"
    if wishes.offload == "none" or (on_processors and wishes.offload == "auto"):
        return ("none",)  # a slot's memory is the host's
    if not at.shared:
        return ("none",) if on_processors or wishes.offload == "optimiser" else ("none", "host")
    if wishes.offload == "all":
        return ("all",) if on_processors else ("all", "host")
    return OFFLOADS if wishes.offload == "auto" else ("optimiser",)


def _plan(site: Site, best: Estimate) -> Plan:
    at = best.arrangement
    placements = {role: _placement(site, best, role) for role in at.sets}
    return Plan(cluster=site.cluster, layout=at.layout, placements=placements)


def _placement(site: Site, best: Estimate, role: Role) -> Placement:
    at = best.arrangement
    numbers = at.sets[role]
    size = at.tensor_parallel if role == "actor_infer" else 1
    return Placement(
        role=role,
        devices=tuple(site.devices[number] for number in numbers),
        tensor_parallel=size,
        data_parallel=len(numbers) // size,
        sharding="none" if role == "actor_infer" else _sharding(role, best, len(numbers)),
        offload=_leaves(role, best),
    )


def _sharding(role: Role, best: Estimate, ranks: int) -> Sharding:
    if ranks == 1:
        return "none"
    if role in ("actor_train", "critic"):
        return best.sharding
    return "weights" if best.sharding == "weights" else "none"


def _leaves(role: Role, best: Estimate) -> tuple[str, ...]:
    """What of a role goes to the host; ``step``: the optimiser stays there for good."""
    trains = role in ("actor_train", "critic")
    step = ("optimiser", "step") if best.offload == "host" and trains else ()
    if role not in best.arrangement.shared or best.offload == "none":
        return step
    if best.offload == "optimiser":
        return ("optimiser",) if trains else ("kv_cache",) if role == "actor_infer" else ()
    if role == "actor_infer":
        return ("weights", "kv_cache")
    return ("weights", *(step or (("optimiser",) if trains else ())))


def _memory(site: Site, job: Job, best: Estimate) -> Iterator[DeviceMemory]:
    for phase in Estimator(job).phases:
        for group in best.arrangement.groups:
            devices = tuple(site.devices[number] for number in group.numbers)
            parts = tuple(held(group, phase, best.uses, best.kv, best.offload))
            capacity = site.cluster.nodes[devices[0].node].memory
            yield DeviceMemory(phase.name, devices, parts, group.limit, capacity)
