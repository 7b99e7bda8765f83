"""Why a plan is as it is, in sentences with numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rollgym.devices import memory
from rollgym.devices.arrange import Site
from rollgym.devices.detail import OFFLOAD_WORDS, ZERO, Reason, size_text, time_text
from rollgym.devices.estimate import OFFLOADS, Estimate
from rollgym.devices.job import Job
from rollgym.devices.memory import SHARDINGS
from rollgym.devices.types import Cluster, DeviceWishes

Key = Callable[[Estimate], object]


def reasons(best: Estimate, job: Job, wishes: DeviceWishes) -> Iterator[Reason]:
    """For each choice, what speaks for it."""
    yield Reason("layout", best.arrangement.layout, _pinned(_layout(best, job), wishes.layout != "auto"))
    size = best.arrangement.tensor_parallel
    yield Reason(
        "tensor_parallel", str(size), _pinned(_engines(best, job), wishes.tensor_parallel is not None)
    )
    yield Reason("sharding", ZERO[best.sharding], _training(best))
    yield Reason("offload", best.offload, _pinned(_offload(best), wishes.offload != "auto"))
    for role in ("actor_train", "actor_infer", "critic", "reference", "reward"):
        if text := getattr(wishes, role):
            yield Reason(role, text, "as it was wished.")


def alternatives(
    best: Estimate, tried: Sequence[Estimate], site: Site, job: Job, wishes: DeviceWishes
) -> Iterator[Reason]:
    """For each other choice, what the best that can be made of it lacks."""
    layout: Key = lambda one: one.arrangement.layout  # noqa: E731
    size: Key = lambda one: one.arrangement.tensor_parallel  # noqa: E731
    same = [one for one in tried if layout(one) == layout(best)]
    for value in ("colocated", "split", "overlapping"):
        if value != layout(best):
            yield Reason(
                "layout", value, _against(best, [o for o in tried if layout(o) == value], wishes, site)
            )
    for parallel in sorted({one.arrangement.tensor_parallel for one in same}):
        if parallel != size(best):
            found = [one for one in same if size(one) == parallel]
            yield Reason("tensor_parallel", str(parallel), _against(best, found, wishes, site))
    for sharding in SHARDINGS:
        found = [o for o in same if o.sharding == sharding and size(o) == size(best)]
        if sharding != best.sharding and found:
            yield Reason("sharding", ZERO[sharding], _against(best, found, wishes, site))
    for offload in OFFLOADS:
        found = [o for o in same if o.offload == offload and size(o) == size(best)]
        if offload != best.offload and found:
            yield Reason("offload", offload, _against(best, found, wishes, site))


def notes(cluster: Cluster, best: Estimate, job: Job) -> Iterator[str]:
    """What was assumed, and what is left over."""
    used = {number for numbers in best.arrangement.sets.values() for number in numbers}
    idle = len(best.arrangement.site.devices) - len(used)
    if idle:
        yield f"{idle} of {len(best.arrangement.site.devices)} devices have no model."
    if any(not node.flops for node in cluster.nodes):
        yield "The speed of some devices is not known: times are those of a 100 TFLOP/s device."
    work = job.work
    if best.kv_tokens < -(-work.in_flight // _count(best)) * work.context:
        at_once = best.kv_tokens // work.context * _count(best)
        yield f"KV caches for {at_once} conversations of full length; {work.in_flight} may be in flight."
    ranks = len(best.arrangement.sets["actor_train"])
    if ranks > work.episodes:
        yield f"A step has {work.episodes} episodes: so many of the {ranks} training devices have work."
    cores = sum(node.cpus for node in cluster.nodes)
    yield f"Environments run on the processors: {cores} cores on {len(cluster.nodes)} node(s)."


def shortage_text(one: Estimate) -> str:
    """What a candidate lacks."""
    short = one.shortage
    assert short is not None
    where = "in the memory of a host" if short.group is None else "on each device"
    return (
        f"needs {size_text(short.needed)} {where} in '{short.phase}', and {size_text(short.there)} may be "
        f"used: {size_text(short.missing)} missing"
    )


def _layout(best: Estimate, job: Job) -> str:
    step = time_text(best.seconds)
    if best.arrangement.layout == "colocated":
        turns = "rollouts wait for the update" if not job.work.staleness else "all devices do both"
        return f"{step} a step: {turns}, so generating and training take turns on all devices."
    train, infer = (len(best.arrangement.sets[role]) for role in ("actor_train", "actor_infer"))
    if best.arrangement.layout == "split":
        return f"{step} a step: {train} devices train and {infer} generate, and no weights are moved away."
    stay = len(set(best.arrangement.sets["actor_infer"]) - set(best.arrangement.sets["actor_train"]))
    return f"{step} a step: {infer} devices generate; {stay} of them go on while the rest train."


def _engines(best: Estimate, job: Job) -> str:
    size, work = best.arrangement.tensor_parallel, job.work
    whole = size_text(memory.engine_weights(job.actor, job, 1))
    each = size_text(best.uses["actor_infer"].active["generate"]["weights"])
    cut = (
        f"the weights ({whole}) are cut into {size}: {each} on each device"
        if size > 1
        else (f"the weights ({whole}) are whole on each device")
    )
    return (
        f"{cut}, which leaves {size_text(best.kv)} for a KV cache of {best.kv_tokens:,} tokens an engine "
        + (f"({best.kv_tokens // work.context} conversations of {work.context:,}).")
    )


def _training(best: Estimate) -> str:
    state = best.uses["actor_train"].active["update"]
    parts = ", ".join(f"{size_text(size)} {part}" for part, size in state.items())
    count = len(best.arrangement.sets["actor_train"])
    return f"with it an update of the actor holds, on each of {count}: {parts}."


def _offload(best: Estimate) -> str:
    moved = sum(use.moved for use in best.uses.values())
    if best.offload == "none":
        return f"{OFFLOAD_WORDS['none']}: everything fits side by side."
    extra = f"; {size_text(moved)} on each device go and come back every step" if moved else ""
    return f"{OFFLOAD_WORDS[best.offload]}{extra}."


def _against(best: Estimate, found: Sequence[Estimate], wishes: DeviceWishes, site: Site) -> str:
    if not found:
        return "not tried: it was not wished, or cannot be with these devices."
    fitting = [one for one in found if one.shortage is None]
    if not fitting:
        least = min(found, key=_missing)
        return f"{shortage_text(least)} ({_with(least)})."
    other = min(fitting, key=lambda one: one.seconds)
    share = other.seconds / best.seconds - 1
    if share <= 0.02:
        return f"{time_text(other.seconds)} a step, as good, but less simple ({_with(other)})."
    return f"{time_text(other.seconds)} a step at best, {100 * share:.0f} % more ({_with(other)})."


def _with(one: Estimate) -> str:
    at = one.arrangement
    counts = f"{len(at.sets['actor_train'])} train, {len(at.sets['actor_infer'])} generate"
    return f"{counts}, TP {at.tensor_parallel}, {ZERO[one.sharding]}, offload {one.offload}"


def _missing(one: Estimate) -> int:
    return one.shortage.missing if one.shortage is not None else 0


def _pinned(why: str, pinned: bool) -> str:
    return f"{why} (As it was wished.)" if pinned else why


def _count(best: Estimate) -> int:
    return max(1, len(best.arrangement.sets["actor_infer"]) // best.arrangement.tensor_parallel)
