"""Meshes of training ranks that a plan may use: copies, and tensor, context or expert parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator

from rollgym.core.errors import UsageError
from rollgym.devices.candidates import Candidate, Site
from rollgym.devices.memory import Sharding
from rollgym.devices.models import ModelShape
from rollgym.devices.types import MeshRequest, TrainMesh
from rollgym.devices.workload import Job

TENSOR = (2, 4, 8)
"""Tensor parallel ranks that are tried."""
CONTEXT = (2, 4, 8)
"""Context parallel ranks that are tried."""
EXPERT = (2, 4, 8, 32, 128)
"""Expert parallel ranks that are tried; on several nodes, at least a node's."""
SHARDS = (8, 16, 32, 64, 128)
"""Ranks that share a copy of the model, where there are several copies."""


def meshes_for(site: Site, at: Candidate, job: Job, sharding: Sharding) -> Iterator[TrainMesh]:
    """Yield the meshes of a candidate's training ranks: the one that is asked for, or those that may pay.

    Only sharded weights have a mesh. A chosen one has tensor, context or expert parallel ranks, or none: not
    two of these kinds.
    """
    ranks = len(at.sets["actor_train"])
    if job.mesh is not None:
        mesh = job.mesh.resolve(ranks)
        if mesh is not None:
            yield mesh
        return
    yield TrainMesh(shard=ranks)
    if sharding != "weights" or not job.choose_mesh:
        return
    nodes = [len(held) for held in site.nodes_of(at.sets["actor_train"]).values()]
    each = min(nodes)
    copies = [
        shard for shard in SHARDS if shard < ranks and ranks % shard == 0 and each % min(shard, each) == 0
    ]
    for shard in copies:
        yield TrainMesh(shard=shard, replicate=ranks // shard)
    for tensor in TENSOR:
        if each % tensor == 0 and not problem(job.actor, tensor):
            yield TrainMesh(shard=ranks // tensor, tensor=tensor)
    for context in CONTEXT:
        if each % context == 0 and _shortens(job, context):
            yield TrainMesh(shard=ranks // context, context=context)
    yield from _expert_meshes(job, ranks, nodes, [*copies, ranks])


def _shortens(job: Job, context: int) -> bool:
    """Return whether so many context parallel ranks can share a row, and each gets fewer tokens for it."""
    work = job.workload
    if not job.choose_context or job.actor.heads % context:
        return False
    # A micro-batch grows with the ranks: only of rows that are longer than it has a rank less.
    return work.context > work.max_tokens_per_microbatch * (context // 2)


def _expert_meshes(job: Job, ranks: int, nodes: list[int], copies: list[int]) -> Iterator[TrainMesh]:
    """Yield meshes with expert parallel ranks, in the largest copies whose shards hold whole experts."""
    shape, each = job.actor, min(nodes)
    # The experts of a rank cannot have LoRA matrices.
    for expert in EXPERT if shape.experts and job.lora_rank is None else ():
        if shape.experts % expert or each % min(expert, each) or (expert < each and len(nodes) > 1):
            continue
        # With more shards than experts, FSDP2 would pad them.
        whole = [copy for copy in copies if not copy % expert and not shape.experts % copy]
        for copy in whole[-1:]:
            yield TrainMesh(replicate=ranks // copy, shard=copy // expert, expert=expert)


def check_request(asked: MeshRequest, job: Job) -> None:
    """Raise `UsageError` where a model cannot be computed on the requested mesh."""
    shape = job.actor
    if asked.tensor > 1 and (why := problem(shape, asked.tensor)):
        raise UsageError(f"learner.parallel.tensor is {asked.tensor}, but {why}.")
    if asked.expert > 1 and not shape.experts:
        raise UsageError(f"learner.parallel.expert is {asked.expert}, but {shape.name} has no experts.")
    if asked.expert > 1 and shape.experts % asked.expert:
        raise UsageError(
            f"learner.parallel.expert is {asked.expert}, which does not divide the {shape.experts} experts "
            f"of {shape.name}."
        )
    if asked.context > 1 and shape.heads // asked.tensor % asked.context:
        raise UsageError(
            f"learner.parallel.context is {asked.context}, which does not divide the "
            f"{shape.heads // asked.tensor} heads of {shape.name} on a rank."
        )


def problem(shape: ModelShape, tensor: int) -> str | None:
    """Return why a model cannot be split over so many tensor parallel ranks, if so."""
    if shape.experts:
        return f"{shape.name} has experts, for which there is no tensor parallel plan: set it to 1"
    for count, what in (
        (shape.heads, "heads"),
        (shape.kv_heads, "key-value heads"),
        (shape.vocab, "tokens of the vocabulary"),
        (shape.inner, "columns of the MLP"),
    ):
        if count % tensor:
            return f"it does not divide the {count} {what} of {shape.name}"
    return None
