"""The sentence for a plan that cannot be: how much is missing where, and what would help."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from rollgym.devices.detail import ZERO, count_text, describe
from rollgym.devices.estimate import Estimate
from rollgym.devices.job import Job
from rollgym.devices.planner import fits
from rollgym.devices.reasons import shortage_text
from rollgym.devices.types import Cluster, DeviceWishes
from rollgym.errors import UsageError

MOST_NODES = 512
"""Beyond so many, nobody is told how many would do."""


def refusal(cluster: Cluster, job: Job, wishes: DeviceWishes, tried: Sequence[Estimate]) -> UsageError:
    """Why there is no plan."""
    if not tried:
        return UsageError(_impossible(cluster, job, wishes))
    near = min(tried, key=lambda one: one.shortage.missing if one.shortage is not None else 0)
    at = near.arrangement
    way = f"{at.layout}, TP {at.tensor_parallel}, {ZERO[near.sharding]}, offload {near.offload}"
    helps = list(_helps(cluster, job, wishes))
    hint = f"This would help: {'; or '.join(helps)}." if helps else "No single change that was tried helps."
    size = count_text(job.actor.parameters)
    return UsageError(
        f"Training {job.actor.name} ({size} parameters) does not fit on {describe(cluster)}: the nearest way "
        f"({way}) {shortage_text(near)}. {hint}"
    )


def _impossible(cluster: Cluster, job: Job, wishes: DeviceWishes) -> str:
    count = len(cluster.devices)
    if wishes.tensor_parallel is not None and wishes.tensor_parallel > count:
        return f"devices.tensor_parallel is {wishes.tensor_parallel}, but there are {count} devices."
    return (
        f"No {'' if wishes.layout == 'auto' else wishes.layout + ' '}plan can be made with these wishes on "
        f"{describe(cluster)} ({count} devices): a {wishes.layout} layout needs devices for training and for "
        "generating that the other wishes leave no room for. Leave out devices.layout or a pinned role."
    )


def _helps(cluster: Cluster, job: Job, wishes: DeviceWishes) -> Iterator[str]:
    """Single changes, each tried."""
    work = job.work
    if not work.checkpointing and fits(cluster, _work(job, checkpointing=True), wishes):
        yield "learner.gradient_checkpointing=true"
    micro = work.micro_tokens
    while micro > work.context:
        micro = max(work.context, micro // 2)
        if fits(cluster, _work(job, micro_tokens=micro), wishes):
            yield f"learner.micro_tokens={micro}"
            break
    if job.lora_rank is None and fits(cluster, replace(job, lora_rank=16), wishes):
        yield "learner.lora={rank: 16}"
    if wishes != DeviceWishes() and fits(cluster, job, DeviceWishes()):
        yield "no wishes in devices"
    elif (nodes := _nodes_enough(cluster, job, wishes)) is not None:
        yield f"{nodes} such nodes instead of {len(cluster.nodes)}"


def _work(job: Job, **changes: int | bool) -> Job:
    return replace(job, work=replace(job.work, **changes))  # type: ignore[arg-type]


def _nodes_enough(cluster: Cluster, job: Job, wishes: DeviceWishes) -> int | None:
    """The fewest nodes of the first kind that do, found by doubling and halving."""
    # One layout is quick to try, and shared devices with offload are the most frugal.
    tried = replace(wishes, layout="colocated") if wishes == DeviceWishes() else wishes
    node = next((node for node in cluster.nodes if node.kind == "gpu"), cluster.nodes[0])

    def enough(count: int) -> bool:
        extra = tuple(replace(node, name=f"{node.name}+{at}") for at in range(count - len(cluster.nodes)))
        return fits(Cluster((*cluster.nodes, *extra)), job, tried)

    low = high = len(cluster.nodes)
    while not enough(high):
        if high >= MOST_NODES or high >= 16 * len(cluster.nodes):
            return None
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
