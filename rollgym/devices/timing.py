"""How long the phases of a step take, roughly: peak rates times the shares that real systems reach.

These order the plans; they promise no times. The shares below are where well-tuned systems usually are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rollgym.devices.arrange import Site
from rollgym.devices.job import Job
from rollgym.devices.memory import GRADIENT, WEIGHT, Sharding
from rollgym.devices.models import ModelShape

TRAIN_SHARE, FORWARD_SHARE, READ_SHARE, LINK_SHARE = 0.4, 0.5, 0.6, 0.7
"""Of the peak: training and forward passes of FLOP/s, decoding of memory bandwidth, collectives of a link."""
HOST_LINK = 25e9
"""Bytes a second between a device and its host (PCIe 4 x16)."""
HOST_ADAM = 1e9
"""Parameters a second that a node's processors step."""
DECODE_STEP = {"gpu": 0.004, "cpu": 0.020}
"""Seconds that one decoding step takes besides computing."""
HOP, FAR_HOP = 10e-6, 40e-6
"""Seconds until two devices have begun to talk, within a node and between nodes."""
UNKNOWN_FLOPS, UNKNOWN_BANDWIDTH, UNKNOWN_LINK = 1e14, 1e12, 2.5e10


@dataclass(frozen=True, slots=True)
class Pace:
    """What the slowest of some devices can do."""

    count: int
    flops: float
    bandwidth: float
    link: float
    network: float
    nodes: int
    each: int
    """Devices of a node."""
    kind: str

    def gather(self, size: float) -> float:
        """Seconds until every device has all of ``size`` bytes that they hold parts of."""
        if self.count == 1:
            return 0.0
        inside = size / (self.link * LINK_SHARE)
        return inside if self.nodes == 1 else max(inside, size / (self.each * self.network * LINK_SHARE))


def pace_of(site: Site, numbers: Sequence[int]) -> Pace:
    """The pace of these devices together."""
    held = site.nodes_of(numbers)
    nodes = [site.cluster.nodes[node] for node in held]
    return Pace(
        count=len(numbers),
        flops=min(node.flops for node in nodes) or UNKNOWN_FLOPS,
        bandwidth=min(node.bandwidth for node in nodes) or UNKNOWN_BANDWIDTH,
        link=min(node.link for node in nodes) or UNKNOWN_LINK,
        network=min(node.network for node in nodes) or UNKNOWN_LINK,
        nodes=len(nodes),
        each=min(len(numbers) for numbers in held.values()),
        kind=nodes[0].kind,
    )


def generate_rate(job: Job, pace: Pace, tensor_parallel: int, kv_tokens: float) -> float:
    """Episodes a second that all engines write together; ``kv_tokens`` fit into the cache of each."""
    work, shape = job.work, job.actor
    engines = pace.count // tensor_parallel
    if not engines:
        return 0.0
    length = min(work.prompt_tokens + work.reply_tokens, work.context)
    at_once = max(1.0, min(work.in_flight / engines, work.episodes / engines, kv_tokens / length))
    step = _decode_step(shape, job.bytes_each, pace, tensor_parallel, at_once, length / 2)
    prompt = 2 * shape.active_parameters * work.prompt_tokens
    reading = prompt / (tensor_parallel * pace.flops * FORWARD_SHARE)
    return engines / (work.reply_tokens * step / at_once + reading)


def _decode_step(
    shape: ModelShape, c: int, pace: Pace, tensor_parallel: int, at_once: float, length: float
) -> float:
    touched = shape.active_parameters
    if shape.experts:
        # Tokens of one step choose different experts: few tokens meet few of them.
        share = 1 - (1 - shape.experts_used / shape.experts) ** at_once
        touched = round(shape.active_parameters + share * (shape.parameters - shape.active_parameters))
    read = c * touched + at_once * length * shape.kv_bytes(c)
    compute = 2 * shape.active_parameters * at_once / (tensor_parallel * pace.flops * FORWARD_SHARE)
    reading = read / (tensor_parallel * pace.bandwidth * READ_SHARE)
    talking = 0.0
    if tensor_parallel > 1:
        near = tensor_parallel <= pace.each
        wire, hop = (pace.link, HOP) if near else (pace.network, FAR_HOP)
        one = 2 * at_once * shape.hidden * c / (wire * LINK_SHARE)
        talking = 2 * shape.layers * (hop * math.log2(tensor_parallel) + one)
    return DECODE_STEP[pace.kind] + max(compute, reading) + talking


def update_seconds(
    shape: ModelShape, job: Job, pace: Pace, sharding: Sharding, *, host_step: bool, trained: int
) -> float:
    """An update of all episodes of a step."""
    work = job.work
    ranks = min(pace.count, work.episodes)
    tokens = work.tokens * work.passes
    each = 2 + (2 if trained < shape.parameters else 4) + (2 if work.checkpointing else 0)
    compute = tokens * each * shape.active_parameters / (ranks * pace.flops * TRAIN_SHARE)
    whole = WEIGHT * shape.parameters
    steps = work.passes * work.optimiser_steps
    if sharding == "weights":
        rounds = max(steps, math.ceil(tokens / ranks / work.longest))
        talk = rounds * (2 * pace.gather(whole) + pace.gather(GRADIENT * trained))
    else:
        talk = steps * 2 * pace.gather(GRADIENT * trained)
    seconds = max(compute, talk)
    if host_step:
        share = trained / pace.count
        seconds += steps * ((GRADIENT + WEIGHT) * share / HOST_LINK + share * pace.each / HOST_ADAM)
    return seconds


def score_seconds(shape: ModelShape, job: Job, pace: Pace, sharding: Sharding) -> float:
    """A pass without gradients over all episodes of a step."""
    ranks = min(pace.count, job.work.episodes)
    compute = job.work.tokens * 2 * shape.active_parameters / (ranks * pace.flops * FORWARD_SHARE)
    if sharding != "weights":
        return compute
    rounds = math.ceil(job.work.tokens / ranks / job.work.longest)
    return max(compute, rounds * pace.gather(WEIGHT * shape.parameters))


def sync_seconds(job: Job, train: Pace, infer: Pace) -> float:
    """Until the engines have the new weights."""
    size = WEIGHT * job.actor.parameters
    return max(train.gather(size), infer.gather(size), size / (max(train.link, infer.link) * LINK_SHARE))
