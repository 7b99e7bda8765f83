"""Explains a plan: reasons for each choice, rejected alternatives, and what to change if nothing fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from rollgym.core.errors import UsageError
from rollgym.devices import memory
from rollgym.devices.candidates import Site
from rollgym.devices.cost_model import OFFLOADS, Estimate
from rollgym.devices.memory import SHARDINGS
from rollgym.devices.report import OFFLOAD_TEXT, ZERO, Reason, count_text, describe, size_text, time_text
from rollgym.devices.types import Cluster, DeviceConfig
from rollgym.devices.workload import Job

Key = Callable[[Estimate], object]
Fits = Callable[[Cluster, Job, DeviceConfig], bool]
"""Whether a plan exists: `planner.fits`."""
MAX_NODES = 512
"""Largest cluster suggested in an error."""


def reasons(best: Estimate, tried: Sequence[Estimate], job: Job, requested: DeviceConfig) -> Iterator[Reason]:
    """Yield the reason for each choice."""
    yield Reason("layout", best.candidate.layout, _pinned(_layout(best, job), requested.layout != "auto"))
    size = best.candidate.tensor_parallel
    yield Reason(
        "tensor_parallel", str(size), _pinned(_engines(best, job), requested.tensor_parallel is not None)
    )
    yield Reason("sharding", ZERO[best.sharding], _training(best))
    if not best.mesh.plain or job.mesh is not None:
        why = f"{_mesh(best)}{_without(best, tried)}"
        yield Reason("mesh", str(best.mesh), _pinned(why, job.mesh is not None))
    yield Reason("offload", best.offload, _pinned(_offload(best), requested.offload != "auto"))
    for role in ("actor_train", "actor_infer", "critic", "reference", "reward"):
        if text := getattr(requested, role):
            yield Reason(role, text, "requested.")


def alternatives(
    best: Estimate, tried: Sequence[Estimate], site: Site, job: Job, requested: DeviceConfig
) -> Iterator[Reason]:
    """Yield, for each rejected choice, what its best estimate lacks."""
    layout: Key = lambda estimate: estimate.candidate.layout  # noqa: E731
    size: Key = lambda estimate: estimate.candidate.tensor_parallel  # noqa: E731
    same = [estimate for estimate in tried if layout(estimate) == layout(best)]
    for value in ("colocated", "split", "overlapping"):
        if value != layout(best):
            yield Reason(
                "layout", value, _against(best, [o for o in tried if layout(o) == value], requested, site)
            )
    for parallel in sorted({estimate.candidate.tensor_parallel for estimate in same}):
        if parallel != size(best):
            estimates = [estimate for estimate in same if size(estimate) == parallel]
            yield Reason("tensor_parallel", str(parallel), _against(best, estimates, requested, site))
    for sharding in SHARDINGS:
        estimates = [o for o in same if o.sharding == sharding and size(o) == size(best)]
        if sharding != best.sharding and estimates:
            yield Reason("sharding", ZERO[sharding], _against(best, estimates, requested, site))
    meshes = dict.fromkeys(o.mesh for o in same if o.candidate.sets == best.candidate.sets)
    for mesh in meshes:
        if mesh != best.mesh and best.sharding == "weights" and mesh.ranks == best.mesh.ranks:
            estimates = [
                o for o in same if o.mesh == mesh and o.sharding == "weights" and size(o) == size(best)
            ]
            yield Reason("mesh", str(mesh), _against(best, estimates, requested, site))
    for offload in OFFLOADS:
        estimates = [o for o in same if o.offload == offload and size(o) == size(best)]
        if offload != best.offload and estimates:
            yield Reason("offload", offload, _against(best, estimates, requested, site))


def notes(cluster: Cluster, best: Estimate, job: Job) -> Iterator[str]:
    """Yield assumptions, and devices that are not fully used."""
    used = {number for numbers in best.candidate.sets.values() for number in numbers}
    idle = len(best.candidate.site.devices) - len(used)
    if idle:
        yield f"{idle} of {len(best.candidate.site.devices)} devices are unused."
    if any(not node.flops for node in cluster.nodes):
        yield "The speed of some devices is unknown: times assume 100 TFLOP/s."
    work = job.workload
    if best.kv_tokens < -(-work.in_flight // _count(best)) * work.context:
        at_once = best.kv_tokens // work.context * _count(best)
        yield f"The KV caches hold {at_once} conversations of full length; {work.in_flight} may be in flight."
    ranks = len(best.candidate.sets["actor_train"])
    if ranks > work.episodes:
        yield f"A step has {work.episodes} episodes: only as many of the {ranks} training devices are busy."
    cores = sum(node.cpus for node in cluster.nodes)
    yield f"Environments run on the CPUs: {cores} cores on {len(cluster.nodes)} node(s)."


def shortage_text(estimate: Estimate) -> str:
    """Describe which memory an estimate lacks."""
    shortage = estimate.shortage
    assert shortage is not None
    where = "in host memory" if shortage.group is None else "on each device"
    return (
        f"needs {size_text(shortage.needed)} {where} in phase '{shortage.phase}', but only "
        f"{size_text(shortage.available)} are usable: {size_text(shortage.missing)} missing"
    )


def _layout(best: Estimate, job: Job) -> str:
    step = time_text(best.seconds)
    if best.candidate.layout == "colocated":
        turns = "rollouts wait for the update" if not job.workload.staleness else "all devices do both"
        return f"{step} per step: {turns}, so generation and training alternate on all devices."
    train, infer = (len(best.candidate.sets[role]) for role in ("actor_train", "actor_infer"))
    if best.candidate.layout == "split":
        return (
            f"{step} per step: {train} devices train and {infer} generate; nothing is offloaded between them."
        )
    stay = len(set(best.candidate.sets["actor_infer"]) - set(best.candidate.sets["actor_train"]))
    return f"{step} per step: {infer} devices generate; {stay} of them continue while the others train."


def _engines(best: Estimate, job: Job) -> str:
    size, work = best.candidate.tensor_parallel, job.workload
    whole = size_text(memory.engine_weights(job.actor, job, 1))
    each = size_text(best.role_memory["actor_infer"].active["generate"]["weights"])
    cut = (
        f"the weights ({whole}) are split over {size} devices: {each} each"
        if size > 1
        else f"each device has all weights ({whole})"
    )
    return (
        f"{cut}, which leaves {size_text(best.kv)} for a KV cache of {best.kv_tokens:,} tokens per engine "
        + (f"({best.kv_tokens // work.context} conversations of {work.context:,}).")
    )


def _training(best: Estimate) -> str:
    state = best.role_memory["actor_train"].active["update"]
    parts = ", ".join(f"{size_text(size)} {part}" for part, size in state.items())
    count = len(best.candidate.sets["actor_train"])
    return f"an update of the actor needs, on each of {count} devices: {parts}."


def _mesh(best: Estimate) -> str:
    mesh = best.mesh
    parts = [f"{mesh.shard} ranks share the weights of a copy"] if mesh.shard > 1 else []
    parts += [f"{mesh.replicate} copies compute different rows"] if mesh.replicate > 1 else []
    parts += [f"{mesh.tensor} ranks share heads and MLP of each layer"] if mesh.tensor > 1 else []
    parts += [f"{mesh.context} ranks share the tokens of a row"] if mesh.context > 1 else []
    parts += [f"{mesh.expert} ranks share the experts"] if mesh.expert > 1 else []
    return f"{', '.join(parts)}."


def _without(best: Estimate, tried: Sequence[Estimate]) -> str:
    """Say why ranks share tokens, heads or experts: what the same plan lacks where none of them do."""
    if best.mesh.copy_ranks == best.mesh.shard:
        return ""
    others = [
        other
        for other in tried
        if other.sharding == "weights"
        and other.candidate.sets == best.candidate.sets
        and other.candidate.tensor_parallel == best.candidate.tensor_parallel
        and other.mesh.copy_ranks == other.mesh.shard
    ]
    if not others:
        return ""
    fitting = [other for other in others if other.shortage is None]
    if not fitting:
        return f" Ranks that only shard do not suffice: that {shortage_text(min(others, key=_missing))}."
    share = min(other.seconds for other in fitting) / best.seconds - 1
    return f" Ranks that only shard would be {100 * share:.0f} % slower."


def _offload(best: Estimate) -> str:
    moved = sum(use.moved for use in best.role_memory.values())
    if best.offload == "none":
        return f"{OFFLOAD_TEXT['none']}: everything fits at once."
    extra = f"; {size_text(moved)} per device are moved to the host and back every step" if moved else ""
    return f"{OFFLOAD_TEXT[best.offload]}{extra}."


def _against(best: Estimate, estimates: Sequence[Estimate], requested: DeviceConfig, site: Site) -> str:
    if not estimates:
        return "not evaluated: excluded by the configuration, or impossible with these devices."
    fitting = [estimate for estimate in estimates if estimate.shortage is None]
    if not fitting:
        least = min(estimates, key=_missing)
        return f"{shortage_text(least)} ({_settings(least)})."
    other = min(fitting, key=lambda estimate: estimate.seconds)
    share = other.seconds / best.seconds - 1
    if share <= 0.02:
        return f"{time_text(other.seconds)} per step: as fast, but more complex ({_settings(other)})."
    return f"{time_text(other.seconds)} per step at best, {100 * share:.0f} % slower ({_settings(other)})."


def _settings(estimate: Estimate) -> str:
    at = estimate.candidate
    counts = f"{len(at.sets['actor_train'])} train, {len(at.sets['actor_infer'])} generate"
    sharding = ZERO[estimate.sharding] if estimate.mesh.plain else f"mesh {estimate.mesh}"
    return f"{counts}, TP {at.tensor_parallel}, {sharding}, offload {estimate.offload}"


def _missing(estimate: Estimate) -> int:
    return estimate.shortage.missing if estimate.shortage is not None else 0


def _pinned(why: str, pinned: bool) -> str:
    return f"{why} (Requested.)" if pinned else why


def _count(best: Estimate) -> int:
    return max(1, len(best.candidate.sets["actor_infer"]) // best.candidate.tensor_parallel)


def infeasible_error(
    cluster: Cluster, job: Job, requested: DeviceConfig, tried: Sequence[Estimate], fits: Fits
) -> UsageError:
    """Return the error for a run that has no plan: how much memory is missing, and what would help."""
    if not tried:
        return UsageError(_impossible(cluster, requested))
    nearest = min(tried, key=_missing)
    candidate = nearest.candidate
    settings = (
        f"{candidate.layout}, TP {candidate.tensor_parallel}, {ZERO[nearest.sharding]}, "
        f"offload {nearest.offload}"
    )
    fixes = list(_fixes(cluster, job, requested, fits))
    hint = f"To make it fit: {'; or '.join(fixes)}." if fixes else "No single change that was tried helps."
    size = count_text(job.actor.parameters)
    return UsageError(
        f"Training {job.actor.name} ({size} parameters) does not fit on {describe(cluster)}: the closest "
        f"plan ({settings}) {shortage_text(nearest)}. {hint}"
    )


def _impossible(cluster: Cluster, requested: DeviceConfig) -> str:
    count = len(cluster.devices)
    if requested.tensor_parallel is not None and requested.tensor_parallel > count:
        return f"devices.tensor_parallel is {requested.tensor_parallel}, but there are {count} devices."
    layout = "" if requested.layout == "auto" else f"{requested.layout} "
    return (
        f"No {layout}plan satisfies the devices section on {describe(cluster)} ({count} devices): the layout "
        "needs devices for training and generation that the other settings exclude. Remove devices.layout "
        "or a pinned role."
    )


def _fixes(cluster: Cluster, job: Job, requested: DeviceConfig, fits: Fits) -> Iterator[str]:
    """Yield single changes that were tried and make the run fit."""
    work = job.workload
    if not work.checkpointing and fits(cluster, _with_workload(job, checkpointing=True), requested):
        yield "set learner.gradient_checkpointing=true"
    micro = work.max_tokens_per_microbatch
    while micro > work.context:
        micro = max(work.context, micro // 2)
        if fits(cluster, _with_workload(job, max_tokens_per_microbatch=micro), requested):
            yield f"set learner.max_tokens_per_microbatch={micro}"
            break
    if job.lora_rank is None and fits(cluster, replace(job, lora_rank=16), requested):
        yield "set learner.lora={rank: 16}"
    if requested != DeviceConfig() and fits(cluster, job, DeviceConfig()):
        yield "remove the devices section"
    elif (nodes := _nodes_needed(cluster, job, requested, fits)) is not None:
        yield f"use {nodes} such nodes instead of {len(cluster.nodes)}"


def _with_workload(job: Job, **changes: int | bool) -> Job:
    return replace(job, workload=replace(job.workload, **changes))  # type: ignore[arg-type]


def _nodes_needed(cluster: Cluster, job: Job, requested: DeviceConfig, fits: Fits) -> int | None:
    """Return the fewest nodes of the first kind that suffice, by doubling and bisection."""
    # One layout is quick to try, and colocation with offloading needs the least memory.
    tried = replace(requested, layout="colocated") if requested == DeviceConfig() else requested
    node = next((node for node in cluster.nodes if node.kind == "gpu"), cluster.nodes[0])

    def enough(count: int) -> bool:
        extra = tuple(replace(node, name=f"{node.name}+{at}") for at in range(count - len(cluster.nodes)))
        return fits(Cluster((*cluster.nodes, *extra)), job, tried)

    low = high = len(cluster.nodes)
    while not enough(high):
        if high >= MAX_NODES or high >= 16 * len(cluster.nodes):
            return None
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
