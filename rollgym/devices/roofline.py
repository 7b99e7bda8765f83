"""Roofline estimates of phase durations: peak rates times typical efficiencies.

They rank plans and do not predict times. The efficiencies are typical of well-tuned systems.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rollgym.devices.candidates import Site
from rollgym.devices.memory import GRADIENT, WEIGHT, Sharding
from rollgym.devices.models import ModelShape
from rollgym.devices.workload import Job

TRAIN_SHARE, FORWARD_SHARE, READ_SHARE, LINK_SHARE = 0.4, 0.5, 0.6, 0.7
"""Fraction of the peak: FLOP/s in training and forward passes, bandwidth in decoding, link in collectives."""
HOST_LINK = 25e9
"""Bytes per second between a device and its host (PCIe 4 x16)."""
HOST_ADAM = 1e9
"""Parameters per second that the CPUs of a node step."""
DECODE_STEP = {"gpu": 0.004, "cpu": 0.020}
"""Overhead of one decoding step in seconds."""
HOP, FAR_HOP = 10e-6, 40e-6
"""Latency between two devices in seconds, within a node and between nodes."""
UNKNOWN_FLOPS, UNKNOWN_BANDWIDTH, UNKNOWN_LINK = 1e14, 1e12, 2.5e10


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """Rates of the slowest device of a set."""

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
        """Return the seconds of an all-gather of ``size`` bytes."""
        if self.count == 1:
            return 0.0
        inside = size / (self.link * LINK_SHARE)
        return inside if self.nodes == 1 else max(inside, size / (self.each * self.network * LINK_SHARE))


def speed_of(site: Site, numbers: Sequence[int]) -> DeviceSpeed:
    """Return the speed of these devices."""
    held = site.nodes_of(numbers)
    nodes = [site.cluster.nodes[node] for node in held]
    return DeviceSpeed(
        count=len(numbers),
        flops=min(node.flops for node in nodes) or UNKNOWN_FLOPS,
        bandwidth=min(node.bandwidth for node in nodes) or UNKNOWN_BANDWIDTH,
        link=min(node.link for node in nodes) or UNKNOWN_LINK,
        network=min(node.network for node in nodes) or UNKNOWN_LINK,
        nodes=len(nodes),
        each=min(len(numbers) for numbers in held.values()),
        kind=nodes[0].kind,
    )


def generate_rate(job: Job, speed: DeviceSpeed, tensor_parallel: int, kv_tokens: float) -> float:
    """Return the episodes per second of all engines; ``kv_tokens``: size of the KV cache of each."""
    work, shape = job.workload, job.actor
    engines = speed.count // tensor_parallel
    if not engines:
        return 0.0
    length = min(work.prompt_tokens + work.reply_tokens, work.context)
    at_once = max(1.0, min(work.in_flight / engines, work.episodes / engines, kv_tokens / length))
    step = _decode_step(shape, job.bytes_each, speed, tensor_parallel, at_once, length / 2)
    prompt = 2 * shape.active_parameters * work.prompt_tokens
    reading = prompt / (tensor_parallel * speed.flops * FORWARD_SHARE)
    return engines / (work.reply_tokens * step / at_once + reading)


def _decode_step(
    shape: ModelShape, c: int, speed: DeviceSpeed, tensor_parallel: int, at_once: float, length: float
) -> float:
    touched = shape.active_parameters
    if shape.experts:
        # Tokens of one step use different experts: few tokens use few of them.
        share = 1 - (1 - shape.experts_used / shape.experts) ** at_once
        touched = round(shape.active_parameters + share * (shape.parameters - shape.active_parameters))
    read = c * touched + at_once * length * shape.kv_bytes(c)
    compute = 2 * shape.active_parameters * at_once / (tensor_parallel * speed.flops * FORWARD_SHARE)
    reading = read / (tensor_parallel * speed.bandwidth * READ_SHARE)
    talking = 0.0
    if tensor_parallel > 1:
        near = tensor_parallel <= speed.each
        wire, hop = (speed.link, HOP) if near else (speed.network, FAR_HOP)
        one = 2 * at_once * shape.hidden * c / (wire * LINK_SHARE)
        talking = 2 * shape.layers * (hop * math.log2(tensor_parallel) + one)
    return DECODE_STEP[speed.kind] + max(compute, reading) + talking


def update_seconds(
    shape: ModelShape, job: Job, speed: DeviceSpeed, sharding: Sharding, *, host_step: bool, trained: int
) -> float:
    """Return the seconds of an update on all episodes of a step."""
    work = job.workload
    ranks = min(speed.count, work.episodes)
    tokens = work.tokens * work.passes
    each = 2 + (2 if trained < shape.parameters else 4) + (2 if work.checkpointing else 0)
    compute = tokens * each * shape.active_parameters / (ranks * speed.flops * TRAIN_SHARE)
    whole = WEIGHT * shape.parameters
    steps = work.passes * work.optimizer_steps
    if sharding == "weights":
        rounds = max(steps, math.ceil(tokens / ranks / work.longest))
        talk = rounds * (2 * speed.gather(whole) + speed.gather(GRADIENT * trained))
    else:
        talk = steps * 2 * speed.gather(GRADIENT * trained)
    seconds = max(compute, talk)
    if host_step:
        share = trained / speed.count
        seconds += steps * ((GRADIENT + WEIGHT) * share / HOST_LINK + share * speed.each / HOST_ADAM)
    return seconds


def score_seconds(shape: ModelShape, job: Job, speed: DeviceSpeed, sharding: Sharding) -> float:
    """Return the seconds of a forward pass over all episodes of a step."""
    ranks = min(speed.count, job.workload.episodes)
    compute = job.workload.tokens * 2 * shape.active_parameters / (ranks * speed.flops * FORWARD_SHARE)
    if sharding != "weights":
        return compute
    rounds = math.ceil(job.workload.tokens / ranks / job.workload.longest)
    return max(compute, rounds * speed.gather(WEIGHT * shape.parameters))


def sync_seconds(job: Job, train: DeviceSpeed, infer: DeviceSpeed) -> float:
    """Return the seconds of a weight sync to the engines."""
    size = WEIGHT * job.actor.parameters
    return max(train.gather(size), infer.gather(size), size / (max(train.link, infer.link) * LINK_SHARE))
