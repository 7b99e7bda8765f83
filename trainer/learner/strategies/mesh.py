"""``mesh``: FSDP2 over a device mesh, replicate x shard x context x tensor x expert (``learner.parallel``).

A tensor parallel model is split by its own plan first, and experts are distributed; then FSDP2 shards what
each rank has. The ranks of one context and tensor group compute the same rows: they are one data rank. Ranks
of an expert group compute different rows; of all parameters but the experts they hold shards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rollgym.core.errors import RunError
from rollgym.engines.weight_sync.wire import LocalShard
from rollgym.trainer.learner.boxes import Box
from rollgym.trainer.learner.context_parallel import ContextGroup
from rollgym.trainer.learner.expert_parallel import find_experts, split_experts
from rollgym.trainer.learner.modules import CriticModule, PolicyModule, TrainedModules
from rollgym.trainer.learner.process_group import ProcessGroup
from rollgym.trainer.learner.sharded_checkpoint import MOMENTS, Fragment
from rollgym.trainer.learner.strategies.fsdp2 import Fsdp2Strategy, shard
from rollgym.trainer.learner.tensor_parallel import split_body, split_model

SHARD_AND_CONTEXT = "shard_and_context"
"""Name of these two dimensions as one, over which parameters are sharded."""
SHARD_AND_EXPERT = "shard_and_expert"
"""The dimension of the ranks that shard all parameters but the experts."""
DRIFT = 1e-3
"""Relative difference between ranks of the gradient of parameters that all of a group have, above which the
model is not computed as its tensor parallel plan says."""


class MeshStrategy(Fsdp2Strategy):
    """A rank of a device mesh."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sizes = self.config.parallel.sizes(self.world)
        """The dimensions of the mesh by name, from the slowest to the fastest varying."""
        self.model_ranks = self.world // self.config.parallel.data_ranks(self.world)

    @property
    def gradient_ranks(self) -> int:
        """Number of ranks over which FSDP2 averages gradients: all that shard or copy a parameter."""
        return math.prod(self.sizes[name] for name in ("replicate", "shard", "context", "expert"))

    @cached_property
    def device_mesh(self) -> DeviceMesh:
        """All ranks, with every dimension."""
        return init_device_mesh(
            self.device.type, tuple(self.sizes.values()), mesh_dim_names=tuple(self.sizes)
        )

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The ranks that FSDP2 shards parameters over, and copies them to."""
        if self.sizes["expert"] > 1:
            sizes = (self.sizes["replicate"], self.sizes["shard"] * self.sizes["expert"])
            mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=("replicate", SHARD_AND_EXPERT))
            return mesh if self.sizes["replicate"] > 1 else mesh[SHARD_AND_EXPERT]
        if self.sizes["context"] == 1:
            return self._expert_mesh
        # All of these ranks have gradients of all parameters.
        flat = self.device_mesh["shard", "context"]._flatten(SHARD_AND_CONTEXT)
        return flat if self.sizes["replicate"] == 1 else self.device_mesh["replicate", SHARD_AND_CONTEXT]

    @cached_property
    def context(self) -> ContextGroup | None:
        """The ranks that share the tokens of a row with this one, if there are more."""
        if self.sizes["context"] == 1:
            return None
        return ContextGroup(self.device_mesh["context"].get_group())

    @cached_property
    def _expert_mesh(self) -> DeviceMesh:
        """The same ranks for the experts that a rank of an expert group holds."""
        names = ("replicate", "shard") if self.sizes["replicate"] > 1 else ("shard",)
        return self.device_mesh[names]

    def _shard(self, module: nn.Module, dtype: torch.dtype) -> nn.Module:
        experts = find_experts(module) if self.sizes["expert"] > 1 else []
        mesh, expert_mesh = self.mesh, self._expert_mesh
        sharded: nn.Module = shard(module, self.cpu_offload, dtype, mesh, experts, expert_mesh)
        return sharded

    def wrap(self, modules: TrainedModules) -> None:
        """Split and shard the modules in place, read the shards, and make the optimizer."""
        for module in (modules.policy, modules.separate_critic):
            self._split(module)
        super().wrap(modules)

    def wrap_frozen(self, module: PolicyModule) -> PolicyModule:
        """Split and shard the module, and read its shards."""
        self._split(module)
        return super().wrap_frozen(module)

    def clip(self, parameters: list[nn.Parameter], max_norm: float) -> Tensor:
        """Clip gradients to a norm; returns the norm before, over all ranks.

        Parameters live on several meshes: a rank adds the squares of what it has, divided by the number of
        ranks that have the same.
        """
        grads = [cast(DTensor, p.grad) for p in parameters if p.grad is not None]
        square, shared = torch.zeros(2, dtype=torch.float64, device=self.device)
        for grad in grads:
            part = torch.linalg.vector_norm(grad.to_local()).double().square().to(self.device)
            square = square + part * self._holders(grad) / self.world
            if "tensor" not in (grad.device_mesh.mesh_dim_names or ()):
                shared = shared + part
        totals = torch.stack([square, self._differs(shared)])
        dist.all_reduce(totals)
        if totals[1] > 0:
            name = type(self.modules.plain_model).__name__
            raise RunError(
                f"Tensor parallel ranks of {name} have different gradients of what they share: its tensor "
                "parallel plan is wrong for training. Set learner.parallel.tensor to 1."
            )
        norm = totals[0].sqrt().float()
        coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for grad in grads:
            local = grad.to_local()
            local.mul_(coefficient.to(local.device))
        return norm

    def _differs(self, square: Tensor) -> Tensor:
        """Return 1 if tensor parallel ranks have different gradients of what they share, by its squares."""
        if self.sizes["tensor"] == 1:
            return torch.zeros_like(square)
        bounds = torch.stack([square, -square])
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=self.device_mesh["tensor"].get_group())
        return (bounds[0] + bounds[1] > DRIFT * bounds[0].clamp(min=1e-20)).to(square)

    def _holders(self, tensor: DTensor) -> int:
        """Return the number of ranks that a tensor is spread over; the others have copies."""
        sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
        return math.prod(size for size, placement in sizes if not placement.is_replicate())

    def gather(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Return whole parameters on rank 0: each rank sends its own parts, in one message."""
        empty = [torch.empty(0, device=self.device) for _ in parameters]
        mine = [self._first(parameter) for parameter in parameters]
        boxes = [_box(p) if own else None for p, own in zip(parameters, mine, strict=True)]
        group = cast(ProcessGroup, self.group)
        entries = group.gather([box and [box.offsets, box.sizes] for box in boxes])
        copy = self._copy.get_group()  # made by all ranks together: later groups would not match otherwise
        if self.device_mesh["replicate"].get_local_rank():
            return empty
        held = [[entry and Box(*map(tuple, entry)) for entry in by_rank] for by_rank in entries]
        held = held[: len(held) // self.sizes["replicate"]]
        longest = max(sum(box.numel for box in by_rank if box) for by_rank in held)
        buffer = torch.zeros(longest, device=self.device)
        at = 0
        for parameter, box in zip(parameters, boxes, strict=True):
            if box is not None:
                local = cast(DTensor, parameter).to_local().detach()
                buffer[at : at + box.numel] = local.reshape(-1)
                at += box.numel
        received = [torch.empty_like(buffer) for _ in held] if self.rank == 0 else None
        dist.gather(buffer, received, group=copy, group_dst=0)
        if received is None:
            return empty
        whole = [torch.empty(parameter.shape, device=self.device) for parameter in parameters]
        for by_rank, values in zip(held, received, strict=True):
            at = 0
            for tensor, box in zip(whole, by_rank, strict=True):
                if box:
                    tensor[box.slices()] = values[at : at + box.numel].view(box.sizes)
                    at += box.numel
        return whole

    @cached_property
    def _copy(self) -> DeviceMesh:
        """The ranks that hold one copy of the model."""
        return self.device_mesh["shard", "context", "tensor", "expert"]._flatten("copy")

    def local_shard(self, parameter: nn.Parameter) -> LocalShard | None:
        """Return this rank's part of a parameter; of ranks that have the same, the first sends it."""
        local = cast(DTensor, parameter).to_local().detach()
        if not local.numel() or not self._first(parameter):
            return None
        return LocalShard(local, tuple(parameter.shape), _box(parameter).offsets)

    def fragments(self) -> list[Fragment]:
        """Return this rank's part of every parameter; of ranks that have the same, the first saves it."""
        return [
            fragment for fragment in self.restored() if self._first(self.modules.trained()[fragment.name])
        ]

    def restored(self) -> list[Fragment]:
        """Return this rank's part of every parameter."""
        fragments = []
        for name, parameter in self.modules.trained().items():
            state = self.optimizer.state.get(parameter, {})
            held = {"weight": parameter, **{key: state[key] for key in MOMENTS if key in state}}
            tensors = {key: cast(DTensor, tensor).to_local().detach() for key, tensor in held.items()}
            box = _box(parameter)
            span = box.flat_range(parameter.shape)
            if span is None:
                fragments.append(Fragment(name, 0, box.numel, tensors, box))
            else:
                flat = {key: tensor.view(-1) for key, tensor in tensors.items()}
                fragments.append(Fragment(name, *span, flat))
        return fragments

    def _first(self, parameter: nn.Parameter) -> bool:
        """Return whether this rank is the first of those that have the same part of a parameter."""
        tensor = cast(DTensor, parameter)
        spread = {
            dimension
            for name, placement in zip(
                cast(Any, tensor.device_mesh.mesh_dim_names), tensor.placements, strict=True
            )
            if not placement.is_replicate()
            for dimension in (("shard", "expert") if name == SHARD_AND_EXPERT else (name,))
        }
        if SHARD_AND_CONTEXT in spread:
            spread |= {"shard", "context"}
        return all(
            self.device_mesh[dimension].get_local_rank() == 0
            for dimension in self.sizes
            if dimension not in spread
        )

    def _split(self, module: PolicyModule | CriticModule | None) -> None:
        if module is None:
            return
        if self.sizes["expert"] > 1:
            model = module.value_model.body if isinstance(module, CriticModule) else module.model
            plain = model.get_base_model() if hasattr(model, "get_base_model") else model
            split_experts(model, type(plain).__name__, self.device_mesh["expert"])
        if self.sizes["tensor"] == 1:
            return
        if isinstance(module, CriticModule):
            split_body(module.value_model.body, self.device_mesh["tensor"])
        else:
            split_model(module.model, self.device_mesh["tensor"])


def _box(tensor: Any) -> Box:
    """Return this rank's part of a sharded tensor."""
    shape, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    inside = (min(offset, size) for offset, size in zip(offsets, tensor.shape, strict=True))
    return Box(tuple(inside), tuple(shape))
