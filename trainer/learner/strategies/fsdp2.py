"""``fsdp2``: weights, gradients and optimizer states sharded; a layer is whole while it is computed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from rollgym.engines.weight_sync.wire import LocalShard
from rollgym.trainer.learner.modules import Critic, PolicyModule, TrainedModules
from rollgym.trainer.learner.process_group import all_or_none
from rollgym.trainer.learner.sharded_checkpoint import Fragment, adam_fragments
from rollgym.trainer.learner.strategies.base import ParallelStrategy


class Fsdp2Strategy(ParallelStrategy):
    """A rank with some rows of every parameter."""

    builds_on_meta: ClassVar[bool] = True
    casts_weights: ClassVar[bool] = True
    _frozen: nn.Module | None = None

    def wrap(self, modules: TrainedModules) -> None:
        """Shard the modules in place, read the shards, and make the optimizer."""
        for module in (modules.policy, modules.separate_critic):
            if module is not None:
                self._shard(module, modules.dtype)
        with all_or_none(self.group):
            modules.load_weights(self._stored_on)
        for module in (modules.policy, modules.separate_critic):
            reset_shards(module)
        super().wrap(modules)

    def wrap_frozen(self, module: PolicyModule) -> PolicyModule:
        """Shard the module, and read its shards."""
        self._frozen = self._shard(module, self.modules.dtype)
        with all_or_none(self.group):
            self.modules.load_reference_weights(self._stored_on)
        reset_shards(self._frozen)
        return cast(PolicyModule, self._frozen)

    def _shard(self, module: nn.Module, dtype: torch.dtype) -> nn.Module:
        """Shard a module in place."""
        sharded: nn.Module = shard(module, self.cpu_offload, dtype, self.mesh)
        return sharded

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The ranks that share the parameters."""
        return init_device_mesh(self.device.type, (self.world,))

    @property
    def _stored_on(self) -> torch.device:
        return torch.device("cpu") if self.cpu_offload else self.device

    def clip(self, parameters: list[nn.Parameter], max_norm: float) -> Tensor:
        """Clip gradients to a norm; returns the norm before, over all ranks."""
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, whole)
        return whole

    def gather(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Return whole parameters."""
        return [cast(DTensor, parameter).full_tensor().detach() for parameter in parameters]

    def local_shard(self, parameter: nn.Parameter) -> LocalShard | None:
        """Return this rank's rows of a parameter."""
        return dtensor_shard(cast(DTensor, parameter.detach()))

    def fragments(self) -> list[Fragment]:
        """Return this rank's rows of every parameter."""
        return adam_fragments(self.modules.trained(), self.optimizer, _span, _local)

    def offload(self, part: str) -> int:
        """Move a part to host memory; returns bytes."""
        return self._after_move(part, super().offload(part))

    def reload(self, part: str) -> int:
        """Move a part back to the device; returns bytes."""
        return self._after_move(part, super().reload(part))

    def _after_move(self, part: str, moved: int) -> int:
        if part == "weights":
            for module in (self.modules.policy, self.modules.separate_critic, self._frozen):
                reset_shards(module)
        return moved


def shard(
    module: Any,
    cpu_offload: bool,
    dtype: torch.dtype = torch.float32,
    mesh: DeviceMesh | None = None,
    apart: Sequence[nn.Module] = (),
    apart_mesh: DeviceMesh | None = None,
) -> Any:
    """Shard a module in place: layers, embedding and head are gathered one by one, the rest at once.

    ``dtype``: gathered weights are cast to it. Gradients are summed over ranks in float32.
    ``mesh``: the ranks; default: all.
    ``apart``: modules inside that are sharded over the ranks of ``apart_mesh``.
    """
    options: dict[str, Any] = {
        "mesh": mesh,
        "offload_policy": CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
        if cpu_offload
        else OffloadPolicy(),
    }
    for inner in list(module.modules()):
        if isinstance(inner, Critic):
            # Values are computed in float32: bfloat16 rounds a value near 1 to 1/128.
            fully_shard(inner.head, **options)
    if dtype != torch.float32:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for inner in apart:
        fully_shard(inner, **{**options, "mesh": apart_mesh})
    blocks = {name for inner in module.modules() for name in getattr(inner, "_no_split_modules", None) or ()}
    for inner in list(module.modules()):
        if type(inner).__name__ in blocks:
            fully_shard(inner, **options)
    for end in _ends(module):
        fully_shard(end, **options)
    # Otherwise the root stays whole after a pass without gradients.
    return fully_shard(module, reshard_after_forward=True, **options)


def _ends(module: nn.Module) -> list[nn.Module]:
    """Return the embeddings and output layers whose weights nothing else has: tied ones stay together."""
    ends = []
    for inner in module.modules():
        for name in ("get_input_embeddings", "get_output_embeddings"):
            try:
                end = getattr(inner, name)() if hasattr(inner, name) else None
            except (AttributeError, NotImplementedError):
                end = None
            if isinstance(end, nn.Module) and end not in ends:
                ends.append(end)
    owners: dict[int, int] = {}
    for inner in module.modules():
        for parameter in inner._parameters.values():
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    free = [end for end in ends if not isinstance(end, FSDPModule)]
    return [end for end in free if all(owners[id(parameter)] == 1 for parameter in end.parameters())]


@torch.no_grad()
def reset_shards(module: nn.Module | None) -> None:
    """Make a sharded module find its shards after they were moved."""
    for inner in () if module is None else module.modules():
        if isinstance(inner, FSDPModule):
            for group in cast(Any, inner)._get_fsdp_state()._fsdp_param_groups:
                for parameter in group.fsdp_params:
                    parameter.reset_sharded_param()


def dtensor_shard(tensor: DTensor) -> LocalShard | None:
    """Return the part of a `DTensor` that this rank sends; of equal parts, the first rank's is sent."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = tensor.device_mesh, tensor.placements
    at = mesh.get_coordinate()
    if at is None or any(one.is_replicate() and where for one, where in zip(placements, at, strict=True)):
        return None
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    local = tensor.to_local()
    return LocalShard(local, tuple(tensor.shape), tuple(offsets)) if local.numel() else None


def _span(tensor: Tensor) -> tuple[int, int]:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert isinstance(tensor, DTensor)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    row = tensor.shape[1:].numel()
    start = min(offset[0], tensor.shape[0]) * row
    return start, start + torch.Size(shape).numel()


def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local().detach().view(-1)
