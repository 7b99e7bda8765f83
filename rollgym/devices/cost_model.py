"""Memory and step time of a candidate: arithmetic only, so that many candidates can be evaluated."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rollgym.devices import memory
from rollgym.devices.activations import saved_by_layer
from rollgym.devices.candidates import Candidate, Group, Site
from rollgym.devices.memory import GRADIENT, WEIGHT, Part, Sharding
from rollgym.devices.models import ModelShape
from rollgym.devices.types import Role, TrainMesh
from rollgym.devices.workload import Job

MATMUL_SHARE, ATTENTION_SHARE, READ_SHARE, LINK_SHARE = 0.6, 0.25, 0.85, 0.7
"""Fraction of the peak: FLOP/s of products with weights and of attention, bandwidth, link in collectives.

`benchmarks/plan_speed.py` compares the resulting times with published ones.
"""
FORWARD_MOVES, BACKWARD_MOVES = 2, 4
"""Times that saved activations pass through memory, outside of products, in a forward and a backward pass:
written and read; with their gradients, written and read once more."""
HOST_LINK = 25e9
"""Bytes per second between a device and its host (PCIe 4 x16)."""
HOST_ADAM = 1e9
"""Parameters per second that the CPUs of a node step."""
DECODE_LAYER = {"gpu": 1e-4, "cpu": 1e-3}
"""Overhead of one layer in a decoding step in seconds: kernels that start one after another."""
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
    attended = min(work.prompt_tokens + work.reply_tokens / 2, work.context)
    step = decode_step(shape, job.bytes_each, speed, tensor_parallel, at_once, attended)
    reading = prompt_seconds(job, speed, tensor_parallel)
    return engines / (work.reply_tokens * step / at_once + reading)


def prompt_seconds(job: Job, speed: DeviceSpeed, tensor_parallel: int) -> float:
    """Return the seconds in which an engine reads the prompt tokens of one episode."""
    tokens = job.workload.prompt_tokens
    return tokens * _forward(job.actor, tokens, speed) / tensor_parallel


def decode_step(
    shape: ModelShape, c: int, speed: DeviceSpeed, tensor_parallel: int, at_once: float, length: float
) -> float:
    """Return the seconds in which each of ``at_once`` sequences of this length gains a token."""
    touched = shape.active_parameters
    if shape.experts:
        # Tokens of one step use different experts: few tokens use few of them.
        share = 1 - (1 - shape.experts_used / shape.experts) ** at_once
        touched = round(shape.active_parameters + share * (shape.parameters - shape.active_parameters))
    read = c * touched + at_once * length * shape.kv_bytes(c)
    compute = 2 * shape.active_parameters * at_once / (tensor_parallel * speed.flops * MATMUL_SHARE)
    reading = read / (tensor_parallel * speed.bandwidth * READ_SHARE)
    talking = 0.0
    if tensor_parallel > 1:
        near = tensor_parallel <= speed.each
        wire, hop = (speed.link, HOP) if near else (speed.network, FAR_HOP)
        transfer = 2 * at_once * shape.hidden * c / (wire * LINK_SHARE)
        talking = 2 * shape.layers * (hop * math.log2(tensor_parallel) + transfer)
    return shape.layers * DECODE_LAYER[speed.kind] + max(compute, reading) + talking


def update_seconds(
    shape: ModelShape,
    job: Job,
    speed: DeviceSpeed,
    sharding: Sharding,
    mesh: TrainMesh,
    *,
    host_step: bool,
    trained: int,
) -> float:
    """Return the seconds of an update on all episodes of a step."""
    work = job.workload
    sets = min(mesh.data_ranks, work.episodes)
    tokens = work.tokens * work.passes
    full = trained == shape.parameters
    # A backward pass costs two forward passes, or one without gradients of the weights.
    passes = 1 + (2 if full else 1) + (1 if work.checkpointing else 0)
    forward = _forward(shape, work.context, speed)
    moves = BACKWARD_MOVES + FORWARD_MOVES * (1 + work.checkpointing)
    each = (passes * forward + moves * _move(shape, job, speed)) / mesh.model_ranks
    compute = tokens / sets * each
    steps = work.passes * work.optimizer_steps
    rounds = max(steps, math.ceil(tokens / sets / work.microbatch(mesh.context)))
    if sharding == "weights":
        talk = rounds * (2 * _gather(shape, job, speed, mesh) + _reduce(shape, trained, speed, mesh))
    else:
        talk = steps * 2 * speed.gather(GRADIENT * trained)
    seconds = max(compute, talk) + (2 + work.checkpointing) * _exchange_seconds(
        shape, job, speed, mesh, tokens
    )
    if host_step:
        share = trained / speed.count
        seconds += steps * ((GRADIENT + WEIGHT) * share / HOST_LINK + share * speed.each / HOST_ADAM)
    return seconds


def score_seconds(
    shape: ModelShape, job: Job, speed: DeviceSpeed, sharding: Sharding, mesh: TrainMesh
) -> float:
    """Return the seconds of a forward pass over all episodes of a step."""
    work = job.workload
    sets = min(mesh.data_ranks, work.episodes)
    each = _forward(shape, work.context, speed) + FORWARD_MOVES * _move(shape, job, speed)
    compute = work.tokens / sets * each / mesh.model_ranks
    if sharding == "weights":
        rounds = math.ceil(work.tokens / sets / work.microbatch(mesh.context))
        compute = max(compute, rounds * _gather(shape, job, speed, mesh))
    return compute + _exchange_seconds(shape, job, speed, mesh, work.tokens)


def _forward(shape: ModelShape, length: int, speed: DeviceSpeed) -> float:
    """Return the seconds of a token's products in a forward pass: two FLOPs a weight, and attention."""
    lookup = 0 if shape.tied else shape.vocab * shape.hidden
    matmul = 2 * (shape.active_parameters - lookup) / (speed.flops * MATMUL_SHARE)
    attention = 2 * shape.layers * shape.heads * shape.head_dim * length
    return matmul + attention / (speed.flops * ATTENTION_SHARE)


