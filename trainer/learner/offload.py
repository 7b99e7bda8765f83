"""Moving tensors between a device and host memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that is in this process: of a sharded one, its own shard."""
    shard: Tensor = getattr(tensor, "_local_tensor", tensor)
    return shard


def size(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors in this process."""
    return sum(local(tensor).nbytes for tensor in tensors)


def move(tensors: Iterable[Tensor], to: torch.device) -> int:
    """Move the storage of tensors, which stay the same objects; returns the bytes moved.

    From CPU to CPU it is a copy too, and the old memory is freed: the same happens on all devices.
    """
    moved = 0
    for tensor in tensors:
        here = local(tensor)
        there = torch.empty_like(here.data, device=to, pin_memory=to.type == "cpu" and here.is_cuda)
        there.copy_(here.data)
        here.data = there
        moved += there.nbytes
    return moved


def optimizer_state(optimizer: Any) -> list[Tensor]:
    """Return the tensors of an optimizer's state, without its scalar step counts."""
    return [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t) and t.ndim]
