"""Meshes of training ranks that a plan may use: copies of shards, and tensor parallel ranks."""

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
SHARDS = (8, 16, 32, 64, 128)
"""Ranks that share a copy of the model, where there are several copies."""


def meshes_for(site: Site, at: Candidate, job: Job, sharding: Sharding) -> Iterator[TrainMesh]:
    """Yield the meshes of a candidate's training ranks: the one that is asked for, or those that may pay.

    Only sharded weights have a mesh. Context and expert parallel ranks are only planned where a setting asks
    for them.
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
    nodes = site.nodes_of(at.sets["actor_train"])
    each = min(map(len, nodes.values()))
    for shard in SHARDS:
        if shard < ranks and ranks % shard == 0 and each % min(shard, each) == 0:
            yield TrainMesh(shard=shard, replicate=ranks // shard)
    for tensor in TENSOR:
        if each % tensor == 0 and not problem(job.actor, tensor):
            yield TrainMesh(shard=ranks // tensor, tensor=tensor)


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
