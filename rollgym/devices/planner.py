"""AutoDeviceMapping: estimates all candidates, keeps those that fit, and returns the fastest with reasons."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rollgym.core.errors import UsageError
from rollgym.devices.candidates import Candidate, Numbers, Site, candidates_for
from rollgym.devices.cost_model import (
    OFFLOADS,
    DeviceSpeed,
    Estimate,
    Estimator,
    Offload,
    memory_parts,
    role_mesh,
    speed_of,
)
from rollgym.devices.explain import alternatives, infeasible_error, notes, reasons
from rollgym.devices.memory import SHARDINGS, Sharding
from rollgym.devices.meshes import check_request, meshes_for
from rollgym.devices.report import DeviceMemory, PlanReport
from rollgym.devices.types import Cluster, DeviceConfig, Layout, Placement, Plan, Role, TrainMesh
from rollgym.devices.workload import Job

LAYOUTS: tuple[Layout, ...] = ("colocated", "split", "overlapping")
TOLERANCE = 1.02
"""Candidates at most this much slower than the fastest count as equally fast; the simplest one is chosen."""


def make_plan(cluster: Cluster, job: Job, requested: DeviceConfig | None = None) -> PlanReport:
    """Place the models of a run on a cluster; raises `UsageError` with numbers if they do not fit."""
    requested = replace(requested or DeviceConfig(), when_lost="replan")  # irrelevant for placement
    site = Site(cluster)
    if job.mesh is not None:
        check_request(job.mesh, job)
    tried = list(estimates(site, job, requested))
    fitting = [estimate for estimate in tried if estimate.shortage is None]
    if job.mesh is not None and not tried:
        raise UsageError(
            "learner.parallel fits no number of training devices of this cluster: its dimensions must divide "
            f"that number, with {len(site.devices)} devices in all. Change them or devices.actor_train."
        )
    if not fitting:
        raise infeasible_error(cluster, job, requested, tried, fits)
    best = choose(fitting)
    return PlanReport(
        plan=Plan(
            cluster=cluster,
            layout=best.candidate.layout,
            placements={role: _placement(site, best, role) for role in best.candidate.sets},
        ),
        job=job,
        sharding=best.sharding,
        offload=best.offload,
        memory=tuple(_memory(site, job, best)),
        timeline=best.spans,
        seconds=best.seconds,
        kv_tokens=best.kv_tokens,
        reasons=tuple(reasons(best, tried, job, requested)),
        alternatives=tuple(alternatives(best, tried, site, job, requested)),
        notes=tuple(notes(cluster, best, job)),
        tried=len(tried),
    )


def fits(cluster: Cluster, job: Job, requested: DeviceConfig) -> bool:
    """Return whether a plan exists."""
    return any(estimate.shortage is None for estimate in estimates(Site(cluster), job, requested))


def estimates(site: Site, job: Job, requested: DeviceConfig) -> Iterator[Estimate]:
    """Yield the estimates of all candidates."""
    estimator = Estimator(job)
    speed_by_set: dict[Numbers, DeviceSpeed] = {}
    for candidate in candidates_for(site, job, requested):
        for numbers in candidate.sets.values():
            if numbers not in speed_by_set:
                speed_by_set[numbers] = speed_of(site, numbers)
        speeds = {role: speed_by_set[numbers] for role, numbers in candidate.sets.items()}
        for sharding in _shardings(candidate, job):
            for mesh in meshes_for(site, candidate, job, sharding):
                for offload in _offloads(candidate, requested):
                    yield estimator.estimate(candidate, speeds, sharding, offload, mesh)


def choose(fitting: list[Estimate]) -> Estimate:
    """Return the simplest of the fastest estimates."""
    least = min(estimate.seconds for estimate in fitting)
    fast = [estimate for estimate in fitting if estimate.seconds <= TOLERANCE * least]
    return min(fast, key=_complexity)


def _complexity(estimate: Estimate) -> tuple[int, int, int, int, int, float]:
    return (
        OFFLOADS.index(estimate.offload),
        LAYOUTS.index(estimate.candidate.layout),
        SHARDINGS.index(estimate.sharding),
        0 if estimate.mesh.plain else estimate.mesh.copy_ranks // estimate.mesh.shard,
        estimate.candidate.tensor_parallel,
        estimate.seconds,
    )


def _shardings(at: Candidate, job: Job) -> tuple[Sharding, ...]:
    if job.mesh is not None:
        return ("weights",)
    ranks = max(len(at.sets[role]) for role in ("actor_train", "critic") if role in at.sets)
    return SHARDINGS if ranks > 1 else ("none",)


def _offloads(at: Candidate, requested: DeviceConfig) -> tuple[Offload, ...]:
    on_cpu = at.site.cluster.nodes[at.site.node_of[at.sets["actor_train"][0]]].kind == "cpu"
    if requested.offload == "none" or (on_cpu and requested.offload == "auto"):
        return ("none",)  # a slot's memory is the host's
    if not at.shared:
        return ("none",) if on_cpu or requested.offload == "optimizer" else ("none", "host")
    if requested.offload == "all":
        return ("all",) if on_cpu else ("all", "host")
    return OFFLOADS if requested.offload == "auto" else ("optimizer",)


def _placement(site: Site, best: Estimate, role: Role) -> Placement:
    at = best.candidate
    numbers = at.sets[role]
    size = at.tensor_parallel if role == "actor_infer" else 1
    return Placement(
        role=role,
        devices=tuple(site.devices[number] for number in numbers),
        tensor_parallel=size,
        data_parallel=len(numbers) // size,
        mesh=_mesh_of(best, role),
        sharding="none" if role == "actor_infer" else _sharding(role, best, len(numbers)),
        offload=_offloaded(role, best),
    )


def _mesh_of(best: Estimate, role: Role) -> TrainMesh | None:
    """Return the mesh of the ranks of a learner, where not all of them only shard."""
    if role in ("actor_infer", "reward"):
        return None
    mesh = role_mesh(role, best.candidate, best.mesh)
    return None if mesh.plain else mesh


def _sharding(role: Role, best: Estimate, ranks: int) -> Sharding:
    if ranks == 1:
        return "none"
    if role in ("actor_train", "critic"):
        return best.sharding
    return "weights" if best.sharding == "weights" else "none"


def _offloaded(role: Role, best: Estimate) -> tuple[str, ...]:
    """Return what a role offloads to the host; ``step``: the optimizer stays there permanently."""
    trains = role in ("actor_train", "critic")
    step = ("optimizer", "step") if best.offload == "host" and trains else ()
    if role not in best.candidate.shared or best.offload == "none":
        return step
    if best.offload == "optimizer":
        return ("optimizer",) if trains else ("kv_cache",) if role == "actor_infer" else ()
    if role == "actor_infer":
        return ("weights", "kv_cache")
    return ("weights", *(step or (("optimizer",) if trains else ())))


def _memory(site: Site, job: Job, best: Estimate) -> Iterator[DeviceMemory]:
    for phase in Estimator(job).phases:
        for group in best.candidate.groups:
            devices = tuple(site.devices[number] for number in group.numbers)
            parts = tuple(memory_parts(group, phase, best.role_memory, best.kv, best.offload))
            capacity = site.cluster.nodes[devices[0].node].memory
            yield DeviceMemory(phase.name, devices, parts, group.limit, capacity)