def _move(shape: ModelShape, job: Job, speed: DeviceSpeed) -> float:
    """Return the seconds in which a token's saved activations pass through memory once."""
    saved = shape.layers * saved_by_layer(shape, job.bytes_each)
    return saved / (speed.bandwidth * READ_SHARE)


def _gather(shape: ModelShape, job: Job, speed: DeviceSpeed, mesh: TrainMesh) -> float:
    """Return the seconds in which every rank gathers all weights, once, in the compute precision."""
    return _spread(job.bytes_each * shape.parameters, job.bytes_each * shape.expert_parameters, speed, mesh)


def _reduce(shape: ModelShape, trained: int, speed: DeviceSpeed, mesh: TrainMesh) -> float:
    """Return the seconds in which gradients are summed over the ranks that shard, and over copies."""
    experts = GRADIENT * shape.expert_parameters if trained == shape.parameters else 0
    seconds = _spread(GRADIENT * trained, experts, speed, mesh)
    if mesh.replicate > 1:
        wire = speed.network if speed.nodes > 1 else speed.link
        seconds += 2 * GRADIENT * trained / mesh.copy_ranks / (wire * LINK_SHARE)
    return seconds


def _spread(size: int, experts: int, speed: DeviceSpeed, mesh: TrainMesh) -> float:
    """Return the seconds in which shards of ``size`` bytes, ``experts`` of them in experts, reach the ranks.

    A rank needs its tensor parallel part of everything, and its own experts.
    """
    parts = [
        (size - experts, mesh.tensor, mesh.shards),
        (experts, mesh.expert * mesh.tensor, mesh.expert_shards),
    ]
    near = sum(part / ways for part, ways, ranks in parts if ranks > 1) / (speed.link * LINK_SHARE)
    if mesh.copy_ranks <= speed.each:
        return near
    # Ranks of a node that need the same receive it once.
    inside = sum(part * min(speed.each, ways) / ways for part, ways, ranks in parts if ranks > 1)
    return max(near, inside / (speed.each * speed.network * LINK_SHARE))


def _exchange_seconds(shape: ModelShape, job: Job, speed: DeviceSpeed, mesh: TrainMesh, tokens: int) -> float:
    """Return the seconds of a pass in which ranks exchange states of tokens, in every layer.

    Tensor parallel ranks sum the states of two blocks. Context parallel ranks trade tokens for heads before
    attention, and back. Expert parallel ranks send each token to its experts, and back.
    """
    if mesh.copy_ranks == mesh.shard:
        return 0.0
    each = tokens / min(mesh.data_ranks, job.workload.episodes) / mesh.context
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    moved = (
        (mesh.tensor, 4 * shape.hidden, shape.layers),
        (mesh.context, 2 * (q + kv) / mesh.tensor, shape.layers),
        (mesh.expert, 2 * shape.experts_used * shape.hidden, shape.layers - shape.dense_layers),
    )
    seconds = 0.0
    for ranks, numbers, layers in moved:
        wire = speed.link if ranks <= speed.each else speed.network
        size = each * numbers * job.bytes_each * (ranks - 1) / ranks
        seconds += layers * size / (wire * LINK_SHARE)
    return seconds


