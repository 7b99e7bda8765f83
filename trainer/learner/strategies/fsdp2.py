"""``fsdp2``: weights, gradients and optimizer states sharded; a layer is whole while it is computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rollgym.trainer.learner.modules import PolicyModule, TrainedModules
from rollgym.trainer.learner.sharded_checkpoint import Fragment, adam_fragments
from rollgym.trainer.learner.strategies.base import ParallelStrategy


class Fsdp2Strategy(ParallelStrategy):
    """A rank with some rows of every parameter."""

    _frozen: nn.Module | None = None

    def wrap(self, modules: TrainedModules) -> None:
        """Shard the modules in place, and make the optimizer."""
        shard(modules.policy, self.cpu_offload)
        if modules.separate_critic is not None:
            shard(modules.separate_critic, self.cpu_offload)
        super().wrap(modules)

    def wrap_frozen(self, module: PolicyModule) -> PolicyModule:
        """Shard the module."""
        self._frozen = shard(module, self.cpu_offload)
        return cast(PolicyModule, self._frozen)

    def clip(self, parameters: list[nn.Parameter], max_norm: float) -> Tensor:
        """Clip gradients to a norm; returns the norm before, over all ranks."""
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, whole)
        return whole

    def gather(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Return whole parameters."""
        return [cast(DTensor, parameter).full_tensor().detach() for parameter in parameters]

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


def shard(module: Any, cpu_offload: bool) -> Any:
    """Shard a module in place: its layers are gathered one by one, and the rest of it at once."""
    policy = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if cpu_offload else OffloadPolicy()
    blocks = {name for inner in module.modules() for name in getattr(inner, "_no_split_modules", None) or ()}
    for inner in list(module.modules()):
        if type(inner).__name__ in blocks:
            fully_shard(inner, offload_policy=policy)
    # Otherwise the root stays whole after a pass without gradients.
    return fully_shard(module, reshard_after_forward=True, offload_policy=policy)


@torch.no_grad()
def reset_shards(module: nn.Module | None) -> None:
    """Make a sharded module find its shards after they were moved."""
    for inner in () if module is None else module.modules():
        if isinstance(inner, FSDPModule):
            for group in cast(Any, inner)._get_fsdp_state()._fsdp_param_groups:
                for parameter in group.fsdp_params:
                    parameter.reset_sharded_param()


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
