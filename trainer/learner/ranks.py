"""Learners of several processes: one rank in each, by a strategy that says what is kept where.

    join_group(rank, world, address, port)
    learner = make_rank_learner("fsdp2", model, settings, loss, rank=rank, world=world)

No launcher: whatever starts the processes (Ray, multiprocessing) tells each its rank and rank 0's address.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from rollgym.errors import UnknownName, UsageError
from rollgym.trainer.learner.buckets import BUCKET_BYTES
from rollgym.trainer.learner.group import Group, free_port, join_group, leave_group
from rollgym.trainer.learner.settings import LearnerSettings
from rollgym.trainer.learner.spmd import RankLearner
from rollgym.trainer.losses import LossSettings

__all__ = [
    "STRATEGIES",
    "RankLearner",
    "Strategy",
    "free_port",
    "join_group",
    "leave_group",
    "make_rank_learner",
]

Strategy = Literal["ddp", "fsdp2", "zero1", "zero2", "zero3"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
_PLACES: Mapping[str, tuple[str, str]] = {
    "ddp": ("ddp", "DdpLearner"),
    "fsdp2": ("fsdp", "FsdpLearner"),
    "zero1": ("zero", "Zero1Learner"),
    "zero2": ("zero", "Zero2Learner"),
    "zero3": ("zero", "Zero3Learner"),
}


def make_rank_learner(
    strategy: Strategy,
    model: nn.Module | Path,
    settings: LearnerSettings,
    loss: LossSettings,
    *,
    rank: int,
    world: int,
    offload: bool = False,
    bucket_bytes: int = BUCKET_BYTES,
    **options: Any,
) -> RankLearner:
    """This rank of a learner, in a process that has joined the group. All ranks call it alike.

    Args:
        strategy: ``ddp`` keeps everything on every rank; ``zero1`` shards the optimiser, ``zero2`` the
            gradients too, ``zero3`` and ``fsdp2`` the weights too.
        model: A folder in Hugging Face format, or a model (which is copied).
        settings: The optimiser, and how a batch is cut up.
        loss: The policy loss.
        rank: Of this process, from 0.
        world: How many ranks there are.
        offload: Keep on the processor what the strategy can keep there. DDP has nothing to offload.
        bucket_bytes: How much of the weights is gathered at once for an engine or an export.
        options: What `LocalLearner` takes besides.
    """
    if strategy not in _PLACES:
        raise UnknownName("strategy", strategy, _PLACES, f"Choose one of {', '.join(_PLACES)}.")
    if offload and strategy == "ddp":
        raise UsageError(
            "DDP keeps everything on its device: for offload choose zero1, zero2, zero3 or fsdp2."
        )
    if options.get("share"):
        raise UsageError("A learner of several ranks cannot share a model: it takes it apart.")
    if bucket_bytes < 1:
        raise UsageError(f"bucket_bytes must be at least 1, not {bucket_bytes}.")
    if settings.device is None and torch.cuda.is_available():
        settings = replace(settings, device=f"cuda:{rank % torch.cuda.device_count()}")
    if settings.device is not None and settings.device.startswith("cuda"):
        torch.cuda.set_device(settings.device)
    group = Group(rank, world)
    module, name = _PLACES[strategy]
    kind: type[RankLearner] = getattr(import_module(f"rollgym.trainer.learner.{module}"), name)
    return kind(model, settings, loss, group=group, offload=offload, bucket_bytes=bucket_bytes, **options)