def sync_seconds(job: Job, train: DeviceSpeed, infer: DeviceSpeed) -> float:
    """Return the seconds of a weight sync to the engines."""
    size = WEIGHT * job.actor.parameters
    return max(train.gather(size), infer.gather(size), size / (max(train.link, infer.link) * LINK_SHARE))


Offload = Literal["none", "optimizer", "all", "host"]
OFFLOADS: tuple[Offload, ...] = ("none", "optimizer", "all", "host")
"""State that is offloaded from a shared device while another role uses it: none; optimizer state and KV
cache; all; all, and the optimizer steps on the host."""
HOST_USABLE = 0.8
Mode = Literal["generate", "score", "update"]
Load = tuple[dict[Mode, dict[Part, int]], dict[Part, int]]
"""Memory of a role while active, by mode, and while idle."""


@dataclass(frozen=True, slots=True)
class RoleMemory:
    """Memory of a role on each of its devices."""

    active: Mapping[Mode, Mapping[Part, int]]
    idle: Mapping[Part, int]
    """While engines use the same device."""
    ready: Mapping[Part, int]
    """While another role that is not an engine uses it: these are reloaded together."""
    moved: int = 0
    """Bytes that are offloaded and reloaded every step."""
    host: int = 0
    """Bytes of host memory per device."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of a step, in which one role computes."""

    role: Role
    mode: Mode

    @property
    def name(self) -> str:
        """The name shown in reports."""
        if self.mode == "generate":
            return "generate"
        return f"{self.mode} {self.role.removesuffix('_train')}"


@dataclass(frozen=True, slots=True)
class Shortage:
    """The largest memory shortage of a candidate."""

    phase: str
    group: Group | None
    """None: host memory."""
    needed: int
    available: int

    @property
    def missing(self) -> int:
        """Missing bytes."""
        return self.needed - self.available


@dataclass(frozen=True, slots=True)
class Span:
    """An interval on the timeline of a step."""

    lane: str
    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """Memory and time of one candidate."""

    candidate: Candidate
    sharding: Sharding
    mesh: TrainMesh
    """Mesh of the actor's training ranks; all of them shard where it is `plain`."""
    offload: Offload
    role_memory: Mapping[Role, RoleMemory]
    kv: int
    """Bytes of KV cache on each generating device."""
    kv_tokens: int
    """Tokens in the cache of one engine."""
    shortage: Shortage | None
    spans: tuple[Span, ...] = ()
    seconds: float = 0.0


def phases(job: Job) -> tuple[Phase, ...]:
    """Return the phases of a step, in order."""
    models = job.models()
    result = [Phase("actor_infer", "generate")]
    result += [Phase(role, "score") for role in ("reward", "reference") if role in models]
    result += [Phase("actor_train", "score")] if job.workload.rescore else []
    result += [Phase("critic", "score"), Phase("critic", "update")] if "critic" in models else []
    return (*result, Phase("actor_train", "update"))


def memory_parts(
    group: Group, phase: Phase, role_memory: Mapping[Role, RoleMemory], kv: int, offload: Offload
) -> Iterator[tuple[Role, Part, int]]:
    """Yield the memory on a device of the group in a phase."""
    for role in group.roles:
        busy = role == phase.role or (role == "actor_infer" and len(group.roles) == 1)
        mode: Mode = "generate" if role == "actor_infer" else phase.mode
        rests = role_memory[role].idle if phase.mode == "generate" else role_memory[role].ready
        for part, size in (role_memory[role].active[mode] if busy else rests).items():
            yield role, part, size
        if role == "actor_infer" and (busy or offload == "none"):
            yield role, "kv_cache", kv


