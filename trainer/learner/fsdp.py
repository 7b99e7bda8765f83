"""FSDP2: weights, gradients and moments in rows over the ranks; a layer is whole while it is computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rollgym.trainer.learner.ddp import TorchRankLearner
from rollgym.trainer.learner.nets import PolicyNet, Wish
from rollgym.trainer.learner.shards import Checkpoint, Fragment, adam_fragments, begin_moments, fill
from rollgym.trainer.rows import Row


class FsdpLearner(TorchRankLearner):
    """A rank with some rows of every parameter."""

    strategy = "fsdp2"

    def _wrap(self) -> None:
        self._policy = self._shard(self._policy)
        if self._judge is not None:
            self._judge = self._shard(self._judge)

    def _spread(self, net: PolicyNet) -> PolicyNet:
        return cast(PolicyNet, shard(net, self._offload))

    def _shard(self, net: Any) -> Any:
        return shard(net, self._offload)

    def _policy_forward(self, rows: Sequence[Row], wish: Wish) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = self._policy(rows, wish)
        return found

    def _judge_forward(self, rows: Sequence[Row]) -> Tensor:
        assert self._judge is not None
        found: Tensor = self._judge(rows)[0]
        return found

    def _backward(self, losses: list[Tensor]) -> None:
        # FSDP2 averages, and what is wanted is the sum.
        cast(Any, sum(losses) * self.world).backward()

    def _norm(self, parameters: list[nn.Parameter], bound: float) -> Tensor:
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        torch.nn.utils.clip_grads_with_norm_(parameters, bound, whole)
        return whole

    def _full(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        return [cast(Any, parameter).full_tensor().detach() for parameter in parameters]

    def _leave(self, part: str) -> int:
        moved = super()._leave(part)
        return self._point(part, moved)

    def _return(self, part: str) -> int:
        moved = super()._return(part)
        return self._point(part, moved)

    def _point(self, part: str, moved: int) -> int:
        if part == "weights":
            for net in (self._policy, self._judge, self._first):
                point(net)
        return moved

    def _owned(self) -> list[Fragment]:
        return adam_fragments(self._trained(), self._optimiser, _span, _local)

    def _restore(self, checkpoint: Checkpoint) -> None:
        begin_moments(self._trained(), self._optimiser, checkpoint.parameter_steps)
        fill(self._owned(), checkpoint)


def shard(net: Any, offload: bool) -> Any:
    """A net whose layers are gathered one by one, and whatever is outside of them at once."""
    policy = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if offload else OffloadPolicy()
    blocks = {name for module in net.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    for module in list(net.modules()):
        if type(module).__name__ in blocks:
            fully_shard(module, offload_policy=policy)
    # Otherwise the root stays whole after a pass without gradients.
    return fully_shard(net, reshard_after_forward=True, offload_policy=policy)


@torch.no_grad()
def point(net: nn.Module | None) -> None:
    """Have a sharded net look where its parts are now, after they were moved."""
    for module in () if net is None else net.modules():
        if isinstance(module, FSDPModule):
            for group in cast(Any, module)._get_fsdp_state()._fsdp_param_groups:
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