class Estimator:
    """Works out candidates; what they have in common is computed once."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.phases = phases(job)
        self.models = job.models()
        self._loads: dict[tuple[Role, TrainMesh, Sharding], Load] = {}

    def estimate(
        self,
        candidate: Candidate,
        speeds: Mapping[Role, DeviceSpeed],
        sharding: Sharding,
        offload: Offload,
        mesh: TrainMesh | None = None,
    ) -> Estimate:
        """A candidate's memory and time; ``mesh``: of the actor's training ranks, default: all shard."""
        mesh = mesh or TrainMesh(shard=len(candidate.sets["actor_train"]))
        role_memory = {
            role: self._role_memory(role, candidate, sharding, offload, mesh) for role in candidate.sets
        }
        kv, kv_tokens, shortage = self._cache(candidate, role_memory, offload)
        shortages = [s for s in (shortage, *self._shortages(candidate, role_memory, kv, offload)) if s]
        short = max(shortages, key=lambda shortage: shortage.missing, default=None)
        plain = (candidate, sharding, mesh, offload, role_memory, kv, kv_tokens)
        if short is not None:
            return Estimate(*plain, short)
        spans = self._timeline(candidate, speeds, sharding, mesh, offload, role_memory, kv_tokens)
        return Estimate(*plain, None, spans, max(span.end for span in spans))

    def _role_memory(
        self, role: Role, at: Candidate, sharding: Sharding, offload: Offload, mesh: TrainMesh
    ) -> RoleMemory:
        if role == "actor_infer":
            return self._engine(at, offload)
        active, idle = self._load(role, role_mesh(role, at, mesh), sharding)
        shared = role in at.shared
        host_step = offload == "host" and "update" in active
        if host_step:
            active = {
                mode: {p: s for p, s in parts.items() if p != "optimizer"} for mode, parts in active.items()
            }
        elif "update" in active:
            active = {**active, "score": {**active["score"], "optimizer": idle["optimizer"]}}
        moving: tuple[Part, ...] = ()
        if shared and offload != "none":
            moving = ("optimizer",) if offload == "optimizer" else ("weights", "optimizer")
        stays = {p: s for p, s in idle.items() if p not in moving and not (host_step and p == "optimizer")}
        moved = sum(s for p, s in idle.items() if p in moving and not (host_step and p == "optimizer"))
        ready = {p: s for p, s in idle.items() if not (host_step and p == "optimizer")}
        return RoleMemory(active, stays, ready, moved, moved + (idle["optimizer"] if host_step else 0))

    def _engine(self, at: Candidate, offload: Offload) -> RoleMemory:
        shape, size = self.job.actor, at.tensor_parallel
        weights = memory.engine_weights(shape, self.job, size)
        active: dict[Part, int] = {
            "weights": weights,
            "activations": memory.engine_workspace(shape, self.job, size),
        }
        # The engine's weights need no host copy: the next ones come from training.
        sleeps = offload in ("all", "host") and "actor_infer" in at.shared
        rests: dict[Part, int] = {} if sleeps else {"weights": weights}
        return RoleMemory({"generate": active}, rests, rests)

    def _load(self, role: Role, mesh: TrainMesh, sharding: Sharding) -> Load:
        key = (role, mesh, sharding)
        if key not in self._loads:
            self._loads[key] = self._fresh_load(role, mesh, sharding)
        return self._loads[key]

    def _fresh_load(self, role: Role, mesh: TrainMesh, sharding: Sharding) -> Load:
        job, shape = self.job, self.models[role]
        writes = role in ("actor_train", "reference")
        # A reward model runs in an engine; all others are learners, whose weights are float32.
        each = job.bytes_each if role == "reward" else memory.WEIGHT
        held = memory.held_weights(shape, each, mesh, sharding)
        rests: dict[Part, int] = {"weights": held}
        rank = job.lora_rank if role == "actor_train" else None
        score = memory.score_memory(shape, job, each, mesh, sharding, rank, vocabulary=writes)
        if role not in ("actor_train", "critic"):
            return {"score": score}, rests
        state = memory.training_state(shape, mesh, sharding, rank)
        score["weights"] += state["weights"] - held
        rests["optimizer"] = state["optimizer"]
        update = memory.update_memory(shape, job, mesh, sharding, rank, vocabulary=writes)
        return {"score": score, "update": update}, rests

    def _cache(
        self, at: Candidate, role_memory: Mapping[Role, RoleMemory], offload: Offload
    ) -> tuple[int, int, Shortage | None]:
        """Bytes of KV cache on each device, tokens in an engine's, and what is missing for the least."""
        work, size = self.job.workload, at.tensor_parallel
        token = memory.kv_bytes(self.job.actor, self.job, size)
        engines = len(at.sets["actor_infer"]) // size
        kv = -(-work.in_flight // max(engines, 1)) * work.context * token
        tightest: tuple[Group, str, int] | None = None
        for group in at.groups:
            if "actor_infer" not in group.roles:
                continue
            for phase in self.phases:
                if phase.mode != "generate" and offload != "none":
                    continue
                taken = sum(number for _, _, number in memory_parts(group, phase, role_memory, 0, offload))
                if group.limit - taken < kv:
                    kv, tightest = group.limit - taken, (group, phase.name, taken)
        if kv < work.context * token and tightest is not None:
            group, name, taken = tightest
            return 0, 0, Shortage(name, group, taken + work.context * token, group.limit)
        return kv, kv // token, None

    def _shortages(
        self, at: Candidate, role_memory: Mapping[Role, RoleMemory], kv: int, offload: Offload
    ) -> Iterator[Shortage]:
        for group in at.groups:
            for phase in self.phases:
                needed = sum(size for _, _, size in memory_parts(group, phase, role_memory, kv, offload))
                if needed > group.limit:
                    yield Shortage(phase.name, group, needed, group.limit)
        each = [sum(role_memory[role].host for role in group.roles) for group in at.groups]
        for host, counts in at.hosts:
            needed = sum(size * count for size, count in zip(each, counts, strict=True))
            if needed > HOST_USABLE * host:
                yield Shortage("offload", None, needed, int(HOST_USABLE * host))

    def _timeline(
        self,
        at: Candidate,
        speeds: Mapping[Role, DeviceSpeed],
        sharding: Sharding,
        mesh: TrainMesh,
        offload: Offload,
        role_memory: Mapping[Role, RoleMemory],
        kv_tokens: int,
    ) -> tuple[Span, ...]:
        job = self.job
        engines = speeds["actor_infer"]
        rate = generate_rate(job, engines, at.tensor_parallel, kv_tokens)
        work: list[tuple[str, float]] = []
        moved = sum(use.moved for use in role_memory.values()) / HOST_LINK
        if moved:
            work.append(("reload", moved))
        work += [
            (phase.name, self._seconds(phase, at, speeds, sharding, offload, mesh))
            for phase in self.phases[1:]
        ]
        if moved:
            work.append(("offload", moved))
        work.append(("sync weights", sync_seconds(job, speeds["actor_train"], engines)))
        training = sum(seconds for _, seconds in work)
        alone = job.workload.episodes / rate
        names = ("all devices", "all devices") if at.layout == "colocated" else ("train", "generate")
        if at.layout == "colocated" or not job.workload.staleness:
            return (Span(names[1], "generate", 0.0, alone), *_after(alone, names[0], work))
        if at.layout == "split":
            # In parallel; the faster one waits.
            return (Span(names[1], "generate", 0.0, alone), *_after(0.0, names[0], work))
        stays = len(set(at.sets["actor_infer"]) - set(at.sets["actor_train"])) / engines.count
        first = max(0.0, (job.workload.episodes - stays * rate * training) / rate)
        return (
            Span(names[0], "generate", 0.0, first),
            Span(names[1], "generate", 0.0, first + training),
            *_after(first, names[0], work),
        )

    def _seconds(
        self,
        phase: Phase,
        at: Candidate,
        speeds: Mapping[Role, DeviceSpeed],
        sharding: Sharding,
        offload: Offload,
        mesh: TrainMesh,
    ) -> float:
        shape, speed = self.models[phase.role], speeds[phase.role]
        mesh = role_mesh(phase.role, at, mesh)
        if phase.mode == "score":
            return score_seconds(shape, self.job, speed, sharding, mesh)
        rank = self.job.lora_rank if phase.role == "actor_train" else None
        trained = shape.parameters if rank is None else shape.lora_parameters(rank)
        host_step = offload == "host"
        return update_seconds(shape, self.job, speed, sharding, mesh, host_step=host_step, trained=trained)


def role_mesh(role: Role, at: Candidate, mesh: TrainMesh) -> TrainMesh:
    """Return the mesh of a role: the actor's, where the same learner computes it, or ranks that all shard."""
    if role != "reward" and at.sets[role] == at.sets["actor_train"]:
        return mesh
    return TrainMesh(shard=len(at.sets[role]))


def _after(start: float, lane: str, work: list[tuple[str, float]]) -> Iterator[Span]:
    for name, seconds in work:
        yield Span(lane, name, start, start + seconds)
        start += seconds
